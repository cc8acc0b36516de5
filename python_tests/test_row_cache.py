"""The ops of the row cache against the reference: every changed tensor, after every call, bit for bit."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from backends import cpu_backends, every_backend
from embedding_bag_checks import Backends
from embedding_bag_format_cases import ROUNDINGS, SEED
from row_cache_cases import (
    FORMATS,
    Action,
    Batch,
    CacheCase,
    CacheSample,
    State,
    Update,
    apply,
    call,
    expected_of,
    sequences,
)
from tiers import drawn

import rec_kernels as rk
from rec_kernels.ops.table_layout import Column
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.reference.row_cache import POLICIES, fmix64, uses_of
from rec_kernels.testing import same_bits, use_threads

Given = tuple[CacheSample, list[Action]]


def check(given: Given, backends: Backends = every_backend) -> None:
    """Checks slots, state and ``row_cache_stats`` after each action, on each backend."""
    sample, actions = given
    case = CacheCase(sample)
    expected, before = expected_of(case, actions), case.state()
    for backend in backends():
        state = {name: t.clone() for name, t in before.items()}
        for i, done in enumerate(expected):
            where = (backend.name, i, done.action)
            assert apply(case, done, state, backend.ops) == done.slots, where
            assert not case.differing(state, done.state), (*where, case.differing(state, done.state))
            assert call("row_cache_stats", case.arguments | state, backend.ops).tolist() == done.cached_and_dirty, where


@pytest.mark.parametrize(("slots", "more"), [(0, 0), (40, 0), (3_000, 0), (300, 1_600)])
def test_stats_of_any_ranges(slots: int, more: int) -> None:
    """Ranges may overlap, be empty, end at the int64 maximum, and exceed a GPU block's memory."""
    most, draw = 2**63 - 1, random.Random(slots)
    tags = [draw.choice([-1, -7, 0, most, most - 1, *range(40)]) for _ in range(slots)]
    dirty = [draw.choice([0, 0, 1, 255]) for _ in tags]
    ranges = [(0, 10), (5, 10), (5, 1), (30, 0), (3, -2), (-4, 9), (20, most), (most, 1), (most - 1, most), (-9, 3)]
    ranges += [(draw.randrange(50), draw.randrange(4)) for _ in range(more)]
    expected = []
    for first, rows in ranges:
        is_dirty = [d != 0 for t, d in zip(tags, dirty, strict=True) if t >= 0 and first <= t < first + rows]
        expected.append([len(is_dirty), sum(is_dirty)])
    given = {"cache_tags": torch.tensor(tags, dtype=torch.int64), "cache_dirty": torch.tensor(dirty, dtype=torch.uint8)}
    parts = rk.table_layout([1] * len(ranges), [1] * len(ranges))
    for column, numbers in zip((Column.row_offset, Column.num_embeddings), zip(*ranges, strict=True), strict=True):
        parts.layout[:, column] = torch.tensor(numbers)
    for backend in every_backend():
        found = call("row_cache_stats", given | parts._asdict(), backend.ops)
        assert found.tolist() == expected, backend.name
        assert not call("row_cache_stats", given | rk.table_layout([], [])._asdict(), backend.ops).numel()


@drawn(200, sequences())
def test_cpu(given: Given) -> None:
    """Every instruction set, with several numbers of threads."""
    check(given, cpu_backends)


@drawn(60, sequences())
def test_every_backend(given: Given) -> None:
    check(given)


def _steps(features: int, batch: int, count: int) -> list[Action]:
    """Insertions, each followed by an update and a lookup of the next batch; sometimes a flush."""
    actions = []
    for i in range(count):
        here, after = (Batch([[3] * batch] * features, seed=i + more) for more in (0, 1))
        actions += [Action("insert", here), Action("update", Update(i)), Action("lookup", after)]
        actions += [Action("flush")] if i % 3 == 1 else []
    return actions


#: 8 of the 16 choices of three options, in which every two options have all of their pairs.
CHOICES = [
    (ROUNDINGS[(w ^ p) & 1], policy, ways) for w, ways in enumerate((1, 2, 4, 32)) for p, policy in enumerate(POLICIES)
]


