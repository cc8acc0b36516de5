"""bench.run's files, bench.compare and bench.report on synthetic figures."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from backends import ROOT
from tiers import full

import bench
from bench import compare, compile_times, figures, report, run, script, step_parts
from bench.figures import FiguresError
from bench.subject import Subject
from bench.workloads import NAMED

MACHINE = {"cpu": "none", "cpu_isa": "v4", "threads": 1, "torch": "2", "python": "3", "date": "2000-01-01"}
MACHINE |= {"commit": "abc", "dirty": False, "command": "python -m bench.run"}
STEADY = [1.0, 1.02, 0.98, 1.01, 0.99]
RECORDED = ROOT / "bench" / "results"


def one_pass(ms: dict[str, float], extra: dict | None = None) -> dict:
    """Result of `bench.run.one_pass` for one group."""
    return {"g": {name: {"ms": v, "min_ms": v / 2, "bytes": 4e6, **(extra or {})} for name, v in ms.items()}}


def document(times: dict[str, list[float]], **machine) -> dict:
    """A file of one group: implementation -> milliseconds of the passes."""
    passes = [one_pass(dict(zip(times, of_pass, strict=True))) for of_pass in zip(*times.values(), strict=True)]
    return {"machine": MACHINE | machine, "results": run.merge(passes)}


def written(path: Path, found: object) -> str:
    """Writes an object to a JSON file; returns its name."""
    path.write_text(json.dumps(found))
    return str(path)


def test_merge_keeps_every_pass() -> None:
    """Merging has medians, ratios within a pass, all passes' times, and the first pass's other values."""
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
    """A workload is accepted only by ops that use it."""
    assert run.arguments(["--workload", "dlrm-small"]).op == list(run.OPS)
    assert run.arguments(["--workload", "dlrm-small", "--op", "embedding_bag"]).op == ["embedding_bag"]
    assert run.arguments([]).op is None
    with pytest.raises(SystemExit):
        run.arguments(["--workload", "dlrm-small", "--op", "expand"])
    assert "--op expand: only embedding_bag, embedding_bag_formats and" in capsys.readouterr().err
    quick = run.arguments(["--quick", "--passes", "9"])
    assert (quick.passes, quick.rounds, quick.skip_tests) == (1, run.QUICK_ROUNDS, True)
    with pytest.raises(SystemExit, match="0"):
        run.arguments(["--help"])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*run.BENCHED, *NAMED))


def test_commit_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit and changes are found in a new repository: a commit, a change, a tag; and without a repository."""
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert bench.commit() == {"commit": "", "dirty": False}
    who = ["-c", "user.name=n", "-c", "user.email=e"]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert bench.commit() == {"commit": git("rev-parse", "--short", "HEAD"), "dirty": False}
    (tmp_path / "new").write_text("git does not know it")
    assert not bench.commit()["dirty"]
    (tmp_path / "file").write_text("2")
    git("tag", "v1")
    assert bench.commit() == {"commit": "v1", "dirty": True}


def test_ratio_by_hand() -> None:
    """Two passes per side have geometric means 2 and 6; t with 2 degrees of freedom is 4.303."""
    found = compare.ratio([1.0, 4.0], [3.0, 12.0])
    assert found.value == pytest.approx(3)
    # Each side's logarithms vary by ln(4)^2 / 2, their mean by half of that.
    half = 4.302653 * math.sqrt(2 * math.log(4) ** 2 / 4)
    assert (found.low, found.high) == pytest.approx((3 / math.exp(half), 3 * math.exp(half)), rel=1e-5)
    assert compare.ratio([2.0], [3.0, 3.0]) == compare.Ratio(pytest.approx(1.5), None, None)
    assert compare.ratio([2.0, 2.0], [3.0, 3.0]) == compare.Ratio(*[pytest.approx(1.5)] * 3)


