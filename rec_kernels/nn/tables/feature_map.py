"""The features of a collection: their tables' parts, and their columns in the ops' output."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rec_kernels.nn.tables.config import EmbeddingConfig, ShardPlace, StoredTable
from rec_kernels.nn.tables.optimizer_state import StatePlaces, TableOptimizers
from rec_kernels.nn.tables.storage import Storage
from rec_kernels.ops.table_layout import CachePlaces, IdPartitions, Shards, TableLayout, table_layout


@dataclass(frozen=True)
class FeatureLookup:
    """A feature: the parts of its table, and its columns [column, column + width) of the ops' output.

    ``parts`` are indices of stored tables, which the ops combine or concatenate (``combine="concat"``, and parts that
    are pooled first).
    """

    table: EmbeddingConfig
    parts: range
    combine: str
    column: int
    width: int

    def __getstate__(self) -> dict:
        return {**self.__dict__, "table": self.table.without_init()}

    @property
    def is_combined_later(self) -> bool:
        """True if the ops' output has concatenated pooled parts that must be added or multiplied afterwards."""
        compression = self.table.compression
        return compression is not None and compression.compose == "pooled" and compression.combine != "concat"

    def combined(self, block: Tensor) -> Tensor:
        """Adds or multiplies the pooled parts in ``block``, [B, width] of the ops' output, in their order."""
        if not self.is_combined_later:
            return block
        first, *others = block.split(self.table.embedding_dim, dim=1)
        for other in others:
            first = first * other if self.table.compression.combine == "mult" else first + other
        return first


