"""TorchRec's planner with this package's byte counts: of rows, optimizer state and messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    Perf,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ShardingPlan

from rec_kernels.distributed.agreement import run_on_all_ranks
from rec_kernels.distributed.collectives import gather_objects
from rec_kernels.distributed.qcomm_codec import wire_row_bytes
from rec_kernels.distributed.sharder import CollectionSharder
from rec_kernels.distributed.table_parts import combines_by_id, part_block
from rec_kernels.nn.arguments import check_rate, is_list, positive_integer
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.optimizer_state import StatePlaces
from rec_kernels.nn.tables.row_cache import RowCache, slot_bytes
from rec_kernels.ops.row_formats import row_bytes

#: Bytes of a block of tables in files.
_BLOCK = 4096


class ShardBytes(NamedTuple):
    """Bytes of a shard.

    Args:
        rows: encoded. state: of the optimizer. slots: of the row cache, with tags and counts.
    """

    rows: int
    state: int
    slots: int


def shard_bytes(
    module: TableCollection, table: EmbeddingConfig, rows: int, columns: int, first_row: int = 0
) -> ShardBytes:
    """Returns the bytes of a block of a table; rows and state as in ``memory_report()`` of its rank.

    Slots are those of the table alone; tables of one width that share sets have up to a set less.

    Args:
        module: the collection of the table. rows, columns, first_row: the block, rows in ids of a compressed table.
    """
    stored = _stored(table, rows, columns, first_row)
    cache = None if module.row_cache is None else module.row_cache.cache
    fraction = 0.0 if cache is None or len(stored) > 1 else cache.of(table.name)
    slots = 0 if cache is None else sum(_slots(cache, fraction, *own) for own in stored)
    each = [(e, *_row(module, table, d)) for e, d in stored]
    return ShardBytes(sum(e * row for e, row, _ in each), sum(e * state for e, _, state in each), slots)


def _stored(table: EmbeddingConfig, rows: int, columns: int, first_row: int) -> list[tuple[int, int]]:
    """Rows and columns of each part in a block of a table."""
    ids, has_all_columns = table.planned_rows, columns == table.embedding_dim
    return [
        (part_block(first_row, rows, ids, t.num_embeddings)[1], t.embedding_dim if has_all_columns else columns)
        for t in table.stored
    ]


def _row(module: TableCollection, table: EmbeddingConfig, columns: int) -> tuple[int, int]:
    """Bytes of a row, and of its optimizer state."""
    state = StatePlaces([], table.optimizer or module.optimizer)
    return row_bytes(table.format, columns), state.row_bytes(columns)


def _slots(cache: RowCache, fraction: float, rows: int, columns: int) -> int:
    counts = rows if cache.policy == "lfu" else 0
    if not fraction or not rows:
        return counts
    sets = cache.sets(rows if cache.is_whole(fraction, rows) else fraction * rows)
    return sets * cache.ways * slot_bytes(columns, cache.policy) + counts


class ByteCostEstimator(ShardEstimator):
    """Estimates memory and time of shards from the bytes that lookups and updates read, write and send.

    Memory is that of rows, optimizer state and slots, and of the ids, rows and gradients of a step; for rows in a file,
    their share of the ranks' budgets. Time is bytes over the topology's bandwidths. A rank looks up all ranks' samples
    in its tables, sends a row per bag, or id, and receives the same number of gradients; so does each row shard.

    Args:
        topology: of the ranks. constraints: not used.
        sharders: one for each kind of collection, for what is sent and in which formats.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        *,
        sharders: Sequence[CollectionSharder],
    ) -> None:
        self._topology, self._sharders = topology, {sharder.module_type: sharder for sharder in sharders}
        self._on_gpu = topology.compute_device != "cpu"
        self._memory = topology.hbm_mem_bw if self._on_gpu else topology.ddr_mem_bw
        sizes = topology.local_world_size, topology.world_size
        network = topology.comms_bandwidths.get_bw(*sizes, CollectiveType.ALL_TO_ALL)
        self._network = min(network, self._memory)  # messages are read from memory first

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any = None) -> None:
        """Writes ``storage`` and ``perf``, in milliseconds, of every shard.

        Args:
            sharding_options: of tables of collections of this package. sharder_data_map: not used.
        """
        in_memory: dict[int, float] = {}
        for option in sharding_options:
            module: Any = option.module[1]
            if id(module) not in in_memory:
                in_memory[id(module)] = self._fraction_in_memory(module)
            table = next(t for t in module.tables if t.name == option.name)
            for shard in option.shards:
                rows, columns = shard.size
                row_shards = sum(other.offset[1] == shard.offset[1] and other.size[0] > 0 for other in option.shards)
                if not rows or not columns:  # a table has fewer rows than ranks
                    row_shards = 0
                elif option.sharding_type == "data_parallel":
                    row_shards = 1
                self._estimate(option, shard, table, row_shards, in_memory[id(module)])

    def _fraction_in_memory(self, module: TableCollection) -> float:
        """The fraction of a collection's rows that is in memory: below 1 only with backing "disk", by the budgets."""
        if module.row_cache is None or module.row_cache.cache.memory_budget is None:
            return 1.0
        rows = sum(t.num_embeddings * row_bytes(t.format, t.embedding_dim) for t in module._features.stored)
        return min(1.0, module.row_cache.cache.memory_budget * self._topology.world_size / max(rows, 1))

    def _estimate(
        self, option: ShardingOption, shard: Any, table: EmbeddingConfig, row_shards: int, in_memory: float
    ) -> None:
        """Writes the estimate of a shard.

        Args:
            row_shards: the number of row shards of its columns; 0: it is empty. in_memory: ``_fraction_in_memory``.
        """
        module: Any = option.module[1]
        world, (rows, columns) = self._topology.world_size, shard.size
        bags = option.batch_size * len(option.input_lengths) * world if row_shards else 0
        ids = option.batch_size * sum(option.input_lengths) * world / row_shards if row_shards else 0
        sharder, stored = self._sharders[type(module)], _stored(table, rows, columns, shard.offset[0])
        by_id = not module._pools or (row_shards > 1 and sharder.row_wise == "exact")
        sent = ids if by_id else bags
        requested, messages = ids, [(columns, sent)]  # columns and rows of each part that is sent separately
        if row_shards > 1 and len(stored) > 1:
            requested, messages = ids * len(stored), [(d, sent) for _, d in stored]
            if not by_id and combines_by_id(table):  # a rank receives a row once
                messages = [(d, min(ids, world * n)) for n, d in stored]
                requested = sum(n for _, n in messages)
        own, cache = shard_bytes(module, table, rows, columns, shard.offset[0]), module.row_cache
        replica = option.sharding_type == "data_parallel"
        on_host = self._on_gpu and cache is not None and cache.cache.backing == "host"
        row, state = (sum(part) for part in zip(*(_row(module, table, d) for _, d in stored), strict=True))
        reading = ids * row / (self._topology.hbm_to_ddr_mem_bw if on_host else self._memory)
        if in_memory < 1:
            reading += (1 - in_memory) * ids * max(row, _BLOCK) / self._topology.ssd_mem_bw
        wire, per_byte = sharder.wire, (world - 1) / world / self._network
        shard.perf = Perf(
            fwd_compute=reading,
            fwd_comms=0.0 if replica else sum(wire_row_bytes(wire.forward, d) * n for d, n in messages) * per_byte,
            bwd_compute=2 * (reading + ids * state / self._memory),
            bwd_comms=sum(wire_row_bytes(wire.backward, d) * n for d, n in messages) * per_byte,
            input_dist_comms=8 * requested * per_byte,
        )
        step = math.ceil(8 * requested + 2 * 4 * sum(d * n for d, n in messages))
        hot, tables = own.state + own.slots + step, own.rows
        if in_memory < 1:  # the budget of a file includes the slots
            tables = max(0, int(in_memory * own.rows) - own.slots)
        if not self._on_gpu:
            shard.storage = Storage(hbm=0, ddr=hot + tables)
        else:
            shard.storage = Storage(hbm=hot if on_host else hot + tables, ddr=tables if on_host else 0)


