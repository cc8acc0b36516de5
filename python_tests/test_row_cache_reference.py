"""The reference of the row cache against docs/numerics.md, computed by hand, without ops."""

from __future__ import annotations

import copy

import pytest
import torch
from embedding_bag_cases import EPS, LR, wide_floats
from embedding_bag_format_cases import ROUNDINGS
from row_cache_cases import FORMATS, Action, CacheCase, CacheSample, expected_of, sequences
from tiers import drawn

from rec_kernels.reference import embedding_bag as bags_reference
from rec_kernels.reference.embedding_bag import Bags, Parts
from rec_kernels.reference.row_cache import (
    Row,
    RowCache,
    Sets,
    Stats,
    Table,
    fmix64,
    halved,
    incremented,
    named_rows,
    uses_of,
)
from rec_kernels.reference.row_formats import dequantize_rows, quantize_rows
from rec_kernels.testing import same_bits


def make_cache(
    tables: list[tuple[int, int, str, Sets | None]], num_sets: int, ways: int, first_row: int = 0, **options
) -> RowCache:
    """A cache over tables (E, D, format, sets) of random rows, a linear row unused between two tables."""
    made = []
    for t, (rows, dim, format, sets) in enumerate(tables):
        numbers = quantize_rows(wide_floats(rows, dim, seed=t), format)
        made.append(Table(numbers, format, dim, first_row, 7 + t, sets))
        first_row += rows + 1
    counts = [0] * first_row if options.get("policy") == "lfu" else []
    return RowCache(made, num_sets, ways, **({"row_counts": counts} | options))


def one_set(ways: int, **options) -> RowCache:
    """A table of 10 rows of 4 columns in bf16 with one set."""
    return make_cache([(10, 4, "bf16", Sets(0, 1))], 1, ways, **options)


def tags(cache: RowCache) -> list[int]:
    """Tags of all slots."""
    return [slot.tag for slot in cache.slots]


def insert(cache: RowCache, *rows: int) -> list[int]:
    """Inserts rows of table 0."""
    return cache.insert([(0, row) for row in rows])


def test_fmix64() -> None:
    """fmix64 has the page's known answers, MurmurHash3's of 0, and full 64-bit arithmetic."""
    assert fmix64(1) == 0xB456BCFC34C2CB2C
    assert fmix64(2) == 0x3ABF2A20650683E7
    assert fmix64(0) == 0
    assert fmix64(2**64 - 1) == 0x64B5720B4B825F21
    assert len({fmix64(x) for x in range(10_000)}) == 10_000


