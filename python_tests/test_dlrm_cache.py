"""The trainer with row caches, in memory and with tables on disk."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from command_lines import main
from dlrm_records import records, without_times
from dlrm_stops import stopped_after
from row_cache_disk_cases import skip_without_host

from rec_kernels.dlrm import TrainConfig, checkpoint, evaluate, train
from rec_kernels.dlrm.config import changes
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.report import summary
from rec_kernels.dlrm.train import TrainingError
from rec_kernels.testing import same_bits

skip_without_host()

OPTIONS = {
    "data": "synthetic",
    "rows": 1_500,
    "table_rows": 20_000,
    "format": "int8",
    "batch_size": 16,
    "accumulate": 2,
}
OPTIONS |= {"cache": 0.05, "decay_every": 7, "eval_every": 11, "valid_fraction": 0.2}
DISK = {"backing": "disk", "memory_budget": "1400KiB"}
HOST = {"backing": "host"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def config(data_dir):
    return lambda runs, **options: TrainConfig(
        **OPTIONS | {"runs_dir": str(runs), "run": "run", "threads": 1, "data_dir": data_dir} | options
    )


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory) -> dict[str, Path]:
    """Uninterrupted runs: in memory, in host memory, and on disk."""
    found = {}
    for backing, more in {"device": {}, "host": HOST, "disk": DISK}.items():
        runs = tmp_path_factory.mktemp(backing)
        found[backing] = Path(train(config(runs, **more), progress=False)["directory"])
    return found


def state(run: Path) -> dict[str, torch.Tensor]:
    """State of the model without the tables' bytes, which a run on disk keeps in its files."""
    found = checkpoint.load(run)["model"]
    return {n: t for n, t in found.items() if (".file_" not in n and ".embedding_bags." not in n) or ".sum" in n}


def assert_same(one: Path, other: Path) -> None:
    """Asserts equal records and checkpoints; counters of a resumed run start at zero."""
    a, b = without_times(one, "tiers"), without_times(other, "tiers")
    for r in (*a, *b):
        r.pop("tables", None)
    assert a == b
    a, b = state(one), state(other)
    assert a.keys() == b.keys()
    assert not [n for n in a if not same_bits(a[n], b[n])]


def test_on_disk_as_in_memory(whole) -> None:
    """Scores, hit rates, slots and MLPs are equal."""
    assert any("row_cache.rows" in name for name in state(whole["disk"]))
    assert_same(whole["device"], whole["disk"])
    assert_same(whole["device"], whole["host"])
    assert state(whole["host"]).keys() == state(whole["device"]).keys()
    assert (whole["disk"] / "embeddings.rows").exists()
    tests = [without_times(run, "tiers")[-1] for run in whole.values()]
    assert tests[0] == tests[1] == tests[2]


def test_records(whole) -> None:
    """The final records have hit rates of every table, and tiers."""
    for backing, run in whole.items():
        found = records(run)
        test = found[-1]
        assert all(0 < t["hit_rate"] < 1 for t in test["tables"])
        tiers = test["tiers"]
        assert tiers["cache_bytes"] == sum(t["cache_bytes"] for t in test["tables"]) > 0
        assert bool(tiers["file_bytes"]) == bool(tiers["read_bytes"]) == (backing == "disk")
        if backing == "disk":
            assert tiers["cache_bytes"] + tiers["row_bytes"] <= 1400 * 1024 < tiers["file_bytes"]


def test_report(whole) -> None:
    """Text and page report the caches."""
    for backing, run in whole.items():
        test = records(run)[-1]
        hits, lookups = (sum(table[key] for table in test["tables"]) for key in ("hits", "lookups"))
        total = rf"^total +{hits / lookups:.1%} +[\d,.]+ +[\d,]+ +{lookups:,} +{hits:,} "
        assert re.search(total, summary(test), re.MULTILINE)
        page = (run / "report.html").read_text()
        assert "<th>hit rate</th>" in page
        for text in (summary(test), page):
            assert ("in files" in text) == (backing == "disk"), backing
            assert ("rows in host memory" if backing == "host" else "rows in memory") in text


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "more",
    [{}, HOST, HOST | {"checkpoint_every": 2}, DISK, DISK | {"checkpoint_every": 2}],
    ids=["device", "host", "host_checkpoints", "disk", "checkpoints"],
)
def test_resumed(more: dict, config, whole, tmp_path) -> None:
    """A resumed run has the bits of an uninterrupted one."""
    with stopped_after(9):
        train(config(tmp_path, **more), progress=False)
    train(config(tmp_path, **more), resume=tmp_path / "run", progress=False)
    assert records(tmp_path / "run")[-1]["counted_from"] == 9
    one, other = without_times(whole["device"], "tiers"), without_times(tmp_path / "run", "tiers")
    for r in (*one, *other):
        r.pop("tables", None)
    assert one == other
    one, other = state(whole["device"]), state(tmp_path / "run")
    assert not [n for n in one if not same_bits(one[n], other[n])]


