"""Generated click logs of any size, with a label that can be learnt: for trying out, and for benches of big tables.

Every one-hot id and every id of a history follows Zipf's law; frequent ids lie scattered over the table. Neighbouring
rows form a session and share its history, a bag. The label is drawn from a logistic model of hidden weights: one per
dense column, and one per id of a feature, made by hashing so that none are stored; a history counts with its mean.

Rows are made in blocks of BLOCK rows, each from a generator of its own, so that any row can be had without those before
it and no row depends on the batch size. Two machines may differ where their floating-point functions do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

import rec_kernels as rk
from rec_kernels.dlrm.data import Batch, DataError, Feature
from rec_kernels.dlrm.ids import mix64

SEED = 0
ROWS = 1_000_000  # for training
TEST_SHARE = 7  # the test has one row per so many rows for training
TABLE_ROWS = 100_000
BLOCK = 8192
EXPONENT = 1.05  # of Zipf's law
MEAN_SESSION = 9  # rows, geometric
MEAN_HISTORY = 20  # ids, geometric from 0 on
LONGEST_HISTORY = 100
NUM_DENSE = 8
BIAS = -1.5  # of the logit; a quarter of the labels is 1
DENSE_WEIGHT, ID_WEIGHT, HISTORY_WEIGHT = 0.25, 0.5, 2.0  # standard deviations of the hidden weights

# Feature -> its table has table_rows / so many rows, and 2 or more.
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
HISTORY = "history"  # of items, with a table of its own
SCATTER = 2_654_435_761  # a prime above every table size: rank -> (rank * SCATTER + shift) mod E is one-to-one
MOST_TABLE_ROWS = 2**31 - 1  # ids are int32, and rank * SCATTER must fit into 64 bits


class _Rows(NamedTuple):
    """n rows in S sessions.

    Args:
        dense: float32 [n, 8].
        ids: int32 [8, n].
        session: int64 [n], non-decreasing, from 0.
        offsets: int64 [S + 1] of the sessions' bags.
        history: int32 [offsets[-1]], the ids in them.
        logit: float64 [n], of which the label was drawn.
        label: float32 [n].
    """

    dense: np.ndarray
    ids: np.ndarray
    session: np.ndarray
    offsets: np.ndarray
    history: np.ndarray
    logit: np.ndarray
    label: np.ndarray


class Synthetic:
    """The data set (``rec_kernels.dlrm.data.DataSet``).

    Args:
        rows: for training, 7 or more; a seventh as many for the test.
        table_rows: of the largest tables; the others have a fixed share of it.

    Raises:
        DataError: an argument is out of range.
    """

    name = "synthetic"
    num_dense = NUM_DENSE

    def __init__(self, rows: int = ROWS, table_rows: int = TABLE_ROWS):
        if rows < TEST_SHARE:
            raise DataError(f"rows is {rows}, allowed are {TEST_SHARE} or more, so that one is for the test")
        if not 1 <= table_rows <= MOST_TABLE_ROWS:
            raise DataError(f"table_rows is {table_rows}, allowed are 1 to {MOST_TABLE_ROWS}")
        self._rows = {"train": rows, "test": rows // TEST_SHARE}
        self.features = [Feature(name, max(table_rows // divisor, 2)) for name, divisor in DIVISORS.items()]
        self.features.append(Feature(HISTORY, max(table_rows, 2), pooling="mean", shared=True))

    def num_rows(self, split: str) -> int:
        """Rows of "train" or "test"."""
        if split not in self._rows:
            raise ValueError(f"split is {split!r}, allowed are 'train' and 'test'")
        return self._rows[split]

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """The batches of a split from number ``start`` on."""
        total = self.num_rows(split)
        block, rows = None, None
        for first in range(start * batch_size, total, batch_size):
            last = min(first + batch_size, total)
            parts = []
            for number in range(first // BLOCK, -(-last // BLOCK)):
                if number != block:
                    block, rows = number, self._block(split, number)
                begin = number * BLOCK
                parts.append(_slice(rows, max(first - begin, 0), min(last - begin, BLOCK)))
            yield self._batch(parts)

    def oracle(self, split: str) -> np.ndarray:
        """The logits that the labels of a split were drawn from, float64 [rows]: no model can know more."""
        total = self.num_rows(split)
        logits = [self._block(split, number).logit for number in range(-(-total // BLOCK))]
        return np.concatenate(logits)[:total]

    def _batch(self, parts: list[_Rows]) -> Batch:
        sessions = np.cumsum([0] + [len(part.offsets) - 1 for part in parts])
        bags = np.cumsum([0] + [len(part.history) for part in parts])
        offsets = [part.offsets[:-1] + start for part, start in zip(parts, bags, strict=False)]
        inverse = [part.session + start for part, start in zip(parts, sessions, strict=False)]
        ids = torch.from_numpy(np.concatenate([part.ids for part in parts], axis=1).ravel())
        return Batch(
            dense=torch.from_numpy(np.concatenate([part.dense for part in parts])),
            features=rk.KeyedJaggedTensor(list(DIVISORS), ids, offsets=torch.arange(len(ids) + 1)),
            label=torch.from_numpy(np.concatenate([part.label for part in parts])),
            shared=rk.KeyedJaggedTensor(
                [HISTORY],
                torch.from_numpy(np.concatenate([part.history for part in parts])),
                offsets=torch.from_numpy(np.concatenate([*offsets, bags[-1:]])),
            ),
            inverse=torch.from_numpy(np.concatenate(inverse)),
        )

    def _block(self, split: str, number: int) -> _Rows:
        """Rows [number * BLOCK, (number + 1) * BLOCK) of a split, also those beyond its end."""
        rng = np.random.default_rng([SEED, list(self._rows).index(split), number])
        new_session = rng.random(BLOCK) < 1 / MEAN_SESSION
        new_session[0] = True
        session = np.cumsum(new_session) - 1
        lengths = np.minimum(rng.geometric(1 / (MEAN_HISTORY + 1), session[-1] + 1) - 1, LONGEST_HISTORY)
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
        logit += HISTORY_WEIGHT * (np.diff(sums) / np.maximum(lengths, 1))[session]
        label = (rng.random(BLOCK) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        return _Rows(dense, ids, session, offsets, history, logit, label)


def _slice(rows: _Rows, first: int, last: int) -> _Rows:
    """Rows [first, last), at least one, and the sessions that they have a part in."""
    begin, end = rows.session[first], rows.session[last - 1] + 1
    offsets = rows.offsets[begin : end + 1]
    return _Rows(
        rows.dense[first:last],
        rows.ids[:, first:last],
        rows.session[first:last] - begin,
        offsets - offsets[0],
        rows.history[offsets[0] : offsets[-1]],
        rows.logit[first:last],
        rows.label[first:last],
    )


def _zipf(rng: np.random.Generator, count: int, feature: int, num_embeddings: int) -> np.ndarray:
    """Ids int32 [count]; the k-th most frequent has a probability proportional to the integral of x^-EXPONENT over
    [k, k + 1], so that no table of probabilities is needed."""
    power = 1 - EXPONENT
    x = (1 + rng.random(count) * ((num_embeddings + 1) ** power - 1)) ** (1 / power)
    rank = np.minimum(x.astype(np.int64) - 1, num_embeddings - 1)  # rounding can give x = num_embeddings + 1
    shift = int(mix64(np.array([feature]))[0] % np.uint64(num_embeddings))
    return ((rank * SCATTER + shift) % num_embeddings).astype(np.int32)


def _hidden_weight(ids: np.ndarray, feature: int) -> np.ndarray:
    """A weight per id of a feature, float64, uniform with mean 0 and variance 1."""
    bits = mix64((np.int64(feature + 1) << np.int64(40)) + ids.astype(np.int64)) >> np.uint64(11)
    return (bits / 2.0**52 - 1) * 3**0.5
