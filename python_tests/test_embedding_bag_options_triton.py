"""What the Triton kernels of embedding_bag take beside tables and bags, and what they refuse.

Run as test_embedding_bag_triton.py is.
"""

from __future__ import annotations

import os

import pytest
import torch
from backends import PASSED
from embedding_bag_cases import make_case
from test_embedding_bag_strides import _two_features

import rec_kernels as rk

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("test_triton.py runs this file in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from rec_kernels import triton  # noqa: E402  (after the check that it can be imported)

DEVICE = "cpu" if INTERPRETED else "cuda"


def _moved(arguments: dict) -> dict:
    return {k: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for k, t in arguments.items()}


def test_other_device_and_other_arguments() -> None:
    """One tensor on another device is refused; so are rows of bytes, and an argument that the op does not have."""
    table, values, offsets = torch.ones(3, 4), torch.tensor([1]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="offsets is on meta, values on cpu: they must be on the same device"):
        triton.embedding_bag(table, values, offsets.to("meta"))
    with pytest.raises(ValueError, match="formats, format_of and embedding_dim must not be given"):
        triton.embedding_bag(table.byte(), values, offsets, formats=["int4"], embedding_dim=4)
    with pytest.raises(TypeError, match="weight_ofsets"):
        triton.embedding_bag(table, values, offsets, weight_ofsets=None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_dtype(dtype: torch.dtype) -> None:
    """The float32 sum, rounded."""
    case = make_case([(5, 8), (3, 4)], [0, 1], [2, 0, 3, 1], seed=1)
    given = _moved({"weights": case.weights, "values": case.values, "offsets": case.offsets} | case.layout)
    whole, _ = triton.embedding_bag(**given)
    found, _ = triton.embedding_bag(**given, output_dtype=dtype)
    assert torch.equal(found, whole.to(dtype))
    with pytest.raises(ValueError, match="output_dtype must be"):
        triton.embedding_bag(**given, output_dtype=torch.float64)
    PASSED["triton"] += 1


@pytest.mark.parametrize("frozen", [[True, False, False], [False, True, True], [True, True, True]])
def test_frozen_features(frozen: list[bool]) -> None:
    """No gradient from their ids, dense, sparse or fused."""
    case = make_case([(5, 18), (3, 7)], [0, 1, 0], [2, 0, 3, 1, 4, 2], mean=[True, False, False], seed=3)
    mask, shape = torch.tensor(frozen), list(case.weights.shape)
    bags = {"values": case.values, "offsets": case.offsets, "frozen": mask} | case.layout
    given, cpu = _moved(bags | {"grad": case.grad}), torch.ops.rec_kernels
    dense = triton.embedding_bag_backward_dense(weights_shape=shape, **given)
    expected = cpu.embedding_bag_backward_dense(weights_shape=shape, **bags, grad=case.grad)
    torch.testing.assert_close(dense.cpu(), expected)
    rows, _, counts = triton.embedding_bag_backward_sparse(weights_shape=shape, **given)
    sparse = cpu.embedding_bag_backward_sparse(weights_shape=shape, **bags, grad=case.grad)
    assert rows.tolist() == sparse[0].tolist()
    assert counts.tolist() == sparse[2].tolist()
    state = _moved({"weights": case.weights.clone(), "step": torch.tensor(0), "lr": torch.tensor(0.1), "sum": None})
    triton.embedding_bag_backward_fused_(**state, **given, optimizer="sgd")
    updated = torch.nan_to_num(case.weights - 0.1 * expected)
    torch.testing.assert_close(torch.nan_to_num(state["weights"].cpu()), updated)
    PASSED["triton"] += 1


def test_refused() -> None:
    """What needs the compiled library is named."""
    case, layout = _two_features()
    bags = {"values": case.values, "offsets": case.offsets} | layout
    starts = torch.tensor([0, 2, 4])
    for name, value in (("bag_starts", starts), ("partition_starts", starts), ("max_parts", 2), ("multiplies", False)):
        with pytest.raises(ValueError, match=rf"{name} must not be given.*compiled CUDA library"):
            triton.embedding_bag(**_moved(bags | {"weights": case.weights, name: value}))
    state = {"weights": case.weights, "step": torch.tensor(0), "lr": torch.tensor(0.1), "sum": None}
    for name, value in (("weight_decay", 0.1), ("clip_grad_value", 1.0), ("clip_grad_norm", 1.0)):
        with pytest.raises(ValueError, match=f"{name} must not be given"):
            triton.embedding_bag_backward_fused_(
                **_moved(bags | state | {"grad": case.grad}), optimizer="sgd", **{name: value}
            )
    PASSED["triton"] += 1


def test_freeze_in_a_module() -> None:
    """A collection on these kernels freezes and unfreezes as on the others."""
    library = torch.library.Library("rec_kernels", "IMPL")
    tables = [rk.EmbeddingBagConfig(5, 4, name="t", feature_names=["f", "g"], init=lambda w: w.fill_(1.0))]
    batch = rk.KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2]), lengths=torch.ones(2).long()).to(DEVICE)
    collection = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5)).to(DEVICE)
    try:
        triton.register(library, "CPU" if DEVICE == "cpu" else "CUDA")
        collection.freeze("g")
        collection(batch).values().sum().backward()
        collection.unfreeze("g")
        collection(batch).values().sum().backward()
    finally:
        library._destroy()
    assert collection.embedding_bags["t"].weight[:, 0].tolist() == [1.0, 0.0, 0.5, 1.0, 1.0]
    PASSED["triton"] += 1
