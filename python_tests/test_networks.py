"""LowRankCrossNet, WukongLayer and Wukong: formulas in float64, gradients, compilation, copies, errors."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk

# in_features, num_layers, low_rank, batch
CROSSES = [(1, 1, 1, 1), (5, 1, 3, 7), (13, 3, 2, 4), (6, 2, 9, 1), (8, 4, 4, 0)]
SIZES = {"in_features": 6, "embedding_dim": 8, "fm_features": 2, "linear_features": 3, "factors": 4}
# Stacks with and without a residual matrix, deep and shallow; one with all sizes 1.
LAYERS = [
    SIZES,
    SIZES | {"linear_features": 4, "hidden": (5,)},
    SIZES | {"in_features": 3, "embedding_dim": 7, "hidden": (9, 5), "factors": 1},
    dict.fromkeys(SIZES, 1),
]
#: A network of either kind, and the shape of a sample.
NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "cross": (lambda **options: rk.LowRankCrossNet(7, 3, 2, **options), (7,)),
    "wukong": (lambda **options: rk.Wukong(**SIZES, num_layers=2, hidden=(5,), **options), (6, 8)),
}
every_network = pytest.mark.parametrize(("make", "sample"), NETWORKS.values(), ids=NETWORKS)


def make_cross(size: tuple[int, int, int]) -> rk.LowRankCrossNet:
    """A layer with nonzero biases."""
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


def make_layer(sizes: dict) -> rk.WukongLayer:
    """A stack with nontrivial norms."""
    torch.manual_seed(sum(sizes["hidden"]) if "hidden" in sizes else 0)
    layer = rk.WukongLayer(**sizes)
    with torch.no_grad():
        for norm in (layer.fm_norm, layer.norm):
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return layer


def check_gradients(net: nn.Module, right: Callable[[nn.Module, Tensor], Tensor], x: Tensor, tolerance: float) -> None:
    """The result and all gradients of ``net`` are those of ``right`` in float64; ``x`` is unchanged."""
    exact, given = copy.deepcopy(net).double(), x.clone()
    grad = torch.randn(net(x).shape)

    def all_of(function: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = function(x)
        return [out, *torch.autograd.grad(out, [x, *net.parameters()], grad.to(x.dtype))]

    pairs = zip(all_of(net, net, x), all_of(lambda x: right(exact, x), exact, x.double()), strict=True)
    for mine, expected in pairs:
        torch.testing.assert_close(mine, expected.float(), rtol=tolerance, atol=tolerance)
    assert torch.equal(x, given)


@pytest.mark.parametrize("size", CROSSES, ids=str)
def test_cross_matches_the_formula(size: tuple[int, int, int, int]) -> None:
    check_gradients(make_cross(size[:3]), formula, torch.randn(size[3], size[0]), 1e-4)


@pytest.mark.parametrize("sizes", LAYERS)
@pytest.mark.parametrize("batch", [0, 1, 9])
def test_wukong_matches_the_equations(sizes: dict, batch: int) -> None:
    layer, x = make_layer(sizes), torch.randn(batch, sizes["in_features"], sizes["embedding_dim"])
    check_gradients(layer, equations, x, 1e-3)
    assert layer(x).shape == (batch, layer.out_features, sizes["embedding_dim"])


@every_network
def test_compiles_once(make: Callable[..., nn.Module], sample: tuple[int, ...]) -> None:
    """One graph for the first batch size, one for all others."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter, net = CompileCounterWithBackend("aot_eager"), make()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for batch in (3, 8, 21):
        x = torch.randn(batch, *sample)
        results = [torch.autograd.grad(f(x).pow(3).sum(), list(net.parameters())) for f in (compiled, net)]
        for mine, right in zip(*results, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


@every_network
def test_without_numbers(make: Callable[..., nn.Module], sample: tuple[int, ...]) -> None:
    """On the meta device, a network has parameters, shapes and gradients."""
    net, real = make(device="meta"), make()
    x = torch.randn(5, *sample, device="meta", requires_grad=True)
    out = net(x)
    out.sum().backward()
    assert {p.device.type for p in net.parameters()} == {"meta"}
    assert (out.is_meta, out.shape, out.dtype) == (True, real(torch.randn(5, *sample)).shape, x.dtype)
    assert x.grad.shape == x.shape


@every_network
def test_states_and_copies(make: Callable[..., nn.Module], sample: tuple[int, ...]) -> None:
    """A state, a deep copy and a pickle give equal results."""
    net, loaded, x = make(), make(), torch.randn(4, *sample)
    loaded.load_state_dict(net.state_dict())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (loaded, copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), net(x))


@every_network
def test_exported(make: Callable[..., nn.Module], sample: tuple[int, ...]) -> None:
    """An exported network takes any batch size."""
    net = make()
    sizes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(net, (torch.randn(4, *sample),), dynamic_shapes=sizes)
    for batch in (2, 9):
        x = torch.randn(batch, *sample)
        torch.testing.assert_close(program.module()(x), net(x))


