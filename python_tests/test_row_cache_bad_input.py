"""Invalid arguments of the row cache's ops are rejected; nothing changes, including the clock."""

from __future__ import annotations

import re

import pytest
import torch
from backends import cpu_backends, emulated, every_backend
from row_cache_cases import Action, Batch, CacheCase, CacheSample, Update, apply, argument_names, call, expected_of
from test_embedding_bag_formats_bad_input import strided
from torch import Tensor

import rec_kernels as rk
from rec_kernels.ops.table_layout import Column, Size
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import same_bits

ops = torch.ops.rec_kernels
INSERT, FLUSH, LOOKUP, PLAN = "row_cache_insert_", "row_cache_flush_", "row_cache_lookup", "row_cache_plan"
TAKE_CACHE = [INSERT, FLUSH, LOOKUP, PLAN]
WRITTEN = ["weights", "cache_rows", "cache_tags", "cache_marks", "cache_stamps", "cache_dirty", "cache_clock"]
WRITTEN += ["cache_stats", "cache_counts", "row_counts", "step"]


def good_case(policy: str = "lfu") -> CacheCase:
    """Two tables of width 4 in three sets of two ways, one of width 8 in two, and parts."""
    tables = [(9, 4, "int8"), (7, 4, "bf16"), (5, 8, "int4"), (5, 2, "int8"), (6, 2, "mx6")]
    parts = Parts([3, 4], [(1, 5), (5, 6)], 30, "concat")
    features = [(0, "sum"), (1, "sum"), (2, "mean"), (parts, "sum")]
    return CacheCase(CacheSample(tables, features, {4: 3, 8: 2}, policy=policy, rounding="stochastic"))


def arguments(policy: str = "lfu", ops: object = ops) -> dict[str, object]:
    """Valid arguments by name."""
    case = good_case(policy)
    state, batch = case.state(), Batch([[2, 1]] * 4)
    for done in expected_of(case, [Action("insert", batch), Action("update", Update(3))]):
        apply(case, done, state, ops)
    bags = case.batch(batch)
    return case.arguments | state | {"values": bags.values, "offsets": bags.offsets}


def namespaces(op: str) -> tuple[object, ...]:
    """Backends of an op: plans are on the CPU only."""
    return (ops,) if op == PLAN else (ops, emulated())


def ops_with(name: str) -> list[str]:
    """The cache ops with an argument."""
    return [op for op in TAKE_CACHE if name in argument_names(op)]


def check_refused(op: str, given: dict[str, object], message: str, namespace: object = ops, error=ValueError) -> None:
    """Asserts the error, whose message matches a pattern, and that no output argument changed."""
    written = [given[name] for name in WRITTEN if isinstance(given.get(name), Tensor)]
    before = [None if t.is_meta else t.clone() for t in written]
    with pytest.raises((error, RuntimeError) if namespace is not ops else error, match=message):
        call(op, given, namespace)
    assert all(b is None or same_bits(t, b) for t, b in zip(written, before, strict=True))


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_calls_to_be_spoilt_are_good(policy: str) -> None:
    """The ops accept the arguments that the tests below change."""
    for op in TAKE_CACHE:
        for namespace in namespaces(op):
            call(op, arguments(policy, namespace), namespace)


