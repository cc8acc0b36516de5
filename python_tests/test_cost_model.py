"""bench.cost_model, on figures that are made up, and on those of the recorded sweeps."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from backends import ROOT

sys.path.append(str(ROOT))  # `pytest` does not know bench, as `python -m pytest` does

from test_bench_tools import RECORDED, STEADY, document, written

from bench import cost_model
from bench.cost_model import Sample
from bench.figures import FiguresError

PRICES = {"call": 20_000.0, "byte from memory": 0.05, "byte from a cache": 0.01, "byte of output": 0.02}
PRICES |= {"pooled bag": 3.0, "id": 4.0, "row": 9.0, "byte of gradient": 0.015}


def made_up(direction: str, prices: dict[str, float], cache_bytes: float) -> list[Sample]:
    """Workloads of many sizes whose times are what the prices say."""
    samples = []
    for i, (ids, bag, dim, repeats) in enumerate(
        (ids, bag, dim, repeats)
        for ids in (2000, 40_000, 900_000)
        for bag in (1, 4, 30)
        for dim in (16, 32, 64)
        for repeats in (1, 5)
    ):
        features = {"ids": ids, "bags": ids // bag, "pooled_bags": (bag > 1) * ids // bag, "dim": dim}
        features |= {"row_bytes": 4 * dim, "unique_rows": ids / repeats, "cycle_rows": 4 * ids / repeats}
        ns = cost_model.CostModel(cache_bytes, prices).ns(direction, features)
        samples.append(Sample(f"w{i}", f"dim {dim}", direction, features, ns))
    return samples


@pytest.mark.parametrize("direction", cost_model.DIRECTIONS)
def test_cost_model_finds_planted_prices(direction: str) -> None:
    """The fit finds the prices and the caches' bytes; each workload is predicted by the others and by other
    families."""
    names = cost_model.counts(direction, made_up(direction, dict.fromkeys(PRICES, 1.0), 0)[0].features, 0)
    prices = {name: PRICES[name] for name in names}
    samples = made_up(direction, prices, 2.0**22)
    found = cost_model.fitted(samples)
    assert found.cache_bytes == 2.0**22
    assert found.prices_ns == pytest.approx(prices, rel=1e-6)
    assert cost_model.geometric_error(cost_model.left_out(samples, "name"), samples) < 1e-6
    assert cost_model.geometric_error(cost_model.left_out(samples, "family"), samples) < 1e-6


@pytest.mark.parametrize("direction", cost_model.DIRECTIONS)
def test_errors_say_what_does_not_follow_the_model(direction: str) -> None:
    """A family that takes three times as long is off by that without it; with its kin in the fit, by less."""
    names = cost_model.counts(direction, made_up(direction, dict.fromkeys(PRICES, 1.0), 0)[0].features, 0)
    samples = made_up(direction, {name: PRICES[name] for name in names}, 2.0**22)
    odd = [s.family == "dim 64" for s in samples]
    samples = [replace(s, ns=3 * s.ns) if is_odd else s for s, is_odd in zip(samples, odd, strict=True)]
    alone, without = (cost_model.left_out(samples, of) for of in ("name", "family"))
    those = [s for s, is_odd in zip(samples, odd, strict=True) if is_odd]
    of_family = cost_model.geometric_error([ns for ns, is_odd in zip(without, odd, strict=True) if is_odd], those)
    assert of_family == pytest.approx(2.0, rel=1e-6)
    mild = cost_model.geometric_error([ns for ns, is_odd in zip(alone, odd, strict=True) if is_odd], those)
    assert 0.05 < mild < 1.9
    lines = cost_model.families({direction: samples}).splitlines()
    assert lines[-2] == f"| dim 64 | 18 | {mild:.1%} | 200.0% |"
    assert lines[-1].startswith("| all | 54 | ")


@pytest.mark.parametrize("direction", cost_model.DIRECTIONS)
def test_a_workload_left_out_is_not_in_its_fit(direction: str) -> None:
    """One that takes twice as long, beside others that follow the model, is off by all of it."""
    names = cost_model.counts(direction, made_up(direction, dict.fromkeys(PRICES, 1.0), 0)[0].features, 0)
    samples = made_up(direction, {name: PRICES[name] for name in names}, 2.0**22)
    samples[7] = replace(samples[7], ns=2 * samples[7].ns)
    assert cost_model.left_out(samples, "name")[7] == pytest.approx(samples[7].ns / 2, rel=1e-6)


def test_too_few_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how many there are and are needed; a family without which too few are left has no error."""
    samples = made_up("train", PRICES, 0)
    with pytest.raises(FiguresError, match="5 float32 workloads of a direction, at least 6 are needed"):
        cost_model.fitted(samples[:5])
    both = [*(replace(s, direction="forward") for s in samples[:9]), *samples[:6]]
    with pytest.raises(FiguresError, match="6 float32 workloads of 'train', at least 7 are needed, to leave out one"):
        cost_model.report(both, [])
    one_family = [replace(s, family="f") for s in samples[:9]]
    assert re.search(r"\| f \| 9 \| [\d.]+% \| too few others \|", cost_model.families({"train": one_family}))
    name = written(tmp_path / "old.json", document({"ours": STEADY}))  # without features
    monkeypatch.setattr(sys, "argv", ["bench.cost_model", name])
    with pytest.raises(SystemExit, match="0 float32 workloads of 'forward', at least 7 are needed"):
        cost_model.main()


