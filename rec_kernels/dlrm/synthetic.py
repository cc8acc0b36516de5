"""Synthetic click logs of any size with a learnable label, for trials and for benchmarks of large tables.

docs/data.md describes the distributions. The label's logistic model has a hidden weight per dense column and per id,
computed by hashing; a history contributes its mean. Every block of BLOCK rows has its own random generator, so that
rows can be accessed at random and do not depend on the batch size.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

import rec_kernels as rk
from rec_kernels.dlrm.array_cache import mix64
from rec_kernels.dlrm.data import Batch, DataError, Feature, Rows

SEED = 0
ROWS = 1_000_000  # training rows
TEST_SHARE = 7  # training rows per test row
TABLE_ROWS = 100_000
BLOCK = 8192
EXPONENT = 1.05  # of Zipf's law
MEAN_SESSION = 9  # rows, geometric
UNCHANGED = 1.0  # probability that a row keeps the history of the previous row in its session
MEAN_HISTORY = 20  # ids, geometric from 0
LONGEST_HISTORY = 5  # times the mean
NUM_DENSE = 8
BIAS = -1.5  # of the logit; about a quarter of the labels is 1
DENSE_WEIGHT, ID_WEIGHT, HISTORY_WEIGHT = 0.25, 0.5, 2.0  # standard deviations of the hidden weights

# A feature's table has table_rows / divisor rows, at least 2.
DIVISORS = {
    "user": 1,
    "item": 1,
    "page": 4,
    "campaign": 20,
    "seller": 20,
    "category": 500,
    "city": 500,
    "device": 10_000,
}
MOST_HISTORY = 10_000
HISTORY = "history"
SCATTER = 2_654_435_761  # a prime above every table size, so that rank -> (rank * SCATTER + shift) mod E is a bijection
MOST_TABLE_ROWS = 2**31 - 1  # ids are int32, and rank * SCATTER must fit into 64 bits


class _Block(NamedTuple):
    """n rows with U distinct histories."""

    dense: np.ndarray  # float32 [n, 8]
    ids: np.ndarray  # int32 [8, n]
    bag: np.ndarray  # int64 [n], index of each row's history, non-decreasing
    offsets: np.ndarray  # int64 [U + 1], of the histories
    history: np.ndarray  # int32 [offsets[-1]], their ids
    logit: np.ndarray  # float64 [n], of the label's distribution: the best possible prediction
    label: np.ndarray  # float32 [n]


class Synthetic(Rows):
    """The data set (``rec_kernels.dlrm.DataSet``).

    Args:
        rows: training rows, 7 or more; the test has a seventh as many.
        table_rows: rows of the largest tables; others have a fixed fraction of it.
        samples_per_session: mean rows S per session, geometric, 1 or more.
        unchanged: probability d that a row keeps the history of the previous row in its session. The mean number of
            rows per history is S / (1 + (S - 1) (1 - d)).
        history: mean ids per history, 1 to 10,000.

    Raises:
        DataError: an argument is out of range.
    """

    num_dense = NUM_DENSE

    def __init__(
        self,
        rows: int = ROWS,
        table_rows: int = TABLE_ROWS,
        *,
        samples_per_session: float = MEAN_SESSION,
        unchanged: float = UNCHANGED,
        history: int = MEAN_HISTORY,
    ):
        allowed: list[tuple[str, float, float, float]] = [("rows", rows, TEST_SHARE, math.inf)]  # one for the test
        allowed += [("table_rows", table_rows, 1, MOST_TABLE_ROWS), ("history", history, 1, MOST_HISTORY)]
        allowed += [("samples_per_session", samples_per_session, 1, BLOCK), ("unchanged", unchanged, 0, 1)]
        for name, value, least, most in allowed:
            if not least <= value <= most:
                bounds = f"{least} or more" if most == math.inf else f"{least} to {most}"
                raise DataError(f"{name} is {value}, allowed are {bounds}")
        self._session, self._unchanged, self._history = samples_per_session, unchanged, history
        # Options that change the rows are part of the name.
        parts: list[tuple[str, float, float]] = [("session", samples_per_session, MEAN_SESSION)]
        parts += [("unchanged", unchanged, UNCHANGED), ("history", history, MEAN_HISTORY)]
        self.name = "-".join(["synthetic", *(f"{name}{value:g}" for name, value, default in parts if value != default)])
        self.train_rows, self.rows = rows, rows + rows // TEST_SHARE
        self._block = lru_cache(2)(self._make_block)
        self.features = [Feature(name, max(table_rows // divisor, 2)) for name, divisor in DIVISORS.items()]
        self.features.append(Feature(HISTORY, max(table_rows, 2), pooling="mean", shared=True))

    def batch_of(self, rows: slice) -> Batch:
        """Makes the batch of these rows, which are in one split."""
        split, start = (0, 0) if rows.start < self.train_rows else (1, self.train_rows)
        first, last = rows.start - start, rows.stop - start
        dense, ids, label, histories = [], [], [], []
        for number in range(first // BLOCK, -(-last // BLOCK)):
            block = self._block(split, number)
            own = slice(max(first - number * BLOCK, 0), last - number * BLOCK)
            dense.append(block.dense[own])
            ids.append(block.ids[:, own])
            label.append(block.label[own])
            bags = map(torch.from_numpy, (block.history, block.offsets, block.bag[own]))
            histories.append(rk.jagged_index_select(*bags))
        values = torch.from_numpy(np.concatenate(ids, axis=1).ravel())
        history, lengths = torch.cat([h for h, _ in histories]), torch.cat([offsets.diff() for _, offsets in histories])
        return Batch(
            dense=torch.from_numpy(np.concatenate(dense)),
            features=rk.KeyedJaggedTensor(list(DIVISORS), values, offsets=torch.arange(len(values) + 1)),
            label=torch.from_numpy(np.concatenate(label)),
            shared=rk.KeyedJaggedTensor([HISTORY], history, lengths=lengths),
        )

    def _make_block(self, split: int, number: int) -> _Block:
        """Makes rows [number * BLOCK, (number + 1) * BLOCK) of the training (0) or test (1) split, or past its end."""
        rng = np.random.default_rng([SEED, split, number])
        new = rng.random(BLOCK) < 1 / self._session
        new[0] = True
        if self._unchanged < 1:  # drawing for 1 would change the other rows of the recorded default
            new |= rng.random(BLOCK) >= self._unchanged
        bag = np.cumsum(new) - 1
        lengths = rng.geometric(1 / (self._history + 1), bag[-1] + 1) - 1
        lengths = np.minimum(lengths, LONGEST_HISTORY * self._history)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        *one_hot, history_feature = self.features
        ids = np.stack([_zipf(rng, BLOCK, feature, f.num_embeddings) for feature, f in enumerate(one_hot)])
        history = _zipf(rng, offsets[-1], len(one_hot), history_feature.num_embeddings)
        dense = rng.standard_normal((BLOCK, NUM_DENSE), dtype=np.float32)
        logit = BIAS + dense.astype(np.float64) @ (
            DENSE_WEIGHT * _hidden_weight(np.arange(NUM_DENSE), len(self.features))
        )
        for feature, column in enumerate(ids):
            logit += ID_WEIGHT * _hidden_weight(column, feature)
        sums = np.concatenate([[0], np.cumsum(_hidden_weight(history, len(one_hot)))])[offsets]
        logit += HISTORY_WEIGHT * (np.diff(sums) / np.maximum(lengths, 1))[bag]
        label = (rng.random(BLOCK) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        return _Block(dense, ids, bag, offsets, history, logit, label)


def _zipf(rng: np.random.Generator, count: int, feature: int, num_embeddings: int) -> np.ndarray:
    """Ids int32 [count]; the k-th most frequent has a probability proportional to the integral of x^-EXPONENT over
    [k, k + 1], which needs no table of probabilities."""
    power = 1 - EXPONENT
    x = (1 + rng.random(count) * ((num_embeddings + 1) ** power - 1)) ** (1 / power)
    rank = np.minimum(x.astype(np.int64) - 1, num_embeddings - 1)  # rounding can give x = num_embeddings + 1
    shift = int(mix64(np.array([feature]))[0] % np.uint64(num_embeddings))
    return ((rank * SCATTER + shift) % num_embeddings).astype(np.int32)


def _hidden_weight(ids: np.ndarray, feature: int) -> np.ndarray:
    """The weights of a feature's ids, float64, uniform with mean 0 and variance 1."""
    bits = mix64((np.int64(feature + 1) << np.int64(40)) + ids.astype(np.int64)) >> np.uint64(11)
    return (bits / 2.0**52 - 1) * 3**0.5
