"""The command `python -m bench.gpu` without a GPU: a trial on the CPU, its options, and its output."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from backends import ROOT
from test_bench_gpu import CPU, SMALL, Ticks

import bench
from bench.gpu import __main__ as command
from bench.gpu import cases, kernel_times, report, subjects
from bench.gpu import implementations as imp

GROUPS = "grouped-projection-5x2x4"
DENSE = [f"{op}-5x3x4{kind}" for op in ("dot-interaction", "factorization-machine") for kind in ("", "-bf16")]
ENCODED = [f"trial-{format}" for format in cases.FORMATS]
JAGGED = ["expand-20x16", "jagged-f2-b20-l3"]


@pytest.mark.full
def test_the_whole_command(tmp_path: Path) -> None:
    """A trial on the CPU runs in a subprocess with interpreted Triton kernels."""
    output = tmp_path / "trial.json"
    chosen = [
        part
        for case in (
            "trial-zipf",
            "trial-power",
            "trial-mx9",
            "scale-rows",
            "grouped",
            "dot",
            "factor",
            "expand",
            "jagged",
        )
        for part in ("--case", case)
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--output", output, "--commit", "abc", *chosen],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    about, (bags, power, encoded, *others) = found["about"], found["cases"]
    assert about["command"].startswith("python -m bench.gpu --device cpu")
    assert (about["commit"], about["gpu"], about["torch"]) == ("abc", None, torch.__version__)
    assert {"date", "cuda", "triton", "fbgemm", "python", "version", "cuda_architectures"} <= about.keys()
    assert set(found["copy_gb_per_s"]) == {"before", "after"}
    assert found["seconds"] > 0
    names = {row["implementation"] for row in bags["results"]} | about["left_out"].keys()
    assert names == {"ours", "ops", "triton", "torch", "fbgemm"}
    assert about["cublas_workspace"] == os.environ.get(report.CUBLAS, report.CUBLAS_WORKSPACE)
    assert "triton" not in about["left_out"] or "Triton" in about["left_out"]["triton"]
    if importlib.util.find_spec("triton"):
        assert "NumPy" in about["left_out"].get("triton", "NumPy")
    assert (power["name"], encoded["name"]) == ("trial-power", "trial-mx9")
    adam = {row["implementation"] for row in power["results"] if row["optimizer"] == cases.ADAM}
    assert adam == {"ours", "ops"}
    failed = [row for case in found["cases"] for row in case["results"] if "error" in row or "graph_error" in row]
    assert not failed
    assert [case["name"] for case in others] == ["scale-rows-5x16", GROUPS, *DENSE, *JAGGED]
    assert all({row["implementation"] for row in case["results"]} - {"fbgemm"} == {"ours", "torch"} for case in others)
    assert report.table(found) in done.stdout
    assert "| trial-zipf | forward |" in done.stdout
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "trial.png").stat().st_size > 1000


def arguments(monkeypatch: pytest.MonkeyPatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["bench.gpu", *words])
    return command.arguments()


def test_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Missing arguments are named; --list prints the cases; limits stay below a call of ten minutes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        arguments(monkeypatch, "--device", "cpu")
    assert "--device cpu needs --output" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        arguments(monkeypatch)
    assert "torch sees no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.effort_of(arguments(monkeypatch)).limit_s < 9 * 60
    assert command.effort_of(arguments(monkeypatch, "--quick")).limit_s < 4 * 60
    assert command.effort_of(arguments(monkeypatch, "--quick", "--limit", "5")).limit_s == 5
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--list", "--device", "cpu", "--output", str(tmp_path / "x")])
    command.main()
    assert capsys.readouterr().out.split() == [
        *(w.name for w in cases.TRIAL),
        *ENCODED,
        "scale-rows-5x16",
        GROUPS,
        *DENSE,
        *JAGGED,
    ]


def test_implementations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations alternate in going first; --case filters by parts of names."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = dict.fromkeys(["ours", "ops", "triton", "torch"])
    every = command.chosen_cases(arguments(monkeypatch), found, 140 * 2**30)
    bags = [case for case in every if case.about()["op"] == "embedding_bag"]
    assert len(every) == len(bags) + 6 + 4 + 8 + 5
    assert [next(iter(case.available)) for case in bags[:4]] == ["ours", "triton", "torch", "ours"]
    some = arguments(monkeypatch, "--case", "d128-zipf", "--case", "d64-zipf")
    names = [case.name for case in command.chosen_cases(some, found, 140 * 2**30)]
    assert {name.split("-", 3)[3] for name in names} == {"d128-zipf", "d64-zipf"}


def test_the_file_is_whole_after_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run interrupted in the second case leaves the first in the file."""
    output = tmp_path / "new" / "found.json"
    args = arguments(monkeypatch, "--device", "cpu", "--output", str(output))
    chosen = [subjects.EmbeddingBag(SMALL, {"torch": imp.Torch}), subjects.ScaleRows(3, 4)]
    monkeypatch.setattr(subjects.ScaleRows, "subjects", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        command.run(args, CPU, Ticks(), chosen, {"about": {}, "cases": []})
    found = json.loads(output.read_text())
    assert [case["name"] for case in found["cases"]] == ["small"]
    assert len(found["cases"][0]["results"]) == 5
    assert [p.name for p in output.parent.iterdir()] == ["found.json"]


def test_a_lost_gpu_costs_the_second_copy_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(monkeypatch, "--device", "cpu", "--output", str(tmp_path / "found.json"))
    rates = iter([1.0])
    monkeypatch.setattr(command, "copy_gb_per_s", lambda *a: next(rates, None) or 1 / 0)
    found = {"about": {}, "cases": []}
    command.run(args, CPU, Ticks(), [], found)
    assert found["copy_gb_per_s"] == {"before": 1.0, "after_error": "division by zero"}


def rows_of(**changes) -> dict:
    row = {"operation": "forward", "optimizer": None, "ms": 2.0}
    row |= {"gb_per_s": {"all": 400.0, "unique": 300.0}, "percent_of_copy": {"all": 40.0, "unique": 30.0}}
    return row | changes


FOUND = {
    "about": {"gpu": {"name": "NVIDIA H200"}},
    "cases": [
        {
            "name": "one",
            "op": "embedding_bag",
            "results": [
                rows_of(implementation="torch", ms=5.0, graph_ms=0.5, graph_error=None),
                rows_of(implementation="ours", graph_ms=0.25),
                rows_of(implementation="fbgemm", ms=3.0, graph_error="RuntimeError: capturing"),
                {"implementation": "ours", "operation": "step", "optimizer": "sgd", "error": "AssertionError: wrong"},
                rows_of(implementation="torch", operation="step", optimizer="sgd", ms=8.0),
            ],
        },
        {"name": "two", "op": "embedding_bag", "results": [], "error": "TimeoutError: not run"},
    ],
}
FOUND["cases"][0]["results"][0].pop("graph_error")


def test_table() -> None:
    """Replays are compared with replays, and calls with calls; a failed case has its reason."""
    assert report.table(FOUND).splitlines() == [
        "| case | operation | ours, ms | graph, ms | GB/s, all rows | GB/s, unique rows | torch | fbgemm |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        "| one | forward | 2.00 | 0.2500 | 400 (40 %) | 300 (30 %) | 0.5000 graph (2.00x) | 3.00 (1.50x) |",
        "| | step, sgd | failed | | | | 8.00 | |",
        "",
        "Not measured:",
        "- one, forward, fbgemm: RuntimeError: capturing",
        "- one, step, sgd, ours: AssertionError: wrong",
        "- two: TimeoutError: not run",
    ]
    assert report._grouped(list("abc"), most=2) == ["a", "b", "- and 1 more, in the JSON file"]


def test_the_replay_of_a_backward_is_that_of_the_ops() -> None:
    """The replayed backward of "ops" is in the line of "ours" with its rates; eager calls are compared with calls."""
    rows = {"operation": "backward", "optimizer": "sgd"}
    rates = {"gb_per_s": {"all": 800.0, "unique": 600.0}, "percent_of_copy": {"all": 80.0, "unique": 60.0}}
    results = [
        rows_of(implementation="ours", **rows),
        rows_of(implementation="ops", ms=1.9, graph_ms=1.0, **rows | rates),
        rows_of(implementation="fbgemm", ms=3.0, **rows),
    ]
    found = FOUND | {"cases": [{"name": "one", "op": "embedding_bag", "results": results}]}
    line = "| one | backward, sgd | 2.00 | 1.00 | 800 (80 %) | 600 (60 %) | 3.00 (1.50x) |"
    assert report.table(found).splitlines()[2] == line


def test_wrong_kernels_end_the_command_with_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command fails after it has measured and written everything."""
    assert command.wrong_results(FOUND) == ["one, step, sgd"]
    output = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--device", "cpu", "--output", str(output)])
    monkeypatch.setattr(command, "measure_apart", lambda *given: bench.save(FOUND, output))
    monkeypatch.setattr(report, "picture", lambda found, path: "")
    with pytest.raises(SystemExit, match="wrong results, hence no figures: one, step, sgd"):
        command.main()


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The picture is drawn if matplotlib is installed, also from a file; otherwise a message says so."""
    file, drawn = tmp_path / "gpu.json", tmp_path / "gpu.png"
    bench.save(FOUND, file)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--show", str(file)])
    if importlib.util.find_spec("matplotlib"):
        command.main()
        assert f"picture: {drawn}" in capsys.readouterr().out
        assert drawn.stat().st_size > 1000
        assert report.picture(FOUND | {"cases": []}, drawn) == "no picture: nothing was measured"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command.main()
    printed = capsys.readouterr().out
    assert "no picture: matplotlib is not installed" in printed
    assert report.table(FOUND) in printed


def test_about_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file has the GPU's name, sizes and driver; the commit, and uncommitted changes."""
    sizes = {"total_memory": 140 * 2**30, "L2_cache_size": 60 * 2**20, "multi_processor_count": 132}
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, **sizes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    commits = iter([{"commit": "abc1234", "dirty": True}, {"commit": "", "dirty": False}])
    monkeypatch.setattr(report, "output_of", lambda *words: "580.159.04\n580.159.04" * (words[0] == "nvidia-smi"))
    monkeypatch.setattr(report.bench, "commit", lambda: next(commits))
    found = report.about(torch.device("cuda"), {"fbgemm": "not installed"}, None)
    assert found["gpu"]["name"] == "NVIDIA H200"
    assert found["gpu"]["driver"] == "580.159.04"
    assert found["gpu"]["compute_capability"] == "9.0"
    assert found["commit"] == "abc1234 and changes"
    assert found["left_out"] == {"fbgemm": "not installed"}
    assert report.about(CPU, {}, None)["commit"].startswith("unknown")
    assert report.default_output("NVIDIA H200").name == "gpu-nvidia-h200.json"


def test_output_survives_a_missing_command() -> None:
    assert report.output_of("no-such-command") == ""
    assert report.output_of(sys.executable, "-c", "raise SystemExit(1)") == ""
    assert report.output_of(sys.executable, "-c", "print(' x ')") == "x"


def test_what_is_left_out_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing Triton and FBGEMM, no interpreter, and an FBGEMM that fails are reported as reasons."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found, reasons = imp.available(CPU)
    assert list(found) == ["ours", "ops", "torch"]
    assert reasons == {"triton": "Triton is not installed", "fbgemm": "fbgemm_gpu is not installed"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    def broken() -> None:
        raise OSError("undefined symbol: _ZN3c10\nand more")

    monkeypatch.setattr(imp, "fbgemm_modules", broken)
    _, reasons = imp.available(CPU)
    assert reasons["triton"] == "on CPU tensors Triton needs TRITON_INTERPRET=1"
    assert reasons["fbgemm"].endswith("does not run here: OSError: undefined symbol: _ZN3c10")
    if not torch.cuda.is_available():
        assert imp._why_not_ours(torch.device("cuda")) is not None


def test_kernel_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs share one file, each with a digest of the tables' bits; a CPU has no kernels to time."""
    output = tmp_path / "kernels.json"
    for label, optimizer in (("before", "sgd"), ("after", "sgd"), ("after", "adam")):
        options = ["--case", "trial-zipf", "--label", label, "--optimizer", optimizer, "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["kernel_times", "--device", "cpu", "--commit", "abc", *options])
        kernel_times.main()
    found = json.loads(output.read_text())
    assert found["about"]["command"].startswith("python -m bench.gpu.kernel_times --device cpu")
    assert found["about"]["commit"] == "abc"
    before, after, other = found["runs"]
    assert before == after | {"label": "before"}
    assert before["kernels_us"] == {"all": 0}
    assert other["digest"] != after["digest"]
    rows = torch.ones(4)
    assert kernel_times.digest(rows) != kernel_times.digest(torch.tensor([1, 1, 1, 1 + 2**-23]))
    monkeypatch.setattr(
        sys, "argv", ["kernel_times", "--device", "cpu", "--case", "x", "--label", "a", "--output", str(output)]
    )
    with pytest.raises(SystemExit):
        kernel_times.main()
    assert "no case is called 'x'" in capsys.readouterr().err


def test_recorded_kernel_times() -> None:
    """All libraries of the recorded runs have the same digest in each case, and their kernels' times add up."""
    found = json.loads((report.RESULTS / "gpu-kernels-h200.json").read_text())
    digests: dict[tuple[str, str], set[str]] = {}
    for run in found["runs"]:
        assert run["label"] in found["about"]["labels"]
        digests.setdefault((run["case"], run["optimizer"]), set()).add(run["digest"])
        kernels = dict(run["kernels_us"])
        assert sum(kernels.values()) == pytest.approx(2 * kernels["all"], rel=0.01)
    assert [len(of_case) for of_case in digests.values()] == [1] * 9
