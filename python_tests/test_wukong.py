"""WukongLayer and Wukong beside the paper's equations in float64: values, gradients, compilation, autocast, errors."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk

SIZES = {"in_features": 6, "embedding_dim": 8, "fm_features": 2, "linear_features": 3, "factors": 4}
# Stacks with and without a residual of their own, deep and shallow; one of everything.
LAYERS = [
    SIZES,
    SIZES | {"linear_features": 4, "hidden": (5,)},
    SIZES | {"in_features": 3, "embedding_dim": 7, "hidden": (9, 5), "factors": 1},
    dict.fromkeys(SIZES, 1),
]


def normalized(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """Normalizes to mean 0 and variance 1 over the last axis, then scales and shifts."""
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def equations(layer: rk.WukongLayer, x: Tensor) -> Tensor:
    """The layer of the paper, with all pairwise products in memory."""
    pairs = torch.einsum("bid,bjd,jk->bik", x, x, layer.factors)
    hidden = normalized(pairs.flatten(1), layer.fm_norm)
    linears = [module for module in layer.mlp if isinstance(module, torch.nn.Linear)]
    for i, linear in enumerate(linears):
        hidden = hidden @ linear.weight.T + linear.bias
        hidden = hidden.clamp(min=0) if i + 1 < len(linears) else hidden
    made = hidden.unflatten(1, (-1, layer.embedding_dim))
    kept = torch.einsum("ln,bnd->bld", layer.compression, x)
    residual = x if layer.residual is None else torch.einsum("mn,bnd->bmd", layer.residual, x)
    return normalized(torch.cat([made, kept], 1) + residual, layer.norm)


def make(sizes: dict) -> rk.WukongLayer:
    """Makes a stack whose norms scale and shift."""
    torch.manual_seed(sum(sizes["hidden"]) if "hidden" in sizes else 0)
    layer = rk.WukongLayer(**sizes)
    with torch.no_grad():
        for norm in (layer.fm_norm, layer.norm):
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return layer


@pytest.mark.parametrize("sizes", LAYERS)
@pytest.mark.parametrize("batch", [0, 1, 9])
def test_matches_the_equations(sizes: dict, batch: int) -> None:
    """Result and all gradients, those of float32 beside those of float64."""
    layer = make(sizes)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(batch, sizes["in_features"], sizes["embedding_dim"])
    grad = torch.randn(batch, layer.out_features, sizes["embedding_dim"])

    def all_of(function, layer: rk.WukongLayer, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = function(x)
        return [out, *torch.autograd.grad(out, [x, *layer.parameters()], grad.to(x.dtype))]

    found = all_of(layer, layer, x)
    right = all_of(lambda x: equations(exact, x), exact, x.double())
    assert found[0].shape == grad.shape
    for mine, expected in zip(found, right, strict=True):
        torch.testing.assert_close(mine, expected.float(), rtol=1e-3, atol=1e-3)


def test_a_residual_where_the_number_changes() -> None:
    """A matrix, or the input itself."""
    assert rk.WukongLayer(**SIZES).residual.shape == (5, 6)
    assert rk.WukongLayer(**SIZES | {"linear_features": 4}).residual is None


def test_stack() -> None:
    """Layers one after the other; the first changes the number of vectors."""
    torch.manual_seed(0)
    stack = rk.Wukong(**SIZES, num_layers=3, hidden=(5,))
    exact, x = copy.deepcopy(stack).double(), torch.randn(4, 6, 8)
    right = x.double()
    for layer in exact:
        right = equations(layer, right)
    assert [layer.residual is None for layer in stack] == [False, True, True]
    assert stack.out_features == right.shape[1] == 5
    torch.testing.assert_close(stack(x), right.float(), rtol=1e-3, atol=1e-3)


def test_starts_as_it_says() -> None:
    """Matrices of variance 1 / n."""
    torch.manual_seed(0)
    layer = rk.WukongLayer(400, 2, fm_features=30, linear_features=30, factors=30)
    for matrix in (layer.factors, layer.compression, layer.residual):
        assert float(matrix.detach().var()) == pytest.approx(1 / 400, rel=0.1)


def test_compiles_once() -> None:
    """One graph for the batch size that comes first, one for all others."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    stack = rk.Wukong(**SIZES, num_layers=2)
    compiled = torch.compile(stack, backend=counter, fullgraph=True)
    for batch in (3, 8, 21):
        x = torch.randn(batch, 6, 8)
        results = [torch.autograd.grad(f(x).pow(3).sum(), list(stack.parameters())) for f in (compiled, stack)]
        for mine, right in zip(*results, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


def test_autocast() -> None:
    """Close to float32 in either input's dtype; the parameters' gradients are float32."""
    torch.manual_seed(0)
    stack, x = rk.Wukong(**SIZES, num_layers=2), torch.randn(9, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = stack(x)
        from_half = stack(x.bfloat16())
    for found in (out, from_half):
        torch.testing.assert_close(found.float(), stack(x), rtol=0.1, atol=0.15)
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in stack.parameters())


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_dtype_under_autocast(has_residual: bool, given: torch.dtype, autocast: torch.dtype) -> None:
    """On the CPU, the dtype under autocast is the docstring's."""
    layer = rk.WukongLayer(**SIZES | {"linear_features": 3 if has_residual else 4})
    with torch.autocast("cpu", dtype=autocast):
        out = layer(torch.randn(2, 6, 8).to(given))
    assert out.dtype == (autocast if has_residual or given == autocast else torch.float32)


def test_half_precision() -> None:
    """A whole module in bfloat16."""
    stack = rk.Wukong(**SIZES, num_layers=2).bfloat16()
    assert stack(torch.randn(3, 6, 8).bfloat16()).dtype == torch.bfloat16


def test_without_numbers() -> None:
    """On the meta device, the stack has shapes and gradients."""
    stack = rk.Wukong(**SIZES, num_layers=2, device="meta")
    x = torch.randn(5, 6, 8, device="meta", requires_grad=True)
    stack(x).sum().backward()
    assert (stack(x).shape, stack(x).dtype, x.grad.shape) == ((5, stack.out_features, 8), x.dtype, x.shape)
    assert stack(x).is_meta


def test_exported() -> None:
    """An exported stack takes any batch size."""
    stack = rk.Wukong(**SIZES, num_layers=2)
    sizes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(stack, (torch.randn(4, 6, 8),), dynamic_shapes=sizes)
    for batch in (2, 9):
        x = torch.randn(batch, 6, 8)
        torch.testing.assert_close(program.module()(x), stack(x))


def test_states_and_copies() -> None:
    """A state, a deep copy and a pickle give the same results."""
    stack, x = rk.Wukong(**SIZES, num_layers=2, hidden=(5,)), torch.randn(4, 6, 8)
    loaded = rk.Wukong(**SIZES, num_layers=2, hidden=(5,))
    loaded.load_state_dict(stack.state_dict())
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    for other in (loaded, copy.deepcopy(stack), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), stack(x))


