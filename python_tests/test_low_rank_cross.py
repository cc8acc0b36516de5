"""LowRankCrossNet beside the formula in float64: values, gradients, compilation, autocast, states, errors."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk

# in_features, num_layers, low_rank, batch
SIZES = [(1, 1, 1, 1), (5, 1, 3, 7), (13, 3, 2, 4), (6, 2, 9, 1), (8, 4, 4, 0)]


def make(size: tuple[int, int, int]) -> rk.LowRankCrossNet:
    """Makes a layer with biases that are not zeros."""
    torch.manual_seed(sum(size))
    net = rk.LowRankCrossNet(*size)
    with torch.no_grad():
        for bias in net.bias:
            bias.normal_()
    return net


def formula(net: rk.LowRankCrossNet, x: Tensor) -> Tensor:
    """Element by element: x_{l+1}[b, i] = x_0[b, i] (sum_j (W V)[i, j] x_l[b, j] + bias[i]) + x_l[b, i]."""
    first = x
    for w, v, bias in zip(net.W_kernels, net.V_kernels, net.bias, strict=True):
        x = first * (torch.einsum("ir,rj,bj->bi", w, v, x) + bias) + x
    return x


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_the_formula(size: tuple[int, int, int, int]) -> None:
    """Result and all gradients, those of float32 beside those of float64."""
    net, x = make(size[:3]), torch.randn(size[3], size[0])
    grad = torch.randn(size[3], size[0])

    def all_of(function, net: rk.LowRankCrossNet, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = function(x)
        return [out, *torch.autograd.grad(out, [x, *net.parameters()], grad.to(x.dtype))]

    exact = copy.deepcopy(net).double()
    given = x.clone()
    found = all_of(net, net, x)
    right = all_of(lambda x: formula(exact, x), exact, x.double())
    for mine, expected in zip(found, right, strict=True):
        torch.testing.assert_close(mine, expected.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(x, given)


def test_gradients_of_gradients() -> None:
    """Plain differentiable operations, of any order."""
    net = make((4, 2, 3)).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net, x)
    assert torch.autograd.gradgradcheck(net, x)


def test_starts_as_it_says() -> None:
    """Biases of zero, and matrices of the variance in the docstring."""
    torch.manual_seed(0)
    net = rk.LowRankCrossNet(300, 2, 100)
    assert all(not bias.any() for bias in net.bias)
    for matrix in (*net.W_kernels, *net.V_kernels):
        assert float(matrix.detach().var()) == pytest.approx(2 / 400, rel=0.1)
    assert not torch.equal(net.W_kernels[0], net.W_kernels[1])


def test_names_and_shapes_of_the_parameters() -> None:
    """Names and shapes are those of TorchRec's module."""
    shapes = {name: list(t.shape) for name, t in rk.LowRankCrossNet(6, 2, 4).state_dict().items()}
    assert shapes == {
        **{f"W_kernels.{i}": [6, 4] for i in range(2)},
        **{f"V_kernels.{i}": [4, 6] for i in range(2)},
        **{f"bias.{i}": [6] for i in range(2)},
    }


def test_compiles_once() -> None:
    """One graph for the batch size that comes first, one for all others."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    net = make((7, 3, 2))
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for batch in (3, 8, 21):
        x = torch.randn(batch, 7)
        results = [torch.autograd.grad(f(x).square().sum(), list(net.parameters())) for f in (compiled, net)]
        for mine, right in zip(*results, strict=True):
            torch.testing.assert_close(mine, right)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Products in bfloat16; what they are added to keeps its dtype, and gradients theirs."""
    net, x = make((16, 3, 8)), torch.randn(32, 16)
    given = x.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(given)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), net(x), rtol=0.05, atol=0.5)
    out.float().sum().backward()
    assert given.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    with torch.autocast("cpu", dtype=torch.float16):
        assert net(x.to(dtype)).dtype == torch.float32


def test_without_numbers() -> None:
    """The layer has a shape on the meta device."""
    y = rk.LowRankCrossNet(8, 2, 3, device="meta")(torch.randn(5, 8, device="meta"))
    assert (y.shape, y.is_meta) == ((5, 8), True)


def test_states_and_copies() -> None:
    """A state, a deep copy and a pickle give the same results."""
    net, x = make((5, 2, 3)), torch.randn(4, 5)
    loaded = rk.LowRankCrossNet(5, 2, 3)
    loaded.load_state_dict(net.state_dict())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (loaded, copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), net(x))


def test_device() -> None:
    """Parameters are made where they are wanted."""
    assert {p.device.type for p in rk.LowRankCrossNet(5, 2, 3, device="meta").parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["in_features", "num_layers", "low_rank"])
@pytest.mark.parametrize("value", [0, 2.0, True])
def test_bad_sizes(name: str, value: object) -> None:
    """The argument, its value and what is allowed."""
    sizes = {"in_features": 5, "num_layers": 2, "low_rank": 3} | {name: value}
    message = f"{name} must be an integer, at least 1 and below 2^63, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rk.LowRankCrossNet(**sizes)


@pytest.mark.parametrize("shape", [[3, 4], [5], [2, 3, 5]])
def test_bad_input(shape: list[int]) -> None:
    """The shape that came, and the one that is allowed."""
    with pytest.raises(ValueError, match=re.escape(f"input must be [B, in_features = 5], got shape {shape}")):
        rk.LowRankCrossNet(5, 1, 2)(torch.ones(shape))
