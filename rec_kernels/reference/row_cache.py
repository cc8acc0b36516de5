"""Reference of the row cache, which keeps rows of encoded tables as float32; one row at a time, not fast.

A row is identified by (table, row): a table index and a row of that table. A *linear* row numbers the rows of all
tables: the table's ``first_row`` + row. docs/numerics.md, "Row cache", has the rules. Where it leaves a choice open,
this file defines it:

- Sets, use counts and tags are indexed by linear row; the noise of an eviction is keyed by the table id and the row in
  its table, as in an update.
- Every insertion advances the clock, even an empty one.
- An eviction counts in the statistics of the evicted row's table.
- Statistics exclude the ids of uncached tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rec_kernels.reference.embedding_bag import Bags, Features, Parts
from rec_kernels.reference.row_formats import dequantize_rows, quantize_rows

UPDATE_STREAM, EVICTION_STREAM = 0, 3
POLICIES = ("lru", "lfu")
LARGEST_COUNT = 255

Row = tuple[int, int]  # (table, row)


def fmix64(x: int) -> int:
    """MurmurHash3's finalizer of an integer in [0, 2^64)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> 33)) * factor % 2**64
    return x ^ (x >> 33)


def uses_of(count: int) -> int:
    """Number of uses that a one-byte count represents."""
    k, m = divmod(count, 16)
    return 2**k * (16 + m) - 16


def incremented(count: int, word: int) -> int:
    """The count after one more use; ``word`` holds 64 random bits of the row."""
    k = count // 16
    increments = count < LARGEST_COUNT and word % 2**k == 0
    return count + 1 if increments else count


def halved(count: int) -> int:
    """Largest count that represents at most half as many uses."""
    return max(c for c in range(count + 1) if 2 * uses_of(c) <= uses_of(count))


@dataclass(frozen=True)
class Sets:
    """A range of sets, [first, first + count), which tables of equal width may share."""

    first: int
    count: int

    def of(self, linear: int, num_embeddings: int, ways: int) -> int:
        """Set index of a linear row of a table with ``num_embeddings`` rows."""
        if self.count * ways >= num_embeddings:
            return self.first + linear % self.count
        return self.first + fmix64(linear) * self.count // 2**64


@dataclass
class Table:
    """An encoded table. ``rows`` is uint8 [E, row_bytes(format, embedding_dim)]; ``sets`` None: not cached."""

    rows: Tensor
    format: str
    embedding_dim: int
    first_row: int
    table_id: int
    sets: Sets | None = None


@dataclass
class Slot:
    """One way of a set; ``tag`` is the cached linear row, with ``values`` float32 [D], or -1."""

    tag: int = -1
    stamp: int = 0
    dirty: bool = False
    count: int = 0
    values: Tensor | None = None

    @property
    def mark(self) -> int:
        """One-byte hash that filters the ways of a set during a lookup."""
        return fmix64(self.tag) % 256 if self.tag >= 0 else 0


@dataclass
class Stats:
    """Per-table counters of insertions: ids looked up, hits; rows inserted, evicted, written back, not inserted."""

    ids: int = 0
    hits: int = 0
    inserted: int = 0
    evicted: int = 0
    written: int = 0
    left_out: int = 0


def named_rows(features: Features, num_embeddings: Sequence[int], bags: Bags) -> list[Row | None]:
    """Row of each position of ``bags.values``; None if the id is skipped.

    A feature with several parts has no rows here: its tables are not cached.
    """
    named: list[Row | None] = [None] * len(bags.values)
    batch = (len(bags.offsets) - 1) // len(features)
    for f, feature in enumerate(features):
        if isinstance(feature, Parts):
            parts = feature
        else:
            rows = num_embeddings[feature]
            parts = Parts([feature], [(1, max(rows, 1))], rows, "concat")
        for b in range(batch if len(parts.tables) == 1 else 0):
            for position in bags.positions(f, b, batch, parts.num_ids):
                named[position] = (parts.tables[0], parts.rows(int(bags.values[position]))[0])
    return named