@pytest.mark.parametrize(("rounding", "policy", "ways"), CHOICES)
def test_grid(rounding: str, policy: str, ways: int) -> None:
    """Every format in widths around a block; all share two sets of their width and evict each other's rows."""
    widths = [3, 16, 33]
    tables = [(23, width, format) for width in widths for format in FORMATS]
    sets = dict.fromkeys(widths, 2)
    options = {"policy": policy, "rounding": rounding, "decay_every": 3 if policy == "lfu" else 0, "gap": 1}
    sample = CacheSample(tables, [(t, "sum") for t in range(len(tables))], sets, ways, **options)
    check((sample, _steps(len(tables), batch=2, count=4)))


@pytest.mark.parametrize("policy", POLICIES)
def test_shared_hashed_and_uncached(policy: str) -> None:
    """Two features of one table insert its rows once; ids are hashed first; tables without sets stay out."""
    tables = [(9, 4, "int8"), (7, 4, "int4"), (5, 8, "bf16"), (6, 4, "mx6")]
    hashed = Parts([1], [(3, 7)], 900, "concat")
    parts = Parts([2, 3], [(1, 5), (5, 6)], 30, "concat")
    features = [(0, "sum"), (hashed, "mean"), (0, "mean"), (parts, "sum"), (2, "sum")]
    sample = CacheSample(tables, features, {4: 2}, 2, uncached=(3,), policy=policy, padding_idx=4, ids=32)
    check((sample, _steps(len(features), batch=4, count=5)))


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_features_insert(policy: str) -> None:
    """Frozen features look up and insert rows as others do."""
    case = CacheCase(CacheSample([(9, 4, "int8"), (9, 4, "bf16")], [(0, "sum"), (1, "sum")], {4: 3}, policy=policy))
    done = expected_of(case, [Action("insert", Batch([[4, 2], [1, 3]]))])[0]
    batch, frozen = case.batch(done.action.given), case.layout(frozen=[True, False])
    assert frozen.column(Column.frozen).tolist() == [1, 0]
    for backend in every_backend():
        state = case.state()
        given = case.arguments | state | frozen._asdict()
        found = call("row_cache_insert_", given | {"values": batch.values, "offsets": batch.offsets}, backend.ops)
        assert found.tolist() == done.slots, backend.name
        assert not case.differing(state, done.state), backend.name


def test_large_batch() -> None:
    """Thousands of ids in many sets, split among threads, including hot rows."""
    tables = [(3000, 8, "int8"), (500, 8, "int4"), (40, 4, "bf16")]
    for policy in POLICIES:
        sample = CacheSample(tables, [(0, "sum"), (1, "sum"), (0, "mean"), (2, "sum")], {8: 40, 4: 2}, 4, policy=policy)
        batches = [Batch([[5] * 40, [3] * 40, [1] * 40, [6] * 40], seed=i) for i in range(3)]
        check((sample, [a for i, b in enumerate(batches) for a in (Action("insert", b), Action("update", Update(i)))]))


@pytest.mark.parametrize("ways", [1, 32, 33, 100])
@pytest.mark.parametrize("policy", POLICIES)
def test_many_rows_want_a_set(policy: str, ways: int) -> None:
    """More rows of several tables compete for a set than a warp has lanes, in another order than their indices."""
    tables = [(90, 4, "int8"), (200, 4, "fp32"), (60, 4, "bf16")]
    features = [(2, "sum"), (0, "sum"), (1, "mean"), (0, "mean")]
    options = {"policy": policy, "decay_every": 2 if policy == "lfu" else 0}
    sample = CacheSample(tables, features, {4: 1}, ways, **options)
    batches = [Batch([[40, 0, 5], [70, 1, 3], [100, 80, 2], [9, 1, 1]], seed=i) for i in range(3)]
    check((sample, [a for i, b in enumerate(batches) for a in (Action("insert", b), Action("update", Update(i)))]))


