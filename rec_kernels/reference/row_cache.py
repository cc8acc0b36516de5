"""Reference of the row cache: which rows of encoded tables are kept as float32, one row at a time. Not fast.

Rows are named by (table, row): a table's number in the list of tables, and a row of it. A *linear* row counts through
all tables: ``first_row`` of the table + row. docs/numerics.md, "Row cache", has the rules. Where it leaves something
open, this file decides:

- Sets are chosen, counts are kept and tags are written by linear rows; the noise of an eviction is that of the table's
  number and the row's number in its table, as in an update.
- Every insertion advances the clock, also one without a row.
- An eviction counts in the statistics of the table whose row leaves.
- Ids of tables that are not cached are in no statistics.
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
    """MurmurHash3's finalizer of a number in [0, 2^64), modulo 2^64."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> 33)) * factor % 2**64
    return x ^ (x >> 33)


def uses_of(count: int) -> int:
    """Number of uses that a one-byte count stands for."""
    k, m = divmod(count, 16)
    return 2**k * (16 + m) - 16


def raised(count: int, word: int) -> int:
    """A count after one more use; ``word`` is the row's, 64 random bits."""
    k = count // 16
    goes_up = count < LARGEST_COUNT and word % 2**k == 0
    return count + 1 if goes_up else count


def halved(count: int) -> int:
    """The largest count that stands for at most half as many uses."""
    return max(c for c in range(count + 1) if 2 * uses_of(c) <= uses_of(count))


@dataclass(frozen=True)
class Sets:
    """A range of sets, which tables of one width may share: ``first`` up to ``first + count``."""

    first: int
    count: int

    def of(self, linear: int, num_embeddings: int, ways: int) -> int:
        """The set of a linear row of a table with so many rows."""
        if self.count * ways >= num_embeddings:
            return self.first + linear % self.count
        return self.first + fmix64(linear) * self.count // 2**64


@dataclass
class Table:
    """A table in a row format. ``rows`` is uint8 [E, row_bytes(format, embedding_dim)]; ``sets`` None: not cached."""

    rows: Tensor
    format: str
    embedding_dim: int
    first_row: int
    table_id: int
    sets: Sets | None = None


@dataclass
class Slot:
    """One way of a set; ``tag`` is the linear row that it holds as ``numbers``, float32 [D], or -1."""

    tag: int = -1
    stamp: int = 0
    dirty: bool = False
    count: int = 0
    numbers: Tensor | None = None

    @property
    def mark(self) -> int:
        """One-byte hash by which a set is searched for the row."""
        return fmix64(self.tag) % 256 if self.tag >= 0 else 0


@dataclass
class Stats:
    """Counts of a table's insertions: ids looked up and hit; rows inserted, evicted, written, left out."""

    ids: int = 0
    hits: int = 0
    inserted: int = 0
    evicted: int = 0
    written: int = 0
    left_out: int = 0


