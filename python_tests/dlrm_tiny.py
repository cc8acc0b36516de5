"""A data set on which a run takes a tenth of a second."""

from __future__ import annotations

import numpy as np
import torch

import rec_kernels as rk
from rec_kernels.dlrm import Batch, Feature


class TinyData:
    """400 rows for training and 200 for the test; the label depends on the id of the one feature."""

    name, num_dense = "tiny", 2
    features = (Feature("id", 20),)
    opened = 0

    def num_rows(self, split):
        return {"train": 400, "test": 200}[split]

    def batches(self, split, batch_size, start=0):
        generator = np.random.default_rng(["train", "test"].index(split))
        ids = generator.integers(0, 20, self.num_rows(split))
        label = torch.from_numpy((generator.random(len(ids)) < ids / 20).astype(np.float32))
        dense = torch.from_numpy(generator.random((len(ids), 2), dtype=np.float32))
        for first in range(start * batch_size, len(ids), batch_size):
            part = slice(first, min(first + batch_size, len(ids)))
            values = torch.from_numpy(ids[part])
            jagged = rk.KeyedJaggedTensor(["id"], values, offsets=torch.arange(len(values) + 1))
            yield Batch(dense[part], jagged, label[part])


def tiny() -> TinyData:
    """The data set of ``--data dlrm_tiny:tiny``."""
    TinyData.opened += 1
    return TinyData()
