"""place_tables assigns slots to the most useful rows, and tiers to tables, within the budgets."""

from __future__ import annotations

import random

import pytest
import torch

import rec_kernels as rk


def table(name: str, rows: int, dim: int, **options) -> rk.EmbeddingBagConfig:
    return rk.EmbeddingBagConfig(rows, dim, name=name, feature_names=[name], **{"format": "int8"} | options)


def greedy(tables: list, counts: dict, budget: int) -> list[int]:
    """Assigns rows one by one, most uses per byte first; with "lru", a row costs its slot only."""
    ranked = [
        (-c / (4 * t.embedding_dim + 18), i) for i, t in enumerate(tables) for c in counts[t.name].tolist() if c > 0
    ]
    rows, spent = [0] * len(tables), 0
    for value, i in sorted(ranked):
        cost = 4 * tables[i].embedding_dim + 18
        if spent + cost > budget:
            return rows, -value
        rows[i], spent = rows[i] + 1, spent + cost
    return rows, 0.0


@pytest.mark.parametrize("seed", range(20))
def test_slots_go_to_the_rows_that_earn_them(seed: int) -> None:
    """Rows with slots have more uses per byte than the first without; the unused budget is less than a slot."""
    draw = random.Random(seed)
    tables = [table(f"t{i}", draw.randint(1, 200), draw.choice([4, 16, 64])) for i in range(4)]
    generator = torch.Generator().manual_seed(seed)
    counts = {
        t.name: torch.randint(0, draw.choice([3, 1000]), (t.num_embeddings,), generator=generator) for t in tables
    }
    budget = draw.randint(0, 30_000)
    placed = rk.place_tables(tables, counts, cache_bytes=budget, policy="lru", ways=1)
    assert list(placed) == [t.name for t in tables]
    assert sum(p.slot_bytes for p in placed.values()) <= budget
    rows, bar = greedy(tables, counts, budget)
    for t, expected in zip(tables, rows, strict=True):
        chosen = round(placed[t.name].fraction * t.num_embeddings)
        ranked = counts[t.name].sort(descending=True).values
        assert placed[t.name].slot_bytes == chosen * (4 * t.embedding_dim + 18)
        at_the_bar = int((ranked.double() / (4 * t.embedding_dim + 18) >= bar * (1 - 1e-9)).sum())
        above = int((ranked.double() / (4 * t.embedding_dim + 18) > bar * (1 + 1e-9)).sum())
        assert above <= chosen <= max(at_the_bar, expected), (t, bar)
        total = int(ranked.sum())
        assert placed[t.name].hit_rate == (int(ranked[:chosen].sum()) / total if total else 0.0)


def test_everything_fits() -> None:
    """Unused rows need no slot."""
    counts = torch.tensor([5, 0, 1, 0])
    placed = rk.place_tables([table("a", 4, 8)], {"a": counts}, cache_bytes=10**6, ways=1)
    assert placed["a"] == type(placed["a"])(0.5, "device", 1.0, 4 * 16, 2 * (32 + 19) + 4)


def test_counts_of_any_size() -> None:
    """Shares of uses place as counts do, and sums may exceed int64."""
    tables = [table("a", 1000, 16), table("b", 500, 8)]
    counts = {t.name: 1e6 // torch.arange(1, t.num_embeddings + 1) for t in tables}
    shares = {name: c.double() / 2.0**30 for name, c in counts.items()}
    placed, expected = (rk.place_tables(tables, c, cache_bytes=20_000) for c in (shares, counts))
    assert 0 < placed["a"].hit_rate == pytest.approx(expected["a"].hit_rate)
    assert {n: p.fraction for n, p in placed.items()} == {n: p.fraction for n, p in expected.items()}
    many = {"a": torch.full((1000,), 2**61), "b": torch.ones(500)}
    found = rk.place_tables(tables, many, cache_bytes=20_000, device_bytes=1000 * 24)
    assert (found["a"].tier, found["b"].tier) == ("device", "host")
    assert found["a"].hit_rate == pytest.approx(found["a"].fraction)


def test_tiers() -> None:
    """Tables with many misses per byte are placed near, within each tier's budget; the rest on disk."""
    tables = [table("cold", 1000, 56), table("hot", 1000, 56), table("warm", 1000, 56)]
    counts = {name: torch.full((1000,), n) for name, n in (("cold", 1), ("hot", 100), ("warm", 10))}
    size = 1000 * 64
    placed = rk.place_tables(tables, counts, cache_bytes=0, device_bytes=size, host_bytes=size)
    assert {name: p.tier for name, p in placed.items()} == {"cold": "disk", "hot": "device", "warm": "host"}
    assert all(p.fraction == 0 and p.slot_bytes == 0 for p in placed.values())
    placed = rk.place_tables(tables, counts, cache_bytes=0, device_bytes=size - 1)
    assert {p.tier for p in placed.values()} == {"host"}


def test_parts() -> None:
    """Uses of hashed ids add up per row; tables of several parts get no slots, and count with all parts."""
    tables = [table("h", 10, 8, compression=rk.Hash(4)), table("q", 100, 8, compression=rk.QuotientRemainder(4))]
    counts = {"h": torch.arange(10), "q": torch.ones(100, dtype=torch.int64)}
    placed = rk.place_tables(tables, counts, cache_bytes=10**6, ways=4)
    assert placed["h"].slot_bytes == 4 * (32 + 19) + 4
    assert placed["h"].fraction == 1.0
    assert placed["h"].hit_rate == 1.0
    assert placed["q"].fraction == 0
    assert placed["q"].encoded_bytes == (25 + 4) * 16
    every = table("h", None, 8, compression=rk.Hash(4))
    by_row = {"h": torch.bincount(torch.arange(-10, 0) % 4)}
    assert rk.place_tables([every], by_row, cache_bytes=10**6, ways=4)["h"] == placed["h"]
    with pytest.raises(ValueError, match=r"counts of table 'h' must be \[4\], got shape \[10\]"):
        rk.place_tables([every], counts, cache_bytes=10**6)


def test_narrow_rows() -> None:
    """Slots of projected rows have the narrow width, not the table's."""
    tables = [table("m", 100, 64, compression=rk.MixedDimension(8)), table("w", 100, 8)]
    counts = dict.fromkeys("mw", torch.arange(1, 101))
    placed = rk.place_tables(tables, counts, cache_bytes=10**6, ways=4)
    assert placed["m"].slot_bytes == placed["w"].slot_bytes == 100 * (32 + 19) + 100
    cache = rk.RowCache({name: p.fraction for name, p in placed.items()}, ways=4, policy="lfu")
    module = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(), cache=cache)
    assert module.tier_report()["cache_bytes"] == sum(p.slot_bytes for p in placed.values())


