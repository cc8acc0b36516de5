"""Batches in time order: slices of the prepared arrays, built one ahead on a background thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

import rec_kernels as rk
from rec_kernels.dlrm.completejourney import FEATURES, HISTORY, Dataset


class Batch(NamedTuple):
    """B consecutive rows.

    Args:
        dense: float32 [B, 3].
        features: KeyedJaggedTensor of the 11 one-hot features, B bags of one id each.
        history: KeyedJaggedTensor of the key "history", a bag per basket, or per row if ``inverse`` is None.
        inverse: int64 [B], the history bag of each row (non-decreasing), or None.
        label: float32 [B].
    """

    dense: torch.Tensor
    features: rk.KeyedJaggedTensor
    history: rk.KeyedJaggedTensor
    inverse: torch.Tensor | None
    label: torch.Tensor


class Batches:
    """Iterate over the batches of one split, always in time order; the last one may be shorter.

    Args:
        data: prepared rows.
        batch_size: rows per batch, at least 1.
        split: "train" or "test".
        unique_history: one history bag per basket plus ``inverse``; else the bag is repeated for every row (a
            training step of 2,048 rows then takes 1.24 times as long on two cores).

    Raises:
        ValueError: ``batch_size`` or ``split`` is not allowed.
    """

    def __init__(self, data: Dataset, batch_size: int, *, split: str = "train", unique_history: bool = True):
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, allowed is 1 or more")
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}, allowed are 'train' and 'test'")
        self.data, self.batch_size, self.unique_history = data, batch_size, unique_history
        self.start, self.stop = (0, data.train_rows) if split == "train" else (data.train_rows, len(data))
        self._one_hot_offsets = torch.arange(len(FEATURES) * batch_size + 1)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if len(self) == 0:
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
            ahead = pool.submit(self.batch, 0)
            for index in range(1, len(self)):
                ready = ahead.result()
                ahead = pool.submit(self.batch, index)
                yield ready
            yield ahead.result()

    def batch(self, index: int) -> Batch:
        """Batch number ``index``, from 0."""
        start = self.start + index * self.batch_size
        stop = min(start + self.batch_size, self.stop)
        ids = torch.from_numpy(self.data.ids[:, start:stop].flatten())
        offsets = self._one_hot_offsets[: len(ids) + 1]
        basket = self.data.basket[start:stop]
        history, inverse = self._history(basket)
        return Batch(
            dense=torch.from_numpy(self.data.dense[start:stop].copy()),
            features=rk.KeyedJaggedTensor(list(FEATURES), ids, offsets=offsets),
            history=history,
            inverse=inverse,
            label=torch.from_numpy(self.data.label[start:stop].copy()),
        )

    def _history(self, basket: np.ndarray) -> tuple[rk.KeyedJaggedTensor, torch.Tensor | None]:
        first, last = int(basket[0]), int(basket[-1])
        offsets = self.data.history_offsets[first : last + 2]
        products = self.data.history_products[offsets[0] : offsets[-1]]
        row = (basket - first).astype(np.int64)
        if self.unique_history:
            return _history_kjt(products.copy(), offsets - offsets[0]), torch.from_numpy(row)
        lengths = np.diff(offsets)[row]
        ends = np.cumsum(lengths)
        begin = (offsets - offsets[0])[row]
        gather = np.arange(ends[-1]) + np.repeat(begin - (ends - lengths), lengths)
        return _history_kjt(products[gather], np.concatenate([[0], ends])), None


def _history_kjt(products: np.ndarray, offsets: np.ndarray) -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor([HISTORY], torch.from_numpy(products), offsets=torch.from_numpy(offsets))
