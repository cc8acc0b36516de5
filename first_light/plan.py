"""The steps, in the order of their worth: three parts of at most nine minutes, each step with a limit of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from first_light import ROOT

#: Seconds of a part: a machine may stop a command after ten minutes.
PART_SECONDS = 540
PARTS = (1, 2, 3)
#: Tests without CUDA kernels, or with a step of their own.
NOT_IN_SUITE = ("dlrm_*", "*triton*", "bench_*", "sanitize_cuda", "stable_abi", "backends", "first_light*")
#: For tests in many processes: more threads than cores would wait for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Step:
    """A command. ``what``: what it shows, for the page; ``rescue``: another command, after one that was stopped."""

    name: str
    part: int
    seconds: int
    what: str
    command: Sequence[str | Path]
    environment: dict[str, str] = field(default_factory=dict)
    rescue: Sequence[str | Path] = ()


def processes() -> int:
    """Number of test processes: each has a context on the GPU, and two cores stay free for everything else."""
    return max(1, min(14, (os.cpu_count() or 1) - 2))


class Commands:
    """The commands of steps, on the GPU or in a rehearsal."""

    def __init__(self, rehearse: bool) -> None:
        self._rehearse = rehearse
        # `=` is needed: pytest does not know the option yet and would take a separate word for a file.
        self._backends = "--backends=cuda_emulated" if rehearse else "--backends=cuda"

    def pytest(self, *options: str, workers: int, few: str) -> list[str]:
        """Tests in several processes; ``few`` in one are what a rehearsal runs."""
        plain = ["-q", "--tb", "short", "-p", "no:cacheprovider", "-p", "first_light.pytest_plugin"]
        spread = ["-n", str(0 if self._rehearse else workers), "--dist", "worksteal"]
        spread += ["--max-worker-restart", "100"]
        chosen = ["-k", few] if self._rehearse else ["--durations", "15"]
        return [sys.executable, "-m", "pytest", *plain, *spread, self._backends, *options, *chosen]

    def sanitize(self, *options: str) -> list[str]:
        """Every CUDA op once."""
        return [sys.executable, "python_tests/sanitize_cuda.py", *(["--emulated"] if self._rehearse else []), *options]

    def module(self, name: str, *options: str | Path) -> list[str | Path]:
        """A program that knows ``--device``."""
        return [sys.executable, "-m", name, *(["--device", "cpu"] if self._rehearse else []), *options]


def test_files(*names: str) -> list[str]:
    """Paths of the test files with these names."""
    return [f"python_tests/test_{name}.py" for name in names]


def steps(output: Path, *, rehearse: bool = False, commit: str | None = None) -> list[Step]:
    """All steps.

    Args:
        output: the folder for what they write.
        rehearse: the same commands with a few cases on this machine's CPU: CUDA kernels in the emulator, Triton's in
            its interpreter, the benchmark's trial.
        commit: that of the sources, where they are no git repository.
    """
    commands, figures = Commands(rehearse), output / "bench.json"
    named = ["--commit", commit] if commit else []
    quick = ["--case", "scale-rows"] if rehearse else ["--quick"]
    # A rehearsal has the tests of scale_rows left.
    left_out = [*NOT_IN_SUITE, "[!s]*"] if rehearse else NOT_IN_SUITE
    ignored = [f"--ignore-glob=*/test_{name}.py" for name in left_out]
    triton = [path.stem.removeprefix("test_") for path in sorted((ROOT / "python_tests").glob("test_*_triton.py"))]
    return [
        Step("bits", 1, 90, "every CUDA op once, tensors aligned and not: the CPU's bits", commands.sanitize()),
        Step(
            *("graphs", 1, 100, "every half both ways; replays of CUDA graphs; wrong ids and offsets"),
            commands.pytest(
                *test_files("halves", "cuda_graph", "embedding_bag_bounds"), workers=6, few="a_bad_batch_skips"
            ),
            ONE_THREAD,
        ),
        Step(
            *("bench", 1, 300, "`bench.gpu --quick`: times beside Triton, torch and a plain copy"),
            commands.module("bench.gpu", *quick, *named, "--output", figures),
            rescue=[sys.executable, "-m", "bench.gpu", "--show", figures],
        ),
        Step(
            *("suite", 2, 500, "the tests of all ops with the CUDA backend only"),
            commands.pytest(
                *ignored,
                workers=processes(),
                few="matches_reference",
            ),
            ONE_THREAD,
        ),
        Step(
            *("counters", 3, 150, "Nsight Compute on five kernels: occupancy, sectors, reasons of stalls"),
            commands.module("first_light.kernels", "--profile", output / "kernels.ncu-rep"),
        ),
        Step("memcheck", 3, 150, "every CUDA op under memcheck", commands.sanitize("--sanitizer", "memcheck")),
        Step("synccheck", 3, 100, "every CUDA op under synccheck", commands.sanitize("--sanitizer", "synccheck")),
        Step(
            *("triton", 3, 120, "the Triton kernels compiled for this GPU, not in the interpreter"),
            commands.pytest(
                *test_files(*(["expand_triton"] if rehearse else triton)), workers=processes(), few="signatures"
            ),
            ONE_THREAD | {"TRITON_INTERPRET": str(int(rehearse))},
        ),
    ]
