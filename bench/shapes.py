"""The workloads, and the ids they look up."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Batches of ids a benchmark cycles through: a training step never sees the same ids twice in a row, and rows of the
#: last batch would otherwise still be in the cache.
BATCHES = 6


@functools.lru_cache(maxsize=2)
def _zipf_shares(rows: int, exponent: float) -> np.ndarray:
    """[rows]: how often the first k ranks are drawn, together."""
    shares = np.cumsum(1.0 / np.arange(1, rows + 1) ** exponent)
    return shares / shares[-1]


@functools.lru_cache(maxsize=32)
def _places(rows: int, table: int) -> np.ndarray:
    """[rows]: where in a table each rank is."""
    return np.random.default_rng(table).permutation(rows)


@dataclass(frozen=True)
class Workload:
    """T tables of E rows and D columns; B bags of L ids each per table.

    Ids are uniform, or Zipf; of all rows, or with ``hot`` uniform of this share of them.
    """

    name: str
    tables: int
    batch: int
    rows: int
    dim: int
    bag: int
    zipf: float | None = None
    hot: float | None = None

    def ids(self, seed: int) -> Tensor:
        """[T * B * L] int64, key-major. Ranks get a random place in the table, the same for every seed."""
        rng, n = np.random.default_rng(seed), self.batch * self.bag
        if self.hot is not None:
            ranks = rng.integers(0, int(self.hot * self.rows), (self.tables, n))
            places = [_places(self.rows, t) for t in range(self.tables)]
            return torch.from_numpy(np.concatenate([p[r] for p, r in zip(places, ranks, strict=True)]))
        if self.zipf is None:
            return torch.from_numpy(rng.integers(0, self.rows, self.tables * n))
        ranks = np.searchsorted(_zipf_shares(self.rows, self.zipf), rng.random((self.tables, n)))
        places = [_places(self.rows, t) for t in range(self.tables)]
        return torch.from_numpy(
            np.concatenate([p[np.minimum(r, self.rows - 1)] for p, r in zip(places, ranks, strict=True)])
        )

    def offsets(self) -> Tensor:
        """[T * B + 1] int64."""
        return torch.arange(0, self.tables * self.batch * self.bag + 1, self.bag)

    def linear(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` in tables that lie one after the other."""
        return (ids.view(self.tables, -1) + torch.arange(self.tables)[:, None] * self.rows).view(-1)

    def forward_bytes(self, row_bytes: int | None = None) -> int:
        """Rows read (every occurrence; of ``row_bytes``, by default float32) + ids + pooled output written."""
        n = self.tables * self.batch * self.bag
        return n * (row_bytes or 4 * self.dim) + n * 8 + self.tables * self.batch * self.dim * 4

    def backward_bytes(self, unique_rows: float, row_bytes: int | None = None, state_bytes: int = 4) -> float:
        """Gradient rows read (every occurrence) + touched rows and ``state_bytes`` each read and written + ids."""
        n = self.tables * self.batch * self.bag
        return n * self.dim * 4 + 2 * unique_rows * ((row_bytes or 4 * self.dim) + state_bytes) + n * 8


WORKLOADS = [
    Workload("d128-uniform", 8, 512, 100_000, 128, 20),
    Workload("d128-zipf", 8, 512, 100_000, 128, 20, zipf=1.15),
    Workload("criteo-like", 26, 2048, 100_000, 16, 1, zipf=1.15),
    Workload("d64-large", 8, 2048, 1_000_000, 64, 8),
]
