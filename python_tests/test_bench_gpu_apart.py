"""bench.gpu's subprocesses: a case that hangs, or breaks the GPU's context, loses only its own figures."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_bench_gpu import CPU, SMALL, Ticks

import bench
from bench.gpu import __main__ as command
from bench.gpu import apart, context, subjects
from bench.gpu import implementations as imp

#: A module without torch, whose import takes seconds; a case's name determines what it does.
MEASURE = f"""
import json, os, sys, time

def measure(args):
    found = json.loads(args.output.read_text()) if args.output.exists() else {{"cases": []}}
    done = [case["name"] for case in found["cases"]]
    for name in [name for name in args.cases if name not in done]:
        running = {{"running": {{"name": name}}}} if name != "nothing" else {{}}
        args.output.write_text(json.dumps(found | running))
        if name == "dies":
            os.abort()
        if name == "hangs":
            time.sleep(60)
        if name in ("raises", "nothing"):
            raise ValueError(name)
        found["cases"].append({{"name": name, "by": os.getpid()}})
        args.output.write_text(json.dumps(found))
        if name == "breaks":
            sys.exit({context.BROKEN})
"""


@pytest.fixture
def measure_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Measures cases in subprocesses: (exit status, content of the file)."""
    (tmp_path / "fake_measure.py").write_text(MEASURE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fake_measure", raising=False)
    measure, output = importlib.import_module("fake_measure").measure, tmp_path / "found.json"

    def run(*cases: str, seconds: float = 300) -> tuple[int, dict]:
        status = apart.measure_apart(measure, Namespace(output=output, cases=cases), seconds)
        return status, json.loads(output.read_text())

    return run


def test_another_process_goes_on(measure_cases, capfd: pytest.CaptureFixture) -> None:
    """A new process measures the cases after a lost one; earlier results are kept, and the loss is printed."""
    status, found = measure_cases("good", "dies", "breaks", "raises", "last")
    assert status == 0
    names = {case["name"]: case for case in found["cases"]}
    assert list(names) == ["good", "dies", "breaks", "raises", "last"]
    assert "running" not in found
    assert names["dies"] == {"name": "dies", "results": [], "error": "not measured: its process ended with status -6"}
    assert names["raises"]["error"] == "not measured: its process ended with status 1"
    assert len({names[name]["by"] for name in ("good", "breaks", "last")}) == 3
    assert "dies: its process ended with status -6; another process goes on" in capfd.readouterr().out


def test_a_case_that_hangs(measure_cases) -> None:
    """A process that writes nothing for a given time is ended."""
    status, found = measure_cases("hangs", "last", seconds=4)
    assert status == 0
    assert found["cases"][0]["error"] == "not measured: it lasted 4 s"
    assert [case["name"] for case in found["cases"]] == ["hangs", "last"]


def test_an_error_outside_of_all_cases_ends_the_run(measure_cases) -> None:
    """An error outside of all cases ends the run, because another process would fail as well."""
    assert measure_cases("good")[0] == 0
    status, found = measure_cases("other", "nothing", "last")
    assert status == 1
    assert [case["name"] for case in found["cases"]] == ["other"]


def test_a_broken_context_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends after it has written the case that broke the context."""
    output = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--device", "cpu", "--output", str(output)])
    monkeypatch.setattr(command, "context_works", lambda: False)
    chosen = [subjects.EmbeddingBag(SMALL, {"torch": imp.Torch}), subjects.ScaleRows(3, 4)]
    with pytest.raises(SystemExit) as ended:
        command.run(command.arguments(), CPU, Ticks(), chosen, {"about": {}, "cases": []})
    assert ended.value.code == context.BROKEN
    found = json.loads(output.read_text())
    (small,) = found["cases"]
    assert (small["name"], small["error"]) == ("small", "not measured: it has left the CUDA context broken")
    assert small["results"]
    assert "running" not in found


def test_a_lost_case_ends_the_command_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command fails after it has measured and written the other cases."""
    output = tmp_path / "found.json"
    lost = {"name": "one", "op": "expand", "results": [], "error": apart.LOST + "it lasted 90 s"}
    found = {"about": {"gpu": None}, "cases": [lost, {"name": "two", "op": "expand", "results": []}]}
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--device", "cpu", "--output", str(output)])
    monkeypatch.setattr(command, "measure_apart", lambda *given: bench.save(found, output))
    with pytest.raises(SystemExit, match=r"^cases that ended their process: one$"):
        command.main()


def test_what_is_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process measures the remaining cases, adds them to the file, and does not repeat the initial copy."""
    output = tmp_path / "found.json"
    before = {"about": {"gpu": None}, "copy_gb_per_s": {"before": 5.0}, "cases": [{"name": "scale-rows-5x16"}]}
    output.write_text(json.dumps(before))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=2**40, name="GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(command, "CudaTimer", Ticks)
    monkeypatch.setattr(command, "available", lambda device: ({"torch": imp.Torch}, {}))
    monkeypatch.setattr(command, "every_case", lambda *a, **k: [subjects.ScaleRows(5, 16), subjects.ScaleRows(3, 4)])
    seen = []
    monkeypatch.setattr(command, "run", lambda args, device, timer, chosen, found: seen.extend((chosen, found)))
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--output", str(output)])
    command.measure(command.arguments())
    assert [case.name for case in seen[0]] == ["scale-rows-3x4"]
    assert seen[1] == before
