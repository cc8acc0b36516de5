"""Documented figures of row caches: bytes of a table with its cache, and hit rates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiers import full
from torch.utils.checkpoint import checkpoint

import rec_kernels as rk

DIM = 64


def collection(rows: int, dim: int, format: str, cache: rk.RowCache) -> rk.EmbeddingBagCollection:
    table = rk.EmbeddingBagConfig(rows, dim, name="t", feature_names=["f"], format=format)
    return rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=0.1), cache=cache)


@pytest.mark.parametrize(("format", "fraction", "times"), [("int8", 0.05, 2.9), ("int4", 0.01, 6.4)])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_memory(format: str, fraction: float, times: float, policy: str) -> None:
    """Rows, slots, tags, stamps, flags and counts together, relative to float32 rows."""
    rows = 200_000
    module = collection(rows, DIM, format, rk.RowCache(fraction, policy=policy))
    (table,) = module.memory_report()
    used_bytes = table["weight_bytes"] + table["cache_bytes"]
    buffers = {name: t for name, t in module.row_cache.named_buffers() if not name.startswith("_")}
    in_slots = sum(buffers[n].nbytes for n in buffers if n not in ("clock", "stats", "geometry"))
    assert table["cache_bytes"] == in_slots == module.tier_report()["cache_bytes"]
    assert used_bytes * times <= rows * DIM * 4


def zipf(rows: int, exponent: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Cumulative shares of the ranks, and the row of each rank."""
    shares = np.cumsum(1.0 / np.arange(1, rows + 1) ** exponent)
    return shares / shares[-1], rng.permutation(rows)


@pytest.mark.parametrize(("policy", "points"), [("lfu", 3.0), *full(("lru", 6.0))])
def test_hit_rate(policy: str, points: float) -> None:
    """With Zipf 1.15 and slots for 5 %, the hit rate is within ``points`` of a cache of the most frequent rows."""
    rows, batch, fraction = 40_000, 8_192, 0.05
    rng = np.random.default_rng(0)
    shares, places = zipf(rows, 1.15, rng)
    module = collection(rows, 4, "int8", rk.RowCache(fraction, policy=policy))
    offsets = torch.arange(batch + 1)
    for step in range(500):
        if step == 300:
            module.row_cache.stats.zero_()
        ids = torch.from_numpy(places[np.searchsorted(shares, rng.random(batch))])
        module(rk.KeyedJaggedTensor(["f"], ids, offsets=offsets))
    (table,) = module.memory_report()
    ideal = shares[int(fraction * rows) - 1]
    assert ideal - points / 100 <= table["hit_rate"] <= ideal + 0.01


def test_halving_follows_what_is_popular_now() -> None:
    """With periodic halving of counts, formerly popular rows are evicted sooner."""
    rows, batch = 4_000, 512
    offsets, hits = torch.arange(batch + 1), {}
    for decay_every in (0, 50):
        rng = np.random.default_rng(1)
        module = collection(rows, 4, "int8", rk.RowCache(0.05, policy="lfu", decay_every=decay_every))
        for step in range(400):
            hot = rng.integers(0, 200, batch) + (0 if step < 300 else 2_000)
            if step == 300:
                module.row_cache.stats.zero_()
            module(rk.KeyedJaggedTensor(["f"], torch.from_numpy(hot), offsets=offsets))
        hits[decay_every] = module.memory_report()[0]["hit_rate"]
    assert hits[50] > hits[0] + 0.2


@pytest.mark.parametrize(("reentrant", "times"), [(False, 2), (True, 1)])
def test_activation_checkpointing(reentrant: bool, times: int) -> None:
    """A lookup repeated in the backward counts its batch again; there is one update."""
    module, weight = collection(50, 4, "int8", rk.RowCache(0.5)), torch.ones(4, requires_grad=True)
    batch = rk.KeyedJaggedTensor(["f"], torch.arange(8), offsets=torch.arange(9))
    output = checkpoint(lambda w: module(batch).values() * w, weight, use_reentrant=reentrant)
    output.sum().backward()
    assert module.memory_report()[0]["lookups"] == module.row_cache.clock * 8 == times * 8
    assert module.step == 1
