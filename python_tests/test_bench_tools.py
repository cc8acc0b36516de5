"""bench.run's files, bench.compare, bench.report and bench.cost_model, on figures that are made up."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from backends import ROOT

sys.path.append(str(ROOT))  # `pytest` does not know bench, as `python -m pytest` does

from bench import compare, cost_model, figures, report, run
from bench.cost_model import Sample
from bench.figures import FiguresError
from bench.workloads import NAMED

MACHINE = {"cpu": "none", "cpu_isa": "v4", "threads": 1, "torch": "2", "python": "3", "date": "2000-01-01"}
MACHINE |= {"commit": "abc", "dirty": False, "command": "python -m bench.run"}
STEADY = [1.0, 1.02, 0.98, 1.01, 0.99]
RECORDED = ROOT / "bench" / "results"


def one_pass(ms: dict[str, float], extra: dict | None = None) -> dict:
    """What `bench.run.one_pass` gives for one group."""
    return {"g": {name: {"ms": v, "min_ms": v / 2, "bytes": 4e6, **(extra or {})} for name, v in ms.items()}}


def document(times: dict[str, list[float]], **machine) -> dict:
    """A file of one group: implementation -> milliseconds of the passes."""
    passes = [one_pass(dict(zip(times, of_pass, strict=True))) for of_pass in zip(*times.values(), strict=True)]
    return {"machine": MACHINE | machine, "results": run.merge(passes)}


def written(path: Path, found: object) -> str:
    """The name of a file that holds it."""
    path.write_text(json.dumps(found))
    return str(path)


def test_merge_keeps_every_pass() -> None:
    """Medians, ratios within a pass, what the passes found, and what the first one told."""
    passes = [one_pass({"ours": a, "torch": b}, {"distinct_bytes": 3}) for a, b in ((1, 4), (2, 4), (4, 4))]
    found = run.merge(passes)["g"]
    assert found["ours"] == {
        "ms": 2,
        "min_ms": 0.5,
        "passes_ms": [1, 2, 4],
        "bytes": 4e6,
        "gb_per_s": 2.0,
        "distinct_bytes": 3,
        "over_ours": 1.0,
    }
    assert (found["torch"]["ms"], found["torch"]["over_ours"]) == (4, 2)


def test_arguments_of_run(capsys: pytest.CaptureFixture) -> None:
    """A workload goes to the ops that take it, and to no other."""
    assert run.arguments(["--workload", "dlrm-small"]).op == list(run.OPS)
    assert run.arguments(["--workload", "dlrm-small", "--op", "embedding_bag"]).op == ["embedding_bag"]
    assert run.arguments([]).op is None
    with pytest.raises(SystemExit):
        run.arguments(["--workload", "dlrm-small", "--op", "expand"])
    assert "--op expand: only embedding_bag and embedding_bag_formats take a --workload" in capsys.readouterr().err


def test_commit_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a repository of its own: a commit, the same with changes, a tag; and of no repository."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run.commit() == {"commit": "", "dirty": False}
    who = ["-c", "user.name=n", "-c", "user.email=e"]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert run.commit() == {"commit": git("rev-parse", "--short", "HEAD"), "dirty": False}
    (tmp_path / "new").write_text("git does not know it")
    assert not run.commit()["dirty"]
    (tmp_path / "file").write_text("2")
    git("tag", "v1")
    assert run.commit() == {"commit": "v1", "dirty": True}


def test_ratio_by_hand() -> None:
    """Two passes a side: geometric means 2 and 6; t of 2 degrees of freedom is 4.303."""
    found = compare.ratio([1.0, 4.0], [3.0, 12.0])
    assert found.value == pytest.approx(3)
    # Each side's logarithms vary by ln(4)^2 / 2, their mean by half of that.
    half = 4.302653 * math.sqrt(2 * math.log(4) ** 2 / 4)
    assert (found.low, found.high) == pytest.approx((3 / math.exp(half), 3 * math.exp(half)), rel=1e-5)
    assert compare.ratio([2.0], [3.0, 3.0]) == compare.Ratio(pytest.approx(1.5), None, None)
    assert compare.ratio([2.0, 2.0], [3.0, 3.0]) == compare.Ratio(*[pytest.approx(1.5)] * 3)


@pytest.mark.parametrize(
    ("ours", "torch", "said"),
    [
        ([t * 0.8 for t in STEADY], STEADY, "faster"),
        ([t * 1.2 for t in STEADY], STEADY, "slower"),
        ([t * 1.01 for t in STEADY], STEADY, "within noise"),
        ([1.2, 2.0, 0.7, 1.6, 0.8], STEADY, "within noise"),
        # The machine has become slower, as code shows that is the same.
        ([t * 1.2 for t in STEADY], [t * 1.3 for t in STEADY], "within noise"),
        ([t * 0.8 for t in STEADY], [t * 1.3 for t in STEADY], "faster"),
        ([t * 1.5 for t in STEADY], [t * 1.3 for t in STEADY], "slower"),
    ],
)
def test_verdicts(ours: list[float], torch: list[float], said: str) -> None:
    """Of an interval, and of what torch moved by meanwhile."""
    before = document({"ours": STEADY, "torch": STEADY})["results"]["g"]
    after = document({"ours": ours, "torch": torch})["results"]["g"]
    assert compare.compare_group(before, after, None)["ours"][1] == said


def test_against_takes_the_machine_out() -> None:
    """All is 1.3 times slower: times say slower where torch is missing, shares of torch's time say nothing changed."""
    slower = [1.3 * t for t in STEADY]
    before, after = document({"ours": STEADY, "torch": STEADY}), document({"ours": slower, "torch": slower})
    found = compare.compare_group(before["results"]["g"], after["results"]["g"], "torch")
    assert list(found) == ["ours"]
    assert found["ours"][0].value == pytest.approx(1)
    alone = [{"ours": d["results"]["g"]["ours"]} for d in (before, after)]
    assert compare.compare_group(*alone, None)["ours"][1] == "slower"
    assert compare.compare_group(*alone, "torch") == {}


