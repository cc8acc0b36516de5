"""bench.tuning: bytes of hand-counted cases, the model with planted constants, the command and its page."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backends import ROOT

import rec_kernels as rk
from bench.shapes import Workload
from bench.timing import LEAST_CALLS, take_turns
from bench.tuning import __main__ as command
from bench.tuning import model, pictures, points, report
from bench.tuning.points import Point
from rec_kernels.testing import use_threads

PAGE = ROOT / "docs" / "tuning.md"
RECORDED = ROOT / "bench" / "results" / "tuning-2threads.json"
RATES = {
    "gather": 40.0,
    "cached": 200.0,
    "stream": 45.0,
    "update": 50.0,
    "decode": dict.fromkeys(rk.ROW_FORMATS, 0.05),
    "encode": dict.fromkeys(rk.ROW_FORMATS, 0.3),
}
PLANTED = model.Model(
    model.Rates(**RATES),
    caches=2.0**25,
    near=2.0**21,
    lookup={"call": 20_000.0, "id": 2.5, "byte of output": 0.05},
    backward={"call": 70_000.0, "id or row": 6.0, "byte of gradient": 0.03},
)
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler for the bare loops"
)


def planted_document() -> dict:
    """A run whose times all follow the model with ``PLANTED``."""
    rows = []
    for point in points.points():
        w = point.workload
        unique = w.tables * w.rows * -math.expm1(-w.batch * w.bag / w.rows) / (1 + (w.zipf or 0) ** 4)
        rows_of = {"batches": 6, "unique_rows": unique, "cycle_rows": 6 * unique}
        row = point.about() | rows_of | {"bytes": points.moved(point, unique)}
        load = model.Load.of_point(point, row)
        for direction in ("forward", "step"):
            ms = PLANTED.ns(direction, load) / 1e6
            row[direction] = {"ours": {"ms": ms, "passes_ms": [ms]}, "fbgemm": {"ms": 2 * ms, "over_ours": 2.0}}
        rows.append(row)
    machine = {"cpu": "none", "cpu_isa": "v4", "threads": 2, "torch": "2", "date": "2000-01-01", "commit": "0"}
    about = machine | {"passes": 1, "seconds": 1, "command": "python -m bench.tuning"}
    document = {"machine": about, "rates": RATES, "points": rows}
    model.add_model(document)
    return document


def test_bytes_by_hand() -> None:
    """Two tables, three bags each, two ids per bag, four columns, five distinct rows."""
    point = Point("base", Workload("tiny", tables=2, batch=3, rows=10, dim=4, bag=2))
    assert (point.num_ids, point.num_bags, point.row_bytes) == (12, 6, 16)
    assert points.moved(point, 5) == {
        "forward": {"all": 440, "unique": 440 - 7 * 16},
        "step": {"all": 440 + 544, "unique": 440 - 7 * 16 + 544 - 6 * 16},
    }
    assert points.moved(replace(point, format="int8"), 5) == {  # rows of 12 bytes
        "forward": {"all": 440 - 12 * 4, "unique": 440 - 7 * 16 - 5 * 4},
        "step": {"all": 440 - 12 * 4 + 544 - 10 * 4, "unique": 440 - 7 * 16 - 5 * 4 + 544 - 6 * 16 - 10 * 4},
    }


@pytest.mark.parametrize("row_bytes", [4, 12, 32, 36, 64, 72, 128, 144, 256, 1024])
def test_line_bytes(row_bytes: int) -> None:
    """The mean over the first rows of a table that starts at a cache line."""
    first = [i * row_bytes for i in range(64)]
    lines = [(begin + row_bytes - 1) // 64 - begin // 64 + 1 for begin in first]
    assert points.line_bytes(row_bytes) == 64 * statistics.fmean(lines)


def test_page_knows_the_bytes_of_rows() -> None:
    """The table of r has each formula's value for 64 columns."""
    heads, _, cells = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.search(r"\| fp32 \|.*\n.*\n.*\n", PAGE.read_text())[0].splitlines()
    )
    for formats, formula in zip(heads, cells, strict=True):
        spelled = re.sub(r"(\d+) D", r"\1 * 64", formula).replace("D", "64")
        for format in formats.split(", "):
            assert eval(spelled) == rk.row_bytes(format, 64), format


def test_points_move_one_parameter() -> None:
    """Every point differs from the base only in its sweep's parameter, and survives a JSON file."""
    for quick in (False, True):
        base, *others = points.points(quick)
        assert base.sweep == "base"
        for point in others:
            moved = {name for name, value in point.about().items() if value != base.about()[name]}
            assert moved == {"sweep", point.sweep}
        for point in (base, *others):
            again = Point.read(json.loads(json.dumps(point.about())))
            assert again.about() == point.about()
            assert again.value == point.value


