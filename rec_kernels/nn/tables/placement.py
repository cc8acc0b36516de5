"""Chooses rows to cache, and tiers for the others, from counts of uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rec_kernels.nn.arguments import check_choice, integer_from
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.row_cache import BACKINGS, POLICIES, RowCache, slot_bytes


@dataclass(frozen=True)
class Placement:
    """Choice of ``place_tables`` for a table.

    Args:
        fraction: of its rows, how many get slots: the table's entry of ``rk.RowCache(fraction=...)``.
        tier: where its encoded rows go, "device", "host" or "disk": the ``backing`` of the ``rk.RowCache`` of a
            collection of all tables of this tier.
        hit_rate: of the uses that were counted, the share that the rows in slots have; 0 without uses.
        encoded_bytes: of its rows in the tier. slot_bytes: of its rows in slots, with tags and counts; of a table with
            slots of its own, of its whole sets.
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
    """Chooses fractions and tiers of tables for given amounts of memory.

    Slots go to the rows with the most uses for each byte that a slot of their width takes. Encoded rows go to the first
    tier that has room for all of their table, tables with the most uses that miss the slots, for each byte, first.

    Args:
        tables: of one collection or several. Those of several parts get no slots.
        counts: table name -> [E] uses of each row or id, whole or not, as ``torch.bincount(ids, minlength=E)`` gives
            them; [buckets], of ``ids % buckets``, of a table without E, of which every int64 is an id.
        cache_bytes: for slots with their tags, stamps, flags and counts. Sets are whole: for each width of tables that
            share slots, a cache may take ``ways`` - 1 slots more.
        device_bytes: for encoded rows in the device's memory; host_bytes: in host memory. None: as much as needed.
        policy: of the cache, whose own default is "lru"; "lfu" keeps a byte for each row of all tables.
        ways: of the cache. Tables with slots for all rows, and those of at most ``ways`` rows, which get slots for all
            or none, have whole sets of their own.

    Returns:
        name -> Placement, in the order of ``tables``.

    Raises:
        ValueError: counts of a table are missing, negative, not finite or not [E]; two tables of one name; a budget is
            negative or no integer; a bad ``ways``.
    """
    RowCache(ways=ways)  # refuses what a cache would
    check_choice("policy", policy, POLICIES)
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
        raise ValueError(f"tables {repeated} are there more than once: counts and placements go by their names")


def _sorted_counts(table: EmbeddingConfig, counts: Mapping[str, Tensor]) -> Tensor:
    """Uses of a table's rows, the most first, float64."""
    if table.name not in counts:
        raise ValueError(f"counts have nothing of table {table.name!r}, only {sorted(counts)}")
    given = torch.as_tensor(counts[table.name], device="cpu").double()
    if given.shape != (table.planned_rows,):
        raise ValueError(
            f"counts of table {table.name!r} must be [{table.planned_rows}], got shape {list(given.shape)}"
        )
    if len(wrong := (~((given >= 0) & given.isfinite())).nonzero()):
        place = int(wrong[0])
        raise ValueError(
            f"counts of table {table.name!r}: [{place}] is {given[place].item()}, must be finite, 0 or more"
        )
    if len(table.stored) == 1 and table.stored[0].num_embeddings < len(given):
        # Hashed: ids share rows.
        rows = torch.arange(len(given), device=given.device) % table.stored[0].num_embeddings
        given = given.new_zeros(table.stored[0].num_embeddings).index_add_(0, rows, given)
    return given.sort(descending=True).values


class _Candidate:
    """A table whose rows may get slots, in the order of their uses.

    Args:
        uses: of its rows, the most first; rows: how many. is_whole: whether it can be cached at all.
        slot_bytes: of a slot. ways: slots of a set.
    """

    def __init__(self, uses: Tensor, rows: int, *, slot_bytes: int, is_whole: bool, ways: int) -> None:
        self._rows, self._slot_bytes = rows, slot_bytes
        self._whole_sets = -(-rows // ways) * ways
        # Small ones get slots for all rows, or none.
        self._step = rows if rows <= ways else 1
        self._negated = -(uses.sum(0, keepdim=True) if rows <= ways else uses)  # ascending
        self._step_bytes = (self._whole_sets if rows <= ways else 1) * slot_bytes
        self.used = self._step * int((self._negated < 0).sum()) if is_whole else 0

    @property
    def most(self) -> float:
        """A bound of the uses for a byte."""
        return -float(self._negated[0]) / self._step_bytes

    def above(self, least: float) -> int:
        """Number of rows with more uses per byte than this."""
        bar = torch.tensor(-least * self._step_bytes, dtype=torch.float64, device=self._negated.device)
        return min(self._step * int(torch.searchsorted(self._negated, bar)), self.used)

    def cost(self, rows: int) -> int:
        """Bytes of so many rows in slots, with sets of their own for all of them."""
        return (self._whole_sets if rows == self._rows else rows) * self._slot_bytes

    def most_within(self, rows: int, budget: int) -> int:
        """The most rows, up to this number, that the budget pays for."""
        rows = min(rows, max(0, budget // self._step_bytes) * self._step)
        return rows if self.cost(rows) <= budget else max(0, rows - self._step)


def _choose_rows(tables: list[_Candidate], budget: int) -> list[int]:
    """Number of each table's most used rows that get slots: those above one number of uses per byte."""

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
    for i, most in enumerate(rows_above(low)):  # rows that are used as much as the last that is in
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
