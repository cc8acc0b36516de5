"""Tables on disk with a row cache have the bits of equal tables in memory, within the memory budget."""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from row_cache_disk_cases import (
    BUDGET,
    LFU,
    LRU,
    NONE,
    OPTIMIZERS,
    TABLES,
    assert_equal_state,
    assert_equal_training,
    assert_unchanged,
    batch,
    check_budget,
    make,
    on_disk,
    pair,
    skip_without_host,
    state_without_tables,
    step,
    tables_of,
    trained_pair,
)
from tiers import cross

import rec_kernels as rk
from rec_kernels.testing import same_bits

skip_without_host()

CACHES = {"lru": LRU, "lfu": LFU, "none": NONE}


def plain(c, i: int) -> list[torch.Tensor]:
    """Trains without prefetch."""
    return [step(c, i)]


def next_prefetched(c, i: int) -> list[torch.Tensor]:
    """Trains with the next batch prefetched."""
    return [step(c, i, i + 1)]


def unused_prefetch(c, i: int) -> list[torch.Tensor]:
    """Prefetches a batch that is not used."""
    return [step(c, i, 1000 + i)]


def two_forwards(c, i: int) -> list[torch.Tensor]:
    """Two lookups, then their updates, the older one first: its rows may have been evicted."""
    outputs = [c(batch(c, 2 * i + more)).values() for more in (0, 1)]
    for output in outputs:
        output.square().sum().backward()
    return [o.detach() for o in outputs]


def accumulated(c, i: int) -> list[torch.Tensor]:
    """Three batches, one update."""
    with c.accumulate():
        return [step(c, 3 * i + more, 3 * i + more + 1) for more in range(3)]


def with_factors(c, i: int) -> list[torch.Tensor]:
    """Per-sample weights with gradients."""
    given = batch(c, i, factors=True)
    pooled = c(given).values()
    c.prefetch(batch(c, i + 1))
    pooled.square().sum().backward()
    return [pooled.detach(), given.weights_or_none().grad]


def with_evaluations(c, i: int) -> list[torch.Tensor]:
    """Lookups of other batches before the update and after it, in eval() and without gradients."""
    pooled = c(batch(c, i)).values()
    c.prefetch(batch(c, i + 1))
    with torch.no_grad():
        between = c(batch(c, 500 + i)).values()
    pooled.square().sum().backward()
    c.eval()
    found = [pooled.detach(), between, c(batch(c, 600 + i, size=3)).values().detach()]
    c.train()
    return found


def flushed_between(c, i: int) -> list[torch.Tensor]:
    """A flush between a lookup and its update, which must still reach the file."""
    pooled = c(batch(c, i)).values()
    c.flush()
    pooled.square().sum().backward()
    return [pooled.detach()]


WAYS = [
    plain,
    next_prefetched,
    unused_prefetch,
    two_forwards,
    accumulated,
    with_factors,
    with_evaluations,
    flushed_between,
]


def named(value) -> str:
    """The name of a training function, or of a cache and an optimizer."""
    return value.__name__ if callable(value) else f"{value[0]}-{type(value[1]).__name__}"


@pytest.mark.parametrize(("kind", "way"), cross([*itertools.product(CACHES, OPTIMIZERS)], WAYS, WAYS[-1]), ids=named)
def test_the_bits_of_tables_in_memory(kind, way, tmp_path) -> None:
    """Outputs of every step are equal; then slots, optimizer state, counters, and the tables' bytes."""
    cache, optimizer = kind
    collections = pair(CACHES[cache], tmp_path / "rows", optimizer)
    for i in range(8):
        outputs = [way(c, i) for c in collections]
        assert all(same_bits(a, b) for a, b in zip(*outputs, strict=True)), i
        check_budget(collections[1])
    assert_equal_state(*collections)
    memory, disk = (c.tier_report() for c in collections)
    assert memory["file_bytes"] == 0 < memory["row_bytes"]
    assert disk["file_bytes"] == memory["row_bytes"] > 3 * BUDGET
    assert disk["read_bytes"] > disk["row_bytes"]
    assert disk["moved_bytes"] == memory["moved_bytes"]
    assert disk["written_bytes"] > 0
    assert disk["row_bytes"] + disk["cache_bytes"] <= BUDGET


def test_products_of_parts(tmp_path) -> None:
    """Gradients of products read the other part's row, as an update does."""
    memory, disk = pair(LRU, tmp_path / "rows", combine="mult")
    for i in range(8):
        assert all(same_bits(a, b) for a, b in zip(*(with_factors(c, i) for c in (memory, disk)), strict=True))
    for a, b in zip(*(accumulated(c, 3) for c in (memory, disk)), strict=True):
        assert same_bits(a, b)
    assert_equal_state(memory, disk)


def test_embedding_collection(tmp_path) -> None:
    torch.manual_seed(0)
    outputs = []
    for cache in (LRU, on_disk(LRU, tmp_path / "rows")):
        torch.manual_seed(0)
        tables = [rk.EmbeddingConfig(30_000, 16, name="a", feature_names=["a", "b"], format="int8")]
        c = rk.EmbeddingCollection(tables, optimizer=rk.SGD(lr=0.5), cache=cache)
        for i in range(8):
            ids = rk.KeyedJaggedTensor(["a", "b"], torch.arange(i, 30_000, 2_501), lengths=torch.tensor([5, 7]))
            rows = c.rows(ids)
            rows.square().sum().backward()
            outputs.append(rows.detach())
    assert all(same_bits(a, b) for a, b in zip(outputs[:8], outputs[8:], strict=True))


