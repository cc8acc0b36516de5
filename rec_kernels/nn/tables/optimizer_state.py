"""Optimizers of a collection's tables, and the layout of their state: one flat tensor per optimizer and kind."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rec_kernels.nn.tables.config import EmbeddingConfig, StoredTable
from rec_kernels.nn.tables.optimizers import Optimizer, check_optimizer
from rec_kernels.ops.embedding_bag import table_starts


class TableOptimizers:
    """The optimizers of a collection's tables. Optimizers that differ only in ``lr`` count as one.

    Args:
        tables: the collection's tables.
        given: the optimizer of tables without their own, or None; or the ``TableOptimizers`` of an unsharded
            collection: its shards keep the indices of its optimizers, even of those that no local table uses.

    Attributes:
        default: the collection's optimizer: ``given``, or the first table's if all have their own; None: tables have
            ordinary gradients for torch's optimizers.
        distinct: the distinct optimizers, in the order of tables; without tables, only ``default``.
        of: for each stored table, the index of its optimizer in ``distinct``; empty without optimizer.

    Raises:
        ValueError: ``given`` is not an optimizer; only some tables have an optimizer.
    """

    def __init__(self, tables: Sequence[EmbeddingConfig], given: Optimizer | TableOptimizers | None) -> None:
        whole = given if isinstance(given, TableOptimizers) else None
        self.distinct: list[Optimizer] = [] if whole is None else list(whole.distinct)
        default: Any = given if whole is None else whole.default
        check_optimizer("optimizer", default)
        without = [t.name for t in tables if t.optimizer is None]
        rated = next((t for t in tables if t.lr is not None), None)
        if default is None and 0 < len(without) < len(tables):
            raise ValueError(
                f"tables {without} have no optimizer, because the collection has optimizer=None, but the others "
                "have fused ones: give one to the collection or to each of these; torch's optimizers train all "
                "tables or none"
            )
        if default is None and without and rated is not None:
            raise ValueError(
                f"table {rated.name!r}: lr = {rated.lr} requires a fused optimizer, but the collection has "
                "optimizer=None: put the table's weight into a parameter group of torch's optimizer"
            )
        self.default: Optimizer | None = tables[0].optimizer if default is None and tables else default
        self.of: list[int] = []
        if self.default is not None:
            self.of = [self._number(t.optimizer or self.default) for t in tables for _ in t.stored]
            self.distinct = self.distinct or [self.default]

    def _number(self, optimizer: Optimizer) -> int:
        for number, other in enumerate(self.distinct):
            if dataclasses.replace(other, lr=optimizer.lr) == optimizer:
                return number
        self.distinct.append(optimizer)
        return len(self.distinct) - 1


class StatePlaces:
    """The layout of an optimizer's tables in the flat tensors of its state.

    Args:
        tables: all stored tables of the collection; None for those with another optimizer.
        optimizer: the optimizer; None: there is no state.
        rows: the first index of each table in per-row state, and the total; None: tables are contiguous.

    Attributes:
        kinds: name -> True for elementwise state, False for per-row state.
        starts, rows: the first index of each table in elementwise and per-row state, and the total.
    """

    def __init__(
        self, tables: Sequence[StoredTable | None], optimizer: Optimizer | None, rows: Sequence[int] | None = None
    ) -> None:
        self.kinds = {} if optimizer is None else optimizer.state
        self._dtype = getattr(optimizer, "state_dtype", torch.float32)
        self._tables = tables
        self.starts = table_starts([t.num_embeddings * t.embedding_dim if t else 0 for t in tables])
        self.rows = [*itertools.accumulate((t.num_embeddings if t else 0 for t in tables), initial=0)]
        if rows is not None:
            end = max((first + t.num_embeddings for first, t in zip(rows, tables, strict=False) if t), default=0)
            self.rows = [*(min(first, end) for first in rows[:-1]), end]  # tables of other optimizers have no rows

    @property
    def is_rounded(self) -> bool:
        """True if any kind is stored with fewer bits than float32."""
        return any(self.dtype(kind) != torch.float32 for kind in self.kinds)

    def dtype(self, kind: str) -> torch.dtype:
        """dtype of the flat tensor; per-row state is float32."""
        return self._dtype if self.kinds[kind] else torch.float32

    def size(self, kind: str) -> int:
        """Elements of the flat tensor."""
        return self.starts[-1] if self.kinds[kind] else self.rows[-1]

    def view(self, kind: str, flat: Tensor, i: int) -> Tensor:
        """View of table i in the flat tensor: [E, D], or [E] for per-row state. The table must have this optimizer."""
        table, start = self._tables[i], self.starts[i]
        rows, columns = table.num_embeddings, table.embedding_dim
        if not self.kinds[kind]:
            return flat[self.rows[i] : self.rows[i] + rows]
        return flat[start : start + rows * columns].view(rows, columns)

    def row_bytes(self, columns: int) -> int:
        """State bytes per row of a table with ``columns`` columns."""
        return sum(self.dtype(kind).itemsize * (columns if each else 1) for kind, each in self.kinds.items())
