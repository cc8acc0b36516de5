"""``place_tables`` chooses cached rows and memory tiers of tables from access counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rec_kernels.nn.arguments import integer_from
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.row_cache import BACKINGS, RowCache, slot_bytes


@dataclass(frozen=True)
class Placement:
    """The placement of a table chosen by ``place_tables``.

    Args:
        fraction: fraction of the rows that get slots: the table's entry of ``rk.RowCache(fraction=...)``.
        tier: tier of the encoded rows, "device", "host" or "disk": the ``backing`` of the ``rk.RowCache`` of a
            collection with all tables of this tier.
        hit_rate: fraction of the counted uses that hit rows in slots; 0 without uses.
        encoded_bytes: bytes of the encoded rows in the tier.
        slot_bytes: bytes of the slots with tags and counts; for a table with its own sets, of all slots of these sets.
    """

    fraction: float
    tier: str
    hit_rate: float
    encoded_bytes: int
    slot_bytes: int


def place_tables(
    tables: Sequence[EmbeddingConfig],
    counts: Mapping[str, Tensor],
    *,
    cache_bytes: int,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    policy: str = "lfu",
    ways: int = 32,
) -> dict[str, Placement]:
    """Chooses cache fractions and memory tiers of tables within memory budgets.

    Slots go to the rows with the most uses per byte of slot. Each table's encoded rows go to the first tier with room
    for the whole table, in descending order of uses that miss the slots per byte.

    Args:
        tables: tables of one or several collections. Tables with several parts get no slots.
        counts: table name -> [E] uses of each row or id, integer or float, like ``torch.bincount(ids, minlength=E)``.
            A table without E: [buckets] uses of ``ids % buckets``.
        cache_bytes: budget for slots with their tags, stamps, flags and counts. Sets are rounded up: for each width of
            tables that share slots, a cache may take ``ways`` - 1 more slots.
        device_bytes, host_bytes: budgets for encoded rows in device and host memory. None: unlimited.
        policy: the cache's ``policy`` (its own default is "lru"); "lfu" takes one more byte per row of all tables.
        ways: the cache's ``ways``. Tables with slots for all rows have whole sets of their own. Tables with at most
            ``ways`` rows get slots for all rows or none.

    Returns:
        name -> Placement, in the order of ``tables``.

    Raises:
        ValueError: counts of a table are missing, negative, not finite or not [E]; two tables have the same name; a
            budget is negative or not an integer; ``ways`` is out of range.
    """
    RowCache(ways=ways, policy=policy)  # checks them
    _check_budgets(cache_bytes=cache_bytes, device_bytes=device_bytes, host_bytes=host_bytes)
    _refuse_repeated([t.name for t in tables])
    sorted_counts = [_sorted_counts(t, counts) for t in tables]
    slot = [slot_bytes(t.stored[0].embedding_dim, policy) for t in tables]  # of the rows that are kept
    stored = [sum(s.num_embeddings for s in t.stored) for t in tables]
    candidates = [
        _Candidate(uses, rows, slot_bytes=b, is_whole=len(t.stored) == 1, ways=ways)
        for t, uses, rows, b in zip(tables, sorted_counts, stored, slot, strict=True)
    ]
    chosen = _choose_rows(candidates, cache_bytes - (sum(stored) if policy == "lfu" else 0))
    counted = policy == "lfu" and any(chosen)
    sums = [pad(uses.cumsum(0), (1, 0)) for uses in sorted_counts]
    hits, uses = [float(s[n]) for s, n in zip(sums, chosen, strict=True)], [float(s[-1]) for s in sums]
    encoded = [sum(s.num_bytes for s in t.stored) for t in tables]
    tiers = _choose_tiers([u - h for u, h in zip(uses, hits, strict=True)], encoded, (device_bytes, host_bytes, None))
    return {
        t.name: Placement(
            fraction=chosen[i] / stored[i],
            tier=tiers[i],
            hit_rate=hits[i] / uses[i] if uses[i] else 0.0,
            encoded_bytes=encoded[i],
            slot_bytes=candidates[i].cost(chosen[i]) + (stored[i] if counted else 0),
        )
        for i, t in enumerate(tables)
    }


def _check_budgets(**budgets: int | None) -> None:
    for name, budget in budgets.items():
        if budget is not None or name == "cache_bytes":
            integer_from(0, name, budget)


def _refuse_repeated(names: list[str]) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"table names must be unique, got {repeated} more than once: counts and placements are keyed by name"
        )


def _sorted_counts(table: EmbeddingConfig, counts: Mapping[str, Tensor]) -> Tensor:
    """Uses of a table's rows in descending order, float64."""
    if table.name not in counts:
        raise ValueError(f"counts must have an entry for table {table.name!r}, got only {sorted(counts)}")
    given = torch.as_tensor(counts[table.name], device="cpu").double()
    if given.shape != (table.planned_rows,):
        raise ValueError(
            f"counts of table {table.name!r} must be [{table.planned_rows}], got shape {list(given.shape)}"
        )
    if len(wrong := (~((given >= 0) & given.isfinite())).nonzero()):
        place = int(wrong[0])
        raise ValueError(
            f"counts of table {table.name!r}: element {place} = {given[place].item()} must be finite and at least 0"
        )
    if len(table.stored) == 1 and table.stored[0].num_embeddings < len(given):
        # Hashed: ids share rows.
        rows = torch.arange(len(given), device=given.device) % table.stored[0].num_embeddings
        given = given.new_zeros(table.stored[0].num_embeddings).index_add_(0, rows, given)
    return given.sort(descending=True).values