def planner(
    model: nn.Module,
    sharders: Sequence[CollectionSharder],
    topology: Topology,
    *,
    batch_size: int = 512,
    lengths: Mapping[str, float] | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    **options: Any,
) -> EmbeddingShardingPlanner:
    """Returns TorchRec's planner for a model whose tables are all in collections of this package.

    ``planner(...).collective_plan(model, sharders, group)`` returns the plan, among the sharding types that the table
    supports and the sharder offers. Memory and times of shards are those of ``docs/distributed.md``, not TorchRec's.

    Args:
        model: with collections, on any device. sharders: one for each kind of collection.
        topology: TorchRec's, of ranks, their memory and bandwidths.
        batch_size: samples of one rank. lengths: feature -> mean ids per sample; 1 if it is missing.
        constraints: TorchRec's, by table. ``sharding_types`` selects among those possible; ``pooling_factors``, unless
            they are None or TorchRec's default, [1.0], replace ``lengths`` of the table's features.
        options: other arguments of ``EmbeddingShardingPlanner``: ``storage_reservation``, ``proposer``, ``debug``, ...

    Raises:
        ValueError: the model has no collection that a sharder shards, or two with tables of one name; ``lengths`` has
            an unknown feature or a value below 0, ``constraints`` an unknown table, no type that is possible, or
            ``pooling_factors`` that are not a number of at least 0 for each feature; a collection cannot be sharded.
            TypeError: an argument has another type.
    """
    _check_arguments(model, sharders, topology, batch_size, lengths, constraints)
    merged: dict[str, ParameterConstraints] = {}
    given, narrower, features = dict(lengths or {}), dict(constraints or {}), set()
    for name, module in model.named_modules():
        sharder = next((s for s in sharders if type(module) is s.module_type), None)
        if sharder is None or not isinstance(module, TableCollection):
            continue
        own = sharder.constraints(module)
        if both := sorted(own.keys() & merged.keys()):
            raise ValueError(
                f"tables {both} of collection {name!r} have the same names as others: planners identify tables by name"
            )
        for table in module.tables:
            own[table.name].pooling_factors = [float(given.get(f, 1)) for f in table.feature_names]
            features.update(table.feature_names)
            if table.name in narrower:
                own[table.name] = _narrowed(table.name, own[table.name], narrower[table.name])
        merged |= own
    if not merged:
        raise ValueError("model must have a collection that one of the sharders can shard, got none")
    if unknown := sorted(given.keys() - features):
        raise ValueError(
            f"lengths name {unknown}, which are not among the features of the model's tables: {sorted(features)}"
        )
    if unknown := sorted(narrower.keys() - merged.keys()):
        raise ValueError(f"constraints name {unknown}, which are not among the model's tables: {sorted(merged)}")
    costs = ByteCostEstimator(topology, sharders=sharders)
    enumerator = EmbeddingEnumerator(topology, batch_size, merged, estimator=costs)
    return CollectivePlanner(
        topology=topology, batch_size=batch_size, enumerator=enumerator, constraints=merged, **options
    )