def test_ratio_of_unequal_runs() -> None:
    """Runs may have different numbers of passes; the interval is scipy's Welch interval of the logarithms."""
    stats = pytest.importorskip("scipy.stats")
    before, after = [1.0, 1.3, 0.9, 1.1, 1.7, 1.2, 0.8], [2.0, 2.1, 2.6]
    found = compare.ratio(before, after)
    welch = stats.ttest_ind([math.log(t) for t in after], [math.log(t) for t in before], equal_var=False)
    right = [math.exp(end) for end in welch.confidence_interval(0.95)]
    assert (found.low, found.high) == pytest.approx(right, rel=1e-9)
    assert found.value == pytest.approx(statistics.geometric_mean(after) / statistics.geometric_mean(before))


def test_others_are_known_by_their_whole_names() -> None:
    """Other libraries' implementations are recognized by full names, not prefixes, in all recorded files."""
    assert not any(map(figures.is_other, ("ours", "limited", "torch format", "compiled ours", "reader", "bfloat16")))
    names = set()
    for path in RECORDED.glob("*.json"):
        with contextlib.suppress(FiguresError):
            names |= {name for group in figures.load(str(path))["results"].values() for name in group}
    peers = ("torch", "fbgemm")
    assert {name for name in names if name.startswith(peers)} <= figures.OTHERS
    others = {*figures.LIMITS, "torch", "fbgemm", "compiled", "tuned", "bmm", "indexing", "index_select"}
    found = {name for name in names if figures.is_other(name)} - {"fbgemm, huge pages"}
    assert found == {*others, *(f"{p}, whole batch" for p in peers)}


def test_share_of_the_limit_is_of_the_same_bytes() -> None:
    """The limit scales with the implementation's bytes; a limit of products does not."""
    group = {
        "ours": {"ms": 4.0, "bytes": 100.0},
        "bfloat16": {"ms": 4.0, "bytes": 50.0},
        "bytes": {"ms": 2.0, "bytes": 100.0},
        "products": {"ms": 0.5, "bytes": 100.0},
    }
    assert figures.share_of_limit(group, "ours") == 0.5
    assert figures.share_of_limit(group, "bfloat16") == 0.25
    group["products"]["ms"] = 1.5
    assert figures.share_of_limit(group, "bfloat16") == 0.375


def test_rounds_and_versions_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and the line above every table have rounds and versions."""
    output = tmp_path / "run.json"
    monkeypatch.setattr(run, "run_tests", lambda ops: None)
    monkeypatch.setattr(run, "one_pass", lambda what, turn: one_pass({"ours": 1.0}))
    monkeypatch.setattr(script, "fbgemm_version", lambda: "1.2")
    given = ["--op", "expand", "--passes", "3", "--rounds", "7", "--threads", "5", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench.run", *given])
    run.main()
    found = figures.load(str(output))
    about = found["machine"]
    assert [about[key] for key in ("passes", "rounds", "threads", "fbgemm")] == [3, 7, 5, "1.2"]
    assert f"5 threads, torch {about['torch']}, FBGEMM 1.2, 3 passes, 7 rounds, " in figures.where(found)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], None),
        (["--case", "g"], None),
        (["--implementation", "torch"], None),
        (["--quick"], None),
        (["--case", "g", "--case", "nope"], "no benchmark of expand has nope in its name"),
        (["--implementation", "nope"], "no benchmark has an implementation 'nope'"),
    ],
)
def test_results_are_whole(
    given: list[str], error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial run does not replace the result file; an unknown name fails after the first pass."""
    turns: list[int] = []
    monkeypatch.setattr(run, "run_tests", lambda ops: None)
    monkeypatch.setattr(run, "one_pass", lambda what, turn: turns.append(turn) or one_pass({"ours": 1.0, "torch": 2.0}))
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.run", "--op", "expand", "--passes", "2", "--threads", "1", *given])
    with pytest.raises(SystemExit, match=error) if error else contextlib.nullcontext():
        run.main()
    assert turns == ([0] if error or "--quick" in given else [0, 1])
    assert [path.name for path in tmp_path.iterdir()] == ([] if given else ["expand-1threads.json"])


