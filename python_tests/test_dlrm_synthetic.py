"""The generated data set: the same rows however they are asked for, Zipf's law, and a label that can be learnt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from sklearn.metrics import log_loss, roc_auc_score

from rec_kernels.dlrm import synthetic
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import Batch, DataError
from rec_kernels.dlrm.ids import mix64
from rec_kernels.dlrm.synthetic import BLOCK, DIVISORS, EXPONENT, HISTORY, SCATTER, Synthetic
from rec_kernels.dlrm.train import train


def rows_of(batches: list[Batch]) -> dict[str, np.ndarray | list[list[int]]]:
    """All rows, the history repeated for every one."""
    histories = []
    for batch in batches:
        offsets, values = batch.shared.offsets().tolist(), batch.shared.values().tolist()
        histories += [values[offsets[bag] : offsets[bag + 1]] for bag in batch.inverse.tolist()]
    return {
        "dense": np.concatenate([b.dense for b in batches]),
        "label": np.concatenate([b.label for b in batches]),
        "ids": np.concatenate([b.features.values().view(len(DIVISORS), -1) for b in batches], axis=1),
        "history": histories,
    }


def assert_same(one: dict, other: dict) -> None:
    for key in ("dense", "label", "ids"):
        np.testing.assert_array_equal(one[key], other[key])
    assert one["history"] == other["history"]


@pytest.fixture(scope="module")
def data() -> Synthetic:
    return Synthetic(rows=2 * BLOCK + 500)


@pytest.fixture(scope="module")
def whole(data):
    return rows_of(list(data.batches("train", data.num_rows("train"))))


@pytest.mark.parametrize("batch_size", [1000, 2048, BLOCK, BLOCK + 1])
def test_rows_do_not_depend_on_the_batch_size(data, whole, batch_size):
    batches = list(data.batches("train", batch_size))
    assert {len(batch.label) for batch in batches[:-1]} == {batch_size}
    assert_same(rows_of(batches), whole)


def test_batches_start_anywhere(data):
    batches = list(data.batches("train", 1000))
    for start in (0, 8, 15, 16):
        assert_same(rows_of(list(data.batches("train", 1000, start))), rows_of(batches[start:]))
    assert not list(data.batches("train", 1000, len(batches)))


def test_a_longer_training_begins_with_the_same_rows(data, whole):
    longer = rows_of(list(Synthetic(rows=3 * BLOCK).batches("train", data.num_rows("train")))[:1])
    assert_same(longer, whole)


def test_splits_differ_and_have_their_size(data, whole):
    test = rows_of(list(data.batches("test", 1000)))
    assert len(test["label"]) == data.num_rows("test") == data.num_rows("train") // 7
    assert not (test["dense"] == whole["dense"][: len(test["dense"])]).any()
    with pytest.raises(ValueError, match="split is 'valid', allowed are 'train' and 'test'"):
        next(data.batches("valid", 10))


@pytest.mark.parametrize("table_rows", [1, 50, 100_000])
def test_ids_are_below_the_rows_of_their_table(table_rows):
    data = Synthetic(rows=BLOCK, table_rows=table_rows)
    (batch,) = data.batches("train", BLOCK)
    ids = batch.features.values().view(len(DIVISORS), -1)
    assert list(batch.features.keys()) == [feature.name for feature in data.features[:-1]]
    for column, feature in zip([*ids, batch.shared.values()], data.features, strict=True):
        assert column.min() >= 0
        assert column.max() < feature.num_embeddings
        assert feature.num_embeddings >= 2
    assert (data.features[-1].name, data.features[-1].shared) == (HISTORY, True)
    assert (batch.dense.dtype, batch.label.dtype) == (torch.float32, torch.float32)
    assert batch.dense.shape == (BLOCK, data.num_dense)


def test_ids_follow_zipfs_law():
    count, size = 400_000, 1000
    ids = synthetic._zipf(np.random.default_rng(1), count, 0, size)
    shift = int(mix64(np.array([0]))[0]) % size
    edges = np.arange(1, size + 2) ** (1 - EXPONENT)
    expected = np.diff(edges) / (edges[-1] - edges[0]) * count
    found = np.bincount(ids, minlength=size)[(np.arange(size) * SCATTER + shift) % size]
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert abs(chi_square - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5
    # The law itself, over two decades of ranks.
    slope = np.polyfit(np.log(np.arange(5, 500)), np.log(found[4:499]), 1)[0]
    assert slope == pytest.approx(-EXPONENT, abs=0.05)


def test_sessions_share_a_history(data):
    batch = next(data.batches("train", BLOCK))
    sessions = len(batch.shared.offsets()) - 1
    assert sorted(set(batch.inverse.tolist())) == list(range(sessions))
    assert (batch.inverse.diff() >= 0).all()
    assert BLOCK / sessions == pytest.approx(synthetic.MEAN_SESSION, rel=0.15)
    lengths = batch.shared.offsets().diff().float()
    assert lengths.mean() == pytest.approx(synthetic.MEAN_HISTORY, rel=0.15)
    assert lengths.min() == 0
    assert 50 < lengths.max() <= synthetic.LONGEST_HISTORY


def test_label_is_drawn_from_the_oracle(data, whole):
    logits = data.oracle("train")
    assert len(logits) == data.num_rows("train")
    probabilities = 1 / (1 + np.exp(-logits))
    labels = whole["label"]
    assert labels.mean() == pytest.approx(probabilities.mean(), abs=0.015)  # four standard deviations
    entropy = -(probabilities * np.log(probabilities) + (1 - probabilities) * np.log(1 - probabilities)).mean()
    assert log_loss(labels, probabilities) == pytest.approx(entropy, abs=0.015)


def test_hidden_weights_are_standardised():
    weights = synthetic._hidden_weight(np.arange(100_000), 3)
    assert abs(weights.mean()) < 0.015
    assert weights.std() == pytest.approx(1, abs=0.01)
    assert not (weights == synthetic._hidden_weight(np.arange(100_000), 4)).any()


def test_documented_oracle():
    """docs/data.md and the docstring of the class give these."""
    data = Synthetic()
    labels = np.concatenate([batch.label for batch in data.batches("test", 50_000)])
    assert roc_auc_score(labels, data.oracle("test")) == pytest.approx(0.836, abs=0.001)
    assert labels.mean() == pytest.approx(0.26, abs=0.005)


def test_a_model_learns_it(tmp_path):
    config = TrainConfig(data="synthetic", rows=100_000, table_rows=1000, lr=0.1, threads=1, runs_dir=str(tmp_path))
    scores = train(config)
    assert scores["auc"] > 0.7
    assert scores["normalized_entropy"] < 0.95
    assert scores["examples"] == 100_000 // 7


@pytest.mark.parametrize("options", [{"rows": 6}, {"table_rows": 0}, {"table_rows": 2**31}])
def test_options_out_of_range(options):
    ((name, value),) = options.items()
    with pytest.raises(DataError, match=f"{name} is {value}, allowed are"):
        Synthetic(**options)
