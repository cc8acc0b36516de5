"""Generated click logs of any size, with a label that can be learnt: for trying out, and for benches of big tables.

Every one-hot id and every id of a history follows Zipf's law; frequent ids lie scattered over the table. Neighbouring
rows form a session. A row has the history of the row before it in its session with a given probability, by default 1,
and else a new one. The label is drawn from a logistic model of hidden weights: one per
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
from rec_kernels.dlrm.array_cache import mix64
from rec_kernels.dlrm.data import Batch, DataError, Feature

SEED = 0
ROWS = 1_000_000  # for training
TEST_SHARE = 7  # the test has one row per so many rows for training
TABLE_ROWS = 100_000
BLOCK = 8192
EXPONENT = 1.05  # of Zipf's law
MEAN_SESSION = 9  # rows, geometric
UNCHANGED = 1.0  # probability of the history of the session's row before
MEAN_HISTORY = 20  # ids, geometric from 0 on
LONGEST_HISTORY = 5  # times the mean
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
    """n rows with U histories.

    Args:
        dense: float32 [n, 8].
        ids: int32 [8, n].
        bag: int64 [n], the history of each row: non-decreasing, from 0.
        offsets: int64 [U + 1] of the histories.
        history: int32 [offsets[-1]], the ids in them.
        logit: float64 [n], of which the label was drawn.
        label: float32 [n].
    """

    dense: np.ndarray
    ids: np.ndarray
    bag: np.ndarray
    offsets: np.ndarray
    history: np.ndarray
    logit: np.ndarray
    label: np.ndarray


class Synthetic:
    """The data set (``rec_kernels.dlrm.data.DataSet``).

    Args:
        rows: for training, 7 or more; a seventh as many for the test.
        table_rows: of the largest tables; the others have a fixed share of it.
        samples_per_session: mean rows S of a session, geometric, 1 or more.
        unchanged: probability d that a row has the history of the row before it in its session. A history is shared by
            S / (1 + (S - 1) (1 - d)) rows in the mean.
        history: mean ids of a history, 1 or more.

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
        if rows < TEST_SHARE:
            raise DataError(f"rows is {rows}, allowed are {TEST_SHARE} or more, so that one is for the test")
        if not 1 <= table_rows <= MOST_TABLE_ROWS:
            raise DataError(f"table_rows is {table_rows}, allowed are 1 to {MOST_TABLE_ROWS}")
        if not 1 <= samples_per_session <= BLOCK:
            raise DataError(f"samples_per_session is {samples_per_session}, allowed are 1 to {BLOCK}")
        if not 0 <= unchanged <= 1:
            raise DataError(f"unchanged is {unchanged}, allowed are 0 to 1")
        if history < 1:
            raise DataError(f"history is {history}, allowed are 1 or more")
        self._session, self._unchanged, self._history = samples_per_session, unchanged, history
        # Other sessions are other rows, and so another data set.
        parts: list[tuple[str, float, float]] = [("session", samples_per_session, MEAN_SESSION)]
        parts += [("unchanged", unchanged, UNCHANGED), ("history", history, MEAN_HISTORY)]
        self.name = "-".join(["synthetic", *(f"{name}{value:g}" for name, value, usual in parts if value != usual)])
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
        histories = [
            rk.jagged_index_select(*map(torch.from_numpy, (part.history, part.offsets, part.bag))) for part in parts
        ]
        ids = torch.from_numpy(np.concatenate([part.ids for part in parts], axis=1).ravel())
        return Batch(
            dense=torch.from_numpy(np.concatenate([part.dense for part in parts])),
            features=rk.KeyedJaggedTensor(list(DIVISORS), ids, offsets=torch.arange(len(ids) + 1)),
            label=torch.from_numpy(np.concatenate([part.label for part in parts])),
            shared=rk.KeyedJaggedTensor(
                [HISTORY],
                torch.cat([values for values, _ in histories]),
                lengths=torch.cat([offsets.diff() for _, offsets in histories]),
            ),
        )

    def _block(self, split: str, number: int) -> _Rows:
        """Rows [number * BLOCK, (number + 1) * BLOCK) of a split, also those beyond its end."""
        rng = np.random.default_rng([SEED, list(self._rows).index(split), number])
        new = rng.random(BLOCK) < 1 / self._session
        new[0] = True
        if self._unchanged < 1:  # else the generator is not asked, and the rows are those of sessions with one history
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
        return _Rows(dense, ids, bag, offsets, history, logit, label)


def _slice(rows: _Rows, first: int, last: int) -> _Rows:
    """Rows [first, last), at least one, and the histories that they have."""
    begin, end = rows.bag[first], rows.bag[last - 1] + 1
    offsets = rows.offsets[begin : end + 1]
    return _Rows(
        rows.dense[first:last],
        rows.ids[:, first:last],
        rows.bag[first:last] - begin,
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