CROSS = {"in_features": 5, "num_layers": 2, "low_rank": 3}
INTEGER = "must be an integer, at least 1 and below 2^63, got"
BAD = [
    *((rk.LowRankCrossNet, CROSS | {name: v}, f"{name} {INTEGER} {v!r}") for name in CROSS for v in (0, 2.0, True)),
    *((rk.Wukong, SIZES | {"num_layers": 2} | {n: 0}, f"{n} {INTEGER} 0") for n in (*SIZES, "num_layers")),
    (rk.Wukong, SIZES | {"num_layers": 2, "hidden": (3, 0)}, f"hidden[1] {INTEGER} 0"),
    *(
        (kind, sizes | {"hidden": h}, f"hidden must be a sequence of integers, each at least 1, got {h!r}")
        for kind, sizes in ((rk.WukongLayer, SIZES), (rk.Wukong, SIZES | {"num_layers": 2}))
        for h in (5, "5", 2.0)
    ),
]


@pytest.mark.parametrize(("make", "sizes", "message"), BAD)
def test_bad_sizes(make: Callable[..., nn.Module], sizes: dict, message: str) -> None:
    """Errors have the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**sizes)


@pytest.mark.parametrize(
    ("net", "shapes", "allowed"),
    [
        (rk.LowRankCrossNet(5, 1, 2), ([3, 4], [5], [2, 3, 5]), "input must be [B, in_features = 5]"),
        (rk.WukongLayer(**SIZES), ([3, 6, 7], [3, 5, 8], [6, 8]), "x must be [B, in_features = 6, embedding_dim = 8]"),
    ],
)
def test_bad_input(net: nn.Module, shapes: tuple[list[int], ...], allowed: str) -> None:
    """Errors have the shape and the allowed one."""
    for shape in shapes:
        with pytest.raises(ValueError, match=re.escape(f"{allowed}, got shape {shape}")):
            net(torch.ones(shape))


def test_cross_has_gradients_of_gradients() -> None:
    """The network is differentiable any number of times."""
    net = make_cross((4, 2, 3)).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net, x)
    assert torch.autograd.gradgradcheck(net, x)


def test_cross_starts_as_it_says() -> None:
    """Biases are zero, and matrices have the variance of the docstring."""
    torch.manual_seed(0)
    net = rk.LowRankCrossNet(300, 2, 100)
    assert all(not bias.any() for bias in net.bias)
    for matrix in (*net.W_kernels, *net.V_kernels):
        assert float(matrix.detach().var()) == pytest.approx(2 / 400, rel=0.1)
    assert not torch.equal(net.W_kernels[0], net.W_kernels[1])


def test_cross_names_and_shapes_of_the_parameters() -> None:
    """Names and shapes are those of TorchRec's module."""
    shapes = {name: list(t.shape) for name, t in rk.LowRankCrossNet(6, 2, 4).state_dict().items()}
    assert shapes == {
        **{f"W_kernels.{i}": [6, 4] for i in range(2)},
        **{f"V_kernels.{i}": [4, 6] for i in range(2)},
        **{f"bias.{i}": [6] for i in range(2)},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_under_autocast(dtype: torch.dtype) -> None:
    """Products are in bfloat16; sums keep their dtype, and gradients theirs."""
    net, x = make_cross((16, 3, 8)), torch.randn(32, 16)
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


def test_a_residual_where_the_number_changes() -> None:
    """The residual is a matrix if the number of vectors changes, otherwise the input."""
    assert rk.WukongLayer(**SIZES).residual.shape == (5, 6)
    assert rk.WukongLayer(**SIZES | {"linear_features": 4}).residual is None


def test_stack() -> None:
    """Layers are applied in order; the first changes the number of vectors."""
    torch.manual_seed(0)
    stack = rk.Wukong(**SIZES, num_layers=3, hidden=(5,))
    exact, x = copy.deepcopy(stack).double(), torch.randn(4, 6, 8)
    right = x.double()
    for layer in exact:
        right = equations(layer, right)
    assert [layer.residual is None for layer in stack] == [False, True, True]
    assert stack.out_features == right.shape[1] == 5
    torch.testing.assert_close(stack(x), right.float(), rtol=1e-3, atol=1e-3)


def test_wukong_starts_as_it_says() -> None:
    """Matrices have variance 1 / n."""
    torch.manual_seed(0)
    layer = rk.WukongLayer(400, 2, fm_features=30, linear_features=30, factors=30)
    for matrix in (layer.factors, layer.compression, layer.residual):
        assert float(matrix.detach().var()) == pytest.approx(1 / 400, rel=0.1)


def test_wukong_under_autocast() -> None:
    """Results are close to float32 in either input's dtype; the parameters' gradients are float32."""
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
    """A module may be bfloat16 as a whole."""
    stack = rk.Wukong(**SIZES, num_layers=2).bfloat16()
    assert stack(torch.randn(3, 6, 8).bfloat16()).dtype == torch.bfloat16


def test_second_derivative() -> None:
    x = torch.randn(2, 6, 8, requires_grad=True)
    (first,) = torch.autograd.grad(rk.WukongLayer(**SIZES)(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.sum().backward()


def test_hidden_is_read_once() -> None:
    """``hidden`` may be an iterator, which is read once for all layers."""
    stack = rk.Wukong(**SIZES, num_layers=2, hidden=iter((5, 4)))
    assert [len(layer.mlp) for layer in stack] == [5, 5]


def test_slices_and_changes() -> None:
    """A slice shares the stack's layers; appending and removing layers changes ``out_features``."""
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
