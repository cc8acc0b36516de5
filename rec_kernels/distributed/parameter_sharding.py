"""Shards of a collection's tables from the ParameterShardings of a TorchRec plan, and checks of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.optimizers import LAMB, Optimizer
from rec_kernels.ops.row_formats import FLOAT_DTYPES

#: TorchRec's sharding types, in the order in which error messages list them.
SHARDING_TYPES = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
_BY_COLUMNS = ("column_wise", "table_column_wise", "grid_shard")
_BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")


@dataclass(frozen=True)
class Shard:
    """A block of a table, and its rank.

    Args:
        table: index of the table in its collection, or in ``LookupMap.tables``. rank: of the process.
        first_row, rows, first_column, columns: the block. Plans count the rows of a compressed table in ids.
        replica: whether every rank has the whole table (data-parallel).
    """

    table: int
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int
    replica: bool = False

    def is_whole(self, table: EmbeddingConfig) -> bool:
        """True if the block is the whole table."""
        return self.rows == table.planned_rows and self.columns == table.embedding_dim


def needs_whole_rows(optimizer: Optimizer | None) -> str:
    """Why an update needs all columns of a row at once; "": it does not."""
    if optimizer is None:
        return ""
    if not all(optimizer.state.values()):
        return f"{type(optimizer).__name__} has one state value per row, of all its columns"
    if isinstance(optimizer, LAMB):
        return "LAMB scales an update by the norm of the whole row"
    if optimizer.clip_grad_norm is not None:
        return f"clip_grad_norm={optimizer.clip_grad_norm} clips by the norm of a whole row's gradient"
    return ""


def sharding_refusal(table: EmbeddingConfig, optimizer: Optimizer | None, sharding_type: str) -> str:
    """Why a table, with its own optimizer or this one, cannot have this sharding type; "": it can."""
    if sharding_type not in SHARDING_TYPES:
        return "rk.distributed has no such sharding type"
    if table.projection and sharding_type in _BY_COLUMNS + _BY_ROWS:
        return f"{table.compression} has a projection, which is on the one rank that pools its rows"
    if len(table.stored) > 1 and sharding_type in _BY_COLUMNS:
        return f"{table.compression} stores it in parts, which can be split by rows only"
    if sharding_type in _BY_COLUMNS:
        if table.format not in FLOAT_DTYPES:
            return f"rows of format {table.format} have scales that span all columns"
        return needs_whole_rows(table.optimizer or optimizer)
    return ""


def possible_types(table: EmbeddingConfig, optimizer: Optimizer | None) -> list[str]:
    """The sharding types that a table can have."""
    return [kind for kind in SHARDING_TYPES if not sharding_refusal(table, optimizer, kind)]


def shards_from_plan(
    tables: Sequence[EmbeddingConfig], optimizer: Optimizer | None, plan: Mapping[str, Any], world_size: int
) -> list[Shard]:
    """The shards of all tables, table by table, each table's by rows and columns.

    Args:
        tables: of the collection. optimizer: its fused optimizer, or None.
        plan: table name -> TorchRec's ``ParameterSharding``. world_size: the number of ranks.

    Raises:
        ValueError: the plan lacks a table, has an unknown table or rank, or a sharding type that the table cannot have;
            or its blocks do not cover a table exactly once.
    """
    names = [table.name for table in tables]
    if sorted(plan) != sorted(names):
        raise ValueError(f"the plan must have each of the tables {sorted(names)}, got {sorted(plan)}")
    return [s for i, table in enumerate(tables) for s in _shards_of(i, table, optimizer, plan[table.name], world_size)]


def _shards_of(
    number: int, table: EmbeddingConfig, optimizer: Optimizer | None, sharding: Any, world_size: int
) -> list[Shard]:
    kind, rows, columns = sharding.sharding_type, table.planned_rows, table.embedding_dim
    if reason := sharding_refusal(table, optimizer, kind):
        near = ", ".join(possible_types(table, optimizer))
        raise ValueError(f"table {table.name!r} cannot be sharded {kind}: {reason}; it can be sharded {near}")
    if kind == "data_parallel":
        return [Shard(number, rank, 0, rows, 0, columns, replica=True) for rank in range(world_size)]
    if sharding.sharding_spec is None:
        raise ValueError(
            f"table {table.name!r}: the plan must have a sharding_spec with the blocks of {kind} sharding, got none"
        )
    shards = []
    for block in sharding.sharding_spec.shards:
        (first_row, first_column), (n, d) = block.shard_offsets, block.shard_sizes
        if block.placement is None:
            raise ValueError(f"table {table.name!r}: the plan has a shard without a placement, such as rank:0/cpu")
        if n and d:  # empty if a table has fewer rows than ranks
            shards.append(Shard(number, block.placement.rank(), first_row, n, first_column, d))
    _check_blocks(table, shards, world_size)
    return sorted(shards, key=lambda s: (s.first_column, s.first_row))


def _check_blocks(table: EmbeddingConfig, shards: list[Shard], world_size: int) -> None:
    for shard in shards:
        if not 0 <= shard.rank < world_size:
            raise ValueError(
                f"table {table.name!r}: the plan has rank {shard.rank}, but there are only {world_size} ranks"
            )
        if shard.first_column % 4:
            raise ValueError(
                f"table {table.name!r}: a shard begins at column {shard.first_column}, which must be a multiple of 4: "
                f"choose fewer column shards for its {table.embedding_dim} columns"
            )
    corners = sorted((s.first_row, s.first_column) for s in shards)
    bands: dict[tuple[int, int], list[Shard]] = {}
    for shard in sorted(shards, key=lambda s: s.first_row):
        bands.setdefault((shard.first_column, shard.first_column + shard.columns), []).append(shard)
    rows = [[(s.first_row, s.first_row + s.rows) for s in band] for band in bands.values()]
    whole = all(_is_whole(spans, table.planned_rows) for spans in rows)
    if not whole or not _is_whole(sorted(bands), table.embedding_dim):
        raise ValueError(
            f"table {table.name!r}: the plan's shards must cover its {table.planned_rows} rows and "
            f"{table.embedding_dim} columns exactly once, got blocks that begin at {corners}"
        )


def _is_whole(spans: list[tuple[int, int]], size: int) -> bool:
    """True if sorted spans cover [0, size) without gaps or overlaps."""
    ends = [0, *(last for _, last in spans)]
    return ends[-1] == size and all(first == end for (first, _), end in zip(spans, ends, strict=False))
