"""Routes between samples and shards: which rank looks up which feature, and where its columns come back to."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.distributed.messages import Message
from rec_kernels.distributed.parts import PartMap
from rec_kernels.distributed.plan import Shard


@dataclass(frozen=True)
class Entry:
    """A feature looked up in a shard.

    Args:
        feature: number of the feature in the collection. shard: where its ids go.
        bounds: where the row shards of these columns begin, and the last one ends: with more than one, this shard pools
            a part of each bag.
        coefficient: whether the gradients of ids are divided by the number of ids of the whole bag, which only its
            sample knows: "mean" pooling of several row shards, and of parts of a table that is split by rows.
        is_part: whether the table is a part of one, of which ids that do not count have no row.
    """

    feature: int
    shard: Shard
    bounds: tuple[int, ...]
    coefficient: bool
    is_part: bool = False

    @property
    def is_split(self) -> bool:
        """True if the table's rows are on several shards."""
        return len(self.bounds) > 2

    @property
    def takes_some(self) -> bool:
        """True if only ids are sent that have a row there."""
        return self.is_split or self.is_part


class Routes:
    """Lists what every rank looks up, in which order, and how columns are put together again; alike on every rank.

    Args:
        parts: the lookups, which are its features, their tables and shards. rank: this process's.
        world_size: the number of ranks. pooled: whether a lookup has a row of each bag, and not of each id.
        row_wise: ``EmbeddingBagCollectionSharder``'s, of pooled lookups.

    Attributes:
        entries: for each rank, what it looks up, in this order; parts that are reduced and then replicas come last.
        num_features: F, as many as lookups; pooled: as above; dims: their columns; dim: of all; limits: F numbers of
            ids, None: every integer is one; padding: F ids that are left out, -1: none.
        sent: for each rank, columns that it sends back of each sample: those of its entries that are neither reduced
            nor replicas. reduced: columns of the output whose parts are reduced. replicated: columns of replicas.
        columns: for each rank, those of its entries. coefficients: for each rank, its entries that need a coefficient.
        means: the features that do. by_id: those whose rows are sent one by one and pooled where their samples are.
        composed: those whose rows are combined there, id by id. unweighted: those whose weights their samples use.
        sent_blocks, blocks: for each rank, what it sends of a sample, and the gradients that it gets: columns that lie
            side by side of entries of one width, and this width.
    """

    def __init__(
        self,
        parts: PartMap,
        rank: int,
        world_size: int,
        *,
        pooled: bool = True,
        row_wise: str = "ordered",
    ) -> None:
        tables, shards, owners = parts.tables, parts.shards, [lookup.table for lookup in parts.lookups]
        self.num_features, self.limits = len(owners), [tables[i].num_embeddings for i in owners]
        self.padding = [-1 if tables[i].padding_idx is None else tables[i].padding_idx for i in owners]
        self.dims = parts.dims
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
        by_id = parts.composed | (split if row_wise == "exact" else set()) if pooled else set()
        self.by_id = [f for f, owner in enumerate(owners) if owner in by_id]
        self.composed = [f for f, owner in enumerate(owners) if owner in parts.composed]
        self.unweighted = {*self.by_id, *self.composed}

        def place_of(shard: Shard) -> int:
            return 2 if shard.replica else int(self._reduces and len(ends[shard.table, shard.first_column]) > 2)

        for shard in sorted(shards, key=place_of):  # stable
            table, bounds = tables[shard.table], ends[shard.table, shard.first_column]
            is_part = pooled and (len(bounds) > 2 or shard.table in parts.mapped)
            mean = is_part and getattr(table, "pooling", "sum") == "mean"
            for feature in (f for f, owner in enumerate(owners) if owner == shard.table):
                self.entries[shard.rank].append(Entry(feature, shard, bounds, mean, shard.table in parts.mapped))
        self.blocks = [_blocks(own) for own in self.entries]
        self.sent_blocks = [_blocks([e for e in own if not self._stays(e)]) for own in self.entries]
        self.columns = [sum(columns for columns, _ in own) for own in self.blocks]
        self.sent = [sum(columns for columns, _ in own) for own in self.sent_blocks]
        self.replicated = sum(e.shard.columns for e in self.own if e.shard.replica)
        every = [e for own in self.entries for e in own if self._is_reduced(e)]
        self.reduced = sorted({column for e in every for column in self._columns(e)})
        self.coefficients = [[i for i, e in enumerate(own) if e.coefficient] for own in self.entries]
        self.means = sorted({e.feature for own in self.entries for e in own if e.coefficient})
        self._gather, self._partial = self._gathers()
        self._scatter = [
            [(_runs([c for e in members for c in self._columns(e)]), width) for width, members in _by_width(own)]
            for own in self.entries
        ]

    @property
    def own(self) -> list[Entry]:
        """The entries of this rank."""
        return self.entries[self.rank]

    def _is_reduced(self, entry: Entry) -> bool:
        """True if a collective adds its parts."""
        return self._reduces and entry.is_split

    def _stays(self, entry: Entry) -> bool:
        """True if its columns are not sent to their sample one by one."""
        return entry.shard.replica or self._is_reduced(entry)

    def _columns(self, entry: Entry) -> range:
        """An entry's columns of the collection's output."""
        first = self._starts[entry.feature] + entry.shard.first_column
        return range(first, first + entry.shard.columns)

    def _gathers(self) -> tuple[list[_Source], list[tuple[slice, _Source]]]:
        """Where output columns are in the blocks that arrive: the first part of each, then those added to it.

        Parts of a column are listed by the shard's rows.
        """
        arrived = [e for own in self.entries for e in own if not self._stays(e)]
        arrived += [e for e in self.own if e.shard.replica]
        parts: list[list[tuple[int, int]]] = [[] for _ in range(self.dim)]
        place = 0
        for entry in arrived:
            for column in self._columns(entry):
                parts[column].append((entry.shard.first_row, place))
                place += 1
        for k, column in enumerate(self.reduced):
            parts[column].append((0, place + k))
        sizes = [columns for own in self.sent_blocks for columns, _ in own] + [self.replicated, len(self.reduced)]
        firsts = list(itertools.accumulate(sizes, initial=0))
        block = [k for k, size in enumerate(sizes) for _ in range(size)]
        ordered = [[p for _, p in sorted(part)] for part in parts]
        found: list[list[tuple[slice, _Source]]] = []
        for k in range(max(map(len, ordered), default=0)):
            pairs = [(c, part[k]) for c, part in enumerate(ordered) if len(part) > k]
            # Runs of columns that are consecutive both in the output and in a block.
            cuts = [c - i for i, (c, _) in enumerate(pairs)], [p - i for i, (_, p) in enumerate(pairs)]
            found.append([])
            for first, last in _bounds(*cuts, [block[p] for _, p in pairs]):
                (to, at), count = pairs[first], last - first
                start = at - firsts[block[at]]
                found[-1].append((slice(to, to + count), _Source(block[at], slice(start, start + count))))
        first_parts = [source for _, source in found[0]] if found else []
        return first_parts, [pair for others in found[1:] for pair in others]

    def parts(self, pooled: Tensor) -> Tensor:
        """[samples of all ranks, columns that are reduced]: this rank's part of them, zeros of rows that it lacks.

        Args:
            pooled: [samples of all ranks, columns of this rank's entries].
        """
        own = [e for e in self.own if self._is_reduced(e)]
        out, place = pooled.new_zeros(len(pooled), len(self.reduced)), self.sent[self.rank]
        for entry in own:
            first = bisect.bisect_left(self.reduced, self._columns(entry).start)
            out[:, first : first + entry.shard.columns] += pooled[:, place : place + entry.shard.columns]
            place += entry.shard.columns
        return out

    def assemble(self, arrived: Sequence[Tensor], counts: Tensor | None) -> Tensor:
        """[B, dim]: the collection's output, partial sums added in the order of their rows and means divided.

        Args:
            arrived: [B, columns] of each of the ``sent_blocks``, rank by rank, then of this rank's replicas, and what
                was reduced. counts: [F, B] ids of each bag that count, where some feature needs them.
        """
        first = [arrived[source.block][:, source.columns] for source in self._gather]
        out = torch.cat(first, dim=1) if first else arrived[-1][:, :0]
        for columns, source in self._partial:
            out[:, columns] += arrived[source.block][:, source.columns]
        for f in self.means:
            block = out[:, self._starts[f] : self._starts[f + 1]]
            block.div_(counts[f].clamp(min=1).to(block.dtype)[:, None])
        return out

    def disperse(self, grad: Tensor, counts: Tensor | None) -> list[Message]:
        """Gathers the gradients of this rank's samples that each rank's update needs.

        Returns:
            For each rank, coefficients, float32 [B, number of its coefficients], and its ``blocks``.
        """
        messages = []
        for own, blocks in zip(self.entries, self._scatter, strict=True):
            numbers = []
            if counted := [e.feature for e in own if e.coefficient]:
                numbers.append((1 / counts[counted].clamp(min=1).to(grad.dtype)).T)
            messages.append(Message(numbers, [([grad[:, run] for run in slices], width) for slices, width in blocks]))
        return messages


class _Source(NamedTuple):
    """Columns of an arrived block."""

    block: int
    columns: slice


def _by_width(entries: Sequence[Entry]) -> list[tuple[int, list[Entry]]]:
    """Entries that lie side by side and have as many columns, and this number."""
    return [(width, list(own)) for width, own in itertools.groupby(entries, lambda e: e.shard.columns)]


def _blocks(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """The columns of each group of ``_by_width``, and their width."""
    return [(width * len(own), width) for width, own in _by_width(entries)]


def _bounds(*differences: list[int]) -> list[tuple[int, int]]:
    """Where runs of positions begin and end in which none of ``differences`` changes."""
    size = len(differences[0])
    cuts = [i for i in range(1, size) if any(d[i] != d[i - 1] for d in differences)]
    return list(itertools.pairwise([0, *cuts, size])) if size else []


def _runs(columns: list[int]) -> list[slice]:
    """Slices of consecutive columns, which are ``columns`` one after the other."""
    bounds = _bounds([c - i for i, c in enumerate(columns)])
    return [slice(columns[first], columns[last - 1] + 1) for first, last in bounds]