def named_rows(features: Features, num_embeddings: Sequence[int], bags: Bags) -> list[Row | None]:
    """The row that each position of ``bags.values`` names; None where the id does not count.

    A feature of several parts names no row: its tables are not cached.
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
            for position in bags.of(f, b, batch, parts.num_ids):
                named[position] = (parts.tables[0], parts.rows(int(bags.values[position]))[0])
    return named


@dataclass
class RowCache:
    """Tables and the cache in front of them.

    Args:
        tables: the tables; their bytes are changed in place.
        num_sets, ways: slots are numbered ways * set + way.
        policy: "lru" or "lfu".
        rounding: "nearest" or "stochastic": how rows are encoded.
        seed: of the noise, and of the counts.
        decay_every: under "lfu", insertions from one halving of all counts to the next; 0: they are never halved.
        row_counts: under "lfu", the count of every linear row.
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
        """The linear row."""
        return self.tables[row[0]].first_row + row[1]

    def slots_of(self, row: Row) -> range:
        """The slots that may hold a row, the lowest way first."""
        table = self.tables[row[0]]
        if table.sets is None:
            return range(0)
        start = self.ways * table.sets.of(self.linear(row), len(table.rows), self.ways)
        return range(start, start + self.ways)

    def slot_of(self, row: Row | None) -> int:
        """The slot that holds a row, or -1."""
        found = [] if row is None else [s for s in self.slots_of(row) if self.slots[s].tag == self.linear(row)]
        return found[0] if found else -1

    def lookup(self, named: Sequence[Row | None]) -> list[int]:
        """The slot of each row, or -1. Nothing changes."""
        return [self.slot_of(row) for row in named]

    def insert(self, named: Sequence[Row | None]) -> list[int]:
        """Makes a batch's rows ready; returns ``lookup`` of them afterwards."""
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
            self.raise_count(row)
        for rows in missing.values():
            for row in sorted(rows, key=self._turn):
                self._bring_in(row)
        return self.lookup(named)

    def count_of(self, row: Row) -> int:
        """The row's count: its slot's while it is cached. 0 under "lru"."""
        slot = self.slot_of(row)
        if self.policy == "lru":
            return 0
        return self.slots[slot].count if slot >= 0 else self.row_counts[self.linear(row)]

    def raise_count(self, row: Row) -> None:
        """Counts one use of a row under "lfu"."""
        if self.policy == "lru":
            return
        linear, slot = self.linear(row), self.slot_of(row)
        word = fmix64((fmix64((self.seed + self.clock) % 2**64) + linear) % 2**64)
        count = raised(self.count_of(row), word)
        if slot >= 0:
            self.slots[slot].count = count
        else:
            self.row_counts[linear] = count

    def decay(self) -> None:
        """Halves every count."""
        self.row_counts = [halved(count) for count in self.row_counts]
        for slot in self.slots:
            slot.count = halved(slot.count)

    def _turn(self, row: Row) -> tuple[int, int]:
        """Sort key by which the missing rows of a set come in."""
        return -self.count_of(row), self.linear(row)

    def _bring_in(self, row: Row) -> None:
        stats, count = self.stats[row[0]], self.count_of(row)
        place = self._place_for(row, count)
        if place is None:
            stats.left_out += 1
            return
        if self.slots[place].tag >= 0:
            self._evict(place)
        table = self.tables[row[0]]
        numbers = dequantize_rows(table.rows[row[1]][None], table.format, table.embedding_dim)[0]
        self.slots[place] = Slot(self.linear(row), self.clock, False, count, numbers)
        stats.inserted += 1

    def _place_for(self, row: Row, count: int) -> int | None:
        """The lowest empty slot, or else the victim's, if there is one."""
        places = self.slots_of(row)
        for s in places:
            if self.slots[s].tag < 0:
                return s
        free = [s for s in places if self.slots[s].stamp != self.clock]
        if not free:
            return None
        if self.policy == "lru":
            return min(free, key=lambda s: (self.slots[s].stamp, s))
        victim = min(free, key=lambda s: (self.slots[s].count, self.slots[s].stamp, s))
        return victim if self.slots[victim].count < count else None

    def row_in(self, place: int) -> Row:
        """The row that a slot holds."""
        tag = self.slots[place].tag
        for t, table in enumerate(self.tables):
            if table.first_row <= tag < table.first_row + len(table.rows):
                return t, tag - table.first_row
        raise ValueError(f"slot {place} holds linear row {tag}, which is of no table")

    def _evict(self, place: int) -> None:
        slot, row = self.slots[place], self.row_in(place)
        stats = self.stats[row[0]]
        if self.policy == "lfu":
            self.row_counts[slot.tag] = slot.count
        if slot.dirty:
            self._encode(row, slot.numbers, self.clock, EVICTION_STREAM)
            stats.written += 1
        stats.evicted += 1
        self.slots[place] = Slot()

    def flush(self) -> None:
        """Encodes the dirty rows into their tables; nothing else changes."""
        for place, slot in enumerate(self.slots):
            if slot.dirty:
                self._encode(self.row_in(place), slot.numbers, self.clock, EVICTION_STREAM)

    def _encode(self, row: Row, numbers: Tensor, step: int, stream: int) -> None:
        table = self.tables[row[0]]
        table.rows[row[1]] = quantize_rows(
            numbers[None],
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
        """float32 [D]: the row as a lookup sees it."""
        slot, table = self.slot_of(row), self.tables[row[0]]
        if slot >= 0:
            return self.slots[slot].numbers.clone()
        return dequantize_rows(table.rows[row[1]][None], table.format, table.embedding_dim)[0]

    def read_table(self, table: int) -> Tensor:
        """float32 [E, D]: all rows of a table."""
        rows = [self.read((table, r)) for r in range(len(self.tables[table].rows))]
        return torch.stack(rows) if rows else torch.zeros(0, self.tables[table].embedding_dim)

    def write(self, row: Row, numbers: Tensor, step: int) -> None:
        """Stores an updated row: in its slot, or encoded into its table."""
        slot = self.slot_of(row)
        if slot >= 0:
            self.slots[slot].numbers, self.slots[slot].dirty = numbers.clone(), True
        else:
            self._encode(row, numbers, step, UPDATE_STREAM)

    def held(self, table: int) -> tuple[int, int]:
        """Numbers of a table's cached rows and of its dirty ones."""
        mine = [slot for place, slot in enumerate(self.slots) if slot.tag >= 0 and self.row_in(place)[0] == table]
        return len(mine), sum(slot.dirty for slot in mine)