# The valid call has 10 slots, 6 of width 4 and 4 of width 8; 56 floats; 5 parts; linear rows 0 to 35.
SLOTS = ["cache_tags", "cache_marks", "cache_stamps", "cache_dirty", "cache_counts"]
WRONG = [
    *((name, lambda t: t.int(), f"{name} must be (int64|uint8), got int32") for name in SLOTS),
    *((name, lambda t: t[None], f"{name} must have (1 dimension|shape)") for name in SLOTS),
    *((name, strided, f"{name} must be contiguous") for name in SLOTS),
    *((name, lambda t: t[:-2], rf"{name} must have shape \[10\], got \[8\]") for name in SLOTS[1:]),
    ("cache_tags", lambda t: t[:-1], "cache_tags must have a multiple of cache_ways = 2 elements, got 9"),
    ("layout", lambda t: t.int(), "layout must be int64, got int32"),
    ("layout", lambda t: t[:, 1:].contiguous(), r"layout must have shape \[5, 26\], got \[5, 25\]"),
    ("layout", lambda t: t.t().contiguous().t(), "layout must be contiguous"),
    ("cache_rows", lambda t: t.double(), "cache_rows must be float32, got float64"),
    ("cache_rows", lambda t: t[None], r"cache_rows must have 1 dimension\(s\), got shape \[1, 56\]"),
    ("cache_rows", strided, "cache_rows must be contiguous"),
    ("cache_clock", lambda t: t.int(), "cache_clock must be int64, got int32"),
    ("cache_clock", lambda t: t[None], r"cache_clock must have 0 dimension\(s\), got shape \[1\]"),
    ("cache_stats", lambda t: t.int(), "cache_stats must be int64, got int32"),
    ("cache_stats", lambda t: t[:, :5].contiguous(), r"cache_stats must have shape \[\d+, 6\], got \[\d+, 5\]"),
    ("cache_stats", lambda t: t.flatten(), r"cache_stats must have 2 dimension\(s\)"),
    ("row_counts", lambda t: t.int(), "row_counts must be uint8, got int32"),
    ("row_counts", lambda t: t[:-1], r"row_counts must have .*36.* got .*35"),
    ("seed", lambda t: t.int(), "seed must be int64, got int32"),
    ("weights", lambda t: t.float(), "weights must be uint8, got float32"),
    ("offsets", lambda t: t[:-1], "offsets must have num_features"),
    ("layout_sizes", lambda _: [4, 26], "layout_sizes must have 9 elements, got 2"),
    ("policy", lambda _: "fifo", 'policy must be "lru" or "lfu", got "fifo"'),
    ("policy", lambda _: "lru", 'cache_counts and row_counts must not be given for policy "lru"'),
    ("cache_counts", lambda _: None, 'cache_counts and row_counts must be given for policy "lfu"'),
    ("row_counts", lambda _: None, 'cache_counts and row_counts must be given for policy "lfu"'),
    ("decay_every", lambda _: -1, "decay_every = -1 must not be negative"),
    ("rounding", lambda _: "up", 'rounding must be "nearest" or "stochastic", got "up"'),
    ("bounds_check", lambda _: "warn", "bounds_check must be"),
]
# row_cache_stats reads three related tensors.
WRONG_STATS = [
    ("cache_tags", lambda t: t[:-1], r"cache_dirty must have shape \[9\], got \[10\]"),
    ("cache_dirty", lambda t: t.bool(), "cache_dirty must be uint8, got bool"),
    ("layout", lambda t: t.int(), "layout must be int64, got int32"),
    ("layout", lambda t: t[:, 1:].contiguous(), r"layout must have shape \[5, 26\], got \[5, 25\]"),
]
# Cache places that rk.table_layout rejects.
WRONG_PLACES = [
    *(("cache_ways", None, n, rf"cache.ways = {n} must be in \[1, 1024\]") for n in (0, -1, 1025)),
    ("cache_sets", 0, -1, r"cache.sets\[0\] = -1 must not be negative"),
    ("cache_sets", 3, 1, r"cache.sets\[3\] = 1 must be 0: feature 3 has several parts"),
    ("cache_sets", 4, 1, r"cache.sets\[4\] = 1 must be 0: feature 3 has several parts"),
    ("cache_first_sets", 0, -1, r"cache.first_sets\[0\] = -1 must not be negative"),
    ("cache_row_offsets", 0, -1, r"cache.row_offsets\[0\] places its first slot at element -1"),
    ("cache_row_offsets", 2, -49, r"cache.row_offsets\[2\] places its first slot at element -1"),
    ("cache_row_offsets", 2, -25, r"cache.row_offsets\[2\]: its slots overlap those of part [01]"),
    ("table_ids", 1, -1, r"table_ids\[1\] = -1 must be in \[0, 65536\)"),
    ("table_ids", 1, 65536, r"table_ids\[1\] = 65536 must be in \[0, 65536\)"),
]
# Forged records (column, part, number), which only the kernels read on a GPU.
FORGED = [
    ("cache_sets", 0, -1),
    ("cache_sets", 2, 3),  # from 3: past the last slot
    ("cache_sets", 3, 1),  # of a feature with two parts
    ("cache_sets", 4, 1),
    ("cache_first_set", 0, -1),
    ("cache_first_set", 2, 4),
    ("cache_first_set", 2, 2**62),
    ("table_id", 1, -1),
    ("table_id", 1, 65536),
    ("cache_row_offset", 0, -1),
    ("cache_row_offset", 2, 2**62),
    ("cache_row_offset", 2, -23),  # rows of width 8 end at 56: at most -24
]