def test_held_out_is_not_fitted_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit's own file and other figures of its workloads are refused by name; other files are not."""
    name = str(RECORDED / "tuning-2threads.json")
    again = json.loads(Path(name).read_text())
    again["points"] = [row for row in again["points"] if row["sweep"] == "bag"][:2]
    for row in again["points"]:
        row["step"]["ours"]["ms"] *= 2
    for held_out, names in (
        (name, "forward base, train base, "),
        (written(tmp_path / "a.json", again), "forward bag 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench.cost_model", name, "--held-out", held_out])
        with pytest.raises(SystemExit, match=f"--held-out: fitted to, and so not held out: {names}"):
            cost_model.main()
    samples = made_up("train", PRICES, 0)
    cost_model.refuse_fitted(samples[:9], samples[9:])


def test_rows_in_use_are_counted_once() -> None:
    """Rows of several batches of bench.tuning's points are counted as a Subject does, also where a file lacks the
    number."""
    (base, *points) = json.loads((RECORDED / "tuning-2threads.json").read_text())["points"]
    skewed = next(row for row in points if row["zipf"] == 1.0)
    assert skewed["cycle_rows"] < 0.7 * skewed["batches"] * skewed["unique_rows"]
    for row in (base, skewed):
        (known, _), (counted, _) = (
            cost_model.samples_of({"points": [given]})
            for given in (row, {key: value for key, value in row.items() if key != "cycle_rows"})
        )
        assert known == counted


def test_counts_by_hand() -> None:
    """100 ids of 40 rows, 80 in use, of which the caches hold a quarter; a row of 24 bytes touches 80 of lines."""
    features = {
        "ids": 100,
        "bags": 10,
        "pooled_bags": 9,
        "dim": 8,
        "row_bytes": 24,
        "unique_rows": 40,
        "cycle_rows": 80,
    }
    forward = cost_model.counts("forward", features, 20 * 80)
    assert forward == {
        "call": 1,
        "byte from memory": 30 * 80,
        "byte from a cache": 70 * 80,
        "byte of output": 320,
        "pooled bag": 9,
    }
    train = cost_model.counts("train", features, 0)
    assert train == {
        "call": 1,
        "byte from memory": 40 * 80,
        "byte of output": 4 * 10 * 8,
        "id": 100,
        "row": 40,
        "byte of gradient": 3200,
    }


def test_geometric_error_by_hand() -> None:
    """Twice and half of what was measured are both off by a factor of 2."""
    samples = [Sample("", "", "train", {}, 10.0)] * 2
    assert cost_model.geometric_error([20.0, 5.0], samples) == pytest.approx(1.0)
    assert cost_model.geometric_error([10.0, 10.0], samples) == 0