def test_a_collection_takes_tables_of_parts() -> None:
    """Tables of several parts are accepted with fraction 0 only."""
    tables = [table("a", 100, 8), table("q", 100, 8, compression=rk.QuotientRemainder(4))]
    placed = rk.place_tables(tables, dict.fromkeys("aq", torch.ones(100)), cache_bytes=2000)
    fractions = {name: p.fraction for name, p in placed.items()}
    module = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(), cache=rk.RowCache(fractions))
    assert module.row_cache.fractions == [fractions["a"], 0.0, 0.0]
    for name, fraction in (("q", 0.1), ("q_0", 0.0), ("x", 0.0)):
        with pytest.raises(
            ValueError, match=rf"fraction names \['{name}'\], which are not tables with a single part: .*'a'"
        ):
            rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(), cache=rk.RowCache({name: fraction}))


def test_a_collection_takes_it() -> None:
    """Fractions and tiers are accepted by rk.RowCache."""
    tables = [table("a", 400, 16), table("b", 300, 16)]
    counts = {"a": torch.arange(400), "b": torch.zeros(300, dtype=torch.int64)}
    placed = rk.place_tables(tables, counts, cache_bytes=10_000, device_bytes=0, ways=4)
    assert {p.tier for p in placed.values()} == {"host"}
    cache = rk.RowCache({name: p.fraction for name, p in placed.items()}, ways=4, backing=placed["a"].tier)
    module = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.1), cache=cache)
    assert 0 < placed["a"].fraction < 1
    assert placed["b"].fraction == 0
    assert module.tier_report()["cache_bytes"] <= 10_000 + 4 * (64 + 19)  # whole sets
    assert module.tier_report()["host_bytes"] >= sum(p.encoded_bytes for p in placed.values())


def taken(tables: list, placed: dict, ways: int, policy: str) -> int:
    """Bytes of the cache that a collection of the tables makes from the placement."""
    cache = rk.RowCache({name: p.fraction for name, p in placed.items()}, ways=ways, policy=policy)
    module = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.1), cache=cache, device="meta")
    return module.tier_report()["cache_bytes"]


@pytest.mark.parametrize(("rows", "budget", "cached"), [(3, 40_000, 2), (33, 400_000, 11), (33, 679_680 + 660, 20)])
def test_sets_of_their_own_are_whole(rows: int, budget: int, cached: int) -> None:
    """Small tables, and those with all rows in slots, need whole sets, which the budget includes."""
    tables = [table(f"t{i}", rows, 128) for i in range(20)]
    counts = {t.name: torch.full((rows,), 5) for t in tables}
    placed = rk.place_tables(tables, counts, cache_bytes=budget)
    assert sum(p.fraction == 1 for p in placed.values()) == cached
    assert sum(p.slot_bytes for p in placed.values()) <= budget
    assert taken(tables, placed, 32, "lfu") <= budget + 31 * (512 + 19)
    if cached < 20:
        whole = -(-rows // 32) * 32 * (512 + 19)
        assert budget - sum(p.slot_bytes for p in placed.values()) < whole, "there was room for another one"


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("ways", [1, 5, 32])
@pytest.mark.parametrize("seed", range(8))
def test_a_cache_keeps_to_the_budget(seed: int, ways: int, policy: str) -> None:
    """A cache stays within its budget, except for rounding up slots shared by tables of one width."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [draw.choice([1, 3, ways, ways + 1, 2 * ways - 1, draw.randint(1, 300)]) for _ in range(12)]
    tables = [table(f"t{i}", rows, draw.choice([4, 16, 64])) for i, rows in enumerate(sizes)]
    counts = {t.name: torch.randint(0, 9, (t.num_embeddings,), generator=generator) for t in tables}
    for budget in (0, 700, 3_000, draw.randint(0, 60_000), 10**7):
        placed = rk.place_tables(tables, counts, cache_bytes=budget, ways=ways, policy=policy)
        planned = sum(p.slot_bytes for p in placed.values())
        assert planned <= budget
        found = taken(tables, placed, ways, policy)
        widths = {t.embedding_dim for t in tables if 0 < placed[t.name].fraction < 1}
        more = sum((ways - 1) * (4 * dim + 18 + (policy == "lfu")) for dim in widths)
        counted = sum(sizes) if policy == "lfu" and not planned else 0
        assert planned <= found <= planned + more + counted, (budget, placed)
        small = [placed[t.name].fraction for t in tables if t.num_embeddings <= ways]
        assert set(small) <= {0.0, 1.0}