@pytest.mark.parametrize("policy", POLICIES)
def test_batch_is_ready_whatever_its_order(policy: str) -> None:
    """Reordered or repeated ids of a batch leave the same state, except counts of ids."""
    case = CacheCase(CacheSample([(30, 4, "int4")], [(0, "sum")], {4: 3}, policy=policy, rounding="stochastic"))
    ids = torch.tensor([7, 2, 19, 4, 28, 11, 3, 5, 23, 17, 1, 8])
    for backend in every_backend():
        found = []
        for values in (ids, ids.flip(0), torch.cat([ids[5:], ids, ids[:5]])):
            state = case.state()
            for t in range(3):
                given = {"values": (values + 5 * t) % 30, "offsets": torch.tensor([0, len(values)])}
                call("row_cache_insert_", case.arguments | state | given, backend.ops)
                state["cache_dirty"][state["cache_tags"] >= 0] = 1
            state["cache_stats"] = state["cache_stats"][:, 2:].clone()
            found.append(state)
        for other in found[1:]:
            assert not case.differing(other, found[0]), backend.name


def test_counts_are_means() -> None:
    """Counters of cached and other rows are exact; the uses they represent are n after n uses, to 4 standard errors."""
    uses, rows = 300, 256
    case = CacheCase(CacheSample([(rows, 1, "bf16")], [(0, "sum")], {1: 1}, rows // 2, policy="lfu"))
    state = case.state()
    state["row_counts"].zero_()
    counts = torch.zeros(rows, dtype=torch.int64)
    given = case.arguments | state | {"values": torch.arange(rows), "offsets": torch.tensor([0, rows])}
    with use_threads(1):
        for t in range(1, uses + 1):
            call("row_cache_insert_", given)
            salt = fmix64(SEED + t)
            words = [fmix64((salt + row) % 2**64) for row in range(rows)]
            counts += torch.tensor([word % 2 ** (c // 16) == 0 for word, c in zip(words, counts.tolist(), strict=True)])
    found = state["row_counts"].clone()
    tags = state["cache_tags"]
    assert (tags >= 0).all()
    found[tags] = state["cache_counts"]
    assert found.tolist() == counts.tolist()
    stands_for = torch.tensor([uses_of(c) for c in found.tolist()], dtype=torch.float64)
    assert (stands_for.mean() - uses).abs() <= 4 * stands_for.std() / rows**0.5


def test_optional_arguments() -> None:
    """Statistics are indexed by the tables' numbers, and optional; the seed defaults to 0, as in an update."""
    case = CacheCase(CacheSample([(9, 4, "int4"), (9, 4, "int8")], [(0, "sum"), (1, "sum")], {4: 1}, policy="lfu"))
    batches = [case.batch(Batch([[4, 2], [1, 3]], seed=i)) for i in range(3)]

    def run(ops: object, **changed: object) -> State:
        state = case.state() | changed.pop("state", {})
        for batch in batches:
            given = case.arguments | state | {"values": batch.values, "offsets": batch.offsets} | changed
            call("row_cache_insert_", given, ops)
        return state

    for backend in every_backend():
        plain = run(backend.ops)
        bare = run(backend.ops, cache_stats=None)
        assert same_bits(bare["cache_stats"], case.first_stats), backend.name
        assert not case.differing(bare | {"cache_stats": plain["cache_stats"]}, plain), backend.name
        numbered = case.layout(table_ids=[0, 1])._asdict()
        by_part = run(backend.ops, **numbered, state={"cache_stats": torch.zeros(2, 6, dtype=torch.int64)})
        ids = [case.table_id(t) for t in (0, 1)]
        assert torch.equal(by_part["cache_stats"], (plain["cache_stats"] - case.first_stats)[ids]), backend.name
        options = {"rounding": "stochastic"}
        no_seed, zero = (run(backend.ops, seed=seed, **options) for seed in (None, torch.tensor(0)))
        assert not case.differing(no_seed, zero), backend.name


def test_lookup_without_sets() -> None:
    """Without cached tables nothing is inserted, the clock advances, and there are no slots."""
    case = CacheCase(CacheSample([(9, 4, "int4"), (3, 2, "bf16")], [(1, "sum"), (0, "sum")], {}))
    assert len(case.state()["cache_tags"]) == 0
    check(
        (case.sample, [Action("insert", Batch([[1, 2], [0, 3]])), Action("flush"), Action("insert", Batch([[], []]))])
    )
    before = case.state()
    assert functools.reduce(lambda n, t: n + t.numel(), (before["cache_rows"], before["cache_stamps"]), 0) == 0
