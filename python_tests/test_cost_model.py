"""bench.cost_model on synthetic and recorded workloads."""

from __future__ import annotations

import copy
import json
import re
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backends import ROOT
from test_bench_tools import RECORDED, STEADY, document, written
from test_tuning import PLANTED, planted_document

from bench import cost_model
from bench.figures import FiguresError
from bench.tuning import model, points
from bench.tuning.points import CALIBRATION
from rec_kernels.testing import use_threads

PAGE = ROOT / "docs" / "benchmarks.md"
FEATURES = {"ids": 40_000, "bags": 8000, "dim": 32, "row_bytes": 128, "unique_rows": 30_000, "cycle_rows": 90_000}


def of_run(ns: dict[str, float], features: dict[str, float], **machine: object) -> dict:
    """A document of bench.run: both directions of a workload, one implementation of which is ours."""
    found = document({"ours": STEADY}, **machine)
    row = found["results"]["g"]["ours"]
    found["results"] = {
        f"{direction} dlrm-small": {"ours": row | {"ms": each / 1e6, "features": features | {"direction": direction}}}
        for direction, each in ns.items()
    }
    return found


def run_main(monkeypatch: pytest.MonkeyPatch, *given: str) -> None:
    """Runs the command with these arguments."""
    monkeypatch.setattr(sys, "argv", ["bench.cost_model", *given])
    cost_model.main()


def test_planted_prices_predict_other_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A model fitted to its own points predicts the other ones exactly, and half of a doubled time."""
    load = model.Load(**FEATURES, tables=8)
    ns = {"forward": PLANTED.ns("forward", load), "train": 2 * PLANTED.ns("step", load)}
    # Older files lack "tables", which the workload's name determines: dlrm-small has 8.
    other = written(tmp_path / "run.json", of_run(ns, FEATURES, cpu="none", threads=2))
    run_main(monkeypatch, written(tmp_path / "points.json", planted_document()), "--held-out", other)
    out = capsys.readouterr().out
    assert re.search(r"\| all \| 28 (\| 0\.0% ){4}\|", out)
    assert re.search(r"\| dlrm-small \| \S+ \| [+-]0% \| \S+ \| -50% \|", out)
    assert "| median error | | 0.0% | | 50.0% |" in out


def test_kinds_are_left_out() -> None:
    """Without a sweep of doubled times, the fit predicts half of them; with it, the error is smaller."""
    found = planted_document()
    for row in found["points"]:
        if row["sweep"] == "bag":
            for direction in ("forward", "step"):
                row[direction]["ours"]["ms"] *= 2
    own = [row for row in found["points"] if row["format"] == "fp32"]
    table = cost_model.kinds(found, model.fit_to(found, own))
    (line,) = (line for line in table.splitlines() if line.startswith("| bag | 6 |"))
    errors = [float(cell.strip(" %")) for cell in line.split("|")[3:7]]
    assert errors[1::2] == [50.0, 50.0]
    assert max(errors[::2]) < 50.0


def test_few_points_fit_all_they_have() -> None:
    """A file without the nine points (--sweep) is fitted to all of its float32 points."""
    rows = [row for row in planted_document()["points"] if row["sweep"] in ("base", "bag", "format")]
    assert model.calibration(rows) == [row for row in rows if row["format"] == "fp32"]
    assert len(model.calibration(planted_document()["points"])) == len(CALIBRATION) == 9


def test_files_that_do_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of another program, of another machine and with too few workloads are rejected by name."""
    planted = planted_document()
    good = written(tmp_path / "points.json", planted)
    few = copy.deepcopy(planted)
    few["points"] = [row for row in few["points"] if row["sweep"] in ("base", "bag", "format")]
    run = written(tmp_path / "run.json", of_run({"forward": 1e6}, FEATURES, cpu="none", threads=4))
    for given, message in (
        ([run], "run.json: not written by python -m bench.tuning"),
        ([written(tmp_path / "few.json", few)], "few.json: 7 float32 workloads, needs at least 9"),
        ([good, "--held-out", run], "run.json: threads is 4, but 2 in the file that the model is fitted to"),
    ):
        with pytest.raises(SystemExit, match=message):
            run_main(monkeypatch, *given)


