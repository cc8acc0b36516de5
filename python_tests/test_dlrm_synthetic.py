"""The synthetic data set: rows independent of the batch size, Zipf's law, and a learnable label."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from tiers import cross

from rec_kernels.dlrm import synthetic
from rec_kernels.dlrm.array_cache import mix64
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import Batch, DataError
from rec_kernels.dlrm.synthetic import BLOCK, DIVISORS, EXPONENT, HISTORY, SCATTER, Synthetic
from rec_kernels.dlrm.train import train


def rows_of(batches: list[Batch]) -> dict[str, np.ndarray | list[list[int]]]:
    histories = []
    for batch in batches:
        offsets, values = batch.shared.offsets().tolist(), batch.shared.values().tolist()
        histories += [values[first:last] for first, last in itertools.pairwise(offsets)]
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
    # Zipf's law over two decades of ranks.
    slope = np.polyfit(np.log(np.arange(5, 500)), np.log(found[4:499]), 1)[0]
    assert slope == pytest.approx(-EXPONENT, abs=0.05)


def test_sessions_share_a_history(data):
    rows = rows_of([next(data.batches("train", BLOCK))])
    bags = [bag for bag, _ in itertools.groupby(rows["history"])]
    assert BLOCK / len(bags) == pytest.approx(synthetic.MEAN_SESSION, rel=0.15)
    lengths = [len(bag) for bag in bags]
    assert np.mean(lengths) == pytest.approx(synthetic.MEAN_HISTORY, rel=0.15)
    assert min(lengths) == 0
    assert 50 < max(lengths) <= synthetic.LONGEST_HISTORY * synthetic.MEAN_HISTORY


def factor(data: Synthetic, batch_size: int) -> float:
    """Ids of the training rows divided by those of distinct bags, in batches."""
    before = stored = 0
    for batch in data.batches("train", batch_size):
        histories = rows_of([batch])["history"]
        before += sum(map(len, histories))
        stored += sum(map(len, set(map(tuple, histories))))
    return before / stored


@pytest.mark.parametrize(("unchanged", "samples"), cross([0.9, 0.0, 0.5, 1.0], [1, 3.5, 9, 40], 9))
def test_factor_of_sessions(unchanged, samples):
    """The factor is S / (1 + (S - 1) (1 - d)) up to chance. Blocks and batches that cut sessions add a bag to each."""
    size = 2 * BLOCK
    data = Synthetic(rows=4 * BLOCK, samples_per_session=samples, unchanged=unchanged, history=30)
    bags = BLOCK * (1 + (samples - 1) * (1 - unchanged)) / samples  # of a block
    new = bags / BLOCK
    expected = BLOCK / (bags + 1 - new)
    # Numbers of rows per bag and ids per row both vary about geometrically.
    spread = (2 / (4 * bags)) ** 0.5
    assert factor(data, size) == pytest.approx(expected, rel=max(4 * spread, 0.005))
    if unchanged == 0 or samples == 1:
        assert factor(data, size) == pytest.approx(1, abs=0.005)  # short bags are equal by chance


def test_histories_change_within_sessions_and_nothing_else_does():
    """Rows that repeat the previous history share its bag, and nothing else changes; with d = 0 no bags are shared."""
    same = rows_of(list(Synthetic(rows=BLOCK, unchanged=1.0).batches("train", BLOCK)))
    assert_same(same, rows_of(list(Synthetic(rows=BLOCK).batches("train", BLOCK))))
    own = rows_of(list(Synthetic(rows=BLOCK, unchanged=0.0, history=50).batches("train", BLOCK)))
    long = [tuple(bag) for bag in own["history"] if len(bag) > 3]
    assert len(set(long)) == len(long) > BLOCK * 0.9
    one = rows_of(list(Synthetic(rows=BLOCK, samples_per_session=BLOCK).batches("train", 64)))
    assert len(set(map(tuple, one["history"][:64]))) == 1
    assert 0 < np.mean([len(bag) for bag in own["history"]]) == pytest.approx(50, rel=0.1)


def test_other_sessions_are_another_data_set():
    names = [
        Synthetic(**options).name
        for options in ({}, {"history": 20}, {"samples_per_session": 2.5}, {"unchanged": 0.5, "history": 7})
    ]
    assert names == ["synthetic", "synthetic", "synthetic-session2.5", "synthetic-unchanged0.5-history7"]


def logits_of(data: Synthetic, split: str) -> np.ndarray:
    """The logits from which the labels of a split were drawn."""
    total = data.num_rows(split)
    blocks = range(-(-total // BLOCK))
    return np.concatenate([data._block(int(split == "test"), number).logit for number in blocks])[:total]


def test_label_is_drawn_from_the_oracle(data, whole):
    logits = logits_of(data, "train")
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
    """The formula and the values are those of docs/data.md and the docstring of the class."""
    data = Synthetic()
    labels = np.concatenate([batch.label for batch in data.batches("test", 50_000)])
    assert roc_auc_score(labels, logits_of(data, "test")) == pytest.approx(0.836, abs=0.001)
    assert labels.mean() == pytest.approx(0.26, abs=0.005)


def test_a_model_learns_it(tmp_path):
    config = TrainConfig(data="synthetic", rows=100_000, table_rows=1000, lr=0.1, threads=1, runs_dir=str(tmp_path))
    scores = train(config)
    assert scores["auc"] > 0.7
    assert scores["normalized_entropy"] < 0.95
    assert scores["examples"] == 100_000 // 7


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 6},
        {"table_rows": 0},
        {"table_rows": 2**31},
        {"samples_per_session": 0.5},
        {"samples_per_session": 8193},
        {"unchanged": -0.1},
        {"unchanged": 1.5},
        {"history": 0},
        {"history": 10**9},
    ],
)
def test_options_out_of_range(options):
    ((name, value),) = options.items()
    with pytest.raises(DataError, match=f"{name} is {value}, allowed are"):
        Synthetic(**options)
