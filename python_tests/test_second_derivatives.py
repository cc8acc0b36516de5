"""Second derivatives equal differences, or raise; so do torch.func's transforms."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
from test_opcheck import samples, with_autograd
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import rec_kernels as rk
from rec_kernels.ops.autograd import overload_of
from rec_kernels.testing import same_bits

#: Ops that are differentiable twice.
TWICE = ("scale_rows", "row_dot", "fake_quantize")


def _outputs(op: str, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Outputs with a gradient."""
    found = overload_of(op)(*args, **kwargs)
    return [t for t in (found if isinstance(found, tuple) else (found,)) if t.requires_grad]


def _inputs(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Arguments that require a gradient."""
    return [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]


def _is_float32(op: str, args: tuple, kwargs: dict) -> bool:
    """True if an output, and all inputs of an op of TWICE, are float32, exact enough for differences."""
    exact = op not in TWICE or all(t.dtype == torch.float32 for t in _inputs(args, kwargs))
    return exact and any(t.dtype == torch.float32 for t in _outputs(op, args, kwargs))


def _squares_of_gradients(op: str, args: tuple, kwargs: dict, inputs: list, grads_in: list) -> torch.Tensor:
    """Squares of all inputs' gradients, with ``grads_in`` for the outputs, which is filled if it is empty."""
    outputs = _outputs(op, args, kwargs)
    if not grads_in:
        grads_in += [torch.randn(t.shape, dtype=t.dtype, requires_grad=True) for t in outputs]
    gradients = torch.autograd.grad(outputs, inputs, grads_in, create_graph=True, allow_unused=True)
    return sum(g.double().square().sum() for g in gradients if g is not None)


def _second_derivative_agrees(op: str, args: tuple, kwargs: dict) -> None:
    inputs = _inputs(args, kwargs)
    grads_in: list[torch.Tensor] = []
    _squares_of_gradients(op, args, kwargs, inputs, grads_in).backward()
    ways = [torch.randn_like(t) for t in inputs + grads_in]
    slope = torch.zeros((), dtype=torch.float64)
    for t, way in zip(inputs + grads_in, ways, strict=True):
        slope += 0.0 if t.grad is None else (t.grad * way).sum()

    def moved(by: float) -> torch.Tensor:
        with torch.no_grad():
            for t, way in zip(inputs + grads_in, ways, strict=True):
                t += by * way
        return _squares_of_gradients(op, args, kwargs, inputs, grads_in).detach()

    step = 2**-7
    after, before = moved(step), moved(-2 * step)
    torch.testing.assert_close(slope, (after - before) / (2 * step), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("op", [op for op in with_autograd() if "backward" not in op])
def test_second_derivative_is_right_or_refused(op: str) -> None:
    """A backward op that does not reject them would have second derivatives of zero in torch, with a warning."""
    floats = [call for call in samples(op) if _is_float32(op, *call)]
    assert floats or op == "jagged_bucketize"
    for args, kwargs in floats:
        refused = rf"{op.partition('.')[0]}\w*(\.\w+)? has no second derivative"
        with contextlib.nullcontext() if op in TWICE else pytest.raises(RuntimeError, match=refused):
            _second_derivative_agrees(op, args, kwargs)


def _cubes(*args: torch.Tensor, sparse: bool = False) -> torch.Tensor:
    """Sums of cubes for one table with given rows and weights."""
    weight, factors = args
    ids, offsets = torch.tensor([1, 2, 1]), torch.tensor([0, 1])
    return rk.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=factors, sparse=sparse).pow(3).sum()


@pytest.mark.parametrize("of", [0, 1], ids=["weight", "factors"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_refused_of_inputs(of: int, sparse: bool) -> None:
    """torch.autograd.grad of given inputs finds that the first gradients depend on them."""
    inputs = [torch.randn(3, 4, requires_grad=True), torch.ones(3, requires_grad=True)]
    loss = _cubes(*inputs, sparse=sparse)
    first = torch.autograd.grad(loss, inputs[of], create_graph=True)[0].to_dense()
    for total in (first.sum(), loss + first.sum()):
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(total, inputs[of], retain_graph=True, allow_unused=True)


def test_hessian_is_refused() -> None:
    """A Hessian is rejected: torch.autograd.functional would return zeros for inputs that a gradient ignores."""
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.functional.hessian(lambda weight: _cubes(weight, torch.ones(3)), torch.randn(3, 4))


def test_refused_of_a_collections_tables() -> None:
    """Second derivatives are rejected for a collection with torch's optimizers."""
    bags = rk.KeyedJaggedTensor(["f"], torch.tensor([1, 2, 2]), offsets=torch.tensor([0, 1, 3]))
    config = rk.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=5, feature_names=["f"])
    tables = rk.EmbeddingBagCollection([config], optimizer=None)
    (weight,) = tables.parameters()
    (first,) = torch.autograd.grad(tables(bags).values().pow(3).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(first.square().sum(), weight)


def test_refused_under_checkpointing() -> None:
    """Activation checkpointing allows reading saved tensors only once."""
    inputs = [torch.randn(3, 4, requires_grad=True), torch.ones(3, requires_grad=True)]
    loss = checkpoint(_cubes, *inputs, use_reentrant=False)
    (first,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(first.sum(), inputs[0])


@pytest.mark.parametrize("op", ["expand", "jagged_index_select", "jagged_windows", "jagged_permute"])
def test_refused_of_what_is_copied(op: str) -> None:
    """The second derivative of a linear op is zero through itself, and not through a following op."""
    args, kwargs = next(call for call in samples(op) if _float_inputs(call) and _outputs(op, *call))
    x = _float_inputs((args, kwargs))[0]
    loss = sum(t.pow(3).sum() for t in _outputs(op, args, kwargs))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"rec_kernels::{op} has no second derivative"):
        torch.autograd.grad(first.sum(), x)


def _float_inputs(call: tuple[tuple, dict]) -> list[torch.Tensor]:
    tensors = [t for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.requires_grad and t.dtype == torch.float32]


def is_float(x: object) -> bool:
    """True for floating-point tensors."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@pytest.mark.parametrize("op", with_autograd())
def test_torch_func(op: str) -> None:
    """First and second derivatives equal autograd's, or raise; updates need autograd."""
    for args, kwargs in samples(op):
        places = [i for i, t in enumerate(args) if all(map(is_float, leaves := pytree.tree_leaves(t))) and leaves]

        def loss(given: list, args: tuple = args, kwargs: dict = kwargs, places: list = places) -> torch.Tensor:
            filled = [given[places.index(i)] if i in places else t for i, t in enumerate(args)]
            found = pytree.tree_leaves(overload_of(op)(*filled, **kwargs))
            return sum(t.float().square().sum() for t in found if t.is_floating_point())

        def second(given: list, loss: Callable = loss) -> torch.Tensor:
            return sum(t.float().sum() for t in pytree.tree_leaves(torch.func.grad(loss)(given)))

        given = pytree.tree_map(torch.detach, [args[i] for i in places])
        if not given:
            continue
        if "fused" in op:
            with pytest.raises(RuntimeError, match=r"compute its gradient by torch\.autograd"):
                torch.func.grad(loss)(given)
            continue
        cloned = pytree.tree_map(lambda t: t.clone().requires_grad_(), given)
        tensors, options = pytree.tree_leaves(cloned), {"allow_unused": True, "materialize_grads": True}
        try:
            first = torch.autograd.grad(loss(cloned), tensors, create_graph=True, **options)
        except (RuntimeError, ValueError) as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                torch.func.grad(loss)(given)
            continue
        assert all(map(same_bits, pytree.tree_leaves(torch.func.grad(loss)(given)), first))
        try:
            twice = torch.autograd.grad(sum(t.float().sum() for t in first), tensors, **options)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                torch.func.grad(second)(given)
        else:
            assert all(map(same_bits, pytree.tree_leaves(torch.func.grad(second)(given)), twice))
