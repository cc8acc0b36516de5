"""The row cache of a collection: its options (``RowCache``) and its slots (``CacheState``)."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.nn.arguments import check_choice, integer_from, positive_integer
from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.layout import move_whole, uncast
from rec_kernels.nn.tables.load_state import copied
from rec_kernels.nn.tables.prefetch import TableCall
from rec_kernels.nn.tables.storage import zeros
from rec_kernels.ops.table_layout import CachePlaces, table_layout
from rec_kernels.ops.version_counters import call_uncounted

_ops = torch.ops.rec_kernels

POLICIES = ("lru", "lfu")
BACKINGS = ("device", "host", "disk")  # fastest first
#: Columns of the ops' ``cache_stats``: counters per table.
COUNTERS = ("lookups", "hits", "inserted", "evicted", "written", "left_out")


@dataclass(frozen=True)
class RowCache:
    """Options of a set-associative FP32 cache for hot rows; all other rows stay encoded in their tables.

    Cached rows are read and trained without rounding, as in FP32 tables; cold rows take the memory of their format. A
    training batch inserts its rows before the lookup; evicted rows are written back with the collection's rounding. A
    row that gets no slot is decoded, updated and encoded in its table. In ``eval()`` mode and without gradients rows
    are read where they are, and none is inserted. Insertion and eviction are the same on every device
    (docs/numerics.md).

    Args:
        fraction: fraction of the tables' rows that have a slot: a number in [0, 1] for all tables, or a dict from table
            name to number (tables that it lacks are not cached). Tables of equal ``embedding_dim`` share their slots,
            except tables with fraction 1, or with a fraction above 0 and at most ``ways`` rows: all their rows fit.
        ways: slots per set, 1 to 1024. Each row maps to one set, and can use any slot of it.
        policy: eviction policy: "lru" evicts the least recently used row; "lfu" the least frequently used one, unless
            the new row has no more uses. "lfu" counts batches that use a row, in one byte per row.
        decay_every: under "lfu", counts are halved every ``decay_every`` batches; 0: never.
        backing: memory of the encoded tables: "device", the collection's device; "host", host memory, page-locked if
            the collection is on a GPU, whose kernels then access uncached rows in place; "disk", a file whose blocks
            are loaded into host memory on demand, for collections on the CPU (a collection on the meta device opens no
            file; ``rk.distributed`` shards it).
        path: the file of backing "disk". An existing file is opened and provides the tables' rows. Copy and move it
            together with ``<path>.log`` beside it. Under ``rk.distributed`` each rank has its own file,
            ``<path>.<rank>-of-<ranks>``.
        memory_budget: with backing "disk", the maximum bytes of rows in memory: slots with their tags and counts, plus
            loaded encoded rows. Optimizer state is not included.
        generation: with backing "disk", the state of an existing file to open, as named in ``state_dict()``; None: the
            last complete one. After a crash two may exist; until something is written, the older one can be opened,
            which deletes the newer one.

    Tables with several parts (``rk.QuotientRemainder``, ``rk.Partitions``) are not cached; their fraction must be 0.

    Raises:
        ValueError: an argument is out of range.
        TypeError: ``path`` is not a path.
    """

    fraction: float | Mapping[str, float] = 0.05
    ways: int = 32
    policy: str = "lru"
    decay_every: int = 0
    backing: str = "device"
    path: str | os.PathLike | None = None
    memory_budget: int | None = None
    generation: int | None = None

    def __post_init__(self) -> None:
        fractions = self.fraction if isinstance(self.fraction, Mapping) else {"": self.fraction}
        for name, value in fractions.items():
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
                where = f"fraction of table {name!r}" if name else "fraction"
                raise ValueError(f"{where} must be a number in [0, 1], got {value!r}")
        if positive_integer("ways", self.ways) > 1024:
            raise ValueError(f"ways must be at most 1024, got {self.ways}")
        check_choice("policy", self.policy, POLICIES)
        if integer_from(0, "decay_every", self.decay_every) and self.policy != "lfu":
            raise ValueError(f"decay_every = {self.decay_every} requires policy 'lfu', got {self.policy!r}")
        check_choice("backing", self.backing, BACKINGS)
        on_disk = self.backing == "disk"
        for name in ("path", "memory_budget"):
            if (getattr(self, name) is not None) != on_disk:
                need = "must be given for" if on_disk else "requires"
                raise ValueError(f"{name} {need} backing 'disk', got {name}={getattr(self, name)!r}, {self.backing!r}")
        if on_disk:
            if not isinstance(self.path, str | os.PathLike):
                raise TypeError(f"path must be a str or an os.PathLike, got {self.path!r}")
            positive_integer("memory_budget", self.memory_budget)
            if self.generation is not None:
                integer_from(0, "generation", self.generation)
        elif self.generation is not None:
            raise ValueError(f"generation requires backing 'disk', got {self.generation!r} and {self.backing!r}")

    def of(self, table: str) -> float:
        """The fraction of the table with this name."""
        return float(self.fraction.get(table, 0.0) if isinstance(self.fraction, Mapping) else self.fraction)

    def is_whole(self, fraction: float, rows: int) -> bool:
        """True if a table with this fraction and number of rows has its own sets, with a slot for every row."""
        return fraction == 1 or (fraction > 0 and rows <= self.ways)

    def sets(self, slots: float) -> int:
        """The number of sets, at least 1, that provide ``slots`` slots."""
        # fraction * rows may be slightly off a whole number because of floating-point error.
        return max(1, -(-math.floor(slots + 1e-6) // self.ways))


@dataclass
class _Group:
    """Tables of equal ``embedding_dim`` that share sets of slots."""

    dim: int
    tables: list[int]
    first_set: int
    sets: int
    first_element: int

    def offset(self, ways: int) -> int:
        """Offset, in elements, that slot 0 would have in ``CacheState.rows`` if all slots had this width."""
        return self.first_element - self.first_set * ways * self.dim


class CacheState(nn.Module):
    """The slots of a collection's row cache.

    Args:
        cache: the options of the cache.
        features: the collection's features and tables.
        device: where the slots are.
    """

    rows: Tensor
    tags: Tensor
    marks: Tensor
    stamps: Tensor
    dirty: Tensor
    clock: Tensor
    counts: Tensor
    row_counts: Tensor
    stats: Tensor
    geometry: Tensor

    def __init__(
        self,
        cache: RowCache,
        features: FeatureMap,
        *,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.cache, self._stored, self._features = cache, features.stored, features.features
        alone = {feature.parts[0] for feature in self._features if len(feature.parts) == 1}
        names = {feature.table.name for feature in self._features if len(feature.parts) == 1}
        if isinstance(cache.fraction, Mapping):
            several = {feature.table.name for feature in self._features} - names
            unknown = sorted(n for n, f in cache.fraction.items() if n not in names and (f or n not in several))
            if unknown:
                own = sorted(names)
                raise ValueError(f"fraction names {unknown}, which are not tables with a single part: those are {own}")
        self.fractions = [cache.of(t.name) if i in alone else 0.0 for i, t in enumerate(self._stored)]
        self._groups = self._make_groups()
        slots = sum(g.sets for g in self._groups) * cache.ways
        elements = sum(g.sets * cache.ways * g.dim for g in self._groups)
        state = {
            "rows": zeros(elements, torch.float32, device),
            "tags": zeros(slots, torch.int64, device).fill_(-1),
            "stamps": zeros(slots, torch.int64, device),
            "dirty": zeros(slots, torch.uint8, device),
            "clock": torch.zeros((), dtype=torch.int64, device=device),
        }
        if cache.policy == "lfu":
            state["counts"] = zeros(slots, torch.uint8, device)
            rows = sum(t.num_embeddings for t in self._stored)
            state["row_counts"] = zeros(rows, torch.uint8, device)
        for name, tensor in state.items():
            self.register_buffer(name, tensor)
        self.register_buffer("marks", zeros(slots, torch.uint8, device), persistent=False)
        self._table_ids = features.table_ids
        stats = torch.zeros(max(self._table_ids, default=-1) + 1, len(COUNTERS), dtype=torch.int64, device=device)
        self.register_buffer("stats", stats, persistent=False)
        self.register_buffer("geometry", torch.tensor(self._geometry(), dtype=torch.int64, device=device))

    def shared(self) -> CacheState:
        """Copies the module with the same slots, so that the copy can be moved independently."""
        other = copy.copy(self)
        other._buffers = dict(self._buffers)
        return other

    def _geometry(self) -> list[list[int]]:
        """[T + 1, 4]: everything that determines a row's slots, saved in a state to detect an incompatible cache.

        Tags are row indices over all tables, so it includes a hash of the tables' names in their order.
        """
        of = {i: group for group in self._groups for i in group.tables}
        places = [(of[i].sets, of[i].first_set) if i in of else (0, 0) for i in range(len(self._stored))]
        tables = [[t.num_embeddings, t.embedding_dim, *p] for t, p in zip(self._stored, places, strict=True)]
        names = ".".join(t.name for t in self._stored)  # no name has a dot
        digest = hashlib.blake2b(names.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little", signed=True)
        return [[self.cache.ways, POLICIES.index(self.cache.policy), number, 0], *tables]

    def _make_groups(self) -> list[_Group]:
        ways, groups = self.cache.ways, []
        first_set = first_element = 0

        def add(dim: int, tables: list[int], slots: float) -> None:
            nonlocal first_set, first_element
            sets = self.cache.sets(slots)
            groups.append(_Group(dim, tables, first_set, sets, first_element))
            first_set, first_element = first_set + sets, first_element + sets * ways * dim

        shared: dict[int, list[int]] = {}
        for i, (table, fraction) in enumerate(zip(self._stored, self.fractions, strict=True)):
            if self.cache.is_whole(fraction, table.num_embeddings):
                add(table.embedding_dim, [i], table.num_embeddings)
            elif fraction > 0:
                shared.setdefault(table.embedding_dim, []).append(i)
        for dim, tables in shared.items():
            add(dim, tables, sum(self.fractions[i] * self._stored[i].num_embeddings for i in tables))
        return groups

    def places(self) -> CachePlaces:
        """The sets and slot offsets of each part of each feature."""
        of = {i: group for group in self._groups for i in group.tables}
        parts = [of.get(i) for feature in self._features for i in feature.parts]
        return CachePlaces(
            self.cache.ways,
            [g.sets if g else 0 for g in parts],
            [g.first_set if g else 0 for g in parts],
            [g.offset(self.cache.ways) if g else 0 for g in parts],
        )

    def lookup(self, call: TableCall) -> Tensor:
        """Finds the slots [N] of ids without changing the cache."""
        return _ops.row_cache_lookup.layout(self.tags, self.marks, *call.bags[:2], **call.layout)

    @torch.no_grad()
    def insert(self, call: TableCall) -> Tensor:
        """Inserts the rows of a batch where slots are available, and returns the slots [N] of its ids."""
        own = self._policy() | self._named("stats")
        slots = self._named("rows", "tags", "marks", "dirty", "stamps", "clock").values()
        given = *slots, *call.bags[:2]
        return call_uncounted("row_cache_insert_.layout", call.weights, *given, **call.layout, **call.rounding, **own)

    def plan(self, call: TableCall, *, inserts: bool) -> tuple[Tensor, Tensor]:
        """The linear rows that a batch reads from the tables, and the subset that it may write to them."""
        slots = self._named("tags", "marks", "dirty", "stamps", "clock").values()
        options = self._policy() | {"seed": call.rounding["seed"], "inserts": inserts}
        return _ops.row_cache_plan.layout(*slots, *call.bags[:2], **call.layout, **options)

    def _policy(self) -> dict[str, object]:
        own: dict[str, object] = {"policy": self.cache.policy}
        if self.cache.policy == "lfu":
            own |= self._named("counts")
            own |= {"row_counts": self.row_counts, "decay_every": self.cache.decay_every}
        return own

    def flush(
        self,
        weights: Tensor,
        layout: dict[str, object],
        rounding: dict[str, object],
        first_slot: int = 0,
        num_slots: int | None = None,
    ) -> None:
        """Writes dirty rows of the slots, or of a range of them, back to their tables; the rows stay cached."""
        slots = self._named("rows", "tags", "dirty", "clock").values()
        given = {"layout": layout["layout"], "layout_sizes": layout["layout_sizes"], **rounding}
        some = {"first_slot": first_slot, "num_slots": num_slots}
        call_uncounted("row_cache_flush_.layout", weights, *slots, **given, **some)

    def dirty_slots(self, most: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yields (first slot, number of slots, linear rows) of slot ranges with at most ``most`` dirty rows each."""
        slots = ((self.tags >= 0) & (self.dirty != 0)).nonzero().flatten()
        for chunk in slots.split(most) if len(slots) else ():  # torch splits an empty tensor into one chunk
            yield int(chunk[0]), int(chunk[-1] - chunk[0]) + 1, self.tags[chunk]

    def clear(self) -> None:
        """Empties all slots, and resets clock, counts and statistics."""
        for name, tensor in self._buffers.items():
            if name != "geometry":
                tensor.fill_(-1 if name == "tags" else 0)
        self.geometry.copy_(torch.tensor(self._geometry(), device="cpu"))

    def arguments(self, slots: Tensor) -> dict[str, Tensor]:
        """The cache arguments of a lookup whose ids are in ``slots``."""
        return self._named("rows", "tags", "marks") | {"cache_slots": slots}

    def update_arguments(self) -> dict[str, Tensor]:
        """The cache arguments of an update."""
        return self._named("rows", "tags", "marks", "dirty")

    def _named(self, *names: str) -> dict[str, Tensor]:
        """The ops' arguments ``cache_<name>``, read from ``_buffers`` because nn.Module attributes are slow."""
        buffers: Any = self._buffers
        return {f"cache_{name}": buffers[name] for name in names}

    def counters(self) -> dict[str, dict[str, int]]:
        """Table name -> counter name -> count; local shards of one table share their sums."""
        stats = _to_cpu(self.stats).tolist()
        tables = zip(self._stored, self._table_ids, strict=True)
        return {t.name: dict(zip(COUNTERS, stats[table_id], strict=True)) for t, table_id in tables}

    def report(self) -> list[dict[str, object]]:
        """The counters, cached rows and share of the cache's bytes of each stored table."""
        sizes = ([t.num_embeddings for t in self._stored], [t.embedding_dim for t in self._stored])
        tables = table_layout(*sizes, device=self.tags.device)
        rows = _to_cpu(_ops.row_cache_stats.layout(self.tags, self.dirty, *tables)).tolist()
        report = []
        for (cached, dirty), share, counters in zip(rows, self._shares(), self.counters().values(), strict=True):
            rate = counters["hits"] / counters["lookups"] if counters["lookups"] else None
            in_slots = {"cached_rows": cached, "dirty_rows": dirty, "cache_bytes": share}
            report.append(in_slots | counters | {"hit_rate": rate})
        return report

    def num_bytes(self) -> int:
        """Bytes of the slots with their tags, stamps, flags and counts, plus the per-row counts of "lfu"."""
        names = ("rows", "tags", "marks", "stamps", "dirty", "counts", "row_counts")
        return sum(self._buffers[name].nbytes for name in names if name in self._buffers)

    def _shares(self) -> list[int]:
        """Cache bytes per table: its group's slots in proportion to ``fraction * rows``, plus its rows' counts."""
        shares = [0] * len(self._stored)
        for group in self._groups:
            requested = [self.fractions[i] * self._stored[i].num_embeddings for i in group.tables]
            remaining = group.sets * self.cache.ways * slot_bytes(group.dim, self.cache.policy)
            total = remaining
            for i, slots in zip(group.tables, requested, strict=True):
                shares[i] = min(remaining, round(total * slots / sum(requested)))
                remaining -= shares[i]
            shares[group.tables[-1]] += remaining
        if self.cache.policy == "lfu":
            shares = [share + t.num_embeddings for share, t in zip(shares, self._stored, strict=True)]
        return shares

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CacheState:
        was_meta = self.tags.is_meta
        # to_empty() must not discard buffers that no state_dict restores, unless they are still on the meta device.
        kept = [] if was_meta else [n for n in self._buffers if n in ("stats", "geometry")]
        for name, buffer in self._buffers.items():
            if name not in kept:
                self._buffers[name] = uncast(buffer, fn)
        if was_meta and not self.tags.is_meta:
            self.clear()
        move_whole(self, kept, self.tags.device)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: object) -> None:
        # A state without a compatible cache was flushed when it was saved: its tables have all rows.
        own = self.own_state(prefix)
        if not self.fits(state_dict, prefix):
            self.clear()
            for name in [n for n in state_dict if n.startswith(prefix)]:
                del state_dict[name]
            state_dict.update(own)
        super()._load_from_state_dict(state_dict, prefix, copied(local_metadata), *args)
        self.marks.copy_(marks_of(self.tags))

    def own_state(self, prefix: str) -> dict[str, Tensor]:
        """The cache's entries of a ``state_dict()``."""
        return {prefix + name: tensor for name, tensor in self.state_dict().items()}

    def fits(self, state_dict: dict, prefix: str) -> bool:
        """True if the state has a cache with the same shapes and geometry."""
        own, given = self.own_state(prefix), {n: t for n, t in state_dict.items() if n.startswith(prefix)}
        if {n: t.shape for n, t in own.items()} != {n: getattr(t, "shape", None) for n, t in given.items()}:
            return False
        geometry = given[prefix + "geometry"]
        return geometry.is_meta or geometry.tolist() == self._geometry()


def _to_cpu(values: Tensor) -> Tensor:
    """Replaces a meta tensor, which has no values, by zeros; other tensors are returned unchanged."""
    return torch.zeros(values.shape, dtype=values.dtype, device="cpu") if values.is_meta else values


def slot_bytes(embedding_dim: int, policy: str) -> int:
    """Bytes per slot: the float32 row, tag, stamp, mark, dirty flag and, under "lfu", the count."""
    return 4 * embedding_dim + 8 + 8 + 1 + 1 + (policy == "lfu")


def marks_of(tags: Tensor) -> Tensor:
    """``cache_marks`` of the ops, uint8 [slots]: one byte of each tag's hash (docs/numerics.md); 0 for empty slots."""
    h = tags
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ _logical_shift(h)) * (factor - (1 << 64))  # int64 wraps around
    return torch.where(tags < 0, 0, (h ^ _logical_shift(h)) & 0xFF).to(torch.uint8)


def _logical_shift(h: Tensor) -> Tensor:
    """Logical right shift by 33 bits."""
    return (h >> 33) & ((1 << 31) - 1)