def test_compare_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Its table and summary, and what differs beside the commit."""
    before = written(tmp_path / "a.json", document({"ours": STEADY, "limit": STEADY}))
    after = document({"ours": [t * 0.5 for t in STEADY], "limit": STEADY}, torch="3", commit="def", dirty=True)
    monkeypatch.setattr(sys, "argv", ["bench.compare", before, written(tmp_path / "b.json", after)])
    compare.main()
    out = capsys.readouterr().out
    assert "commit def and changes" in out
    assert "The runs differ in torch: 2, 3: no comparison of commits." in out
    line = next(line for line in out.splitlines() if line.startswith("| g | ours |"))
    assert line == "| g | ours | 0.9999 | 0.4999 | 0.500 | 0.489 to 0.512 | 1.000 to 1.000 | faster |"
    assert "Ours: 1 faster; geometric mean 0.500." in out
    monkeypatch.setattr(sys, "argv", ["bench.compare", before, "nowhere.json"])
    with pytest.raises(SystemExit, match=r"nowhere\.json: neither a file nor"):
        compare.main()


def test_files_are_read(tmp_path: Path) -> None:
    """Of today, as git has them, from before every pass was kept; not those of other programs."""
    found = document({"ours": [2.0, 4.0], "limit": [1.0, 1.0]})
    group = figures.load(written(tmp_path / "a.json", found))["results"]["g"]
    assert figures.passes(group["ours"]) == [2.0, 4.0]
    assert figures.moved(group["ours"]) == 4e6
    assert figures.share_of_limit(group, "ours") == statistics.median([0.5, 0.25])
    assert figures.share_of_limit(group, "limit") is None
    old = {"ours": {"ms": 2.0, "gb_per_s": 2.0}, "bytes": {"ms": 1.0}, "products": {"ms": 1.5}}
    assert figures.passes(old["ours"]) == [2.0]
    assert figures.moved(old["ours"]) == 4e6
    assert figures.share_of_limit(old, "ours") == 0.75
    for other in ({"machine": {}, "points": []}, [1], {"machine": {}, "results": {"ours": 1}}):
        with pytest.raises(FiguresError, match=r"not written by python -m bench\.run"):
            figures.load(written(tmp_path / "other.json", other))
    if (ROOT / ".git").exists():
        name = "bench/results/embedding_bag-2threads.json"
        assert figures.load(f"HEAD:{name}")["results"].keys() == figures.load(str(ROOT / name))["results"].keys()


def test_recorded_files_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Every file of bench.run in bench/results, whatever its age, and no other."""
    monkeypatch.setattr(sys, "argv", ["bench.report"])
    report.main()
    out = capsys.readouterr().out
    assert "## embedding_bag-2threads\n" in out
    assert "## tuning-2threads" not in out
    columns = {line.count("|") for line in out.splitlines() if line.startswith("|")}
    assert columns == {10}


