"""The first half hour on a GPU, rehearsed without one: commands, limits, restarts, and the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from backends import ROOT, build

from first_light import __main__ as command
from first_light import carried, kernels, limited, pack, page, plan
from first_light.plan import PART_SECONDS, PARTS, Step

PYTHON = (sys.executable, "-c")
FILES = {"first_light.json", "first_light.md", "log.txt", "bench.json", "bench.png", "kernels.ncu-rep"}


def fake_tools(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes of NVIDIA's tools, which print their arguments; ncu also writes its report."""
    code = {
        "compute-sanitizer": "print('called', args[:4], [os.path.basename(a) for a in args[5:]])",
        "ncu": "print(args); '--export' in args and open(args[args.index('--export') + 1], 'w').write('report')",
    }
    folder.mkdir()
    for name, lines in code.items():
        (folder / name).write_text(f"#!{sys.executable}\nimport os, sys\nargs = sys.argv[1:]\n{lines}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.full
def test_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs with a few cases in the emulator; "graphs" is the suite with file names."""
    os.environ.get("REC_KERNELS_TEST_LIBRARY") or build("rec_kernels_emulated")
    fake_tools(tmp_path / "tools", monkeypatch)
    # limits for a busy machine
    made = [replace(s, seconds=900) for s in plan.steps(tmp_path, rehearse=True) if s.name != "graphs"]
    monkeypatch.setattr(command, "steps", lambda *args, **how: made)
    status = command.main(["--rehearse", "--output", str(tmp_path)])
    text = (tmp_path / "first_light.md").read_text()
    assert status == 0, text
    found = command.read(tmp_path)
    assert {name: step["state"] for name, step in found["steps"].items()} == {step.name: "passed" for step in made}
    assert found["about"]["rehearsal"] is True
    assert found["about"]["cpu_library"].endswith("librec_kernels_cpu.so")
    printed = (tmp_path / "log.txt").read_text()
    assert "called ['--tool', 'synccheck', '--error-exitcode', '1'] ['sanitize_cuda.py', '--emulated']" in printed
    assert "comparisons passed by backend: cuda_emulated" in printed
    assert {path.name for path in tmp_path.iterdir()} - {"tools"} <= FILES
    assert "A rehearsal without a GPU" in text


def test_the_kernels_that_are_profiled(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is launched, with tiny tables on the CPU, and exists in csrc/*/cuda."""
    monkeypatch.setattr(sys, "argv", ["kernels", "--device", "cpu"])
    assert kernels.main() == 0
    assert capsys.readouterr().out.count("launched") == len(kernels.CASES) == 5
    sources = "".join(path.read_text() for path in (ROOT / "csrc").glob("*/cuda/*"))
    assert all(re.search(rf"__global__[^;{{]*\b{name}\(", sources) for name in kernels.KERNELS)


def test_without_the_profiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Without the profiler the step is left out, and the page reports it."""
    monkeypatch.setattr(kernels, "find_profiler", lambda: None)
    assert kernels.profile(tmp_path / "kernels.ncu-rep", "cpu") == 0
    assert command.LEFT_OUT.search(capsys.readouterr().out)
    assert command.LEFT_OUT.search("compute-sanitizer is neither on the PATH nor beside nvcc: memcheck left out\n")
    assert not command.LEFT_OUT.search("fbgemm is left out: it is not installed\n")


def test_the_plan(tmp_path: Path) -> None:
    """Every part fits into its time, all files exist, and no command is of a rehearsal."""
    steps = plan.steps(tmp_path, commit="abc")
    assert len({step.name for step in steps}) == len(steps)
    assert {step.part for step in steps} == set(PARTS)
    for part in PARTS:
        assert sum(step.seconds for step in steps if step.part == part) <= PART_SECONDS - 15
    for name in plan.NOT_IN_SUITE:
        assert list((ROOT / "python_tests").glob(f"test_{name}.py")), name
    words = [str(word) for step in steps for word in step.command]
    assert not {"cpu", "--emulated", "cuda_emulated"} & set(words)
    assert "abc" in words
    assert all((ROOT / word).exists() for word in words if word.startswith("python_tests/"))


def facts(run: command.Run) -> dict[str, object]:
    """Facts that must agree for a run's steps to count in another."""
    return {"commit": command.commit(), "sources": command.sources(), "rehearsal": run.rehearse}


def fake_plan(monkeypatch: pytest.MonkeyPatch, *steps: tuple[str, int, float, str]) -> None:
    """Replaces the plan by steps of (name, part, limit, Python code)."""
    made = [Step(name, part, limit, f"what {name} shows", (*PYTHON, code)) for name, part, limit, code in steps]
    monkeypatch.setattr(command, "steps", lambda *args, **kwargs: made)
    monkeypatch.setattr(command.Run, "prepare", lambda run: run.about(gpu="none", **facts(run)))


WAIT = "import time; print('waits', flush=True); time.sleep(60)"
OUTCOMES = (
    ("good", 1, 30, "print('fine | really')"),
    ("bad", 1, 30, "raise SystemExit('it is broken')"),
    ("long", 1, 5, WAIT),
    ("missing", 1, 30, "print('Nsight Compute is nowhere: left out')"),
    ("last", 1, 30, "print('3 passed in 1 s'); print('and more')"),
    ("other", 2, 500, "print('not reached')"),
)


def test_every_outcome_is_on_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed or stopped step does not affect later ones; a step without time left is not started."""
    fake_plan(monkeypatch, *OUTCOMES)
    assert command.main(["--part", "1", "--output", str(tmp_path), "--seconds", "90"]) == 1
    states = {name: step["state"] for name, step in command.read(tmp_path)["steps"].items()}
    outcomes = ("passed", "failed", "stopped", "left out", "passed", "waiting")
    assert states == dict(zip((name for name, *_ in OUTCOMES), outcomes, strict=True))
    text = (tmp_path / "first_light.md").read_text()
    assert "2 passed, 1 failed, 1 stopped at its limit, 1 left out, 1 not reached." in text
    for part in (
        "| good | what good shows | passed |",
        "| fine / really |",
        "| 3 passed in 1 s |",
        "| other | what other shows | not reached | at most 500 |",
        "## bad: the end of what it printed",
        "it is broken",
        "## long",
        "waits",
    ):
        assert part in text
    assert "## good" not in text


def test_what_is_finished_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A restart in another folder runs only interrupted and remaining steps, the part's own steps first."""
    count = "import pathlib; path = pathlib.Path('{}'); path.write_text(path.read_text() + '{}')"
    note = tmp_path / "note"
    note.write_text("")
    names = (("a", 1), ("b", 1), ("c", 2), ("d", 3))
    fake_plan(monkeypatch, *((name, part, 300, count.format(note, name)) for name, part in names))
    first, second = tmp_path / "first", tmp_path / "second"
    assert command.main(["--part", "1", "--output", str(first), "--seconds", "200"]) == 0
    assert note.read_text() == "ab"
    state = command.read(first)
    state["steps"]["b"]["state"] = "running"  # as if the machine was lost
    command.save(state, first)
    assert "**was cut**: the run ended before the step did" in (first / "first_light.md").read_text()
    assert command.main(["--part", "2", "--output", str(second), "--earlier", str(first), "--seconds", "2000"]) == 0
    assert note.read_text() == "ab" + "cbd"
    assert command.main(["--output", str(second)]) == 0
    assert note.read_text() == "abcbd"
    assert command.main(["--output", str(second), "--again", "--part", "3", "--seconds", "200"]) == 0
    assert note.read_text() == "abcbdd"
    monkeypatch.setattr(command, "commit", lambda: "another one")
    assert command.main(["--part", "3", "--output", str(second), "--seconds", "2000"]) == 0
    assert note.read_text() == "abcbddd"  # finished steps do not count for other sources; earlier parts are unknown


def test_a_part_without_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step with less time than its limit is not finished; none is started with almost no time."""
    fake_plan(monkeypatch, ("cut", 1, 30, WAIT), ("late", 1, 30, "print()"))
    monkeypatch.setattr(command, "LEAST", 1.0)
    left = {"waiting": 3.0, "running": 3.0}  # remaining seconds, by the state of the first step
    monkeypatch.setattr(command.Run, "left", lambda run: left.get(run.state["steps"]["cut"]["state"], 0.5))
    assert command.main(["--part", "1", "--output", str(tmp_path), "--seconds", "60"]) == 1
    assert [step["state"] for step in command.read(tmp_path)["steps"].values()] == ["cut", "waiting"]
    assert not page.finished(command.read(tmp_path)["steps"]["cut"])


def test_one_page_of_several_folders(tmp_path: Path) -> None:
    """The page shows each step's finished state from any folder; a state file cut while written is ignored."""
    step = {"part": 1, "what": "w", "limit": 3}
    folders = [tmp_path / name for name in "abc"]
    states = [
        {"about": {"gpu": "one"}, "steps": {"x": step | {"state": "passed"}, "y": step | {"state": "waiting"}}},
        {"about": {"cpus": 4}, "steps": {"x": step | {"state": "waiting"}, "y": step | {"state": "failed"}}},
    ]
    for folder, state in zip(folders, states, strict=False):
        folder.mkdir()
        command.save(state, folder)
    folders[2].mkdir()
    (folders[2] / "first_light.json").write_text('{"about": {')
    assert command.main(["--output", str(tmp_path / "all"), "--page", *map(str, folders)]) == 0
    found = command.read(tmp_path / "all")
    assert [found["steps"][name]["state"] for name in "xy"] == ["passed", "failed"]
    assert found["about"] == {"gpu": "one", "cpus": 4}


@pytest.mark.full
def test_a_limit_holds_for_the_whole_group(tmp_path: Path) -> None:
    """A limit ends all processes of a command, also those that ignore SIGINT."""
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {stubborn!r}]); "
    start = time.monotonic()
    done = limited.run(
        [sys.executable, "-c", code + "print(p.pid, flush=True); p.wait()"], tmp_path / "log", 6, grace=0.5
    )
    assert done.status is None
    assert time.monotonic() - start < 30
    child = int(re.search(r"^\d+$", done.tail, re.MULTILINE)[0])
    for _ in range(100):  # the system takes a moment
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split(")")[1].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"process {child} still runs")


