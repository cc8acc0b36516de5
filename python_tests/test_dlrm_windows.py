"""Windows in the trainer's reader: the bits of whole bags, fewer ids per batch, and a record of the choice."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from dlrm_cases import Changed, reader
from dlrm_records import without_times

import rec_kernels as rk
from rec_kernels.dlrm import Batch, TrainConfig, checkpoint, evaluate, train
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.reader import dedup_batch
from rec_kernels.dlrm.synthetic import HISTORY, Synthetic

pytestmark = pytest.mark.usefixtures("no_pictures")
ROWS, SIZE = 3000, 500
LONGEST, STEP, TABLE_ROWS = 20, 3, 1000


def slide(batch: Batch) -> Batch:
    """Pairs of rows with equal history, shifted by ``STEP`` ids from pair to pair."""
    bag, first = torch.arange(len(batch.label)) // 2, len(batch.shared.values())
    ids = (first + STEP * bag[:, None] + torch.arange(LONGEST)).flatten() % TABLE_ROWS
    lengths = torch.full((len(bag),), LONGEST)
    return batch._replace(shared=rk.KeyedJaggedTensor([HISTORY], ids, lengths=lengths))


@pytest.fixture(scope="module")
def data() -> Changed:
    return Changed(Synthetic(ROWS, TABLE_ROWS), functools.partial(map, slide))


def config(runs_dir: Path, **options) -> TrainConfig:
    given = {"data": "synthetic", "rows": ROWS, "batch_size": SIZE, "threads": 1, "table_rows": TABLE_ROWS}
    return TrainConfig(**given | {"runs_dir": str(runs_dir), "lr": 0.1} | options)


def test_a_batch_has_each_id_once(data: Changed) -> None:
    for batch in data.batches("train", SIZE):
        found = dedup_batch(batch, windows=True)
        windows = found.shared.stored()
        assert isinstance(windows, rk.KeyedJaggedWindows)
        assert len(windows.values()) == STEP * (SIZE // 2 - 1) + LONGEST
        assert windows._bags is None  # not materialized yet
        assert torch.equal(found.shared.to_kjt().values(), batch.shared.values())
        again = dedup_batch(dedup_batch(batch), windows=True)  # as of a data set that deduplicates its sessions
        assert torch.equal(again.shared.stored().values(), windows.values())
    alone = batch._replace(shared=None)
    assert dedup_batch(alone, windows=True) is alone


@pytest.mark.parametrize("options", [{}, {"batch_size": 125, "accumulate": 4, "optimizer": "adam"}], ids=["", "more"])
def test_the_bits_of_whole_bags(data: Changed, tmp_path: Path, options: dict) -> None:
    """Losses, scores and weights are equal, with evaluations between."""
    for mode in ("on", "windows"):
        given = config(tmp_path, run=mode, dedup=mode, eval_every=4, valid_fraction=0.34, **options)
        train(given, data, progress=False)
    on, windows = (without_times(tmp_path / mode) for mode in ("on", "windows"))
    assert windows == on
    assert windows[-1]["dedup"] is True
    models = [checkpoint.load(tmp_path / mode)["model"] for mode in ("on", "windows")]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())
    assert evaluate(tmp_path / "windows", data) == evaluate(tmp_path / "on", data)


def test_a_data_set_that_gives_windows(data: Changed) -> None:
    """Windows of a data set are kept until lookup, unless a bag per row is requested."""
    given = Changed(data, functools.partial(map, lambda batch: dedup_batch(batch, windows=True)))
    for mode in ("on", "auto"):
        features = next(reader(given, SIZE, dedup=mode).batches("train", SIZE)).features
        assert isinstance(features, rk.InverseKeyedJaggedTensor)
    assert isinstance(next(reader(given, SIZE, dedup="off").batches("train", SIZE)).features, rk.KeyedJaggedTensor)


@pytest.mark.parametrize("deduplicated", [False, True])
def test_weights_are_refused(data: Changed, tmp_path: Path, deduplicated: bool) -> None:
    """Weights are rejected for plain and for distinct bags; the error names the data set and the option."""

    def weighted(batch: Batch) -> Batch:
        shared = batch.shared
        ones = torch.ones(len(shared.values()))
        shared = rk.KeyedJaggedTensor([HISTORY], shared.values(), offsets=shared.offsets(), weights=ones)
        batch = batch._replace(shared=shared)
        return dedup_batch(batch) if deduplicated else batch

    given = Changed(data, functools.partial(map, weighted))
    message = rf"{data.name!r}, batch 0 of split 'train': shared has weights, which dedup='windows' does not support"
    with pytest.raises(DataError, match=message):
        train(config(tmp_path, run="windows", dedup="windows"), given, progress=False)
    assert train(config(tmp_path, run="on", dedup="on"), given, progress=False)["dedup"]


def test_other_choices_make_no_windows(data: Changed) -> None:
    on, windows = (reader(data, SIZE, dedup=mode) for mode in ("on", "windows"))
    assert windows.dedup == (True, None)
    assert isinstance(next(on.batches("train", SIZE)).features.stored(), rk.KeyedJaggedTensor)
    assert isinstance(next(windows.batches("train", SIZE)).shared.stored(), rk.KeyedJaggedWindows)