def test_second_derivative() -> None:
    """A second derivative is refused in words."""
    x = torch.randn(2, 6, 8, requires_grad=True)
    (first,) = torch.autograd.grad(rk.WukongLayer(**SIZES)(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.sum().backward()


@pytest.mark.parametrize("name", [*SIZES, "num_layers", "hidden"])
def test_bad_sizes(name: str) -> None:
    """The argument, its value and what is allowed."""
    sizes = SIZES | {"num_layers": 2} | {name: (3, 0) if name == "hidden" else 0}
    shown = "hidden[1]" if name == "hidden" else name
    message = f"{shown} must be an integer, at least 1 and below 2^63, got 0"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rk.Wukong(**sizes)


@pytest.mark.parametrize("hidden", [5, "5", 2.0])
def test_hidden_that_is_no_sequence(hidden: object) -> None:
    """A layer and the stack refuse a ``hidden`` that is no sequence."""
    message = f"^{re.escape(f'hidden must be a sequence of integers, each at least 1, got {hidden!r}')}$"
    for make_one in (rk.WukongLayer, lambda **sizes: rk.Wukong(**sizes, num_layers=2)):
        with pytest.raises(ValueError, match=message):
            make_one(**SIZES, hidden=hidden)


def test_hidden_is_read_once() -> None:
    """An iterator serves all layers."""
    stack = rk.Wukong(**SIZES, num_layers=2, hidden=iter((5, 4)))
    assert [len(layer.mlp) for layer in stack] == [5, 5]


def test_slices_and_changes() -> None:
    """A slice has the stack's own layers; what is appended or removed shows in ``out_features``."""
    stack, x = rk.Wukong(**SIZES, num_layers=3), torch.randn(4, 6, 8)
    for part in (slice(1), slice(2, None), slice(None, None, 2), slice(0)):
        assert list(stack[part]) == list(stack)[part]
    assert torch.equal(stack[1:](stack[0](x)), stack(x))
    wider = rk.WukongLayer(5, 8, fm_features=4, linear_features=4, factors=2)
    whole = stack(x)
    assert stack.append(wider).out_features == 8
    assert torch.equal(stack(x), wider(whole))
    assert stack.pop(-1) is wider
    assert stack.out_features == 5
    with pytest.raises(TypeError, match="layer 3, the last, is a ReLU, which has no out_features"):
        _ = copy.deepcopy(stack).append(torch.nn.ReLU()).out_features
    stack.insert(0, wider)
    with pytest.raises(ValueError, match=re.escape("x must be [B, in_features = 5, embedding_dim = 8]")):
        stack(x)


@pytest.mark.parametrize("shape", [[3, 6, 7], [3, 5, 8], [6, 8]])
def test_bad_input(shape: list[int]) -> None:
    """The shape that came, and the one that is allowed."""
    message = f"x must be [B, in_features = 6, embedding_dim = 8], got shape {shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.WukongLayer(**SIZES)(torch.ones(shape))
