"""The trainer on several processes: compared with one process, resumed on other numbers, stopped, rejected."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree as copy

import pytest
import torch
from distributed_pool import pool
from dlrm_records import records
from dlrm_sharded_cases import DATA, options, run, scores
from tiers import full

from rec_kernels.dlrm import checkpoint
from rec_kernels.dlrm.data import DataSet
from rec_kernels.dlrm.model_factory import restored_model
from rec_kernels.dlrm.reader import Reader
from rec_kernels.dlrm.report import summary

HERE = "dlrm_sharded_cases"
ROOT = Path(__file__).parents[1]
pytest.importorskip("torchrec.distributed")
pytestmark = pytest.mark.usefixtures("no_pictures")


def on(world: int, *arguments: object) -> list:
    """Results of ``run`` on each of ``world`` processes; with 1, in this process."""
    return [run(*arguments)] if world == 1 else pool(world).run(HERE, "run", *arguments)


def weights(folder: Path, data: DataSet, **more: object) -> dict[str, torch.Tensor]:
    """The model of a run's last checkpoint in one process."""
    config = options(str(folder), **more)
    reader = Reader(config, data)
    return restored_model(config, reader, folder / "run", checkpoint.load(folder / "run")).state_dict()


def test_beside_one_process(tmp_path: Path) -> None:
    """A run of one process resumes on two, and ends as it would alone, up to rounding.

    It has micro-batches, an uneven last batch, evaluations between, shared bags and weights.
    """
    more = {"accumulate": 2, "eval_every": 2, "valid_fraction": 0.1, "epochs": 2, "dedup": "off"}
    for folder in ("alone", "two"):
        assert "interrupted after step 1 of 6" in on(1, str(tmp_path / folder), "bags", 1, False, more)[0]
    alone = on(1, str(tmp_path / "alone"), "bags", 0, True)[0]
    first, second = on(2, str(tmp_path / "two"), "bags", 0, True)
    assert first["auc"] == second["auc"] == pytest.approx(alone["auc"], abs=1e-3)
    assert first["log_loss"] == pytest.approx(alone["log_loss"], abs=1e-5)
    assert first["train_examples"] == alone["train_examples"] == 720
    found, expected = (weights(tmp_path / f, DATA["bags"](), **more) for f in ("two", "alone"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-4, msg=lambda text, name=name: name + text)
    found = records(tmp_path / "two" / "run")
    assert sum(record["examples"] for record in found if record["kind"] == "train") == 720
    assert [record["step"] for record in found if record["kind"] == "eval"] == [2, 4, 6]
    assert found[-1]["machines"][1]["processes"] == len(found[-1]["ranks"]) == 2


def test_stopped_and_resumed(tmp_path: Path) -> None:
    """A run of two processes that one is asked to stop resumes on one and on two, up to rounding."""
    errors = on(2, str(tmp_path), "tiny", 3)
    assert [text.partition(":")[0] for text in errors] == ["RunInterruptedError"] * 2
    assert [path.name for path in (tmp_path / "run").glob("shards-*")] == ["shards-3-0"]
    copy(tmp_path / "run", tmp_path / "copy" / "run")
    alone, shared = on(1, str(tmp_path / "copy"), "tiny", 0, True)[0], on(2, str(tmp_path), "tiny", 0, True)
    assert not list((tmp_path / "copy" / "run").glob("shards-*"))
    assert shared[0]["auc"] == shared[1]["auc"] == pytest.approx(alone["auc"], abs=1e-3)
    assert shared[0]["log_loss"] == pytest.approx(alone["log_loss"], abs=1e-5)
    assert scores(str(tmp_path)) == pool(2).run(HERE, "scores", str(tmp_path))[1]


@pytest.mark.parametrize("policy", ["lfu", *full("lru")])
def test_row_cache(tmp_path: Path, policy: str) -> None:
    """Cached fp32 rows are not rounded: a run with a cache, stopped and resumed, scores as one without."""
    more = {"epochs": 2, "cache": 0.5, "policy": policy, "backing": "host", "eval_every": 3, "dedup": "off"}
    plain = on(2, str(tmp_path / "plain"), "bags", 0, False, more | {"cache": 0.0, "backing": "device"})
    assert "interrupted after step 3 of 14" in on(2, str(tmp_path / "two"), "bags", 3, False, more)[1]
    copy(tmp_path / "two", tmp_path / "one")
    cached = on(2, str(tmp_path / "two"), "bags", 0, True)
    assert cached[0]["auc"] == cached[1]["auc"] == plain[0]["auc"]
    assert cached[0]["log_loss"] == plain[0]["log_loss"]
    alone = on(1, str(tmp_path / "one"), "bags", 0, True)[0]
    assert alone["log_loss"] == pytest.approx(plain[0]["log_loss"], abs=1e-5)
    found = records(tmp_path / "two" / "run")
    test, sizes = found[-1], {"id": 20, "bag": 9}
    assert {t["name"]: t["num_embeddings"] for t in test["tables"]} == sizes
    assert {t["name"]: t["hits"] for t in test["tables"]} == {t["name"]: t["hits"] for t in cached[1]["tables"]}
    assert all(0 < t["cached_rows"] <= t["num_embeddings"] for t in test["tables"])
    assert test["tiers"]["cache_bytes"] == sum(t["cache_bytes"] for t in test["tables"]) > 0
    assert "hit rate" in summary(test)


def test_loss_that_is_not_finite(tmp_path: Path) -> None:
    """A loss that is not finite stops every process before any update, and names the batch."""
    for error in on(2, str(tmp_path), "broken"):
        assert re.match("NotFiniteError: loss is (inf|nan) at step 3 of 7, must be finite: .* batch 2 of the ", error)
    assert records(tmp_path / "run")[-1]["kind"] == "failed"


def test_data_that_one_process_lacks(tmp_path: Path) -> None:
    """If one process lacks the data, no other waits for it, and there is no run."""
    own, other = on(2, str(tmp_path), "absent")
    assert own == "ValueError: no such file"
    assert other == "TrainingError: process 0 has failed: ValueError: no such file"
    assert not (tmp_path / "run").exists()


def test_an_id_without_a_row(tmp_path: Path) -> None:
    """The process of the bad row reports the id, the other one that process; the record has the cause."""
    other, own = on(2, str(tmp_path), "unknown")
    where = "data set 'tiny', after step 1 of 7: "  # ids are sent a step ahead
    assert own.startswith(f"IndexError: {where}feature 'id', bag 29: id 1000000 must be in [0, 20)")
    assert other.startswith(f"TrainingError: {where}another rank refused its batch")
    assert "rank 1: IndexError: feature 'id', bag 29: id 1000000" in other
    assert records(tmp_path / "run")[-1]["cause"] == "IndexError"


@pytest.mark.parametrize("option", [{"backing": "disk"}, {"embedding": "mixed"}, {"dedup": "windows"}], ids=str)
def test_refused(tmp_path: Path, option: dict) -> None:
    """Options that sharded tables do not support are rejected by name before there is a run."""
    (name, value), errors = next(iter(option.items())), on(2, str(tmp_path), "tiny", 0, False, option)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"TrainingError: {name} is {value!r}, which tables sharded over several processes")
    assert not list(tmp_path.iterdir())


