"""Plans of a batch's reads and writes agree with the reference and with the ops; flushes may be partial."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from backends import every_backend
from row_cache_cases import Action, Batch, CacheCase, CacheSample, Update, apply, call, expected_of, sequences
from tiers import drawn

from rec_kernels.reference.embedding_bag import Bags, Parts
from rec_kernels.reference.row_cache import POLICIES, Row, RowCache

Rows = set[int]


class RecordingCache(RowCache):
    """The model, which records the linear rows whose bytes it writes."""

    def _encode(self, row: Row, *rest: object) -> None:
        self.__dict__.setdefault("encoded", set()).add(self.linear(row))
        super()._encode(row, *rest)


def named_of_all(case: CacheCase, batch) -> list[Row]:
    """The rows of a batch, including those of partitioned features."""
    sizes, features = [rows for rows, _ in batch.tables], batch.features
    bags = Bags(batch.values, batch.offsets, None, batch.padding_idx)
    size, named = (len(batch.offsets) - 1) // len(features), []
    for f, feature in enumerate(features):
        parts = (
            feature
            if isinstance(feature, Parts)
            else Parts([feature], [(1, max(sizes[feature], 1))], sizes[feature], "concat")
        )
        for b in range(size):
            for position in bags.positions(f, b, size, parts.num_ids):
                named += zip(parts.tables, parts.rows(int(batch.values[position])), strict=True)
    return named


def expected_rows(case: CacheCase, model: RowCache, batch, inserts: bool) -> tuple[Rows, Rows]:
    """Rows read from the tables; of these, rows written by an insertion, or by this batch's or the previous update."""
    model = copy.deepcopy(model)
    model.__class__ = RecordingCache
    model.encoded = set()
    missing = {row for row in named_of_all(case, batch) if model.slot_of(row) < 0}
    read = {model.linear(row) for row in missing}
    if not inserts:
        return read, read
    for slot in model.slots:  # an update may follow, of rows of the previous batch
        slot.dirty |= slot.tag >= 0 and slot.stamp == model.clock
    model.insert(case.named(batch))
    written = model.encoded | {model.linear(row) for row in missing if model.slot_of(row) < 0}
    return read | written, written


def check(sample: CacheSample, actions: list[Action]) -> None:
    """Checks plans before every insertion and lookup of a sequence."""
    case, model = CacheCase(sample), CacheCase(sample).model()
    for action in actions:
        if action.name in ("insert", "lookup"):
            batch, state = case.batch(action.given), case.state(model)
            given = case.arguments | state | {"values": batch.values, "offsets": batch.offsets}
            for inserts in (True, False):
                rows, written = call("row_cache_plan", given | {"inserts": inserts})
                expected = expected_rows(case, model, batch, inserts)
                assert (rows.tolist(), written.tolist()) == tuple(map(sorted, expected)), (action, inserts)
            assert not case.differing(state, case.state(model)), "the plan changed something"
        expected_of(case, [action], model)


@drawn(250, sequences())
def test_against_the_reference(given: tuple[CacheSample, list[Action]]) -> None:
    """Any tables, caches, features and batches."""
    check(*given)


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_come_and_go(policy: str) -> None:
    """Few slots and many rows: clean and dirty evictions, uncached rows, partitioned features, uncached tables."""
    tables = [(40, 4, "int8"), (30, 4, "int4"), (5, 8, "bf16"), (6, 4, "mx6")]
    features = [(0, "sum"), (1, "mean"), (Parts([2, 3], [(1, 5), (5, 6)], 30, "concat"), "sum"), (3, "sum")]
    decay = 3 if policy == "lfu" else 0
    sample = CacheSample(tables, features, {4: 2}, 2, uncached=(2, 3), policy=policy, decay_every=decay)
    actions = []
    for i in range(12):
        actions += [Action("insert", Batch([[3, 2]] * 4, seed=i))] + [Action("update", Update(i))] * (i % 3 > 0)
    check(sample, actions)


@pytest.mark.parametrize("decay_every", [1, 2, 3])
def test_counts_that_are_halved(decay_every: int) -> None:
    """Frequent reuse of few rows: evictions differ if counts are halved one batch too early or late."""
    tables, features = [(12, 4, "int8"), (10, 4, "int4")], [(0, "sum"), (1, "mean")]
    actions = []
    for i in range(16):
        actions += [Action("insert", Batch([[3, 2]] * 2, seed=i))] + [Action("update", Update(i))] * (i % 3 > 0)
    check(CacheSample(tables, features, {4: 2}, 4, policy="lfu", decay_every=decay_every), actions)