def test_cost_model_of_the_recorded_sweeps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Every float32 point of bench.tuning is a sample of both directions; left out of the fit, it is off by < 15 %."""
    name = str(RECORDED / "tuning-2threads.json")
    samples, _ = cost_model.read([name], fastest=False)
    points = [row for row in json.loads(Path(name).read_text())["points"] if row["format"] == "fp32"]
    assert [s.ns for s in samples[:2]] == [points[0][d]["ours"]["ms"] * 1e6 for d in ("forward", "step")]
    assert len(samples) == 2 * len(points)
    for direction in cost_model.DIRECTIONS:
        own = [s for s in samples if s.direction == direction]
        assert cost_model.geometric_error(cost_model.left_out(own, "name"), own) < 0.15
    monkeypatch.setattr(sys, "argv", ["bench.cost_model", name, "--predict", "criteo-kaggle"])
    cost_model.main()
    out = capsys.readouterr().out
    assert "| forward zipf 1.4 |" in out
    assert "\ncriteo-kaggle: forward " in out


def test_page_has_the_cost_model_of_the_recorded_sweeps() -> None:
    """docs/benchmarks.md: its prices, and by how much they are off."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    samples, _ = cost_model.read([str(RECORDED / "tuning-2threads.json")], fastest=False)
    of = {d: [s for s in samples if s.direction == d] for d in cost_model.DIRECTIONS}
    assert cost_model.prices({d: cost_model.fitted(own) for d, own in of.items()}) in page
    assert cost_model.families(of) in page


def test_page_has_what_was_held_out() -> None:
    """docs/benchmarks.md: other workloads than those that the prices of that machine were fitted to."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    fitted_to, held_out = (
        cost_model.read([str(RECORDED / f"{name}.json")], fastest=False)[0]
        for name in ("tuning-2threads-xeon", "embedding_bag-workloads-2threads-xeon")
    )
    cost_model.refuse_fitted(fitted_to, held_out)
    errors = []
    for direction in cost_model.DIRECTIONS:
        model = cost_model.fitted([s for s in fitted_to if s.direction == direction])
        others = [s for s in held_out if s.direction == direction]
        errors.append(cost_model.geometric_error([model.ns(direction, s.features) for s in others], others))
    assert f"are off by {errors[0]:.1%} and {errors[1]:.1%}:".replace("%", " %") in page


def test_cost_model_reads_runs(tmp_path: Path) -> None:
    """Groups with features of float32 rows; the median of the passes or the fastest; one machine only."""
    features = made_up("train", PRICES, 0)[0].features | {"direction": "train"}
    found = document({"ours": [3.0, 1.0, 2.0], "torch": [4.0] * 3})
    found["results"]["g"]["ours"]["features"] = features
    found["results"]["int8"] = {"ours": found["results"]["g"]["ours"] | {"features": features | {"row_bytes": 24}}}
    name = written(tmp_path / "a.json", found)
    for fastest, ms in ((False, 2.0), (True, 1.0)):
        samples, _ = cost_model.read([name], fastest)
        assert [(s.name, s.direction, s.ns) for s in samples] == [("g", "train", ms * 1e6)]
    other = written(tmp_path / "b.json", document({"ours": STEADY}, threads=2))
    with pytest.raises(FiguresError, match="threads is 2, and 1 in"):
        cost_model.read([name, other], fastest=False)


def of_run(samples: list[Sample]) -> dict:
    """A document of bench.run: a group for each of them, in which ours is timed."""
    found = document({"ours": STEADY})
    row = found["results"]["g"]["ours"]
    found["results"] = {
        f"{s.direction} {s.name}": {
            "ours": row | {"ms": s.ns / 1e6, "features": s.features | {"direction": s.direction}}
        }
        for s in samples
    }
    return found


def test_report_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A workload's two directions are one family; one that was measured in one direction has no error of the other."""
    forward, train = (made_up(direction, PRICES, 0)[::4] for direction in cost_model.DIRECTIONS)
    name = written(tmp_path / "run.json", of_run([*forward, *train[1:]]))
    monkeypatch.setattr(sys, "argv", ["bench.cost_model", name])
    cost_model.main()
    lines = capsys.readouterr().out.splitlines()
    (first,) = (line for line in lines if line.startswith("| w0 |"))
    (second,) = (line for line in lines if line.startswith("| w4 |"))
    assert re.fullmatch(r"\| w0 \| 1 (\| [\d.]+% ){2}(\|   ){2}\|", first)
    assert re.fullmatch(r"\| w4 \| 1 (\| [\d.]+% ){4}\|", second)
    assert sum(line.startswith("| forward w0 |") for line in lines) == 1