@pytest.mark.full
def test_a_command_may_say_what_it_knows_before_it_ends(tmp_path: Path) -> None:
    """A stopped command may still print, as pytest does after Ctrl-C."""
    code = "import time\ntry:\n  time.sleep(60)\nexcept KeyboardInterrupt:\n  print('knows 7 things')"
    done = limited.run([sys.executable, "-c", code], tmp_path / "log", 60, grace=53)
    assert (done.status, done.tail.splitlines()[-1]) == (None, "knows 7 things")


def test_logs_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long logs keep their start and end; the file has every step's."""
    monkeypatch.setattr(limited, "HEAD", 200)
    monkeypatch.setattr(limited, "TAIL", 100)
    code = "print('first'); [print('x' * 9) for _ in range(5000)]; print('last')"
    log = tmp_path / "log"
    assert limited.run([sys.executable, "-c", code], log, 60).tail.endswith("last\n")
    assert limited.run(["no-such-program"], log, 60).status == 127
    text = log.read_text()
    assert re.search(r"first\n(x+\n)+x*\n\.\.\. \d{5} bytes left out \.\.\.\nx*\n(x+\n)+last\n", text)
    assert "No such file or directory: 'no-such-program'" in text
    assert len(text) < 1000
    monkeypatch.setattr(limited, "LOG", 100)
    limited.run(["no-such-program"], log, 60)
    assert len(log.read_text()) < len(text) / 2