def test_runs_of_other_formats_and_without_features_are_left_out() -> None:
    """Only float32 rows are predicted."""
    found = of_run({"forward": 1e6}, FEATURES | {"row_bytes": 40})
    found["results"]["old"] = {"ours": {"ms": 1.0}}
    assert cost_model.of_run(found) == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler for the bare loops")
def test_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """--calibrate measures the fitting points of ours alone, writes them to a file, and fits them."""
    quick = points.points(quick=True)
    monkeypatch.setattr(cost_model, "points", lambda: quick)
    monkeypatch.setattr(cost_model, "EFFORT", cost_model.Effort(0.002, 1, 1))
    monkeypatch.setattr(cost_model, "PASSES", 1)
    chosen = tuple((p.sweep, p.value) for p in quick if p.format == "fp32")[:9]
    for module in (cost_model, model):
        monkeypatch.setattr(module, "CALIBRATION", chosen)
    file = tmp_path / "new" / "machine.json"
    with use_threads(torch.get_num_threads()):
        run_main(monkeypatch, str(file), "--calibrate", "--threads", "1", "--predict", "criteo-kaggle")
    found = json.loads(file.read_text())
    assert [(row["sweep"], points.Point.read(row).value) for row in found["points"]] == list(chosen)
    assert all(list(row[direction]) == ["ours"] for row in found["points"] for direction in ("forward", "step"))
    assert found["machine"]["threads"] == 1
    out = capsys.readouterr().out
    assert "Median errors" not in out  # no other workloads
    assert re.search(r"\ncriteo-kaggle: forward \S+ ms, step \S+ ms", out)


@pytest.mark.parametrize("name", ["tuning-2threads", "tuning-2threads-xeon"])
def test_recorded_workloads_of_other_kinds(name: str) -> None:
    """Target: a median error of 10 %, with nine points of a machine and with any kind of workloads left out."""
    found = cost_model.read(str(RECORDED / f"{name}.json"))
    fitted = model.fit_to(found, model.calibration(found["points"]))
    table = cost_model.kinds(found, fitted)
    errors = [float(cell.strip(" %")) for cell in table.splitlines()[-1].split("|")[3:7]]
    assert max(errors) < 10.0
    assert table in PAGE.read_text()


def test_page_has_what_was_held_out() -> None:
    """docs/benchmarks.md has the errors of the named workloads on the machine of the nine points."""
    found = cost_model.read(str(RECORDED / "tuning-2threads-xeon.json"))
    others = cost_model.read_held_out([str(RECORDED / "embedding_bag-workloads-2threads-xeon.json")], found)
    fitted = model.fit_to(found, model.calibration(found["points"]))
    assert cost_model.held_out(others, fitted) in PAGE.read_text()
    with pytest.raises(FiguresError, match="cpu is AMD EPYC, but Intel"):
        cost_model.read_held_out([str(RECORDED / "embedding_bag-workloads-2threads.json")], found)


def test_page_has_what_rates_alone_are_good_for() -> None:
    """docs/benchmarks.md has the errors of one machine's prices with the other's rates."""
    epyc, xeon = (
        cost_model.read(str(RECORDED / f"{name}.json")) for name in ("tuning-2threads", "tuning-2threads-xeon")
    )
    carried = model.fit_to(epyc, model.calibration(epyc["points"]))
    carried = replace(carried, rates=model.Rates(**xeon["rates"]))
    samples = cost_model.of_points([row for row in xeon["points"] if row["format"] == "fp32"])
    off = [statistics.median(abs(s.error(carried)) for s in samples if s.direction == d) for d in ("forward", "step")]
    assert f"off by {off[0]:.0%} and {off[1]:.0%}.".replace("%", " %") in PAGE.read_text()