def _narrowed(table: str, own: ParameterConstraints, given: ParameterConstraints) -> ParameterConstraints:
    """The constraints ``given`` of a table, with those of its ``own`` sharding types that they have."""
    possible = own.sharding_types or []
    types = [kind for kind in possible if given.sharding_types is None or kind in given.sharding_types]
    if not types:
        raise ValueError(
            f"constraints[{table!r}].sharding_types = {given.sharding_types} must have one of {possible}, which the "
            "table supports and the sharder's sharding_types offer"
        )
    expected, factors = own.pooling_factors or [], given.pooling_factors
    if factors is None or factors == ParameterConstraints().pooling_factors:
        factors = expected
    name = f"constraints[{table!r}].pooling_factors"
    if not is_list(factors) or len(factors) != len(expected):
        raise ValueError(f"{name} must be a list of {len(expected)} numbers, one per feature, got {factors!r}")
    for i, factor in enumerate(factors):
        check_rate(f"{name}[{i}]", factor)
    return dataclasses.replace(given, sharding_types=types, pooling_factors=factors)


class CollectivePlanner(EmbeddingShardingPlanner):
    """TorchRec's planner, with errors of ``collective_plan`` raised on all ranks: none waits for a plan."""

    def collective_plan(
        self, module: nn.Module, sharders: Any = None, pg: dist.ProcessGroup | None = None
    ) -> ShardingPlan:
        """Returns the first rank's ``plan(module, sharders)`` on all ranks of a group; None: the default group.

        Raises:
            PlannerError: on the first rank, if there is no plan. RuntimeError: on the others, with its message.
        """
        group = dist.group.WORLD if pg is None else pg
        is_first = dist.get_rank(group) == 0
        plan = run_on_all_ranks(lambda: self.plan(module, sharders) if is_first else None, group, "has found no plan")
        return gather_objects(plan, group)[0]


def _check_arguments(model: Any, sharders: Any, topology: Any, batch_size: Any, lengths: Any, constraints: Any) -> None:
    for name, good, expected, given in (
        ("model", isinstance(model, nn.Module), "a torch.nn.Module", model),
        (
            "sharders",
            is_list(sharders) and all(isinstance(s, CollectionSharder) for s in sharders),
            "a list of sharders",
            sharders,
        ),
        ("topology", isinstance(topology, Topology), "TorchRec's Topology", topology),
        ("lengths", isinstance(lengths, Mapping | None), "a dict of features' numbers of ids", lengths),
        (
            "constraints",
            isinstance(constraints, Mapping | None)
            and all(isinstance(c, ParameterConstraints) for c in (constraints or {}).values()),
            "a dict from tables to TorchRec's ParameterConstraints",
            constraints,
        ),
    ):
        if not good:
            raise TypeError(f"{name} must be {expected}, got {given!r}")
    positive_integer("batch_size", batch_size)
    for feature, number in (lengths or {}).items():
        check_rate(f"lengths[{feature!r}]", number)
