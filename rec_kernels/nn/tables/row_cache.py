"""A row cache of a collection: which rows, how many slots, and the state of these."""

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
from rec_kernels.nn.tables.storage import zeros
from rec_kernels.ops.table_layout import CachePlaces, table_layout
from rec_kernels.ops.version_counters import call_uncounted

_ops = torch.ops.rec_kernels

POLICIES = ("lru", "lfu")
BACKINGS = ("device", "host", "disk")  # near ones first
#: Columns of the ops' ``cache_stats``, which count for each table.
COUNTERS = ("lookups", "hits", "inserted", "evicted", "written", "left_out")


@dataclass(frozen=True)
class RowCache:
    """Some rows of a collection's tables in FP32, read and trained without rounding; the others stay encoded.

    Hot rows learn as in FP32 tables while the many cold ones take the memory of their format. A training batch's rows
    come in before they are looked up, and others leave for them, encoded with the collection's rounding. A row that
    finds no slot is decoded, updated and encoded in its table. After ``eval()``, and without gradients, rows are read
    where they are and none moves. What is cached when is defined in docs/numerics.md and the same on every device.

    Args:
        fraction: how many of the tables' rows have a slot: one number in [0, 1] for all, or table name -> number
            (tables that are not named are not cached). Tables of one ``embedding_dim`` share their slots, except those
            with fraction 1 or, unless it is 0, at most ``ways`` rows: all of these have one.
        ways: slots of a set, 1 to 1024; a row can be in any slot of one set.
        policy: which row leaves: "lru", the one that has not been used for longest; "lfu", the one with the fewest
            uses, which stays if the new row has had no more. Uses are counted by batch, in one byte a row.
        decay_every: under "lfu", counts are halved after so many batches; 0: never.
        backing: where the encoded tables are: "device", in the memory of the collection's device; "host", in host
            memory, which is page-locked when the collection is on a GPU, whose kernels read and write there what is in
            no slot; "disk", in a file, of which blocks come into host memory as batches need them (the collection is on
            the CPU then; on the meta device it has no file, and is for ``rk.distributed``).
        path: of the file, with backing "disk". One that is there is opened, and its rows are the tables'. It belongs
            together with ``<path>.log``, which lies beside it: the two are copied and moved together. Ranks that share
            tables out (``rk.distributed``) have a file each, ``<path>.<rank>-of-<ranks>``.
        memory_budget: with backing "disk", bytes of rows that are in memory at a time, at most: those in slots, with
            tags and counts, and encoded ones. State of the optimizer comes on top.
        generation: with backing "disk", which state of an existing file to open, as ``state_dict()`` names it; None:
            the last one that is whole. After a crash there may be two: as long as nothing was written, the last one can
            be left for the one before it, and is gone then.

    Tables of several parts (``rk.QuotientRemainder``, ``rk.Partitions``) are not cached, and have no fraction but 0.

    Raises:
        ValueError: an argument is out of its range. TypeError: ``path`` is no path.
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
            raise ValueError(f"decay_every = {self.decay_every} is for policy 'lfu', got {self.policy!r}")
        check_choice("backing", self.backing, BACKINGS)
        on_disk = self.backing == "disk"
        for name in ("path", "memory_budget"):
            if (getattr(self, name) is not None) != on_disk:
                need = "must be given for" if on_disk else "is for"
                raise ValueError(f"{name} {need} backing 'disk', got {name}={getattr(self, name)!r}, {self.backing!r}")
        if on_disk:
            if not isinstance(self.path, str | os.PathLike):
                raise TypeError(f"path must be a str or an os.PathLike, got {self.path!r}")
            positive_integer("memory_budget", self.memory_budget)
            if self.generation is not None:
                integer_from(0, "generation", self.generation)
        elif self.generation is not None:
            raise ValueError(f"generation is for backing 'disk', got {self.generation!r} and {self.backing!r}")

    def of(self, table: str) -> float:
        """The fraction of a table."""
        return float(self.fraction.get(table, 0.0) if isinstance(self.fraction, Mapping) else self.fraction)

    def is_whole(self, fraction: float, rows: int) -> bool:
        """True if a table of so many rows, with this fraction, has a slot for each of them, in sets of its own."""
        return fraction == 1 or (fraction > 0 and rows <= self.ways)

    def sets(self, slots: float) -> int:
        """The number of sets with at least so many slots, one or more; ``slots`` may be a product with a fraction."""
        # Such a product may be a little off a whole number.
        return max(1, -(-math.floor(slots + 1e-6) // self.ways))


@dataclass
class _Group:
    """Tables that share sets of slots of one width."""

    dim: int
    tables: list[int]
    first_set: int
    sets: int
    first_element: int

    def offset(self, ways: int) -> int:
        """Offset of slot 0."""
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
        alone = {feature.parts[0].stored for feature in self._features if len(feature.parts) == 1}
        names = {feature.table.name for feature in self._features if len(feature.parts) == 1}
        if isinstance(cache.fraction, Mapping):
            several = {feature.table.name for feature in self._features} - names
            unknown = sorted(n for n, f in cache.fraction.items() if n not in names and (f or n not in several))
            if unknown:
                own = sorted(names)
                raise ValueError(f"fraction names {unknown}, which are no tables of one part: those are {own}")
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
        self._numbers = features.table_ids
        stats = torch.zeros(max(self._numbers, default=-1) + 1, len(COUNTERS), dtype=torch.int64, device=device)
        self.register_buffer("stats", stats, persistent=False)
        self.register_buffer("geometry", torch.tensor(self._geometry(), dtype=torch.int64, device=device))

    def shared(self) -> CacheState:
        """Shares these slots with another module, which can be moved by itself."""
        other = copy.copy(self)
        other._buffers = dict(self._buffers)
        return other

    def _geometry(self) -> list[list[int]]:
        """[T + 1, 4]: numbers that decide which slots a row can be in, and what is kept of it. Part of a state.

        Tags number the rows of all tables, so the tables' names belong to it, in their order.
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
        """Places of the features' rows in the cache."""
        of = {i: group for group in self._groups for i in group.tables}
        parts = [of.get(part.stored) for feature in self._features for part in feature.parts]
        return CachePlaces(
            self.cache.ways,
            [g.sets if g else 0 for g in parts],
            [g.first_set if g else 0 for g in parts],
            [g.offset(self.cache.ways) if g else 0 for g in parts],
        )

    def lookup(self, bags: tuple[Tensor, Tensor], layout: dict[str, object]) -> Tensor:
        """[N]: the slots of ids; nothing changes. ``layout`` is the ops'."""
        return _ops.row_cache_lookup.layout(self.tags, self.marks, *bags, **layout)

    def insert(
        self, weights: Tensor, bags: tuple[Tensor, Tensor], layout: dict[str, object], rounding: dict[str, object]
    ) -> Tensor:
        """[N]: the slots of a batch's ids, whose rows come in if they can."""
        own = self._policy() | self._named("stats")
        slots = self._named("rows", "tags", "marks", "dirty", "stamps", "clock").values()
        return call_uncounted("row_cache_insert_.layout", weights, *slots, *bags, **layout, **rounding, **own)

    def plan(
        self, bags: tuple[Tensor, Tensor], layout: dict[str, object], seed: Tensor, *, inserts: bool
    ) -> tuple[Tensor, Tensor]:
        """Linear rows that a batch reads in the tables, and those of them that it may write there."""
        slots = self._named("tags", "marks", "dirty", "stamps", "clock").values()
        return _ops.row_cache_plan.layout(*slots, *bags, **layout, **self._policy(), seed=seed, inserts=inserts)

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
        """Encodes the rows that have changed, in some slots or all, into their tables; they stay where they are."""
        slots = self._named("rows", "tags", "dirty", "clock").values()
        given = {"layout": layout["layout"], "layout_sizes": layout["layout_sizes"], **rounding}
        some = {"first_slot": first_slot, "num_slots": num_slots}
        call_uncounted("row_cache_flush_.layout", weights, *slots, **given, **some)

    def dirty_slots(self, most: int) -> Iterator[tuple[int, int, Tensor]]:
        """Ranges of slots, first and how many, with the at most ``most`` linear rows in them that have changed."""
        slots = ((self.tags >= 0) & (self.dirty != 0)).nonzero().flatten()
        for some in slots.split(most) if len(slots) else ():  # torch splits nothing into one piece
            yield int(some[0]), int(some[-1] - some[0]) + 1, self.tags[some]

    def clear(self) -> None:
        """Empties the slots, and forgets uses."""
        for name, tensor in self._buffers.items():
            if not name.startswith("_") and name != "geometry":
                tensor.fill_(-1 if name == "tags" else 0)
        self.geometry.copy_(torch.tensor(self._geometry(), device="cpu"))

    def arguments(self, slots: Tensor) -> dict[str, Tensor]:
        """Arguments of a lookup whose ids' rows are in ``slots``."""
        return self._named("rows", "tags", "marks") | {"cache_slots": slots}

    def update_arguments(self) -> dict[str, Tensor]:
        """Arguments of an update."""
        return self._named("rows", "tags", "marks", "dirty")

    def _named(self, *names: str) -> dict[str, Tensor]:
        """The ops' arguments ``cache_<name>``, of which calls have many: attributes of an nn.Module are slow."""
        held: Any = self._buffers
        return {f"cache_{name}": held[name] for name in names}

    def counters(self) -> dict[str, dict[str, int]]:
        """Counters of each stored table, by its name and those of ``COUNTERS``; shards of one table have its sums."""
        found = _on_host(self.stats).tolist()
        tables = zip(self._stored, self._numbers, strict=True)
        return {t.name: dict(zip(COUNTERS, found[number], strict=True)) for t, number in tables}

    def report(self) -> list[dict[str, object]]:
        """Reports each stored table's counters, rows in slots and share of the cache's bytes."""
        sizes = ([t.num_embeddings for t in self._stored], [t.embedding_dim for t in self._stored])
        tables = table_layout(*sizes, device=self.tags.device)
        held = _on_host(_ops.row_cache_stats.layout(self.tags, self.dirty, *tables)).tolist()
        report = []
        for (cached, dirty), share, named in zip(held, self._shares(), self.counters().values(), strict=True):
            rate = named["hits"] / named["lookups"] if named["lookups"] else None
            in_slots = {"cached_rows": cached, "dirty_rows": dirty, "cache_bytes": share}
            report.append(in_slots | named | {"hit_rate": rate})
        return report

    def num_bytes(self) -> int:
        """Bytes of the slots with their tags, stamps, flags and counts, and of the rows' counts."""
        names = ("rows", "tags", "marks", "stamps", "dirty", "counts", "row_counts")
        held = [self._buffers[name] for name in names if name in self._buffers]
        return sum(t.nbytes for t in held)

    def _shares(self) -> list[int]:
        """Bytes of each table: its share of its group's slots, by how many it asked for, and its rows' counts."""
        shares = [0] * len(self._stored)
        for group in self._groups:
            asked = [self.fractions[i] * self._stored[i].num_embeddings for i in group.tables]
            left = group.sets * self.cache.ways * slot_bytes(group.dim, self.cache.policy)
            total = left
            for i, slots in zip(group.tables, asked, strict=True):
                shares[i] = min(left, round(total * slots / sum(asked)))
                left -= shares[i]
            shares[group.tables[-1]] += left
        if self.cache.policy == "lfu":
            shares = [share + t.num_embeddings for share, t in zip(shares, self._stored, strict=True)]
        return shares

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CacheState:
        was_meta = self.tags.is_meta
        # to_empty() must not empty buffers that no state_dict brings, unless there is nothing yet.
        kept = [] if was_meta else [n for n in self._buffers if n in ("stats", "geometry")]
        for name, buffer in self._buffers.items():
            if name not in kept:
                self._buffers[name] = uncast(buffer, fn)
        if was_meta and not self.tags.is_meta:
            self.clear()
        move_whole(self, kept, self.tags.device)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: object) -> None:
        # A state without such a cache has all rows in its tables, and so has one of another cache: it was flushed.
        own = self.own_state(prefix)
        if not self.fits(state_dict, prefix):
            self.clear()
            for name in [n for n in state_dict if n.startswith(prefix)]:
                del state_dict[name]
            state_dict.update(own)
        super()._load_from_state_dict(state_dict, prefix, copied(local_metadata), *args)
        self.marks.copy_(marks_of(self.tags))

    def own_state(self, prefix: str) -> dict[str, Tensor]:
        """Tensors of the cache in a ``state_dict()``."""
        return {prefix + name: tensor for name, tensor in self.state_dict().items()}

    def fits(self, state_dict: dict, prefix: str) -> bool:
        """True if a state is of a cache with equal slots."""
        own, given = self.own_state(prefix), {n: t for n, t in state_dict.items() if n.startswith(prefix)}
        if {n: t.shape for n, t in own.items()} != {n: getattr(t, "shape", None) for n, t in given.items()}:
            return False
        geometry = given[prefix + "geometry"]
        return geometry.is_meta or geometry.tolist() == self._geometry()