def test_turns() -> None:
    """Every turn begins with the next function; its first call of each is not counted."""
    called: list[tuple[str, int]] = []
    functions = {name: lambda i, name=name: called.append((name, i)) for name in "ab"}
    found = take_turns(functions, 3, turns=2, seconds=0.0, first=1)
    assert [len(found[name]) for name in "ab"] == [2 * LEAST_CALLS] * 2
    each = 1 + LEAST_CALLS
    assert [name for name, _ in called] == ["b"] * each + ["a"] * 2 * each + ["b"] * each
    assert [i for name, i in called if name == "a"] == [i % 3 for i in range(2 * each)]


def test_fit_finds_planted_prices() -> None:
    """Prices that are fitted to nine points predict all others, also in other formats."""
    document = planted_document()
    found = document["model"]
    assert found["prices_ns"]["forward"] == pytest.approx(PLANTED.lookup, rel=1e-6)
    assert found["prices_ns"]["step"] == pytest.approx(PLANTED.backward, rel=1e-6)
    assert (found["caches_bytes"], found["near_bytes"]) == (PLANTED.caches, PLANTED.near)
    for row in document["points"]:
        assert abs(row["model"]["forward"]["error"]) < 1e-6
        assert abs(row["model"]["step"]["error"]) < 1e-6
    fitted = [(row["sweep"], Point.read(row).value) for row in document["points"] if row["model"]["fitted"]]
    assert sorted(fitted, key=str) == sorted(points.CALIBRATION, key=str)


def test_costs_by_hand() -> None:
    """100 ids of 40 rows; the caches hold a quarter of 80 in use. A row of 64 bytes is a line, its state another.

    A sample has 2 tables of 16 columns, 128 bytes: a table's gradient of 10 bags is spread over 1280 bytes.
    """
    rates = model.Rates(gather=2.0, cached=100.0, stream=4.0, update=8.0, decode={"int8": 0.5}, encode={"int8": 3.0})
    load = model.Load(ids=100, bags=20, tables=2, dim=16, row_bytes=64, unique_rows=40, cycle_rows=80)
    lookup = model.lookup_cost(load, rates, caches=20 * 64)
    assert lookup.known == {
        "rows from memory": 30 * 64 / 2.0,
        "ids, offsets": (8 * 100 + 8 * 21) / 4.0,
        "rows from a cache": 70 * 64 / 100.0,
    }
    assert lookup.counts == {"call": 1, "id": 100, "byte of output": 4 * 20 * 16}
    backward = model.backward_cost(load, rates, caches=0.0, near=320.0)
    assert backward.known == {
        "gradient": pytest.approx(4 * 100 * 16 * (0.75 / 4.0 + 0.25 / 100.0)),
        "rows and state": 2 * 40 * 128 / 8.0,
        "ids, offsets": (8 * 100 + 8 * 21) / 4.0,
        "decoding, encoding": 0.0,
    }
    assert backward.counts == {"call": 1, "id or row": 140, "byte of gradient": 4 * 20 * 16}
    encoded = replace(load, format="int8", row_bytes=24)
    assert model.lookup_cost(encoded, rates, 0.0).known["decoding"] == 100 * 16 * 0.5
    assert model.lookup_cost(encoded, rates, 0.0).counts["id"] == 0
    assert model.backward_cost(encoded, rates, 0.0, 320.0).known["decoding, encoding"] == 40 * 16 * 3.5


@pytest.mark.parametrize(
    ("tables", "dim", "reach"),
    [
        (1, 16, 10 * 64),  # bags are adjacent
        (4, 64, 10 * 1024),
        (26, 128, 10 * 4096),  # a page for each bag: samples are further apart
        (2, 2048, 10 * 8192),  # a bag has two pages
    ],
)
def test_gradient_reach(tables: int, dim: int, reach: int) -> None:
    """Ten bags of a table: the bytes of all pages that they touch."""
    load = model.Load(100, 10 * tables, tables, dim, 4 * dim, 40, 80)
    assert load.gradient_reach() == reach


def test_fit_has_no_negative_price() -> None:
    """A negative price becomes 0, and the rest is fitted again: 10 per call, 3 per id."""
    costs = [model.Cost({"known": 100.0}, {"call": 1, "bag": n * n, "id": n}) for n in (1.0, 2.0, 5.0)]
    times = [100.0 + 10 + 3 * n - 0.01 * n * n for n in (1.0, 2.0, 5.0)]
    found = model.fit(costs, times)
    assert found["bag"] == 0
    assert found["call"] == pytest.approx(10, abs=0.5)
    assert found["id"] == pytest.approx(3, abs=0.2)
    assert model.fit(costs, [50.0] * 3) == {"call": 0.0, "bag": 0.0, "id": 0.0}
    free = [model.Cost({}, {"call": 1, "bag": 0}) for _ in range(2)]
    assert model.fit(free, [5.0] * 2) == pytest.approx({"call": 5.0, "bag": 0.0})


def test_errors_by_hand() -> None:
    """Errors are mean magnitudes; the base belongs to no sweep."""
    rows = [
        {"sweep": sweep, "model": {"fitted": fitted, "forward": {"error": error}, "step": {"error": -2 * error}}}
        for sweep, fitted, error in (("base", True, 0.3), ("bag", True, -0.1), ("bag", False, 0.2))
    ]
    found = {name: of_group["forward"] for name, of_group in model.errors(rows).items()}
    expected = {"bag": 0.15, "points fitted to": 0.2, "other points": 0.2, "all points": 0.2}
    assert found == pytest.approx(expected)
    assert model.errors(rows)["bag"]["step"] == pytest.approx(0.3)