@pytest.mark.parametrize(("name", "place", "number", "message"), WRONG_PLACES)
def test_bad_place(name: str, place: int | None, number: int, message: str) -> None:
    """``rk.table_layout`` rejects the place."""
    case, changed = good_case(), number
    if place is not None:
        column = {"table_ids": "table_id", "cache_sets": "cache_sets"}.get(name, name.removesuffix("s"))
        changed = case.layout().column(Column[column]).tolist()
        changed[place] = number
    with pytest.raises(ValueError, match=message):
        case.layout(**{name: changed})


@pytest.mark.parametrize(("column", "part", "number"), FORGED)
def test_forged_place(column: str, part: int, number: int) -> None:
    """The CPU names the wrong record before it reads or writes there."""
    for op in (INSERT, FLUSH) if column == "cache_row_offset" else TAKE_CACHE:
        given = arguments()
        given["layout"] = given["layout"].clone()
        given["layout"][part, Column[column]] = number
        for _ in cpu_backends():
            check_refused(op, given, rf"layout\[{part}\]: .*{column}")


def test_bad_number() -> None:
    """Bad offsets, and tables without a row of statistics, are rejected."""
    wrong = arguments() | good_case().layout(table_ids=[0, 1000, 2, 3, 4])._asdict()
    offsets = arguments()["offsets"].clone()
    offsets[1] = -1
    for _ in cpu_backends():
        check_refused(INSERT, wrong, "cache_stats")
        for op in (INSERT, LOOKUP, PLAN):
            check_refused(op, arguments() | {"offsets": offsets}, r"offsets\[1\] = -1")


def test_tables_of_two_widths_share_no_sets() -> None:
    """Tables of two widths must not share sets: their rows would overlap."""
    case = good_case()
    with pytest.raises(ValueError, match=r"cache.first_sets\[\d\] = \d+: its sets overlap those of part \d"):
        case.layout(cache_first_sets=[0, 0, 1, 0, 0], cache_row_offsets=[0, 0, 16, 0, 0])


@pytest.mark.parametrize(
    ("name", "number"), [("sets", 2), ("sets", 0), ("first_sets", 1), ("row_offsets", 4)], ids=lambda a: str(a)
)
def test_features_of_a_table_agree(name: str, number: int) -> None:
    """All features of a table must give its rows one place: another place would be a second copy."""
    case = CacheCase(CacheSample([(9, 4, "int8")], [(0, "sum"), (0, "sum")], {4: 3}))
    good = {"sets": 3, "first_sets": 0, "row_offsets": 0}[name]
    with pytest.raises(ValueError, match=r"cache\.\w+\[\d\]"):
        case.layout(**{f"cache_{name}": [good, number]})
    batch, column = case.batch(Batch([[2], [2]])), {"sets": "cache_sets", "first_sets": "cache_first_set"}
    given = case.arguments | case.state() | {"values": batch.values, "offsets": batch.offsets}
    given["layout"] = given["layout"].clone()
    given["layout"][1, Column[column.get(name, "cache_row_offset")]] = number
    check_refused(INSERT, given, r"layout\[1\]: ")


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_bad_id(bad: int) -> None:
    """A bad id raises IndexError and inserts nothing; a hashed feature's limit is that of ids."""
    hashed = Parts([0], [(1, 9)], 30, "concat")
    for feature, limit in ((0, 9), (hashed, 30)):
        case = CacheCase(CacheSample([(9, 4, "int8")], [(feature, "sum")], {4: 2}))
        given = case.arguments | case.state()
        given |= {"values": torch.tensor([1, 2, bad if bad != 9 else limit, 4]), "offsets": torch.tensor([0, 1, 4])}
        number = int(given["values"][2])
        message = (
            f"values[2] = {number} (feature 0, bag 1) is out of range: ids of this feature must be in [0, {limit})"
        )
        for op in (INSERT, LOOKUP, PLAN):
            for _ in cpu_backends():
                check_refused(op, given, re.escape(message), error=IndexError)