@pytest.mark.usefixtures("no_pictures")
def test_crashed_after_its_checkpoint(config, whole, tmp_path, monkeypatch) -> None:
    """After a checkpoint failed although tables were flushed, the run resumes from the previous checkpoint."""
    saves = checkpoint.save

    def full(directory: Path, found: dict) -> None:
        if found["step"] > 8:
            raise OSError("No space left on device")
        saves(directory, found)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        with pytest.raises(OSError, match="No space left"):
            train(config(tmp_path, checkpoint_every=8, **DISK), progress=False)
    assert checkpoint.load(tmp_path / "run")["step"] == 8
    train(config(tmp_path, **DISK), resume=tmp_path / "run", progress=False)
    one, other = state(whole["device"]), state(tmp_path / "run")
    assert not [n for n in one if not same_bits(one[n], other[n])]


def test_evaluate(whole) -> None:
    """Evaluation repeats the scores of the run; tables on disk cannot be evaluated on a GPU."""
    for run in whole.values():
        for _ in range(2):
            test = evaluate(run)
            assert {name: records(run)[-1][name] for name in test} == test
    with pytest.raises(DataError, match="backing is 'disk', which needs device 'cpu'"):
        evaluate(whole["disk"], device="cuda")


@pytest.mark.parametrize(
    ("of", "backing", "message"),
    [
        (
            "device",
            "disk",
            r"checkpoint\.pt has its tables in memory, but backing is 'disk': use --backing device or",
        ),
        (
            "disk",
            "device",
            r"checkpoint\.pt has its tables in a file, but backing is 'device': use --backing disk",
        ),
    ],
)
def test_other_backings(of: str, backing: str, message: str, config, whole, tmp_path) -> None:
    """Resuming with another backing is rejected, and the run's folder is unchanged."""
    run = Path(shutil.copytree(whole[of], tmp_path / "run"))
    before = sorted(run.iterdir())
    with pytest.raises(DataError, match=message):
        train(config(tmp_path, **DISK | {"backing": backing}), resume=run, progress=False)
    assert sorted(run.iterdir()) == before


@pytest.mark.usefixtures("no_pictures")
def test_budgets_that_are_too_small(config, tmp_path, capsys) -> None:
    """The error has the bytes that slots need; a batch that needs more fails at its step."""
    with pytest.raises(DataError, match=r"memory_budget = \d+ must be at least \d+: the .*memory_budget is '90kB'"):
        train(config(tmp_path, **DISK | {"memory_budget": "90kB"}), progress=False)
    more = DISK | {"memory_budget": "1200kB", "run": "large", "batch_size": 250}
    with pytest.raises(
        TrainingError, match=r"bytes.*increase memory_budget.*memory_budget is '1200kB', batch_size 250"
    ):
        train(config(tmp_path, **more), progress=False)
    assert "Failed" in (tmp_path / "large" / "report.html").read_text()
    flags = ["--data", "synthetic", "--data-dir", str(tmp_path), "--rows", "100", "--table-rows", "50"]
    assert main(["train", "--backing", "disk", "--memory-budget", "1", "--runs-dir", str(tmp_path), *flags]) == 1
    assert "error: tables on disk: memory_budget = 1 must be" in capsys.readouterr().err


@pytest.mark.usefixtures("no_pictures")
def test_a_comparison_goes_on_with_a_larger_budget(data_dir, tmp_path, capsys) -> None:
    """In a comparison, a run that failed for lack of memory is repeated; finished ones are kept."""
    flags = ["--data", "synthetic", "--data-dir", data_dir, "--rows", "1500", "--table-rows", "20000", "--seeds", "1"]
    command = ["compare", "a:batch_size=16", "b:batch_size=250", *flags, "--backing", "disk", "--name", "c"]
    command += ["--threads", "1", "--runs-dir", str(tmp_path), "--memory-budget"]
    assert main([*command, "1200kB"]) == 1
    assert "memory_budget is '1200kB'" in capsys.readouterr().err
    failed = records(tmp_path / "c" / "b-seed0")[-1]
    assert (failed["kind"], "memory" in failed["cause"].lower()) == ("failed", True)
    done = (tmp_path / "c" / "a-seed0" / "metrics.jsonl").read_bytes()
    assert main([*command, "64MiB"]) == 0
    assert (tmp_path / "c" / "a-seed0" / "metrics.jsonl").read_bytes() == done
    assert [record["kind"] for record in records(tmp_path / "c" / "b-seed0")].count("failed") == 0
    assert records(tmp_path / "c" / "b-seed0")[-1]["kind"] == "test"


def test_names_and_differences() -> None:
    """The tables' backing is no difference between configurations; the choice of cached rows is."""
    plain = TrainConfig(cache=0.05)
    assert plain.run_name("d").count("-cache0.05lfu") == 1
    assert "cache" not in TrainConfig().run_name("d")
    assert plain.outcome() == TrainConfig(cache=0.05, backing="disk", memory_budget="1GiB").outcome()
    assert len(changes(plain.outcome(), TrainConfig(cache=0.1, policy="lru").outcome())) == 2