@dataclass
class RowCache:
    """Tables and their cache.

    Args:
        tables: encoded tables, updated in place.
        num_sets, ways: the slot index is ways * set + way.
        policy: "lru" or "lfu".
        rounding: "nearest" or "stochastic", for encoding rows.
        seed: seed of the rounding noise and of the use counts.
        decay_every: with "lfu", number of insertions between halvings of all counts; 0: never.
        row_counts: with "lfu", the count of every linear row.
    """

    tables: list[Table]
    num_sets: int
    ways: int
    policy: str = "lru"
    rounding: str = "stochastic"
    seed: int = 0
    decay_every: int = 0
    clock: int = 0
    row_counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [Slot() for _ in range(self.num_sets * self.ways)]
        self.stats = [Stats() for _ in self.tables]

    def linear(self, row: Row) -> int:
        """Linear row of a row."""
        return self.tables[row[0]].first_row + row[1]

    def slots_of(self, row: Row) -> range:
        """Slots that may hold a row, lowest way first."""
        table = self.tables[row[0]]
        if table.sets is None:
            return range(0)
        start = self.ways * table.sets.of(self.linear(row), len(table.rows), self.ways)
        return range(start, start + self.ways)

    def slot_of(self, row: Row | None) -> int:
        """Slot that holds a row, or -1."""
        matches = [] if row is None else [s for s in self.slots_of(row) if self.slots[s].tag == self.linear(row)]
        return matches[0] if matches else -1

    def lookup(self, named: Sequence[Row | None]) -> list[int]:
        """Slot of each row, or -1, without changing the cache."""
        return [self.slot_of(row) for row in named]

    def insert(self, named: Sequence[Row | None]) -> list[int]:
        """Inserts the rows of a batch; returns their ``lookup`` afterwards."""
        self.clock += 1
        if self.policy == "lfu" and self.decay_every and self.clock % self.decay_every == 0:
            self.decay()
        cacheable = [row for row in named if row is not None and self.tables[row[0]].sets]
        for row in cacheable:
            self.stats[row[0]].ids += 1
            self.stats[row[0]].hits += self.slot_of(row) >= 0
        missing: dict[range, list[Row]] = {}
        for row in set(cacheable):
            slot = self.slot_of(row)
            if slot >= 0:
                self.slots[slot].stamp = self.clock
            else:
                missing.setdefault(self.slots_of(row), []).append(row)
            self.increment_count(row)
        for rows in missing.values():
            for row in sorted(rows, key=self._priority):
                self._insert_row(row)
        return self.lookup(named)

    def count_of(self, row: Row) -> int:
        """Uses count of a row, stored in its slot while it is cached; 0 with "lru"."""
        slot = self.slot_of(row)
        if self.policy == "lru":
            return 0
        return self.slots[slot].count if slot >= 0 else self.row_counts[self.linear(row)]

    def increment_count(self, row: Row) -> None:
        """Counts one use of a row with "lfu"."""
        if self.policy == "lru":
            return
        linear, slot = self.linear(row), self.slot_of(row)
        word = fmix64((fmix64((self.seed + self.clock) % 2**64) + linear) % 2**64)
        count = incremented(self.count_of(row), word)
        if slot >= 0:
            self.slots[slot].count = count
        else:
            self.row_counts[linear] = count

    def decay(self) -> None:
        """Halve every count."""
        self.row_counts = [halved(count) for count in self.row_counts]
        for slot in self.slots:
            slot.count = halved(slot.count)

    def _priority(self, row: Row) -> tuple[int, int]:
        """Sorts key of the insertion order of a set's missing rows."""
        return -self.count_of(row), self.linear(row)

    def _insert_row(self, row: Row) -> None:
        stats, count = self.stats[row[0]], self.count_of(row)
        slot = self._slot_for(row, count)
        if slot is None:
            stats.left_out += 1
            return
        if self.slots[slot].tag >= 0:
            self._evict(slot)
        table = self.tables[row[0]]
        values = dequantize_rows(table.rows[row[1]][None], table.format, table.embedding_dim)[0]
        self.slots[slot] = Slot(self.linear(row), self.clock, False, count, values)
        stats.inserted += 1

    def _slot_for(self, row: Row, count: int) -> int | None:
        """The lowest empty slot, else the eviction victim, else None."""
        slots = self.slots_of(row)
        for s in slots:
            if self.slots[s].tag < 0:
                return s
        evictable = [s for s in slots if self.slots[s].stamp != self.clock]
        if not evictable:
            return None
        if self.policy == "lru":
            return min(evictable, key=lambda s: (self.slots[s].stamp, s))
        victim = min(evictable, key=lambda s: (self.slots[s].count, self.slots[s].stamp, s))
        return victim if self.slots[victim].count < count else None

    def row_in(self, slot: int) -> Row:
        """Row that a slot holds."""
        tag = self.slots[slot].tag
        for t, table in enumerate(self.tables):
            if table.first_row <= tag < table.first_row + len(table.rows):
                return t, tag - table.first_row
        raise ValueError(f"slot {slot} holds linear row {tag}, which belongs to no table")

    def _evict(self, place: int) -> None:
        slot, row = self.slots[place], self.row_in(place)
        stats = self.stats[row[0]]
        if self.policy == "lfu":
            self.row_counts[slot.tag] = slot.count
        if slot.dirty:
            self._encode(row, slot.values, self.clock, EVICTION_STREAM)
            stats.written += 1
        stats.evicted += 1
        self.slots[place] = Slot()

    def flush(self) -> None:
        """Encodes the dirty rows into their tables without changing the cache."""
        for place, slot in enumerate(self.slots):
            if slot.dirty:
                self._encode(self.row_in(place), slot.values, self.clock, EVICTION_STREAM)

    def _encode(self, row: Row, values: Tensor, step: int, stream: int) -> None:
        table = self.tables[row[0]]
        table.rows[row[1]] = quantize_rows(
            values[None],
            table.format,
            rounding=self.rounding,
            seed=self.seed,
            step=step,
            table=table.table_id,
            first_row=row[1],
            stream=stream,
            raise_not_finite=False,
        )[0]

    def read(self, row: Row) -> Tensor:
        """Row as a lookup sees it, float32 [D]."""
        slot, table = self.slot_of(row), self.tables[row[0]]
        if slot >= 0:
            return self.slots[slot].values.clone()
        return dequantize_rows(table.rows[row[1]][None], table.format, table.embedding_dim)[0]

    def read_table(self, table: int) -> Tensor:
        """All rows of a table, float32 [E, D]."""
        rows = [self.read((table, r)) for r in range(len(self.tables[table].rows))]
        return torch.stack(rows) if rows else torch.zeros(0, self.tables[table].embedding_dim)

    def write(self, row: Row, values: Tensor, step: int) -> None:
        """Stores an updated row in its slot, or encodes it into its table if it is not cached."""
        slot = self.slot_of(row)
        if slot >= 0:
            self.slots[slot].values, self.slots[slot].dirty = values.clone(), True
        else:
            self._encode(row, values, step, UPDATE_STREAM)

    def cached_counts(self, table: int) -> tuple[int, int]:
        """Number of a table's cached rows, and of those that are dirty."""
        slots = [slot for place, slot in enumerate(self.slots) if slot.tag >= 0 and self.row_in(place)[0] == table]
        return len(slots), sum(slot.dirty for slot in slots)