def test_differences_of_runs() -> None:
    """Values that differ are listed, and values that only one of the files has."""
    old, new = document({"ours": STEADY}), document({"ours": STEADY}, fbgemm="1.2", rounds=60)
    assert compare.differences(old, new) == ["fbgemm: not recorded, 1.2", "rounds: not recorded, 60"]
    other = document({"ours": STEADY}, fbgemm=None, rounds=30, threads=2)
    assert compare.differences(new, other) == ["threads: 1, 2", "fbgemm: 1.2, None", "rounds: 60, 30"]
    assert compare.differences(old, old) == compare.differences(new, new) == []


@pytest.mark.parametrize(
    ("ours", "torch", "verdict"),
    [
        ([t * 0.8 for t in STEADY], STEADY, "faster"),
        ([t * 1.2 for t in STEADY], STEADY, "slower"),
        ([t * 1.01 for t in STEADY], STEADY, "within noise"),
        ([1.2, 2.0, 0.7, 1.6, 0.8], STEADY, "within noise"),
        # The machine has become slower: torch's time shows it.
        ([t * 1.2 for t in STEADY], [t * 1.3 for t in STEADY], "within noise"),
        ([t * 0.8 for t in STEADY], [t * 1.3 for t in STEADY], "faster"),
        ([t * 1.5 for t in STEADY], [t * 1.3 for t in STEADY], "slower"),
    ],
)
def test_verdicts(ours: list[float], torch: list[float], verdict: str) -> None:
    """Verdicts follow from an interval and from the change of torch's time between the runs."""
    before = document({"ours": STEADY, "torch": STEADY})["results"]["g"]
    after = document({"ours": ours, "torch": torch})["results"]["g"]
    assert compare.compare_group(before, after, None)["ours"][1] == verdict


def test_against_takes_the_machine_out() -> None:
    """If everything is 1.3 times slower, ratios to torch are unchanged; without torch, the verdict is slower."""
    slower = [1.3 * t for t in STEADY]
    before, after = document({"ours": STEADY, "torch": STEADY}), document({"ours": slower, "torch": slower})
    found = compare.compare_group(before["results"]["g"], after["results"]["g"], "torch")
    assert list(found) == ["ours"]
    assert found["ours"][0].value == pytest.approx(1)
    alone = [{"ours": d["results"]["g"]["ours"]} for d in (before, after)]
    assert compare.compare_group(*alone, None)["ours"][1] == "slower"
    assert compare.compare_group(*alone, "torch") == {}


def test_compare_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The command prints its table and summary, and differences of the runs other than the commit."""
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
    """Current files, files from git and older ones without passes are read; other programs' files are refused."""
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
    for text in ("not JSON", ""):
        (tmp_path / "text.json").write_text(text)
        with pytest.raises(FiguresError, match=r"text\.json: not a JSON file"):
            figures.load(str(tmp_path / "text.json"))
    for other in (
        {"machine": {}, "points": []},
        {"machine": MACHINE, "points": [{"sweep": "base"}]},
        {"machine": MACHINE, "points": {"a": 1}},
        {"machine": {"cpu": "none"}, "results": {}},
    ):
        with pytest.raises(FiguresError, match=r"not written by python -m bench\.run or python -m bench\.tuning"):
            figures.load(written(tmp_path / "other.json", other), kinds=("results", "points"))
    with pytest.raises(FiguresError, match="neither a file nor"):
        figures.load(str(tmp_path))
    if (ROOT / ".git").exists():
        name = "bench/results/embedding_bag-2threads.json"
        assert figures.load(f"HEAD:{name}")["results"].keys() == figures.load(str(ROOT / name))["results"].keys()