def test_wrong_announcements_take_no_room(tmp_path) -> None:
    """Prefetched batches that are never used do not occupy memory that others need."""
    memory, disk = pair(LRU, tmp_path / "rows")
    for i in range(10):
        for more in range(60):  # until not even another bag fits
            disk.prefetch(batch(disk, 100 * i + more, size=1))
        assert same_bits(step(memory, i), step(disk, i))
    for _ in range(20):
        disk.prefetch(batch(disk, 5000, size=200))  # more than the budget: nothing is read
    assert same_bits(step(memory, 10), step(disk, 10))
    assert_equal_state(memory, disk)


def test_a_batch_that_does_not_fit(tmp_path) -> None:
    """MemoryError has both numbers; nothing changes, and smaller batches continue with the bits of memory."""
    memory, disk = trained_pair(LFU, tmp_path / "rows")
    before = state_without_tables(disk)
    message = r"\d+ bytes.*memory_budget is \d+ bytes, without the cache's slots: increase memory_budget"
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context, pytest.raises(MemoryError, match=message):
            disk(batch(disk, 7, size=100))
    assert_unchanged(disk, before)
    assert_equal_training(memory, disk)


def test_an_id_out_of_range(tmp_path) -> None:
    """Lookup and prefetch raise IndexError; nothing changes."""
    memory, disk = trained_pair(LFU, tmp_path / "rows")
    before = state_without_tables(disk)
    bad = batch(disk, 7)
    bad.values()[-1] = 4_000
    for call in (disk, disk.prefetch):
        with pytest.raises(IndexError, match=r" = 4000 \(feature '"):
            call(bad)
    assert_unchanged(disk, before)
    assert_equal_training(memory, disk)


def test_bad_ids_that_are_ignored(tmp_path) -> None:
    """Ignored ids access no row of the file."""
    collections = pair(LRU, tmp_path / "rows", bounds_check="ignore")
    outputs = []
    for c in collections:
        for i in range(4):
            given = batch(c, i, size=3)
            given.values()[::3] = torch.tensor([-1, 2**40, 12_000, -(2**62)]).repeat(20)[: len(given.values()[::3])]
            pooled = c(given).values()
            pooled.square().sum().backward()
            outputs.append(pooled.detach())
    assert all(same_bits(a, b) for a, b in zip(outputs[:4], outputs[4:], strict=True))
    assert_equal_state(*collections)


def test_empty_batches(tmp_path) -> None:
    """No id, no bag."""
    memory, disk = trained_pair(LRU, tmp_path / "rows")
    for size in (0, 3):
        for c in (memory, disk):
            none = rk.KeyedJaggedTensor(
                c.feature_names,
                torch.empty(0, dtype=torch.int64),
                lengths=torch.zeros(size * len(c.feature_names), dtype=torch.int64),
            )
            c.prefetch(none)
            c(none).values().square().sum().backward()
    assert_equal_state(memory, disk)


def test_lookups_on_several_threads(tmp_path) -> None:
    """Two threads' lookups both find their rows, which do not fit into the budget together."""
    table = rk.EmbeddingBagConfig(20_000, 64, name="t", feature_names=["t"], init=lambda weight: weight.fill_(1.0))
    cache = on_disk(rk.RowCache(0.05), tmp_path / "rows", 400 * 4096 + 700_000)
    c = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=0.5), cache=cache)
    ids = torch.randint(0, 20_000, (300, 200), generator=torch.Generator().manual_seed(0))
    one = torch.ones(200, dtype=torch.int64)

    def look_up(batches: torch.Tensor) -> int:
        with torch.no_grad():
            found = [c(rk.KeyedJaggedTensor(["t"], some, lengths=one)).values() for some in batches]
        return sum(int((rows != 1).any(1).sum()) for rows in found)

    c.eval()
    with ThreadPoolExecutor(2) as pool:
        wrong = list(pool.map(look_up, [ids[::2], ids[1::2]]))
    assert wrong == [0, 0]
    check_budget(c)


class Powers:
    """An init that needs the whole table, or declares that it does not."""

    def __init__(self, in_chunks: bool) -> None:
        self.in_chunks, self.calls = in_chunks, []

    def __call__(self, weight: torch.Tensor) -> None:
        self.calls.append(len(weight))
        weight.normal_(0, 0.1)


def test_init(tmp_path) -> None:
    """An init of the whole table, or of rows in consecutive calls, gives equal tables in memory and on disk."""
    inits = [Powers(False), Powers(False)]
    tables = [tables_of(make(LRU, init=inits[0])), tables_of(make(on_disk(LRU, tmp_path / "rows"), init=inits[1]))]
    assert inits[0].calls == inits[1].calls == [rows for _, rows, *_ in TABLES]
    assert all(torch.equal(t, tables[1][n]) for n, t in tables[0].items())
    # Random numbers of consecutive calls differ from those of one call.
    init = Powers(True)
    disk = make(on_disk(LRU, tmp_path / "chunks"), init=init)
    assert sum(init.calls) == sum(inits[0].calls)
    assert max(init.calls) < 6_000
    check_budget(disk)


def test_the_usual_start_is_that_of_memory(tmp_path) -> None:
    """The default init draws uniform numbers in chunks, with equal tables in memory."""
    memory, disk = pair(LRU, tmp_path / "rows")
    assert_equal_state(memory, disk)
    assert disk.state_dict()["file_generation"] == 1  # nothing has changed since