@pytest.mark.parametrize("name", ["cache_tags", "cache_rows", "layout", "cache_clock", "row_counts", "cache_stats"])
def test_other_device(name: str) -> None:
    """Tensors on another device are rejected instead of returning uninitialized memory."""
    for op in [op for op in ops_with(name) if op != PLAN]:  # the results' size depends on data
        given = arguments()
        check_refused(op, given | {name: given[name].to("meta")}, "same device")


def test_statistics_of_too_few_tables() -> None:
    """The CPU raises; a device, with the tables' numbers in memory, skips those beyond the statistics."""
    whole, given, memory = arguments(), arguments(), torch.full((20, 6), 77)
    memory[:5] = given["cache_stats"][:5]
    slots = [call(INSERT, whole, emulated()), call(INSERT, given | {"cache_stats": memory[:5]}, emulated())]
    assert torch.equal(*slots)
    assert torch.equal(memory[:5], whole["cache_stats"][:5])
    assert (memory[5:] == 77).all()
    check_refused(INSERT, arguments() | {"cache_stats": memory[:5]}, "cache_stats must have .* rows")


def test_a_layout_without_tables() -> None:
    """No slot has a row of its tables: a flush writes nothing, and reads no table's number."""
    emulated()
    given = {Size.max_embedding_dim: 1, Size.most_parts: 1, Size.cache_ways: 4, Size.formats: 1}
    layout, sizes = torch.zeros(0, len(Column), dtype=torch.int64), [given.get(size, 0) for size in Size]
    for namespace in (ops, torch.ops.rec_kernels_emulated):
        tags, dirty, weights = torch.tensor([5, -1, -1, 7]), torch.ones(4, dtype=torch.uint8), torch.zeros(0)
        garbage = [torch.full((1,), 0x7F00000000) for _ in range(1000)]
        del garbage
        namespace.row_cache_flush_(
            weights, torch.zeros(16), tags, dirty, torch.tensor(3), layout, sizes, "nearest", None
        )
        assert tags.tolist() == [5, -1, -1, 7]


LOOKUPS = ["embedding_bag", "embedding_bag_fused", "embedding_bag_backward_per_sample_weights"]
UPDATE = "embedding_bag_backward_fused_"


def training(ops: object = ops) -> dict[str, object]:
    """Valid arguments of the embedding_bag ops that read and update cached rows."""
    given = arguments(ops=ops)
    slots, num_rows = call(LOOKUP, given, ops), given["layout_sizes"][Size.num_rows]
    state = {"sum": torch.ones(num_rows), "step": torch.tensor(3), "lr": torch.tensor(0.1), "token": torch.empty(0)}
    return given | state | {"cache_slots": slots, "grad": torch.ones(2, given["layout_sizes"][Size.output_dim])}


WRONG_LOOKUPS = [
    ("cache_slots", lambda t: t.int(), "cache_slots must be int64, got int32"),
    ("cache_slots", lambda t: t[:-1], r"cache_slots must have shape \[12\], got \[11\]"),
    ("cache_slots", strided, "cache_slots must be contiguous"),
    ("cache_slots", lambda _: None, "cache_slots is missing"),
    ("cache_rows", lambda _: None, "cache_rows is missing"),
    ("cache_rows", lambda t: t.double(), "cache_rows must be float32, got float64"),
]
WRONG_UPDATES = [
    ("cache_tags", lambda t: t.int(), "cache_tags must be int64, got int32"),
    ("cache_tags", lambda _: None, "cache_tags is missing"),
    ("cache_marks", lambda _: None, "cache_marks is missing"),
    ("cache_marks", lambda t: t[:-2], r"cache_marks must have shape \[10\], got \[8\]"),
    ("cache_dirty", lambda t: t[:-2], r"cache_dirty must have shape \[10\], got \[8\]"),
    ("cache_dirty", lambda _: None, "cache_dirty is missing"),
    ("cache_rows", lambda t: t.double(), "cache_rows must be float32, got float64"),
    ("cache_rows", lambda _: None, "cache_rows is missing"),
]


