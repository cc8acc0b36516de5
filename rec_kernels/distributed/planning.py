"""A planner of TorchRec that counts this package's bytes: of rows, of their state, and of what ranks send."""

from __future__ import annotations

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

#: Bytes that are read at once of tables in a file.
_BLOCK = 4096


class ShardBytes(NamedTuple):
    """Bytes of a shard.

    Args:
        rows: encoded. state: of the optimizer. slots: of a row cache, with tags and counts.
    """

    rows: int
    state: int
    slots: int


def shard_bytes(
    module: TableCollection, table: EmbeddingConfig, rows: int, columns: int, first_row: int = 0
) -> ShardBytes:
    """Bytes of a block of a table: of rows and state what ``memory_report()`` of its rank has.

    Slots are those of a table by itself; tables of one width that share sets have up to a set less.

    Args:
        module: the collection that has the table. rows, columns, first_row: of the block, in ids of a compressed table.
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
    """Memory and time of shards, by the bytes that lookups and updates read, write and send.

    Memory is that of rows, optimizer state and slots, and of the ids, rows and gradients of a step; of rows in a file
    their share of the ranks' budgets. Time is bytes over the topology's bandwidths. A rank that has a table looks up
    all ranks' samples, sends a row for each bag, or id, and gets as many gradients: of row shards, each does so.

    Args:
        topology: of the ranks. constraints: not used.
        sharders: one for each kind of collection, for what travels and in which formats.
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
        self._network = min(network, self._memory)  # what is sent is read first

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any = None) -> None:
        """Writes ``storage`` and ``perf``, in milliseconds, of every shard.

        Args:
            sharding_options: of tables of collections of this package. sharder_data_map: not used.
        """
        kept: dict[int, float] = {}
        for option in sharding_options:
            module: Any = option.module[1]
            if id(module) not in kept:
                kept[id(module)] = self._kept(module)
            table = next(t for t in module.tables if t.name == option.name)
            for shard in option.shards:
                rows, columns = shard.size
                parts = sum(other.offset[1] == shard.offset[1] and other.size[0] > 0 for other in option.shards)
                if not rows or not columns:  # a table has fewer rows than there are ranks
                    parts = 0
                elif option.sharding_type == "data_parallel":
                    parts = 1
                self._estimate(option, shard, table, parts, kept[id(module)])

    def _kept(self, module: TableCollection) -> float:
        """The part of the rows of a collection that ranks have in memory: with backing "disk", by their budgets."""
        if module.row_cache is None or module.row_cache.cache.memory_budget is None:
            return 1.0
        rows = sum(t.num_embeddings * row_bytes(t.format, t.embedding_dim) for t in module._features.stored)
        return min(1.0, module.row_cache.cache.memory_budget * self._topology.world_size / max(rows, 1))

    def _estimate(self, option: ShardingOption, shard: Any, table: EmbeddingConfig, parts: int, kept: float) -> None:
        """One shard's; ``parts``: of how many row shards of its columns, 0: it is empty; ``kept``: ``_kept``."""
        module: Any = option.module[1]
        world, (rows, columns) = self._topology.world_size, shard.size
        bags = option.batch_size * len(option.input_lengths) * world if parts else 0
        ids = option.batch_size * sum(option.input_lengths) * world / parts if parts else 0
        sharder, stored = self._sharders[type(module)], _stored(table, rows, columns, shard.offset[0])
        by_id = not module._pools or (parts > 1 and sharder.row_wise == "exact")
        sent = ids if by_id else bags
        asked, travels = ids, [(columns, sent)]  # for each part that travels by itself, its columns and rows
        if parts > 1 and len(stored) > 1:
            asked, travels = ids * len(stored), [(d, sent) for _, d in stored]
            if not by_id and combines_by_id(table):  # a rank asks for a row once
                travels = [(d, min(ids, world * n)) for n, d in stored]
                asked = sum(n for _, n in travels)
        held, cache = shard_bytes(module, table, rows, columns, shard.offset[0]), module.row_cache
        replica = option.sharding_type == "data_parallel"
        on_host = self._on_gpu and cache is not None and cache.cache.backing == "host"
        row, state = (sum(own) for own in zip(*(_row(module, table, d) for _, d in stored), strict=True))
        reading = ids * row / (self._topology.hbm_to_ddr_mem_bw if on_host else self._memory)
        if kept < 1:
            reading += (1 - kept) * ids * max(row, _BLOCK) / self._topology.ssd_mem_bw
        wire, away = sharder.wire, (world - 1) / world / self._network
        shard.perf = Perf(
            fwd_compute=reading,
            fwd_comms=0.0 if replica else sum(wire_row_bytes(wire.forward, d) * n for d, n in travels) * away,
            bwd_compute=2 * (reading + ids * state / self._memory),
            bwd_comms=sum(wire_row_bytes(wire.backward, d) * n for d, n in travels) * away,
            input_dist_comms=8 * asked * away,
        )
        step = math.ceil(8 * asked + 2 * 4 * sum(d * n for d, n in travels))
        near, far = held.state + held.slots + step, held.rows
        if kept < 1:  # a budget of rows in a file has the slots, too
            far = max(0, int(kept * held.rows) - held.slots)
        if not self._on_gpu:
            shard.storage = Storage(hbm=0, ddr=near + far)
        else:
            shard.storage = Storage(hbm=near if on_host else near + far, ddr=far if on_host else 0)