def test_recorded_files_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The report reads every file of bench.run in bench/results, of any age, and no other."""
    monkeypatch.setattr(sys, "argv", ["bench.report"])
    report.main()
    out = capsys.readouterr().out
    assert "## embedding_bag-2threads\n" in out
    assert "## tuning-2threads" not in out
    columns = {line.count("|") for line in out.splitlines() if line.startswith("|")}
    assert columns == {10}


def test_report_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A line is that computed by hand; a file without a limit has no picture."""
    pytest.importorskip("matplotlib")
    name = written(tmp_path / "run.json", document({"ours": [2.0, 4.0, 2.0], "torch": [4.0] * 3, "limit": [1.0] * 3}))
    bare = written(tmp_path / "bare.json", document({"ours": STEADY}))
    monkeypatch.setattr(sys, "argv", ["bench.report", name, bare, "--pictures", str(tmp_path / "images")])
    report.main()
    out = capsys.readouterr().out
    assert "| g | ours | 4 | | 2 | 2 to 4 | 2.0 | 50% | 1.00 |" in out
    assert out.index("- g: ours 2 ms; torch 2.00x; limit 0.50x\n") < out.index("| g | ours |")
    assert "no picture of bare: no benchmark in it has bytes and a limit" in out
    (picture,) = (tmp_path / "images").iterdir()
    assert picture.name == "run-rates.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["criteo-kaggle", *full(*(name for name in NAMED if name != "criteo-kaggle"))])
def test_page_knows_the_workloads(name: str) -> None:
    """docs/benchmarks.md has T, B, D and rows of every named workload."""
    w, page = NAMED[name], (ROOT / "docs" / "benchmarks.md").read_text()
    cells = [cell.strip() for cell in re.search(rf"^\| `{name}` \|(.*)\|$", page, re.MULTILINE)[1].split("|")]
    assert cells[:3] == [str(w.tables), str(w.batch), str(w.dim)]
    assert cells[4] == f"{sum(w.table_rows):,}"
    assert cells[5].startswith(f"{w.num_ids:,}, ")
    if w.num_ids < 10**6:  # more of them take seconds
        assert cells[5].endswith(f", {Subject(w).unique_rows() / 1000:.1f} k")


def test_compile_times(tmp_path: Path) -> None:
    """Only CUDA files are compiled, each by its own command, and the build's objects are not overwritten."""
    busy = "sum(range(10**7)); open(sys.argv[2], 'w')"
    commands = [
        {
            "file": f"/x/csrc/{name}",
            "directory": str(tmp_path),
            "command": f'{sys.executable} -c "import sys; {code}" -o kept.o',
        }
        for name, code in (("rows/cuda/a.cu", busy), ("core/b.cpp", "sys.exit(1)"))
    ]
    (tmp_path / "compile_commands.json").write_text(json.dumps(commands))
    (found,) = compile_times.compile_times(tmp_path).items()
    assert found[0] == "rows/cuda/a.cu"
    assert found[1] > 0.01
    assert not (tmp_path / "kept.o").exists()


def test_parts_of_a_step() -> None:
    """Functions of our library are assigned to parts by their names, not by their template arguments."""
    space = "[.] rec_kernels::v4::(anonymous namespace)::"
    report = "\n".join(
        [
            "# Overhead;Shared Object;Symbol",
            f" 40.00% ;librec_kernels_cpu.so ;{space}FinishNarrow<rec_kernels::UpdateTarget<rec_kernels::Sorted>>",
            f"  6.00% ;librec_kernels_cpu.so ;{space}sum_sorted",
            f" 24.00% ;librec_kernels_cpu.so ;{space}pool_block<(rec_kernels::v4::BagKind)0>",
            f" 10.00% ;librec_kernels_cpu.so ;{space}TableSorter::write_entries<long>",
            f"  5.00% ;librec_kernels_cpu.so ;{space}copy_somewhere<Update>",
            " 10.00% ;libpython3.11.so.1.0  ;[.] _PyEval_EvalFrameDefault",
            "  5.00% ;[unknown] ;[k] 0xffffffff",
        ]
    )
    assert step_parts.shares(report) == pytest.approx(
        {
            "lookup": 0.24,
            "keys, sort, runs": 0.1,
            "sums of gradients, update": 0.46,
            "other kernels": 0.05,
            step_parts.OUTSIDE: 0.15,
        }
    )


def test_cases_under_pytest_benchmark() -> None:
    """pytest-benchmark has an op's cases with the selected implementations; without an op, the error says so."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--benchmark-disable",
        "bench/test_cases.py",
    ]
    chosen = ["--op", "scale_rows", "--case", "4096x16", "--implementation", "torch", "--rounds", "2"]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True)
    assert "4 passed" in done.stdout, done.stdout
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "--op must be given" in done.stdout + done.stderr
