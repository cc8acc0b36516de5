"""Complete Journey as the trainer wants it: batches in time order, slices of the prepared arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

import rec_kernels as rk
from rec_kernels.dlrm.completejourney import DENSE, FEATURES, HISTORY, Prepared, folder_name
from rec_kernels.dlrm.data import Batch, Feature


class CompleteJourney:
    """The data set (``rec_kernels.dlrm.data.DataSet``).

    Args:
        prepared: its rows.
    """

    num_dense = len(DENSE)

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        rows = prepared.num_embeddings
        self.name = folder_name(prepared.weeks, prepared.history)
        # One-hot bags: sum and mean are the row itself.
        self.features = [Feature(name, rows[name]) for name in FEATURES]
        self.features.append(Feature(HISTORY, rows[HISTORY], pooling="mean", shared=True))

    def num_rows(self, split: str) -> int:
        """Rows of "train" or "test"."""
        start, stop = self._range(split)
        return stop - start

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """The batches of a split from number ``start`` on, in time order."""
        for index in range(start, -(-self.num_rows(split) // batch_size)):
            yield self.batch(split, batch_size, index)

    def batch(self, split: str, batch_size: int, index: int) -> Batch:
        """Batch number ``index``, from 0."""
        first, end = self._range(split)
        start = first + index * batch_size
        stop = min(start + batch_size, end)
        data = self.prepared
        ids = torch.from_numpy(data.ids[:, start:stop].flatten())
        return Batch(
            dense=torch.from_numpy(data.dense[start:stop].copy()),
            features=rk.KeyedJaggedTensor(list(FEATURES), ids, offsets=torch.arange(len(ids) + 1)),
            label=torch.from_numpy(data.label[start:stop].copy()),
            shared=self._history(data.basket[start:stop]),
        )

    def _range(self, split: str) -> tuple[int, int]:
        ranges = {"train": (0, self.prepared.train_rows), "test": (self.prepared.train_rows, len(self.prepared))}
        if split not in ranges:
            raise ValueError(f"split is {split!r}, allowed are 'train' and 'test'")
        return ranges[split]

    def _history(self, basket: np.ndarray) -> rk.KeyedJaggedTensor:
        """Of every row, that of its basket."""
        first, last = int(basket[0]), int(basket[-1])
        offsets = self.prepared.history_offsets[first : last + 2]
        products = torch.from_numpy(self.prepared.history_products[offsets[0] : offsets[-1]].copy())
        bags = torch.from_numpy(offsets - offsets[0])
        values, ends = rk.jagged_index_select(products, bags, torch.from_numpy(basket - first))
        return rk.KeyedJaggedTensor([HISTORY], values, offsets=ends)