class _Candidate:
    """A table whose rows compete for slots, in descending order of uses.

    Args:
        uses: uses of its rows, in descending order. rows: number of rows.
        is_whole: True if the table can be cached. slot_bytes: bytes per slot. ways: slots per set.
    """

    def __init__(self, uses: Tensor, rows: int, *, slot_bytes: int, is_whole: bool, ways: int) -> None:
        self._rows, self._slot_bytes = rows, slot_bytes
        self._whole_sets = -(-rows // ways) * ways
        # Small tables get slots for all rows or none.
        self._step = rows if rows <= ways else 1
        self._negated = -(uses.sum(0, keepdim=True) if rows <= ways else uses)  # ascending
        self._step_bytes = (self._whole_sets if rows <= ways else 1) * slot_bytes
        self.used = self._step * int((self._negated < 0).sum()) if is_whole else 0

    @property
    def most(self) -> float:
        """The most uses per byte of a row, or of a table that gets slots for all rows or none."""
        return -float(self._negated[0]) / self._step_bytes

    def above(self, least: float) -> int:
        """Number of rows with more than ``least`` uses per byte."""
        bar = torch.tensor(-least * self._step_bytes, dtype=torch.float64, device=self._negated.device)
        return min(self._step * int(torch.searchsorted(self._negated, bar)), self.used)

    def cost(self, rows: int) -> int:
        """Bytes of slots for ``rows`` rows; whole sets if all rows get slots."""
        return (self._whole_sets if rows == self._rows else rows) * self._slot_bytes

    def most_within(self, rows: int, budget: int) -> int:
        """The largest number of rows, at most ``rows``, that fits in the budget."""
        rows = min(rows, max(0, budget // self._step_bytes) * self._step)
        return rows if self.cost(rows) <= budget else max(0, rows - self._step)


def _choose_rows(tables: list[_Candidate], budget: int) -> list[int]:
    """Number of each table's rows that get slots: those above a common threshold of uses per byte."""

    def rows_above(least: float) -> list[int]:
        return [t.above(least) for t in tables]

    def cost(rows: list[int]) -> int:
        return sum(t.cost(n) for t, n in zip(tables, rows, strict=True))

    used = [t.used for t in tables]
    if cost(used) <= budget:
        return used
    low, high = 0.0, 1.0 + max(t.most for t in tables)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(rows_above(middle)) <= budget else (middle, high)
    rows = rows_above(high)
    for i, most in enumerate(rows_above(low)):  # rows at the threshold, as far as the budget allows
        left = budget - cost(rows) + tables[i].cost(rows[i])
        rows[i] = max(rows[i], tables[i].most_within(most, left))
    return rows


def _choose_tiers(misses: list[float], sizes: list[int], budgets: tuple[int | None, ...]) -> list[str]:
    tiers = [BACKINGS[-1]] * len(sizes)
    left = list(budgets)
    for i in sorted(range(len(sizes)), key=lambda i: -misses[i] / max(sizes[i], 1)):
        number = next(n for n, room in enumerate(left) if room is None or sizes[i] <= room)
        tiers[i] = BACKINGS[number]
        if left[number] is not None:
            left[number] -= sizes[i]
    return tiers