@pytest.mark.full
def test_a_test_that_hangs_or_breaks_the_gpu_costs_no_other(tmp_path: Path) -> None:
    """A hanging test's process ends, and another one runs the remaining tests; a failure is printed at once."""
    (tmp_path / "test_some.py").write_text(
        "import time\nfrom first_light import pytest_plugin\n"
        "def test_fails():\n  assert 1 == 2\n"
        "def test_hangs():\n  time.sleep(60)\n"
        "def test_breaks():\n  pytest_plugin.context_works = lambda: False\n  assert 3 == 4\n"
        "def test_good():\n  pass\n"
    )
    options = ["-q", "-n", "1", "-p", "no:cacheprovider", "-p", "first_light.pytest_plugin", "--test-seconds", "6"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    printed = done.stdout + done.stderr
    assert re.search(r"^\d failed, 1 passed", printed, re.MULTILINE), printed
    assert printed.index("FAILED AT ONCE test_some.py::test_fails (call)") < printed.index("= FAILURES =")
    assert "Timeout (0:00:06)!" in printed
    assert "the CUDA context is broken: this process ends" in printed


def wheel(folder: Path, name: str, module: str) -> None:
    """A wheel with one module."""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as packed:
        packed.writestr(f"{module}/__init__.py", "")
        packed.writestr(f"{name}-1.0.dist-info/METADATA", "")


def test_packages_that_are_missing_are_added(tmp_path: Path) -> None:
    """Missing packages come from the packed wheels; installed ones stay as they are."""
    wheels = tmp_path / "carry" / "wheels"
    wheels.mkdir(parents=True)
    wheel(wheels, "pytest", "pytest")
    wheel(wheels, "no_such_package", "no_such_module")
    assert carried.add_packages(tmp_path / "site", tmp_path / "carry") == ["no_such_package"]
    assert [path.name for path in (tmp_path / "site").iterdir() if path.suffix == ""] == ["no_such_module"]


def test_libraries_that_are_packed(tmp_path: Path) -> None:
    """Packed libraries are used on GPUs they are built for, unless newer ones exist."""
    carry, package = tmp_path / "carry", tmp_path / "package"
    (carry / "lib").mkdir(parents=True)
    package.mkdir()
    names = [f"librec_kernels_{kind}.so" for kind in ("cpu", "cuda")]
    assert carried.place_libraries("9.0", carry, package) == "no libraries are packed"
    for name in (*names, "cuda_version.txt"):
        (carry / "lib" / name).write_text("packed")
    packed = {"architectures": ["9.0"], "cmake_architectures": "90-real", "sources": "of another commit"}
    (carry / "about.json").write_text(json.dumps(packed))
    assert "of other sources" in carried.place_libraries("9.0", carry, package)
    (carry / "about.json").write_text(json.dumps(packed | {"sources": carried.sources()}))
    assert "this GPU is 8.0" in carried.place_libraries("8.0", carry, package)
    assert not carried.have_cuda_library(package)
    assert carried.place_libraries("9.0", carry, package) == f"{', '.join(names)} are those that were packed"
    assert carried.have_cuda_library(package)
    assert (package / "cuda_architectures.txt").read_text() == "90-real\n"
    assert (package / "cuda_version.txt").read_text() == "packed"
    for name in names:
        (package / name).write_text("built")
        os.utime(package / name, (time.time() + 9, time.time() + 9))
    assert "are newer" in carried.place_libraries("9.0", carry, package)
    assert (package / names[0]).read_text() == "built"


def test_what_the_gpu_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is reported by the driver, otherwise by torch; none without a GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 9.0\necho 8.0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert carried.capability() == "9.0"
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no_python"))
    assert carried.capability() is None


def test_sources_have_a_digest(tmp_path: Path) -> None:
    """The digest changes with every source of the libraries, except the emulator's."""
    (tmp_path / "csrc" / "emulator").mkdir(parents=True)
    (tmp_path / "CMakeLists.txt").write_text("")
    found = [carried.sources(tmp_path)]
    for name in ("csrc/a.cpp", "csrc/emulator/b.h", "csrc/b.cpp"):
        (tmp_path / name).write_text("x")
        found.append(carried.sources(tmp_path))
    assert [found[0] == found[1], found[1] == found[2], found[2] == found[3]] == [False, True, False]


def test_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The pack has libraries, wheels and their targets, up to a size. Builds and downloads are faked."""
    called = []

    def build_one(architectures: list[str], python: str | None, output: Path) -> None:
        called.append((architectures, python))
        (output / "librec_kernels_cpu.so").write_text("library")

    monkeypatch.setattr(pack, "CARRY", tmp_path)
    monkeypatch.setattr(pack, "build", build_one)
    monkeypatch.setattr(pack, "download", lambda python, output: wheel(output, "some", "some"))
    monkeypatch.setattr(sys, "argv", ["pack", "--python", "3.99", "--architectures", "9.0;10.0"])
    assert pack.main() == 0
    assert called == [(["9.0", "10.0"], None)]
    about = carried.about(tmp_path)
    assert about["cmake_architectures"] == "90-real 100-real"
    assert (about["libraries"], about["wheels"]) == (["librec_kernels_cpu.so"], ["some-1.0-py3-none-any.whl"])
    assert about["sources"] == carried.sources()
    assert "_host is left out: there is no python3.99" in capsys.readouterr().out
    monkeypatch.setattr(pack, "MOST", 100)
    assert pack.main() == 1


def test_what_packing_asks_for() -> None:
    """Versions are pinned in requirements-dev.txt, for this Python if it has headers; torch has the architectures."""
    pinned = pack.requirements((ROOT / "requirements-dev.txt").read_text())
    assert [line.split("=")[0] for line in pinned] == ["pytest", "pytest-xdist", "hypothesis", "hypothesis", "filelock"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if found := pack.find_python(version):
        assert subprocess.run([found, "-V"], capture_output=True, text=True).stdout.startswith(f"Python {version}")
    with pytest.raises(ValueError, match=r"'9.0\+PTX' is not an architecture such as 9\.0"):
        pack.cmake_architecture("9.0+PTX")