def test_other_options(tmp_path: Path) -> None:
    """Different options on processes are rejected."""
    errors = pool(2).run(HERE, "different_seeds", str(tmp_path))
    assert errors[0] == errors[1]
    assert "TrainingError: options of process 1 is TrainConfig(" in errors[0]


def test_metadata_names_members_of_enums_alone() -> None:
    """Only members of known enums are unpickled by getattr(kind, name), as Python 3.11.0 to 3.11.3 pickle them."""
    of = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n%s\nV%s\ntR."
    good = of % (b"_MEM_FORMAT_ENCODING", b"TORCH_CONTIGUOUS_FORMAT")
    assert checkpoint._Unpickler(io.BytesIO(good)).load().name == "TORCH_CONTIGUOUS_FORMAT"
    for kind, name in ((b"Metadata", b"mro"), (b"_MEM_FORMAT_ENCODING", b"mro")):
        with pytest.raises(pickle.UnpicklingError, match="which no table needs"):
            checkpoint._Unpickler(io.BytesIO(of % (kind, name))).load()


def test_shards_execute_nothing(tmp_path: Path) -> None:
    """Metadata with other names than tables need is rejected."""
    checkpoint.save_shards(folder := tmp_path / "shards-1-0", {"t": torch.ones(3, 2)})
    target = {"t": torch.zeros(3, 2)}
    checkpoint.load_shards(folder, target)
    assert target["t"].all()
    (folder / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"\.metadata names builtins\.print, which no table needs"):
        checkpoint.load_shards(folder, target)
    (folder / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"shards-1-0: process 0: .*No such file.*\.metadata'$"):
        checkpoint.load_shards(folder, target)


def test_shards_that_cannot_be_written(tmp_path: Path) -> None:
    """A file system error on one shard, such as a full disk, is reported in a line; torch's error is no Exception."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"shards-1-0 could not be written completely: process 0: NotADirectoryError: "):
        checkpoint.save_shards(tmp_path / "file" / "shards-1-0", {"t": torch.ones(3, 2)})


@pytest.mark.full
def test_killed(tmp_path: Path) -> None:
    """SIGKILL of one of four processes stops all, with a line each, and the run resumes on two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "--nproc-per-node"]
    train = ["--", "rec_kernels.dlrm", "train", "--data", "synthetic", "--rows", "12000", "--table-rows", "500"]
    train += ["--batch-size", "256", "--runs-dir", str(tmp_path), "--run", "killed", "--checkpoint-every", "20"]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*command, "4", *train], env=settings, stderr=log, stdout=log)
    state = tmp_path / "killed" / "checkpoint.pt"
    while not state.exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[2]), signal.SIGKILL)
    assert process.wait(60) == 1
    assert "cannot reach another process, which has probably ended" in (tmp_path / "log").read_text()
    resume = ["--", "rec_kernels.dlrm", "train", "--resume", str(tmp_path / "killed")]
    done = subprocess.run([*command, "2", *resume], env=settings, capture_output=True, text=True, check=True)
    assert done.stdout.count("test AUC") == 1
    assert len(records(tmp_path / "killed")[-1]["ranks"]) == 2