def test_report_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A line by hand, two pictures; a file without a limit has none."""
    pytest.importorskip("matplotlib")
    name = written(tmp_path / "run.json", document({"ours": [2.0, 4.0, 2.0], "torch": [4.0] * 3, "limit": [1.0] * 3}))
    bare = written(tmp_path / "bare.json", document({"ours": STEADY}))
    monkeypatch.setattr(sys, "argv", ["bench.report", name, bare, "--pictures", str(tmp_path / "images")])
    report.main()
    out = capsys.readouterr().out
    assert "| g | ours | 4 |  | 2 | 2 to 4 | 2.0 | 50% | 1.00 |" in out
    assert "no pictures of bare: no benchmark in it has bytes and a limit" in out
    pictures = sorted((tmp_path / "images").iterdir())
    assert [p.name for p in pictures] == ["run-rates.png", "run-roofline.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def made_up(direction: str, prices: dict[str, float], cache_bytes: float) -> list[Sample]:
    """Workloads of many sizes whose times are what the prices say."""
    samples = []
    for i, (ids, bag, dim, repeats) in enumerate(
        (ids, bag, dim, repeats)
        for ids in (2000, 40_000, 900_000)
        for bag in (1, 4, 30)
        for dim in (16, 64)
        for repeats in (1, 5)
    ):
        features = {"ids": ids, "bags": ids // bag, "pooled_bags": (bag > 1) * ids // bag, "dim": dim}
        features |= {"row_bytes": 4 * dim, "unique_rows": ids / repeats, "cycle_rows": 4 * ids / repeats}
        ns = cost_model.CostModel(cache_bytes, prices).ns(direction, features)
        samples.append(Sample(f"w{i}", f"dim {dim}", direction, features, ns))
    return samples


@pytest.mark.parametrize("direction", cost_model.DIRECTIONS)
def test_cost_model_finds_planted_prices(direction: str) -> None:
    """And the caches' bytes; each workload is predicted by the others, and by those of other families."""
    names = cost_model.counts(direction, made_up(direction, dict.fromkeys(PRICES, 1.0), 0)[0].features, 0)
    prices = {name: PRICES[name] for name in names}
    samples = made_up(direction, prices, 2.0**22)
    found = cost_model.fitted(samples)
    assert found.cache_bytes == 2.0**22
    assert found.prices_ns == pytest.approx(prices, rel=1e-6)
    assert cost_model.geometric_error(cost_model.left_out(samples, "name"), samples) < 1e-6
    assert len(cost_model.left_out(samples, "family")) == len(samples)


PRICES = {"call": 20_000.0, "byte from memory": 0.05, "byte from a cache": 0.01, "byte of output": 0.02}
PRICES |= {"pooled bag": 3.0, "id": 4.0, "row": 9.0, "byte of gradient": 0.015}


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
    assert train == {"call": 1, "byte from memory": 40 * 80, "id": 100, "row": 40, "byte of gradient": 3200}


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
    for what in ("name", "family"):
        off = [f"{cost_model.geometric_error(cost_model.left_out(own, what), own):.1%}" for own in of.values()]
        assert re.search(r" \D*".join(error.replace("%", " %") for error in off), page)


def test_page_knows_the_workloads() -> None:
    """docs/benchmarks.md: T, B, D and rows of every named workload."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name, w in NAMED.items():
        cells = [cell.strip() for cell in re.search(rf"^\| `{name}` \|(.*)\|$", page, re.MULTILINE)[1].split("|")]
        assert cells[:3] == [str(w.tables), str(w.batch), str(w.dim)]
        assert cells[4] == f"{sum(w.table_rows):,}"
        assert cells[5].startswith(f"{w.num_ids:,}, ")


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