class FeatureMap:
    """The features and tables of a collection, and the layout of its flat tensors. Immutable.

    Args:
        tables: the tables, in their order.
        optimizers: the optimizers of the tables.
        numbers_rows: True if per-row optimizer state is indexed by linear row over all tables, as a row cache needs;
            False: with several optimizers, each one's state has only the rows of its own tables.
        is_weighted: see ``rk.EmbeddingBagCollection``.

    Attributes:
        is_rounded: True if updates round rows or state.
        stored: the physical tables in memory order: uncompressed tables and parts of compressed ones.
        table_ids: the index of each stored table in the unsharded model.
        storage: the layout of the flat weight tensor. rows: the first linear row of each stored table, and the total.
        optimizers: the optimizers of the tables. states: the state layout of each optimizer, or one without optimizer.
        features: F lookups, in the order of ``feature_names``. Outputs are named ``output_keys`` and have
            ``output_dims`` columns; the ops' outputs have ``widths`` columns, and ``combined_dims`` after combining.
        projected: the tables with a projection, in the order of features.
        combines_later: True if pooled parts of a feature are combined after the ops. finishes_later: True if parts are
            combined or columns are projected after the ops.

    Raises:
        ValueError: two tables, or two outputs, have the same name.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizers: TableOptimizers,
        *,
        numbers_rows: bool = False,
        is_weighted: bool | None = None,
    ) -> None:
        self.tables, self.is_weighted = tables, is_weighted
        self.stored = [s for t in tables for s in t.stored]
        self.table_ids = [n if s.place is None else s.place.table_id for n, s in enumerate(self.stored)]
        names = [s.name for s in self.stored]
        if len(set(names)) != len(names):
            raise ValueError(f"table names, including those of parts, must be unique, got {names}")
        self.storage = Storage(self.stored)
        self.rows = [*itertools.accumulate((s.num_embeddings for s in self.stored), initial=0)]
        self.optimizers = optimizers
        self.states = self._states(self.rows if numbers_rows else None)
        self.is_rounded = self.storage.is_bytes or any(state.is_rounded for state in self.states)
        self.feature_names = [f for t in tables for f in t.feature_names]
        self.output_keys = _output_keys(tables, self.feature_names)
        self.output_dims = [t.embedding_dim for t in tables for _ in t.feature_names]
        self.features = _lookups(tables)
        self.widths = [feature.width for feature in self.features]
        dims = zip(self.features, self.output_dims, strict=True)
        self.combined_dims = [f.table.projection[1] if f.table.projection else dim for f, dim in dims]
        self.combines_later = any(f.is_combined_later for f in self.features)
        self.projected = [f.table for f in self.features if f.table.projection]
        self.finishes_later = self.combines_later or bool(self.projected)

    def _states(self, rows: list[int] | None) -> list[StatePlaces]:
        optimizers = self.optimizers
        if not optimizers.distinct:
            return [StatePlaces(self.stored, None)]
        tables = list(zip(self.stored, optimizers.of, strict=True))
        return [
            StatePlaces([t if own == number else None for t, own in tables], optimizer, rows)
            for number, optimizer in enumerate(optimizers.distinct)
        ]

    def number_of(self, i: int) -> int:
        """The index of stored table i's optimizer; 0 without optimizer."""
        return self.optimizers.of[i] if self.optimizers.of else 0

    def state_of(self, i: int) -> StatePlaces:
        """The state layout of stored table i's optimizer."""
        return self.states[self.number_of(i)]

    def state_name(self, kind: str, number: int) -> str:
        """The name of a collection's flat tensor of one kind of state, for the optimizer with index ``number``."""
        return f"_{kind}" if len(self.states) == 1 else f"_{kind}_{number}"

    def state_bytes(self, i: int) -> int:
        """Bytes of stored table i's optimizer state."""
        table = self.stored[i]
        return table.num_embeddings * self.state_of(i).row_bytes(table.embedding_dim)

    def __deepcopy__(self, _: dict) -> FeatureMap:
        return self  # immutable

    def __getstate__(self) -> dict[str, Any]:
        # An ``init`` has run already, and is often not picklable.
        bare = {name: [t.without_init() for t in getattr(self, name)] for name in ("tables", "projected")}
        return self.__dict__ | bare

    def layout(
        self,
        frozen: Sequence[bool],
        cache: CachePlaces | None,
        device: torch.device | str | None,
        by_row: Sequence[int] = (),
        optimizer: int | None = None,
    ) -> TableLayout:
        """The ops' layout.

        Args:
            frozen: for each feature, True if its ids give no gradient. cache: sets and offsets in the row cache.
            by_row: indices of stored tables that get an additional feature whose ids are rows.
            optimizer: index of the optimizer that updates with this layout; tables of other optimizers have no rows,
                and their features are frozen. None: the layout of lookups, and of a single optimizer.
        """
        stored = self.stored if optimizer is None else self._stored_for(optimizer)
        numbers = [*(i for feature in self.features for i in feature.parts), *by_row]
        parts = [stored[i] for i in numbers]
        is_left_out = [stored[i] is not self.stored[i] for i in (*(f.parts[0] for f in self.features), *by_row)]
        tables = [None if out else f.table for f, out in zip(self.features, is_left_out, strict=False)]
        state = None if optimizer is None and len(self.states) > 1 else self.states[optimizer or 0]
        rows = self.rows if state is None else state.rows
        return table_layout(
            [t.num_embeddings for t in parts],
            [t.embedding_dim for t in parts],
            weight_offsets=[self.storage.starts[i] for i in numbers],
            row_offsets=[rows[i] for i in numbers],
            state_offsets=None if state is None else [state.starts[i] for i in numbers],
            formats=[t.format for t in parts] if self.storage.is_bytes else None,
            table_ids=[self.table_ids[i] for i in numbers],
            mean=[getattr(table, "pooling", "sum") == "mean" for table in tables] + [False] * len(by_row),
            frozen=[a or b for a, b in zip([*frozen, *[False] * len(by_row)], is_left_out, strict=True)],
            padding_idx=[getattr(table, "padding_idx", None) for table in tables] + [None] * len(by_row),
            cache=cache,
            num_rows=rows[-1],
            device=device,
            partitions=self._partitions(parts, tables, len(by_row)) if any(t.part for t in self.stored) else None,
            shards=_shards(parts) if any(t.place for t in self.stored) else None,
        )

    def _stored_for(self, optimizer: int) -> list[StoredTable]:
        """The stored tables; those of other optimizers have no rows, and the format of a table of this one."""
        own = [number == optimizer for number in self.optimizers.of]
        like = next(itertools.compress(self.stored, own), None)
        return [
            t if is_own else dataclasses.replace(t, num_embeddings=0, format=(like or t).format, part=None)
            for t, is_own in zip(self.stored, own, strict=True)
        ]

    def output(self, dtype: torch.dtype) -> dict[str, object]:
        """The ops' argument for outputs of ``dtype``; empty if outputs are combined or projected first."""
        return {} if dtype == torch.float32 or self.finishes_later else {"output_dtype": dtype}

    def _partitions(
        self, parts: Sequence[StoredTable], tables: Sequence[EmbeddingConfig | None], by_row: int
    ) -> IdPartitions:
        """Id -> row partitions of all features; those without a table have no ids, and the last ``by_row`` rows."""
        starts = list(itertools.accumulate([len(f.parts) for f in self.features] + [1] * by_row, initial=0))
        mapped = [part.part for part in parts[: len(parts) - by_row]] + [None] * by_row
        limits = [0 if table is None else table.num_embeddings for table in tables]
        return IdPartitions(
            starts=starts,
            divisors=[part.divisor if part else 1 for part in mapped],
            moduli=[part.modulus if part else max(t.num_embeddings, 1) for part, t in zip(mapped, parts, strict=True)],
            id_limits=limits + [t.num_embeddings for t in parts[len(parts) - by_row :]],
            combine=[f.combine for f in self.features] + ["concat"] * by_row,
        )


def _shards(parts: Sequence[StoredTable]) -> Shards:
    """The positions of stored tables in the unsharded tables."""
    places = [p.place or ShardPlace(0, p.num_embeddings) for p in parts]
    return Shards(
        first_rows=[p.first_row for p in places],
        first_columns=[p.first_column for p in places],
        table_rows=[p.table_rows for p in places],
    )


def _output_keys(tables: Sequence[EmbeddingConfig], feature_names: list[str]) -> list[str]:
    shared = {f for f in feature_names if feature_names.count(f) > 1}
    keys = [f"{f}@{t.name}" if f in shared else f for t in tables for f in t.feature_names]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(
            f"feature_names give several outputs the name {twice}: a table must list a feature only once, and "
            "no feature may be named <feature>@<table>, the output's name for a feature of several tables"
        )
    return keys


def _lookups(tables: Sequence[EmbeddingConfig]) -> list[FeatureLookup]:
    """One lookup for each feature, in the order of the tables."""
    features, column, stored = [], 0, 0
    for table in tables:
        compression = table.compression
        combined = compression is not None and compression.compose == "per_id" and compression.combine != "concat"
        parts = range(stored, stored + len(table.stored))
        stored = parts.stop
        width = table.embedding_dim if combined else sum(part.embedding_dim for part in table.stored)
        for _ in table.feature_names:
            features.append(FeatureLookup(table, parts, compression.combine if combined else "concat", column, width))
            column += width
    return features
