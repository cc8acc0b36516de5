"""Options of the embedding_bag Triton kernels: results, rejected options, and statuses.

Run as test_embedding_bag_triton.py is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from operator import attrgetter

import pytest
import torch
from backends import PASSED, OnDevice, moved
from embedding_bag_cases import LR, make_case
from jagged_cases import BAD_LAYOUT, BAD_OFFSETS
from layout_calls import OPS, ListOps, as_call
from test_embedding_bag_bad_input import (
    BAD_ARGUMENTS,
    FAMILY,
    NOT_LAYOUTS,
    WRITTEN,
    arguments,
    call,
    is_on_the_host,
    with_layout,
)
from test_embedding_bag_device import FORGED
from test_embedding_bag_strides import _two_features
from tiers import cross
from torch import Tensor
from triton_device import DEVICE

import rec_kernels as rk
from rec_kernels import triton
from rec_kernels.ops import in_triton
from rec_kernels.ops.autograd import signature_of
from rec_kernels.ops.table_layout import Column, Size
from rec_kernels.testing import same_bits

LISTED = ListOps(triton)
on_device = OnDevice(triton, lambda t: t.to(DEVICE), Tensor.cpu)


def _moved(arguments: dict) -> dict:
    return {k: moved(t, lambda flat: flat.to(DEVICE)) if isinstance(t, Tensor) else t for k, t in arguments.items()}


def test_other_device_and_other_arguments() -> None:
    """A tensor on another device, byte rows and unknown arguments are rejected."""
    table, values, offsets = torch.ones(3, 4), torch.tensor([1]), torch.tensor([0, 1])
    lookup = triton.embedding_bag.table
    with pytest.raises(ValueError, match="offsets is on meta, values on cpu: they must be on the same device"):
        lookup(table, values, offsets.to("meta"))
    with pytest.raises(ValueError, match="layout is on meta, values on cpu: they must be on the same device"):
        triton.embedding_bag.layout(table.view(-1), values, offsets, *rk.table_layout([3], [4], device="meta"))
    weights, layout = torch.ones(16), rk.table_layout([3], [4])
    for tables, message in (
        ([table.to("meta")], "tables is on meta, values on cpu: they must be on the same device"),
        ([table.double()], r"tables\[0\] must be float32, got float64"),
    ):
        with pytest.raises(ValueError, match=message):
            triton.embedding_bag_tables.layout(weights, tables, values, offsets, *layout)
    with pytest.raises(ValueError, match="format must not be given"):
        lookup(table.byte(), values, offsets, format="int4", embedding_dim=4)
    with pytest.raises(TypeError, match="poolin"):
        lookup(table, values, offsets, poolin="sum")
    with pytest.raises(TypeError, match="layout"):
        lookup(table, values, offsets, layout=None)
    with pytest.raises(TypeError, match="missing a required argument: 'offsets'"):
        lookup(table, values, pooling="sum")
    with pytest.raises(TypeError, match="missing a required argument: 'offsets'"):
        lookup(table, values, offset=offsets)  # of valid length
    with pytest.raises(TypeError, match="missing a required argument: 'layout'"):
        triton.embedding_bag.layout(table.view(-1), values, offsets)
    with pytest.raises(TypeError, match="multiple values for argument 'values'"):
        lookup(table, values, offsets, values=values)
    with pytest.raises(TypeError, match="too many positional arguments"):
        lookup(table, values, offsets, *[None] * 99)
    with pytest.raises(AttributeError, match=r"embedding_bag has no overload 'tables', only \['layout', 'table'\]"):
        _ = triton.embedding_bag.tables


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_dtype(dtype: torch.dtype) -> None:
    """The output is the rounded float32 sum."""
    case = make_case([(5, 8), (3, 4)], [0, 1], [2, 0, 3, 1], seed=1)
    given = _moved({"weights": case.weights, "values": case.values, "offsets": case.offsets} | case.layout)
    whole, _ = LISTED.embedding_bag(**given)
    found, _ = LISTED.embedding_bag(**given, output_dtype=dtype)
    assert torch.equal(found, whole.to(dtype))
    with pytest.raises(ValueError, match="output_dtype must be"):
        LISTED.embedding_bag(**given, output_dtype=torch.float64)
    PASSED["triton"] += 1


@pytest.mark.parametrize("frozen", [[True, False, False], [False, True, True], [True, True, True]])
def test_frozen_features(frozen: list[bool]) -> None:
    """Frozen features have no dense or sparse gradient, and no fused update."""
    case = make_case([(5, 18), (3, 7)], [0, 1, 0], [2, 0, 3, 1, 4, 2], mean=[True, False, False], seed=3)
    mask, shape = torch.tensor(frozen), list(case.weights.shape)
    bags = {"values": case.values, "offsets": case.offsets, "frozen": mask} | case.layout
    given, cpu = _moved(bags | {"grad": case.grad}), OPS
    dense = LISTED.embedding_bag_backward_dense(weights_shape=shape, **given)
    expected = cpu.embedding_bag_backward_dense(weights_shape=shape, **bags, grad=case.grad)
    torch.testing.assert_close(dense.cpu(), expected)
    rows, _, counts = LISTED.embedding_bag_backward_sparse(weights_shape=shape, **given)
    sparse = cpu.embedding_bag_backward_sparse(weights_shape=shape, **bags, grad=case.grad)
    assert rows.tolist() == sparse[0].tolist()
    assert counts.tolist() == sparse[2].tolist()
    state = _moved({"weights": case.weights.clone(), "step": torch.tensor(0), "lr": torch.tensor(0.1), "sum": None})
    LISTED.embedding_bag_backward_fused_(**state, **given, optimizer="sgd")
    updated = torch.nan_to_num(case.weights - 0.1 * expected)
    torch.testing.assert_close(torch.nan_to_num(state["weights"].cpu()), updated)
    PASSED["triton"] += 1


#: Two features of different tables, as lists.
_WHOLE = {
    "partition_starts": [0, 1, 2],
    "divisors": [1, 1],
    "moduli": [5, 3],
    "id_limits": [5, 3],
    "combine": [0, 0],
}
_ONE_OF_TWO_PARTS = {"partition_starts": [0, 2], "id_limits": [3], "combine": [0], "mean": [False]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bag_starts": torch.tensor([0, 2, 4])}, r"bag_starts must not be given \(rk\.EmbeddingCollection.*\): "),
        (_WHOLE | _ONE_OF_TWO_PARTS, "layout has features of several parts"),
        (_WHOLE | {"divisors": [2, 1]}, "layout has .* ids that are not their rows"),
        (_WHOLE | {"id_limits": [5, 4]}, "layout has .* ids that are not their rows"),
        ({"formats": ["fp32"], "weight_offsets": [0, 160]}, "layout has formats"),
    ],
)
def test_refused(change: dict, message: str) -> None:
    """Options that need the compiled library are rejected by name."""
    case, layout = _two_features()
    bags = {"values": case.values, "offsets": case.offsets} | layout | change
    with pytest.raises(ValueError, match=f"{message}.*compiled CUDA library"):
        LISTED.embedding_bag(**_moved(bags | {"weights": case.weights}))
    PASSED["triton"] += 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: torch.tensor([0])}, f"{name} must not be given") for name in ("inverse", "bag_starts")),
        ({"groups": [0]}, "groups must not be given"),
        ({"cache_rows": torch.tensor([0.0])}, "cache_rows must not be given"),
        ({"cache_slots": torch.tensor([0])}, "cache_slots must not be given"),
        ({"cache_tags": torch.tensor([0])}, "cache_tags must not be given"),
        ({"cache_marks": torch.tensor([0])}, "cache_marks must not be given"),
        ({"cache_dirty": torch.tensor([0])}, "cache_dirty must not be given"),
        ({"weight_decay": 0.1}, "weight_decay must not be given"),
        ({"clip_grad_value": 1.0}, "clip_grad_value must not be given"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm must not be given"),
        ({"exp_avg": torch.ones(12)}, 'exp_avg must not be given for optimizer "rowwise_adagrad"'),
        ({"rounding": "up"}, 'rounding must be "nearest" or "stochastic", got "up"'),
        ({"weight_decay_mode": "l1"}, 'weight_decay_mode must be "l2" or "decoupled", got "l1"'),
        ({"seed": torch.tensor([1])}, "seed must have 0 dimension"),
        ({"grad_scale": torch.ones(2)}, "grad_scale must have one element, got shape \\[2\\]"),
        ({"grad_scale": torch.tensor(1)}, "grad_scale must be float32, got int64"),
        ({"weights": torch.ones(12).half()}, 'rounding must be "nearest" for float16 weights, got "stochastic"'),
    ],
)
def test_nothing_is_ignored(change: dict, message: str) -> None:
    """Unused options must have their defaults; errors are those of the compiled ops."""
    given = {"weights": torch.ones(12), "step": torch.tensor(0), "lr": torch.tensor(0.1), "sum": torch.zeros(3)}
    given |= {"values": torch.tensor([1]), "offsets": torch.tensor([0, 1])} | rk.table_layout([3], [4])._asdict()
    forward = given | {"token": torch.ones(0)} | change
    backward = given | {"grad": torch.ones(1, 4)} | change
    for op, mine in (("embedding_bag_fused", forward), ("embedding_bag_backward_fused_", backward)):
        with pytest.raises(ValueError, match=message):
            getattr(triton, op).layout(**_moved(mine))
    PASSED["triton"] += 1


def test_places_of_a_cache_alone_change_nothing() -> None:
    """Without a cache, cache offsets in a layout are ignored: rows are read and written in weights."""
    case = make_case([(5, 8), (3, 4)], [0, 1], [2, 0, 3, 1], seed=1)
    cached = {"cache_sets": [1, 1], "cache_set_starts": [0, 1], "cache_offsets": [0, 64], "cache_ways": 2}
    given = _moved({"weights": case.weights, "values": case.values, "offsets": case.offsets} | case.layout)
    plain, _ = LISTED.embedding_bag(**given)
    found, status = LISTED.embedding_bag(**given, **cached)
    assert torch.equal(found, plain)
    assert status[1] == 0
    PASSED["triton"] += 1


def test_freeze_in_a_module() -> None:
    """A collection on these kernels freezes and unfreezes as on the others."""
    library = torch.library.Library("rec_kernels", "IMPL")
    tables = [rk.EmbeddingBagConfig(5, 4, name="t", feature_names=["f", "g"], init=lambda w: w.fill_(1.0))]
    batch = rk.KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2]), lengths=torch.ones(2).long()).to(DEVICE)
    collection = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5)).to(DEVICE)
    try:
        in_triton.register_stand_ins(library, "CPU" if DEVICE == "cpu" else "CUDA")
        collection.freeze("g")
        collection(batch).values().sum().backward()
        collection.unfreeze("g")
        collection(batch).values().sum().backward()
    finally:
        library._destroy()
    assert collection.embedding_bags["t"].weight[:, 0].tolist() == [1.0, 0.0, 0.5, 1.0, 1.0]
    PASSED["triton"] += 1


def _call(op: str, given: dict[str, object]) -> object:
    """Calls a function positionally, as torch does, with its arguments or their defaults."""
    name, found = as_call(op, given)
    return attrgetter(name)(on_device)(*(found.get(n, default) for n, default in signature_of(name).items()))


def test_the_three_lookups_are_one() -> None:
    """The three lookup ops have equal results; num_rows and max_embedding_dim change nothing."""
    plain, wide = with_layout(arguments()), with_layout(arguments())
    wide["layout_sizes"][Size.num_rows], wide["layout_sizes"][Size.max_embedding_dim] = 9, 40
    results = [_call(op, given) for given in (plain, wide) for op in FAMILY[:3]]
    assert all(same_bits(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize(("mode", "bad"), cross(["ignore", "error", "none"], BAD_OFFSETS, BAD_OFFSETS[-1]))
def test_bad_offsets(bad: tuple[list[int], int], mode: str) -> None:
    """Bad offsets set status in every mode, before bad ids; their bags are empty, and no row changes."""
    offsets, first = bad
    given = arguments() | {"offsets": torch.tensor(offsets), "bounds_check": mode}
    output, status = _call("embedding_bag", given)
    assert status[0].item() == BAD_LAYOUT + 1 + first
    bag = max(first - 1, 0)  # the bag that the offset ends, or the first
    column = [0, 16, 48, 64]
    assert not output[bag % 2, column[bag // 2] : column[bag // 2 + 1]].any()
    _assert_nothing_changes(given | {"status": None})


def _assert_nothing_changes(given: dict) -> None:
    """Asserts that no update changes anything and that the gradient is 0."""
    before = {n: given[n].clone() for n in ("weights", "sum", "step")}
    _call("embedding_bag_backward_fused_", given)
    assert all(same_bits(given[n], t) for n, t in before.items())
    assert not _call("embedding_bag_backward_dense", given).any()
    assert not _call("embedding_bag_backward_sparse", given)[1].any()


#: Columns that these kernels do not read: they support neither partitions, shards nor products.
_UNREAD = ("part_start", "mean", "first_row", "table_rows", "first_column", "multiplied")
_SIZES = [("output_dim", 63), ("max_embedding_dim", 31), ("num_rows", 7)]


@pytest.mark.parametrize(
    ("part", "column", "number"),
    [
        *((part, column, number) for part, column, number, *_ in FORGED if column not in _UNREAD),
        *((None, column, number) for column, number in _SIZES),
    ],
)
def test_bad_layout(part: int | None, column: str, number: int) -> None:
    """Invalid layout records on the device set status; nothing is read or written at their offsets."""
    given = with_layout(arguments())
    if part is None:
        given["layout_sizes"][Size[column]] = number
    else:
        given["layout"][part, Column[column]] = number
    given["grad"] = given["grad"][:, : given["layout_sizes"][Size.output_dim]]
    given["sum"] = torch.ones(10)
    _, status = _call("embedding_bag", given)
    assert status.tolist() == [BAD_LAYOUT, 0]
    _assert_nothing_changes(given | {"status": None})


@pytest.mark.parametrize(("name", "change", "message"), NOT_LAYOUTS)
def test_not_a_layout(name: str, change: Callable, message: str) -> None:
    """Every function checks the sizes of a layout, with the compiled ops' errors."""
    for op in FAMILY:
        given = with_layout(arguments())
        given[name] = change(given[name])
        with pytest.raises(ValueError, match=re.escape(message)):
            _call(op, given)


