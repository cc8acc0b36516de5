"""Routes between samples and shards: what each rank looks up, and where its columns are in outputs."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.distributed.messages import Message
from rec_kernels.distributed.parameter_sharding import Shard
from rec_kernels.distributed.table_parts import LookupMap


@dataclass(frozen=True)
class Entry:
    """A feature that is looked up in a shard.

    Args:
        feature: index of the lookup. shard: where its ids are sent.
        bounds: first rows of the row shards of these columns, and the end of the last. If there are several, each
            shard computes a partial sum of each bag.
        divides_by_count: whether gradients of ids are divided by the ids of the whole bag, which only the sample's rank
            knows: "mean" pooling over several row shards, or over parts of a table that is split by rows.
        is_part: whether the table is a part of a compressed one, in which invalid ids have no row.
    """

    feature: int
    shard: Shard
    bounds: tuple[int, ...]
    divides_by_count: bool
    is_part: bool = False

    @property
    def is_split(self) -> bool:
        """True if several shards have rows of these columns."""
        return len(self.bounds) > 2

    @property
    def filters_ids(self) -> bool:
        """True if only the ids that have a row in the shard are sent."""
        return self.is_split or self.is_part


class Routes:
    """Lists what every rank looks up, in order, and assembles outputs from it; the same on every rank.

    Args:
        lookup_map: the lookups, their tables and shards. rank: this process's.
        world_size: the number of ranks. pooled: whether a lookup has a row per bag instead of per id.
        row_wise: ``EmbeddingBagCollectionSharder``'s, of pooled lookups.

    Attributes:
        entries: for each rank, what it looks up, in order; reduced entries and then replicas come last.
        num_features: F, the number of lookups. dims: their columns. dim: the sum of these.
        pooled: as given.
        limits: F numbers of ids, None: any integer. padding: F ids that are left out, -1: none.
        sent_columns: for each rank, the number of columns that it sends per sample: not reduced ones, not replicas.
        reduced_columns: output columns that a reduce-scatter adds. replica_columns: the number of those of replicas.
        entry_columns: for each rank, the number of columns of its entries.
        mean_entries: for each rank, its entries that divide gradients by the ids of a bag. mean_features: theirs.
        unpooled_features: those that receive a row per id, which this rank pools.
        combined_features: those whose rows of parts are combined id by id on this rank.
        unweighted_features: those whose per-sample weights are applied on this rank.
        sent_blocks, gradient_blocks: for each rank, the blocks that it sends per sample, and receives as gradients:
            columns of adjacent entries of one width, and this width.
    """

    def __init__(
        self,
        lookup_map: LookupMap,
        rank: int,
        world_size: int,
        *,
        pooled: bool = True,
        row_wise: str = "ordered",
    ) -> None:
        tables, shards, owners = lookup_map.tables, lookup_map.shards, [lookup.table for lookup in lookup_map.lookups]
        self.num_features, self.limits = len(owners), [tables[i].num_embeddings for i in owners]
        self.padding = [-1 if tables[i].padding_idx is None else tables[i].padding_idx for i in owners]
        self.dims = lookup_map.dims
        self._starts = [0, *itertools.accumulate(self.dims)]
        self.dim = self._starts[-1]
        self.rank, self.world_size, self.pooled = rank, world_size, pooled
        self._reduces = pooled and row_wise == "reduce_scatter"
        self.entries: list[list[Entry]] = [[] for _ in range(world_size)]
        firsts: dict[tuple[int, int], set[int]] = {}
        for shard in shards:
            firsts.setdefault((shard.table, shard.first_column), set()).add(shard.first_row)
        ends = {place: (*sorted(rows), tables[place[0]].planned_rows) for place, rows in firsts.items()}

        split = {table for (table, _), bounds in ends.items() if len(bounds) > 2}
        by_id = lookup_map.combined_tables | (split if row_wise == "exact" else set()) if pooled else set()
        self.unpooled_features = [f for f, owner in enumerate(owners) if owner in by_id]
        self.combined_features = [f for f, owner in enumerate(owners) if owner in lookup_map.combined_tables]
        self.unweighted_features = {*self.unpooled_features, *self.combined_features}

        def order(shard: Shard) -> int:
            return 2 if shard.replica else int(self._reduces and len(ends[shard.table, shard.first_column]) > 2)

        for shard in sorted(shards, key=order):  # stable
            table, bounds = tables[shard.table], ends[shard.table, shard.first_column]
            is_part = pooled and (len(bounds) > 2 or shard.table in lookup_map.part_tables)
            mean = is_part and getattr(table, "pooling", "sum") == "mean"
            for feature in (f for f, owner in enumerate(owners) if owner == shard.table):
                self.entries[shard.rank].append(
                    Entry(feature, shard, bounds, mean, shard.table in lookup_map.part_tables)
                )
        self.gradient_blocks = [_blocks(own) for own in self.entries]
        self.sent_blocks = [_blocks([e for e in own if not self._is_not_sent(e)]) for own in self.entries]
        self.entry_columns = [sum(columns for columns, _ in own) for own in self.gradient_blocks]
        self.sent_columns = [sum(columns for columns, _ in own) for own in self.sent_blocks]
        self.replica_columns = sum(e.shard.columns for e in self.own if e.shard.replica)
        every = [e for own in self.entries for e in own if self._is_reduced(e)]
        self.reduced_columns = sorted({column for e in every for column in self._columns(e)})
        self.mean_entries = [[i for i, e in enumerate(own) if e.divides_by_count] for own in self.entries]
        self.mean_features = sorted({e.feature for own in self.entries for e in own if e.divides_by_count})
        self._first_sources, self._partial_sums = self._find_sources()
        self._gradient_slices = [
            [(_runs([c for e in members for c in self._columns(e)]), width) for width, members in _by_width(own)]
            for own in self.entries
        ]

    @property
    def own(self) -> list[Entry]:
        """The entries of this rank."""
        return self.entries[self.rank]

    def _is_reduced(self, entry: Entry) -> bool:
        """True if a reduce-scatter adds its partial sums."""
        return self._reduces and entry.is_split

    def _is_not_sent(self, entry: Entry) -> bool:
        """True if its columns are reduced or those of a replica."""
        return entry.shard.replica or self._is_reduced(entry)

    def _columns(self, entry: Entry) -> range:
        """The columns of an entry in the output of all lookups."""
        first = self._starts[entry.feature] + entry.shard.first_column
        return range(first, first + entry.shard.columns)

    def _find_sources(self) -> tuple[list[_Source], list[tuple[slice, _Source]]]:
        """Finds output columns in the received blocks: the first partial sum of each, and those added to it.

        Partial sums of a column are in the order of the shards' rows.
        """
        received = [e for own in self.entries for e in own if not self._is_not_sent(e)]
        received += [e for e in self.own if e.shard.replica]
        partial: list[list[tuple[int, int]]] = [[] for _ in range(self.dim)]
        place = 0
        for entry in received:
            for column in self._columns(entry):
                partial[column].append((entry.shard.first_row, place))
                place += 1
        for k, column in enumerate(self.reduced_columns):
            partial[column].append((0, place + k))
        sizes = [columns for own in self.sent_blocks for columns, _ in own] + [
            self.replica_columns,
            len(self.reduced_columns),
        ]
        firsts = list(itertools.accumulate(sizes, initial=0))
        block = [k for k, size in enumerate(sizes) for _ in range(size)]
        ordered = [[p for _, p in sorted(sums)] for sums in partial]
        found: list[list[tuple[slice, _Source]]] = []
        for k in range(max(map(len, ordered), default=0)):
            pairs = [(c, sums[k]) for c, sums in enumerate(ordered) if len(sums) > k]
            # Runs of columns that are consecutive in the output and in a block.
            cuts = [c - i for i, (c, _) in enumerate(pairs)], [p - i for i, (_, p) in enumerate(pairs)]
            found.append([])
            for first, last in _bounds(*cuts, [block[p] for _, p in pairs]):
                (to, at), count = pairs[first], last - first
                start = at - firsts[block[at]]
                found[-1].append((slice(to, to + count), _Source(block[at], slice(start, start + count))))
        first_sources = [source for _, source in found[0]] if found else []
        return first_sources, [pair for others in found[1:] for pair in others]

    def reduce_scatter_input(self, pooled: Tensor) -> Tensor:
        """[samples of all ranks, reduced columns]: this rank's partial sums, zeros in columns that it lacks.

        Args:
            pooled: [samples of all ranks, columns of this rank's entries].
        """
        own = [e for e in self.own if self._is_reduced(e)]
        out, place = pooled.new_zeros(len(pooled), len(self.reduced_columns)), self.sent_columns[self.rank]
        for entry in own:
            first = bisect.bisect_left(self.reduced_columns, self._columns(entry).start)
            out[:, first : first + entry.shard.columns] += pooled[:, place : place + entry.shard.columns]
            place += entry.shard.columns
        return out

    def assemble_output(self, received: Sequence[Tensor], counts: Tensor | None) -> Tensor:
        """[B, dim]: the output of all lookups; adds partial sums in the order of their rows, and divides means.

        Args:
            received: [B, columns] of each of the ``sent_blocks``, rank by rank, then of this rank's replicas, then the
                output of the reduce-scatter. counts: [F, B] valid ids of each bag, if a feature needs them.
        """
        first = [received[source.block][:, source.columns] for source in self._first_sources]
        out = torch.cat(first, dim=1) if first else received[-1][:, :0]
        for columns, source in self._partial_sums:
            out[:, columns] += received[source.block][:, source.columns]
        for f in self.mean_features:
            block = out[:, self._starts[f] : self._starts[f + 1]]
            block.div_(counts[f].clamp(min=1).to(block.dtype)[:, None])
        return out

    def gradient_messages(self, grad: Tensor, counts: Tensor | None) -> list[Message]:
        """Gathers the gradients of this rank's samples that each rank needs for its update.

        Returns:
            For each rank, 1 / ids of bags, float32 [B, its ``mean_entries``], and its ``gradient_blocks``.
        """
        messages = []
        for own, blocks in zip(self.entries, self._gradient_slices, strict=True):
            floats = []
            if counted := [e.feature for e in own if e.divides_by_count]:
                floats.append((1 / counts[counted].clamp(min=1).to(grad.dtype)).T)
            messages.append(Message(floats, [([grad[:, run] for run in slices], width) for slices, width in blocks]))
        return messages


class _Source(NamedTuple):
    """Columns of a received block."""

    block: int
    columns: slice


def _by_width(entries: Sequence[Entry]) -> list[tuple[int, list[Entry]]]:
    """Groups adjacent entries of one width."""
    return [(width, list(own)) for width, own in itertools.groupby(entries, lambda e: e.shard.columns)]


def _blocks(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """The columns of each group of ``_by_width``, and its width."""
    return [(width * len(own), width) for width, own in _by_width(entries)]


def _bounds(*differences: list[int]) -> list[tuple[int, int]]:
    """Bounds of the runs in which no list of ``differences`` changes."""
    size = len(differences[0])
    cuts = [i for i in range(1, size) if any(d[i] != d[i - 1] for d in differences)]
    return list(itertools.pairwise([0, *cuts, size])) if size else []


def _runs(columns: list[int]) -> list[slice]:
    """Merges consecutive columns into slices."""
    bounds = _bounds([c - i for i, c in enumerate(columns)])
    return [slice(columns[first], columns[last - 1] + 1) for first, last in bounds]