def _on_host(numbers: Tensor) -> Tensor:
    """The numbers; zeros of a cache on the meta device, which has none."""
    return torch.zeros(numbers.shape, dtype=numbers.dtype, device="cpu") if numbers.is_meta else numbers


def slot_bytes(embedding_dim: int, policy: str) -> int:
    """Bytes of a slot: a row of float32, tag and stamp, mark and dirty flag, and under "lfu" the count."""
    return 4 * embedding_dim + 8 + 8 + 1 + 1 + (policy == "lfu")


def marks_of(tags: Tensor) -> Tensor:
    """uint8 [slots]: ``cache_marks`` of the ops, a byte of each tag's hash (docs/numerics.md); 0 of empty slots."""
    h = tags
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ _shifted(h)) * (factor - (1 << 64))  # int64 wraps around
    return torch.where(tags < 0, 0, (h ^ _shifted(h)) & 0xFF).to(torch.uint8)


def _shifted(h: Tensor) -> Tensor:
    """Shifts 33 places to the right; zeros come in."""
    return (h >> 33) & ((1 << 31) - 1)


def choose_cache(cache: CacheState | None, state_dict: dict, prefix: str, tables: list[str]) -> bool:
    """Leaves in a collection's state what its tables and this cache can take of the state's cache.

    Args:
        prefix: of the collection's names. tables: the names of its tables' weights.

    Returns:
        Whether the rows of this cache must be encoded first: of tables that the state does not have.
    """
    prefix += "row_cache."
    missing = [name for name in tables if name not in state_dict]
    if cache is not None and not missing:
        return False
    # The state was flushed: its tables say everything.
    for name in [n for n in state_dict if n.startswith(prefix)]:
        del state_dict[name]
    if cache is not None and missing == tables:
        state_dict.update(cache.own_state(prefix))
        return False
    return cache is not None
