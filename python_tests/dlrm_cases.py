"""Data sets of the trainer's tests."""

from __future__ import annotations


class Changed:
    """The data set with a change to its batches."""

    def __init__(self, data, change):
        self.data, self.change = data, change
        self.name, self.num_dense, self.features, self.num_rows = (
            data.name,
            data.num_dense,
            data.features,
            data.num_rows,
        )

    def batches(self, split, batch_size, start=0):
        return self.change(self.data.batches(split, batch_size, start))