@pytest.mark.parametrize("policy", POLICIES)
def test_only_planned_rows_change(policy: str) -> None:
    """The ops change only planned rows of tables, over insertions with updates between."""
    tables = [(40, 4, "int8"), (30, 4, "int4")]
    case = CacheCase(CacheSample(tables, [(0, "sum"), (1, "sum")], {4: 2}, 2, policy=policy, rounding="stochastic"))
    state, changed = case.state(), 0
    for done in expected_of(
        case,
        [a for i in range(10) for a in (Action("insert", Batch([[4, 4]] * 2, seed=i)), Action("update", Update(i)))],
    ):
        if done.action.name == "insert":
            batch, before = case.batch(done.action.given), state["weights"].clone()
            given = case.arguments | state | {"values": batch.values, "offsets": batch.offsets}
            written = set(call("row_cache_plan", given)[1].tolist())
        apply(case, done, state, torch.ops.rec_kernels)
        if done.action.name == "insert":
            first = 0
            for new, old in zip(case.encoded.split(state["weights"]), case.encoded.split(before), strict=True):
                differ = {first + r for r in range(len(new)) if not torch.equal(new[r], old[r])}
                assert differ <= written
                changed, first = changed + len(differ), first + len(new)
    assert changed


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_flushes_in_pieces(rounding: str) -> None:
    """Flushes of slot ranges of any order and size together flush everything; some flush their rows alone."""
    tables = [(40, 4, "int8"), (30, 4, "int4"), (20, 16, "bf16")]
    case = CacheCase(CacheSample(tables, [(t, "sum") for t in range(3)], {4: 5, 16: 3}, 4, rounding=rounding, gap=1))
    model = case.model()
    expected_of(case, [Action("insert", Batch([[5, 6]] * 3)), Action("update", Update(1))], model)
    before = case.state(model)
    slots, dirty = before["cache_tags"].numel(), before["cache_dirty"].bool()
    model.flush()
    whole = case.state(model)
    for backend in every_backend():
        for cuts in ([0, slots], [0, 1, slots], [0, 7, 7, 20, slots - 1, slots], list(range(slots + 1))):
            state = {name: t.clone() for name, t in before.items()}
            pieces = list(itertools.pairwise(cuts))
            for first, last in reversed(pieces):
                more = {"first_slot": first} | ({} if last == slots else {"num_slots": last - first})
                call("row_cache_flush_", case.arguments | state | more, backend.ops)
            assert not case.differing(state, whole), (backend.name, cuts)
        state = {name: t.clone() for name, t in before.items()}
        slot = int(dirty.nonzero()[1])
        call("row_cache_flush_", case.arguments | state | {"first_slot": slot, "num_slots": 1}, backend.ops)
        views = (case.encoded.split(s["weights"]) for s in (state, before))
        differ = [int((new != old).any(1).sum()) for new, old in zip(*views, strict=True)]
        assert sum(differ) == 1, (backend.name, differ)


@pytest.mark.parametrize(
    ("first", "count", "message"),
    [
        (-1, None, r"first_slot = -1 must be in \[0, 4\]"),
        (5, None, r"first_slot = 5 must be in \[0, 4\]"),
        (0, 5, r"num_slots = 5 must be in \[0, 4\], the slots from first_slot on"),
        (3, 2, r"num_slots = 2 must be in \[0, 1\]"),
        (0, -1, r"num_slots = -1 must be in \[0, 4\]"),
        (2**62, 2**62, "first_slot = "),
    ],
)
def test_bad_ranges_of_slots(first: int, count: int | None, message: str) -> None:
    """Bad ranges are named with what is allowed; nothing is written."""
    case = CacheCase(CacheSample([(9, 4, "int8")], [(0, "sum")], {4: 2}, 2))
    for backend in every_backend():
        state = case.state()
        with pytest.raises(ValueError, match=message):
            call("row_cache_flush_", case.arguments | state | {"first_slot": first, "num_slots": count}, backend.ops)
        assert not case.differing(state, case.state())