@pytest.mark.full
@needs_compiler
def test_quick_run(tmp_path: Path) -> None:
    """The command measures every sweep, fits a model, and draws two pictures."""
    pytest.importorskip("matplotlib")
    output, images = tmp_path / "tuning.json", tmp_path / "images"
    arguments = ["--quick", "--threads", "1", "--output", str(output), "--pictures", str(images)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "bench.tuning", *arguments], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    document = json.loads(output.read_text())
    assert {row["sweep"] for row in document["points"]} == {"base", *points.QUICK_SWEEPS}
    for row in document["points"]:
        assert 0 < row["unique_rows"] <= row["tables"] * row["batch"] * row["bag"]
        assert row["unique_rows"] <= row["cycle_rows"] <= row["batches"] * row["unique_rows"]
        for direction in ("forward", "step"):
            assert 0 < row["bytes"][direction]["unique"] <= row["bytes"][direction]["all"]
            assert row[direction]["ours"]["ms"] > 0
            assert row["model"][direction]["ms"] > 0
            assert math.isfinite(row["model"][direction]["error"])
    for direction in ("forward", "step"):
        picture = (images / f"tuning-{direction}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 150_000


@needs_compiler
def test_run_without_peer_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without FBGEMM, its column is empty; without matplotlib, a message is printed."""
    output = tmp_path / "tuning.json"
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--quick", "--sweep", "bag", "--output", str(output), "--pictures", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench.tuning", *arguments])
    with use_threads(torch.get_num_threads()):
        command.main()
    assert "no pictures: matplotlib is not installed" in capsys.readouterr().out
    rows = json.loads(output.read_text())["points"]
    assert [row["sweep"] for row in rows] == ["base", "bag", "bag"]
    assert all(list(row[direction]) == ["ours"] for row in rows for direction in ("forward", "step"))


def test_peer_takes_part() -> None:
    """An installed FBGEMM is measured in float32 training, and in lookups of its formats."""
    pytest.importorskip("fbgemm_gpu")
    from bench.subject import Subject
    from bench.tuning import measure

    tables, base = measure.Tables(), points.points(quick=True)[0]
    for format, who in (("fp32", {"ours", "fbgemm"}), ("int8", {"ours", "fbgemm"}), ("mx9", {"ours"})):
        point = Point("format", base.workload, format)
        subject, built = Subject(point.workload, 1), tables.at(point)
        found = measure.measure_point(subject, built, measure.QUICK, first=0)
        assert found["forward"].keys() == who
        assert found["step"].keys() == (who if format == "fp32" else {"ours"})


def test_quick_needs_an_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """--quick requires --output, so that its figures do not replace results."""
    monkeypatch.setattr(sys, "argv", ["bench.tuning", "--quick"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--quick needs --output" in capsys.readouterr().err


def test_page_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--docs rewrites only the generated parts of the page, and is idempotent."""
    page, file = tmp_path / "docs" / "tuning.md", tmp_path / "results" / "run.json"
    page.parent.mkdir()
    file.parent.mkdir()
    page.write_text(PAGE.read_text())
    file.write_text(json.dumps(planted_document()))
    monkeypatch.setattr(sys, "argv", ["bench.tuning", "--docs", str(page), "--output", str(file)])
    command.main()
    text = page.read_text()
    assert "Not measured yet" not in text
    assert "[run.json](../results/run.json)" in text
    assert "images/tuning" not in text  # no pictures
    assert report.PART.sub("", text) == report.PART.sub("", PAGE.read_text())
    command.main()
    assert page.read_text() == text


def test_page_without_its_parts_is_refused() -> None:
    """The error names the missing part."""
    with pytest.raises(ValueError, match="must have the generated parts curves, prices, errors, but has none"):
        report.page_with("# Tuning\n", planted_document(), PAGE, RECORDED)


def test_every_panel_is_drawn(tmp_path: Path) -> None:
    """All six parameters have a panel, also of a run with FBGEMM in every point."""
    pytest.importorskip("matplotlib")
    assert "tuning-forward.png" in pictures.draw(planted_document(), tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["tuning-forward.png", "tuning-step.png"]


@pytest.mark.skipif(not RECORDED.exists(), reason="no run has been recorded")
def test_page_has_the_recorded_run() -> None:
    """The page has the file's tables and model, and the model is fitted to the file's points."""
    recorded = json.loads(RECORDED.read_text())
    again = copy.deepcopy(recorded)
    model.add_model(again)
    for direction, prices in recorded["model"]["prices_ns"].items():
        assert again["model"]["prices_ns"][direction] == pytest.approx(prices, rel=1e-6)
    text = PAGE.read_text()
    assert report.page_with(text, recorded, PAGE, RECORDED) == text
