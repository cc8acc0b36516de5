"""The workloads, and the ids they look up."""

from __future__ import annotations

import abc
import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Batches of ids a benchmark cycles through: a training step never sees the same ids twice in a row, and rows of the
#: last batch would otherwise still be in the cache.
BATCHES = 6


@functools.lru_cache(maxsize=32)
def _zipf_shares(rows: int, exponent: float) -> np.ndarray:
    """[rows]: cumulative probability of the first k ranks."""
    shares = np.cumsum(1.0 / np.arange(1, rows + 1) ** exponent)
    return shares / shares[-1]


@functools.lru_cache(maxsize=32)
def places(rows: int, table: int) -> np.ndarray:
    """[rows]: the row of each rank in its table."""
    return np.random.default_rng(table).permutation(rows)


def zipf_ranks(rows: int, exponent: float, drawn: np.ndarray) -> np.ndarray:
    """Ranks below ``rows`` for uniform random values in [0, 1)."""
    return np.minimum(np.searchsorted(_zipf_shares(rows, exponent), drawn), rows - 1)


class Shape(abc.ABC):
    """T tables of D float32 columns, each with its rows and the length of its bags; B bags to a table.

    Attributes:
        name, tables, batch, dim: its name; T; B; D.
    """

    name: str
    tables: int
    batch: int
    dim: int

    @property
    @abc.abstractmethod
    def table_rows(self) -> tuple[int, ...]:
        """[T]: E of every table."""

    @property
    @abc.abstractmethod
    def table_bags(self) -> tuple[int, ...]:
        """[T]: L of every table, the length of all its bags."""

    @abc.abstractmethod
    def ids(self, seed: int) -> Tensor:
        """[N] int64, key-major."""

    @property
    def num_ids(self) -> int:
        """N: B times the sum of L."""
        return self.batch * sum(self.table_bags)

    def offsets(self) -> Tensor:
        """[T * B + 1] int64."""
        lengths = torch.tensor(self.table_bags).repeat_interleave(self.batch)
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def sizes(self) -> str:
        """The sizes as text."""
        bags, rows = self.table_bags, sum(self.table_rows)
        length = f"{min(bags)} to {max(bags)}" if len(set(bags)) > 1 else f"{bags[0]}"
        return f"{self.tables} tables x {self.batch} bags x {length} ids, {rows:,} rows in all, D = {self.dim}"

    def split(self, ids: Tensor) -> tuple[Tensor, ...]:
        """The ids of every table: [B * L] each."""
        return ids.split([self.batch * bag for bag in self.table_bags])

    def linear(self, ids: Tensor) -> Tensor:
        """The linear rows of ``ids`` in consecutive tables."""
        first = itertools.accumulate(self.table_rows, initial=0)
        return torch.cat([of_table + start for of_table, start in zip(self.split(ids), first, strict=False)])

    def runs(self, out: Tensor) -> list[tuple[int, slice, Tensor]]:
        """Consecutive tables with equal L: L, the range of their ids, and their columns of a lookup.

        Args:
            out: the lookup [B, T * D]. Its views are [tables, B, D].
        """
        columns = out.view(self.batch, self.tables, self.dim).transpose(0, 1)
        found, first, table = [], 0, 0
        for bag, of_run in itertools.groupby(self.table_bags):
            tables = len(list(of_run))
            last = first + tables * self.batch * bag
            found.append((bag, slice(first, last), columns[table : table + tables]))
            first, table = last, table + tables
        return found

    def forward_bytes(self, row_bytes: int | None = None, rows: float | None = None) -> float:
        """Bytes of rows read, ids, and pooled output written.

        Args:
            row_bytes: of a row; by default float32.
            rows: how many rows; by default N, every occurrence.
        """
        rows = self.num_ids if rows is None else rows
        return rows * (row_bytes or 4 * self.dim) + self.num_ids * 8 + self.tables * self.batch * self.dim * 4

    def backward_bytes(
        self, unique_rows: float, row_bytes: int | None = None, state_bytes: int = 4, gradient_rows: int | None = None
    ) -> float:
        """Bytes of gradient rows read, touched rows with ``state_bytes`` each read and written, and ids.

        Args:
            unique_rows: touched rows.
            row_bytes, state_bytes: of a row, by default float32; of its optimizer state.
            gradient_rows: how many rows of the gradient; by default N, every occurrence.
        """
        gradient_rows = self.num_ids if gradient_rows is None else gradient_rows
        touched = 2 * unique_rows * ((row_bytes or 4 * self.dim) + state_bytes)
        return gradient_rows * self.dim * 4 + touched + self.num_ids * 8


@dataclass(frozen=True)
class Workload(Shape):
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

    @property
    def table_rows(self) -> tuple[int, ...]:
        """[T]: E, T times."""
        return (self.rows,) * self.tables

    @property
    def table_bags(self) -> tuple[int, ...]:
        """[T]: L, T times."""
        return (self.bag,) * self.tables

    def ids(self, seed: int) -> Tensor:
        """[T * B * L] int64, key-major. Ranks get a random place in the table, the same for every seed."""
        rng, size = np.random.default_rng(seed), (self.tables, self.batch * self.bag)
        if self.hot is not None:
            ranks = rng.integers(0, int(self.hot * self.rows), size)
        elif self.zipf is not None:
            ranks = zipf_ranks(self.rows, self.zipf, rng.random(size))
        else:
            return torch.from_numpy(rng.integers(0, self.rows, self.tables * self.batch * self.bag))
        return torch.from_numpy(np.concatenate([places(self.rows, t)[r] for t, r in enumerate(ranks)]))


WORKLOADS = [
    Workload("d128-uniform", 8, 512, 100_000, 128, 20),
    Workload("d128-zipf", 8, 512, 100_000, 128, 20, zipf=1.15),
    Workload("criteo-like", 26, 2048, 100_000, 16, 1, zipf=1.15),
    Workload("d64-large", 8, 2048, 1_000_000, 64, 8),
]