def planner(
    model: nn.Module,
    sharders: Sequence[CollectionSharder],
    topology: Topology,
    *,
    batch_size: int = 512,
    lengths: Mapping[str, float] | None = None,
    **options: Any,
) -> EmbeddingShardingPlanner:
    """TorchRec's planner for a model whose tables are all of collections of this package.

    ``planner(...).collective_plan(model, sharders, group)`` makes the plan, of the ways that each table can be sharded
    and the sharder offers. Memory and times of shards are those of ``docs/distributed.md``, not TorchRec's.

    Args:
        model: with collections, on any device. sharders: one for each kind of collection.
        topology: TorchRec's, of ranks, their memory and bandwidths.
        batch_size: samples of one rank. lengths: feature -> ids of a sample in the mean; 1 of features without one.
        options: further arguments of ``EmbeddingShardingPlanner``, as ``storage_reservation``, ``proposer``, ``debug``.

    Raises:
        ValueError: the model has no collection that a sharder shards, or tables of one name in two; ``lengths`` name a
            feature that no table has, or a number below 0; a collection cannot be sharded. TypeError: an argument is of
            another type.
    """
    _check_arguments(model, sharders, topology, batch_size, lengths)
    constraints: dict[str, ParameterConstraints] = {}
    given, features = dict(lengths or {}), set()
    for name, module in model.named_modules():
        sharder = next((s for s in sharders if type(module) is s.module_type), None)
        if sharder is None or not isinstance(module, TableCollection):
            continue
        own = sharder.constraints(module)
        if both := sorted(own.keys() & constraints.keys()):
            raise ValueError(f"tables {both} of collection {name!r} have the names of others: planners go by names")
        for table in module.tables:
            own[table.name].pooling_factors = [float(given.get(f, 1)) for f in table.feature_names]
            features.update(table.feature_names)
        constraints |= own
    if not constraints:
        raise ValueError("model must have a collection of a kind that one of the sharders shards, got none")
    if unknown := sorted(given.keys() - features):
        raise ValueError(f"lengths name {unknown}, which are no features of the model's tables: {sorted(features)}")
    costs = ByteCostEstimator(topology, sharders=sharders)
    enumerator = EmbeddingEnumerator(topology, batch_size, constraints, estimator=costs)
    return CollectivePlanner(
        topology=topology, batch_size=batch_size, enumerator=enumerator, constraints=constraints, **options
    )


class CollectivePlanner(EmbeddingShardingPlanner):
    """TorchRec's planner, but all ranks are told if ``collective_plan`` finds no plan, and none waits for it."""

    def collective_plan(
        self, module: nn.Module, sharders: Any = None, pg: dist.ProcessGroup | None = None
    ) -> ShardingPlan:
        """The first rank's ``plan(module, sharders)``, on all ranks of a group; None: of all there are.

        Raises:
            PlannerError: on the first rank, there is no plan. RuntimeError: on the others, with its message.
        """
        group = dist.group.WORLD if pg is None else pg
        is_first = dist.get_rank(group) == 0
        plan = run_on_all_ranks(lambda: self.plan(module, sharders) if is_first else None, group, "has found no plan")
        return gather_objects(plan, group)[0]


def _check_arguments(model: Any, sharders: Any, topology: Any, batch_size: Any, lengths: Any) -> None:
    for name, good, told, given in (
        ("model", isinstance(model, nn.Module), "a torch.nn.Module", model),
        (
            "sharders",
            is_list(sharders) and all(isinstance(s, CollectionSharder) for s in sharders),
            "a list of sharders",
            sharders,
        ),
        ("topology", isinstance(topology, Topology), "TorchRec's Topology", topology),
        ("lengths", isinstance(lengths, Mapping | None), "a dict of features' numbers of ids", lengths),
    ):
        if not good:
            raise TypeError(f"{name} must be {told}, got {given!r}")
    positive_integer("batch_size", batch_size)
    for feature, number in (lengths or {}).items():
        check_rate(f"lengths[{feature!r}]", number)