def test_uses_of_counts() -> None:
    """A count represents 2^k (16 + m) - 16 uses: exact up to 16, then in steps of 2^k."""
    assert [uses_of(c) for c in range(17)] == list(range(17))
    assert [uses_of(c) for c in (17, 31, 32, 33, 48, 240, 255)] == [18, 46, 48, 52, 112, 524272, 1015792]
    assert all(uses_of(c + 1) - uses_of(c) == 2 ** (c // 16) for c in range(255))


def test_halved() -> None:
    """The largest count of at most half the uses; for small ones, half the count."""
    assert [halved(c) for c in range(18)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 9]
    for c in range(256):
        assert 2 * uses_of(halved(c)) <= uses_of(c)
        assert 2 * uses_of(halved(c) + 1) > uses_of(c)
    assert halved(255) == 239  # 507,888 uses are half of its own, and 239 represents 507,888


def test_raised() -> None:
    """Counts always increase up to 16; then if the lowest k bits of the word are 0; never above 255."""
    assert [incremented(c, 0xFFFFFFFF) for c in (0, 1, 14, 15, 16, 40, 255)] == [1, 2, 15, 16, 16, 40, 255]
    assert [incremented(c, 4) for c in (31, 32, 47, 48, 63)] == [32, 33, 48, 48, 63]
    assert [incremented(c, 0) for c in (254, 255)] == [255, 255]


def test_sets() -> None:
    """A table that fits into its sets uses the remainder as set, others a hash; tables may share a range."""
    large, small = Sets(5, 4), Sets(5, 3)
    assert [large.of(linear, 8, 2) for linear in (0, 3, 4, 1001)] == [5, 8, 5, 6]
    assert [small.of(linear, 7, 2) for linear in (1, 2)] == [5 + fmix64(n) * 3 // 2**64 for n in (1, 2)]
    assert {small.of(linear, 7, 2) for linear in range(100)} == {5, 6, 7}
    cache = make_cache([(8, 4, "int8", Sets(1, 4)), (9, 4, "int4", Sets(1, 4))], 5, 2, first_row=1001)
    assert list(cache.slots_of((0, 0))) == [2 * (1 + 1001 % 4), 2 * (1 + 1001 % 4) + 1]
    assert cache.slots_of((1, 2))[0] == 2 * (1 + fmix64(1001 + 9 + 2) * 4 // 2**64)
    assert min(cache.insert([(0, row) for row in range(8)])) >= 2
    assert cache.cached_counts(0) == (8, 0)
    assert cache.cached_counts(1) == (0, 0)


def test_lru() -> None:
    """Empty ways are used first, the lowest one; then the least recently used row; rows of the batch stay."""
    cache = one_set(3)
    assert insert(cache, 7, 2, 7) == [1, 0, 1]
    assert insert(cache, 5) == [2]
    assert insert(cache, 7) == [1]
    assert insert(cache, 9) == [0]  # row 2, of the first batch, is evicted
    assert tags(cache) == [9, 7, 5]
    assert [slot.stamp for slot in cache.slots] == [4, 3, 2]
    # Rows are inserted in ascending order, whatever the batch's: 1 and 3, for 5 and 7; 8 finds every slot locked.
    assert insert(cache, 8, 3, 9, 1) == [-1, 1, 0, 2]
    assert cache.lookup([(0, 9), (0, 8), None, (0, 1)]) == [0, -1, -1, 2]
    assert cache.stats == [Stats(ids=10, hits=2, inserted=6, evicted=3, written=0, left_out=1)]
    assert insert(cache) == []
    assert cache.clock == 6


def test_lfu() -> None:
    """The victim has the smallest count, and is evicted for a higher one only; higher counts are inserted first."""
    cache = one_set(2, policy="lfu")
    insert(cache, 4, 6)
    insert(cache, 6)
    assert insert(cache, 3, 6) == [-1, 1]  # 1 use against 4's 1
    assert cache.row_counts[3] == 1
    assert insert(cache, 3) == [0]  # 2 against 1
    assert tags(cache) == [3, 6]
    assert [slot.count for slot in cache.slots] == [2, 3]
    assert cache.row_counts[4] == 1
    cache.row_counts[8], cache.row_counts[9], cache.row_counts[2] = 5, 30, 5
    assert insert(cache, 2, 8, 9) == [
        1,
        -1,
        0,
    ]  # 9 replaces the lowest count; 2 and 8 have equal counts
    assert cache.row_counts[8] == 6
    assert [cache.count_of((0, row)) for row in (2, 3, 6)] == [6, 2, 3]


def test_lfu_decides_equal_counts_by_stamp() -> None:
    """Equal counts are decided by the least recent use, then by the lowest way."""
    cache = one_set(3, policy="lfu")
    insert(cache, 1, 2, 3)
    cache.slots[0].stamp = 2
    cache.clock = 2
    cache.row_counts[5] = cache.row_counts[6] = 9
    assert insert(cache, 5) == [1]
    assert insert(cache, 6) == [2]


def test_lfu_decay() -> None:
    """Every count is halved before the batch is counted, when the period divides the clock."""
    cache = one_set(2, policy="lfu", decay_every=3)
    cache.row_counts[0], cache.row_counts[9] = 9, 40
    insert(cache, 0)
    insert(cache, 0)
    assert (cache.slots[0].count, cache.row_counts[9]) == (11, 40)
    insert(cache, 0, 1)
    assert (cache.slots[0].count, cache.row_counts[9]) == (6, halved(40))
    assert cache.slots[1].count == 1


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_what_leaves_is_encoded(format: str, rounding: str, policy: str) -> None:
    """An evicted dirty row is encoded with the noise of stream 3 at the insertion's clock; others keep their bytes."""
    sets = Sets(0, 1)
    cache = make_cache([(3, 5, "int8", None), (9, 21, format, sets)], 1, 2, policy=policy, seed=5, rounding=rounding)
    before, numbers = cache.tables[1].rows.clone(), wide_floats(21, seed=8)
    cache.insert([(1, 4), (1, 6)])
    cache.write((1, 4), numbers, step=100)
    assert torch.equal(cache.tables[1].rows, before)
    assert same_bits(cache.read((1, 4)), numbers)
    for _ in range(2):
        cache.insert([(1, 1), (1, 2)])
    evicted = {"lru": 2, "lfu": 3}[policy]  # the first time, a count of 1 is not above another
    noise = {"seed": 5, "step": evicted, "table": 8, "first_row": 4, "stream": 3}
    after = quantize_rows(numbers[None], format, rounding=rounding, raise_not_finite=False, **noise)
    assert torch.equal(cache.tables[1].rows[4], after[0])
    others = [row for row in range(9) if row != 4]
    assert torch.equal(cache.tables[1].rows[others], before[others])
    assert same_bits(cache.read((1, 4)), dequantize_rows(after, format, 21)[0])
    assert cache.stats[1].written == 1
    assert cache.stats[0] == Stats()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_what_is_not_cached_is_encoded_by_the_update(rounding: str) -> None:
    """Uncached rows are encoded with the noise of stream 0 at the step; a table without sets has no slots."""
    cache = make_cache([(5, 9, "int4", None)], 2, 2, seed=3, rounding=rounding)
    assert cache.insert([(0, 1), None]) == [-1, -1]
    numbers = wide_floats(9, seed=2)
    cache.write((0, 1), numbers, step=12)
    noise = {"seed": 3, "step": 12, "table": 7, "first_row": 1, "stream": 0}
    assert torch.equal(cache.tables[0].rows[1], quantize_rows(numbers[None], "int4", rounding=rounding, **noise)[0])
    assert (cache.clock, cache.stats) == (1, [Stats()])


@drawn(60, sequences())
def test_what_always_holds(given: tuple[CacheSample, list[Action]]) -> None:
    """A row is in at most one slot of its set, clean rows equal their bytes, and flushing changes bytes only."""
    case = CacheCase(given[0])
    model = case.model()
    for action in given[1]:
        expected_of(case, [action], model)
        cached_tags = [tag for tag in tags(model) if tag >= 0]
        assert len(set(cached_tags)) == len(cached_tags)
        for place, slot in enumerate(model.slots):
            if slot.tag < 0:
                continue
            row = model.row_in(place)
            assert model.slot_of(row) == place
            if not slot.dirty:
                assert same_bits(model.read(row), decoded(model, row))
        flushed = copy.deepcopy(model)
        flushed.flush()
        before, after = case.state(model), case.state(flushed)
        assert case.differing(after, before) in ([], ["weights"])
        if given[0].rounding == "nearest":
            flushed.flush()
            assert torch.equal(case.state(flushed)["weights"], after["weights"])
        total = [sum(getattr(s, name) for s in model.stats) for name in ("inserted", "evicted")]
        assert total[0] - total[1] == len(cached_tags)


def decoded(model: RowCache, row: Row) -> torch.Tensor:
    """Values of a row's bytes, cached or not."""
    table = model.tables[row[0]]
    return dequantize_rows(table.rows[row[1]][None], table.format, table.embedding_dim)[0]


def test_named_rows() -> None:
    """Rows of counted ids in bags; hashed ids by their row; none of partitioned features."""
    features = [0, Parts([1], [(2, 3)], 50, "concat"), Parts([0, 1], [(1, 5), (5, 3)], 15, "concat")]
    values = torch.tensor([-9, 4, 5, 1, 49, 50, 6, 11, 3])
    bags = Bags(values, torch.tensor([1, 3, 4, 7, 7, 8, 8]), None, padding_idx=1)
    assert named_rows(features, [5, 3], bags) == [None, (0, 4), None, None, (1, 0), None, (1, 0), None, None]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_all_rows_cached_is_training_in_float32(policy: str) -> None:
    """Updates of cached rows equal those of a float32 table of the decoded rows; bytes stay."""
    cache = make_cache([(6, 5, "int4", Sets(0, 3))], 3, 2, policy=policy)
    before, floats, sums = cache.tables[0].rows.clone(), cache.read_table(0), torch.zeros(6)
    for step in range(4):
        gradients = {row: wide_floats(5, seed=10 * step + row) for row in range(6) if (row + step) % 3}
        cache.insert([(0, row) for row in gradients])
        mine, mine_sums = cache.read_table(0), sums.clone()
        bags_reference.rowwise_adagrad_(mine, mine_sums, gradients, LR, EPS)
        bags_reference.rowwise_adagrad_(floats, sums, gradients, LR, EPS)
        for row in gradients:
            cache.write((0, row), mine[row], step)
    assert same_bits(cache.read_table(0), floats)
    assert torch.equal(cache.tables[0].rows, before)
    assert cache.cached_counts(0) == (6, 6)
