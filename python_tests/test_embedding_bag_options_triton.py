"""What the Triton kernels of embedding_bag take beside tables and bags, and what they refuse.

Run as test_embedding_bag_triton.py is.
"""

from __future__ import annotations

import os

import pytest
import torch
from backends import PASSED
from embedding_bag_cases import make_case
from layout_calls import OPS, InLists
from test_embedding_bag_strides import _two_features

import rec_kernels as rk
from rec_kernels._triton_versions import UnsupportedTritonError
from rec_kernels.ops import in_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("test_triton.py runs this file in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("rec_kernels.triton", exc_type=UnsupportedTritonError)

from rec_kernels import triton  # noqa: E402  (after the check that it can be imported)

DEVICE = "cpu" if INTERPRETED else "cuda"
LISTED = InLists(triton)


def _moved(arguments: dict) -> dict:
    return {k: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for k, t in arguments.items()}


def test_other_device_and_other_arguments() -> None:
    """One tensor on another device is refused; so are rows of bytes, and an argument that the op does not have."""
    table, values, offsets = torch.ones(3, 4), torch.tensor([1]), torch.tensor([0, 1])
    lookup = triton.embedding_bag.table
    with pytest.raises(ValueError, match="offsets is on meta, values on cpu: they must be on the same device"):
        lookup(table, values, offsets.to("meta"))
    with pytest.raises(ValueError, match="layout is on meta, values on cpu: they must be on the same device"):
        triton.embedding_bag.layout(table.view(-1), values, offsets, *rk.table_layout([3], [4], device="meta"))
    with pytest.raises(ValueError, match="format must not be given"):
        lookup(table.byte(), values, offsets, format="int4", embedding_dim=4)
    with pytest.raises(TypeError, match="poolin"):
        lookup(table, values, offsets, poolin="sum")
    with pytest.raises(TypeError, match="layout"):
        lookup(table, values, offsets, layout=None)
    with pytest.raises(TypeError, match="missing a required argument: 'offsets'"):
        lookup(table, values, pooling="sum")
    with pytest.raises(TypeError, match="missing a required argument: 'offsets'"):
        lookup(table, values, offset=offsets)  # as many as there should be
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
    """The float32 sum, rounded."""
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
    """No gradient from their ids, dense, sparse or fused."""
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


#: Two features of a table each, in the lists of features of several.
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
    """What needs the compiled library is named."""
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
    """What these kernels do not use is refused unless it is its default, in the words of the compiled ops."""
    given = {"weights": torch.ones(12), "step": torch.tensor(0), "lr": torch.tensor(0.1), "sum": torch.zeros(3)}
    given |= {"values": torch.tensor([1]), "offsets": torch.tensor([0, 1])} | rk.table_layout([3], [4])._asdict()
    forward = given | {"token": torch.ones(0)} | change
    backward = given | {"grad": torch.ones(1, 4)} | change
    for op, arguments in (("embedding_bag_fused", forward), ("embedding_bag_backward_fused_", backward)):
        with pytest.raises(ValueError, match=message):
            getattr(triton, op).layout(**_moved(arguments))
    PASSED["triton"] += 1


def test_places_of_a_cache_alone_change_nothing() -> None:
    """A layout may say where rows would lie in a row cache: without the cache, they are read and written in weights."""
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