def test_the_training_to_be_spoilt_is_good() -> None:
    """The unchanged training runs on every kind of backend."""
    for namespace in (ops, emulated()):
        for op in (*LOOKUPS, UPDATE):
            call(op, training(namespace), namespace)


BAD_ARGUMENTS = [
    *((arguments, ops_with(row[0]), *row) for row in WRONG),
    *((arguments, ["row_cache_stats"], *row) for row in WRONG_STATS),
    *((training, LOOKUPS, *row) for row in WRONG_LOOKUPS),
    *((training, [UPDATE], *row) for row in WRONG_UPDATES),
]


@pytest.mark.parametrize(("made", "taken_by", "name", "change", "message"), BAD_ARGUMENTS)
def test_bad_argument(made, taken_by: list[str], name: str, change, message: str) -> None:
    """Every op with the argument raises ValueError on every kind of backend, and writes nothing."""
    assert taken_by, name
    for op in taken_by:
        for namespace in namespaces(op):
            given = made(ops=namespace)
            check_refused(op, given | {name: change(given[name])}, message, namespace)


@pytest.mark.parametrize("slot", [-2, 14, 2**62, 2**63 - 1, -(2**63)])
def test_bad_slot(slot: int) -> None:
    """A slot out of range is named by its position; nothing outside of the rows is read."""
    given = training()
    place = int((given["cache_slots"] >= 0).nonzero()[0])
    alone = {"cache_slots": torch.full_like(given["cache_slots"], -1)}
    alone["cache_slots"][place] = given["cache_slots"][place] = slot
    for op in LOOKUPS:
        check_refused(op, given | alone, rf"cache_slots\[{place}\] = {slot}")
        for _ in cpu_backends():
            check_refused(op, given, rf"cache_slots\[{place}\] = {slot}")


def with_foreign_tags() -> dict[str, object]:
    """A row of width 8 in a slot of width 4, and vice versa; both are dirty."""
    given = arguments()
    given["cache_tags"][[1, 8]] = torch.tensor([17, 3])
    given["cache_dirty"][[1, 8]] = 1
    return given


def test_rows_in_slots_of_other_tables() -> None:
    """Slots with rows of other widths or of tables outside of the call are not accessed."""
    for backend in every_backend():
        given, clean = with_foreign_tags(), with_foreign_tags()
        clean["cache_dirty"][[1, 8]] = 0
        call(FLUSH, given, backend.ops)
        call(FLUSH, clean, backend.ops)
        assert same_bits(given["weights"], clean["weights"])

        given = with_foreign_tags()
        given["values"] = given["values"].flip(0)
        before = {name: given[name].clone() for name in ("cache_tags", "cache_dirty", "cache_stamps")}
        for _ in range(3):
            given["values"] = (given["values"] + 1) % 5
            call(INSERT, given, backend.ops)
        assert all(torch.equal(given[name][[1, 8]], t[[1, 8]]) for name, t in before.items()), backend.name
        assert not torch.equal(given["cache_tags"], before["cache_tags"])


@pytest.mark.parametrize("combine", [0, 1, 2], ids=["concat", "add", "mult"])
def test_slots_of_features_with_several_parts_are_not_read(combine: int) -> None:
    """No cache has rows of partitioned features: they are read from the tables, whatever slots are given."""
    places = rk.CachePlaces(1, [0, 0], [0, 0], [0, 0])
    parts = rk.IdPartitions([0, 2], [1, 4], [4, 4], [16], [combine])
    made = rk.table_layout([4, 4], [4, 4], partitions=parts, cache=places)
    layout = made._asdict()
    bags = torch.arange(32.0), torch.tensor([3, 7]), torch.tensor([0, 1, 2])
    grad = torch.ones(2, made.layout_sizes[Size.output_dim])
    cache = {"cache_rows": torch.full((64,), -1.0)}
    for namespace in (ops, emulated()):
        plain = namespace.embedding_bag(*bags, **layout)[0]
        weighted = namespace.embedding_bag_backward_per_sample_weights(grad, *bags, **layout)
        for slots in ([2, 3], [1 << 40, -7]):
            given = layout | cache | {"cache_slots": torch.tensor(slots)}
            assert same_bits(namespace.embedding_bag(*bags, **given)[0], plain)
            assert same_bits(namespace.embedding_bag_backward_per_sample_weights(grad, *bags, **given), weighted)