def test_id_limits() -> None:
    """A feature's id limit may be below its table's rows; updated rows are indexed in the whole table."""
    case = make_case([(9, 20)], [0, 0], [3, 2, 1, 4], weighted=True, seed=4)
    case.values.copy_(torch.tensor([0, 4, 5, 2, 1, 8, 8, 3, 9, 0]))  # 5 and 9 are out of range
    limits = {"partition_starts": [0, 1, 2], "divisors": [1, 1], "moduli": [9, 9], "id_limits": [5, 9]}
    bags = {"values": case.values, "offsets": case.offsets, "per_sample_weights": case.per_sample_weights}
    given = case.layout | limits | {"combine": [0, 0], "bounds_check": "ignore"} | bags
    given |= {"weights": case.weights, "grad": case.grad, "sum": case.sum}
    given |= {"step": torch.tensor(0), "lr": torch.tensor(LR)}
    for op in ("embedding_bag", *FAMILY[3:]):
        mine, compiled = ({n: t.clone() if n in WRITTEN else t for n, t in given.items()} for _ in range(2))
        found, expected = _call(op, mine), call(op, compiled)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for name in given.keys() & set(WRITTEN):
            torch.testing.assert_close(mine[name], compiled[name], rtol=1e-4, atol=1e-4)
        PASSED["triton"] += 1


_REFUSED = [
    row
    for row in BAD_ARGUMENTS
    if is_on_the_host(row[0], row[2]) and row[2] != "weights must be float32, got float16"  # float16 is allowed here
]


@pytest.mark.parametrize(("name", "change", "message"), _REFUSED)
def test_bad_argument(name: str, change: Callable, message: str) -> None:
    """Every function with the argument raises the compiled ops' errors, and nothing changes."""
    accepting = [op for op in FAMILY if name in inspect.signature(getattr(triton, op).layout).parameters]
    assert accepting
    for op in accepting:
        given = with_layout(arguments())
        given[name] = change(given.get(name))
        before = {n: t.clone() for n, t in given.items() if isinstance(t, Tensor)}
        with pytest.raises(ValueError, match=re.escape(message)):
            _call(op, given)
        assert all(same_bits(given[n], t) for n, t in before.items())
