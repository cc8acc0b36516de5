"""scale_rows and row_dot, the template op: reference, gradients, odd sizes, bad input. Copy this file for a new op."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels.reference import scale_rows as reference

SIZES = [(0, 4), (4, 0), (1, 1), (5, 3), (7, 15), (7, 16), (3, 17), (4, 64), (2, 127), (2, 128), (3, 129), (2, 1000)]
# More rows than a warp processes together, and no multiple of them.
SIZES += [(301, 8), (70, 13), (37, 32), (23, 60), (9, 132)]
ops = torch.ops.rec_kernels


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_reference(size: tuple[int, int]) -> None:
    x, other, scale = torch.randn(size), torch.randn(size), torch.randn(size[0])
    for backend in every_backend():
        assert torch.equal(backend.ops.scale_rows(x, scale), reference.scale_rows(x, scale)), backend.name
        assert torch.equal(backend.ops.row_dot(x, other), reference.row_dot(x, other)), backend.name


@pytest.mark.parametrize("columns", [4, 16, 28, 64, 128, 256])
def test_sums_that_underflow(columns: int) -> None:
    """Missing columns of a row's last register add +0 to a sum of -0; existing ones do not."""
    x = torch.full((5, columns), 2.0**-100)
    expected = reference.row_dot(x, -x)
    assert expected.signbit().all() == (columns % 128 == 0)
    for backend in every_backend():
        assert testing.same_bits(backend.ops.row_dot(x, -x), expected), backend.name


def test_gradients() -> None:
    """Gradients equal torch's autograd: the scale's gradient differs in the order of summation only."""
    x, scale = torch.randn(6, 100, requires_grad=True), torch.randn(6, requires_grad=True)
    weight = torch.randn(6, 100)
    found = torch.autograd.grad((rk.scale_rows(x, scale) * weight).sum(), (x, scale))
    expected = torch.autograd.grad((x * scale[:, None] * weight).sum(), (x, scale))
    assert torch.equal(found[0], expected[0])
    magnitude = (x.detach().double() * weight).abs().sum(1)
    testing.assert_same_sum(found[1], expected[1], magnitude, terms=100)


def test_second_gradients() -> None:
    """The backward is made of differentiable ops."""
    x, scale = torch.randn(3, 5, requires_grad=True), torch.randn(3, requires_grad=True)
    (gx,) = torch.autograd.grad(rk.scale_rows(x, scale).square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(gx.sum(), scale)
    torch.testing.assert_close(found, 4 * scale.detach() * x.detach().sum(1))


def test_large_is_independent_of_threads() -> None:
    """Enough rows for every thread."""
    x, scale = torch.randn(5000, 33), torch.randn(5000)
    results = []
    for n in (1, 2, 3):
        with testing.use_threads(n):
            results.append((rk.scale_rows(x, scale), ops.row_dot(x, x)))
    for scaled, dots in results[1:]:
        assert torch.equal(scaled, results[0][0])
        assert torch.equal(dots, results[0][1])


def test_strided_inputs_are_read_right() -> None:
    """Non-contiguous arguments are read correctly."""
    x, scale = torch.randn(8, 12)[::2, 1::3], torch.randn(8)[::2]
    assert torch.equal(rk.scale_rows(x, scale), x * scale[:, None])


@pytest.mark.parametrize("isa", testing.cpu_isas())
def test_denormals_and_zeros(isa: str) -> None:
    """torch.set_flush_denormal changes nothing, and an underflow keeps its sign."""
    x, scale = torch.randn(40, 300) * 2.0**-130, torch.randn(40)
    expected = reference.scale_rows(x, scale), reference.row_dot(x, x * 2.0**100), reference.row_dot(x, -x)
    assert (expected[0] != 0).any()
    assert (expected[2] == 0).all()
    with testing.use_cpu_isa(isa):
        larger = x * 2.0**100
        with testing.flush_denormals():
            found = rk.scale_rows(x, scale), ops.row_dot(x, larger), ops.row_dot(x, -x)
    assert all(map(testing.same_bits, found, expected))


def test_nan_and_inf_propagate() -> None:
    """NaN and Inf reach only their own row."""
    x = torch.ones(3, 4)
    out = rk.scale_rows(x, torch.tensor([1.0, torch.nan, torch.inf]))
    assert torch.equal(out[0], x[0])
    assert out[1].isnan().all()
    assert out[2].isinf().all()


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (torch.ones(3), torch.ones(3), r"x must have 2 dimension\(s\), got shape \[3\]"),
        (torch.ones(3, 2), torch.ones(2), r"scale must have shape \[3\], got \[2\]"),
        (torch.ones(3, 2).double(), torch.ones(3), "x must be float32, got float64"),
        (torch.ones(3, 2), torch.ones(3).half(), "scale must be float32, got float16"),
    ],
)
def test_bad_input(x: torch.Tensor, scale: torch.Tensor, message: str) -> None:
    """The message names the argument and what is allowed."""
    with pytest.raises(ValueError, match=message):
        rk.scale_rows(x, scale)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(3), torch.ones(3), r"a must have 2 dimension\(s\), got shape \[3\]"),
        (torch.ones(3, 2), torch.ones(3, 3), r"b must have shape \[3, 2\], got \[3, 3\]"),
        (torch.ones(3, 2).half(), torch.ones(3, 2), "a must be float32, got float16"),
        (torch.ones(3, 2), torch.ones(3, 2).long(), "b must be float32, got int64"),
        (torch.ones(3, 2), torch.ones(3, 2, device="meta"), "same device"),
    ],
)
def test_bad_rows(a: torch.Tensor, b: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.row_dot(a, b)


@pytest.mark.parametrize("op", [rk.scale_rows, rk.expand, rk.factorization_machine], ids=lambda op: op.__name__)
def test_gradients_inside_vmap(op) -> None:
    """Tensors in torch.vmap do not report that they require a gradient: wrappers must not skip autograd there."""
    x = torch.randn(3, 4, 5, requires_grad=True)
    other = {"scale_rows": torch.randn(4), "expand": torch.tensor([2, 0, 3]), "factorization_machine": None}[
        op.__name__
    ]
    if other is None:
        other, x = torch.randn(4, 6, 5), torch.randn(3, 4, 6, 5, requires_grad=True)
    grads = []
    for call in (torch.vmap(lambda one: op(one, other)), lambda all: torch.stack([op(one, other) for one in all])):
        output = call(x)
        assert output.requires_grad
        grads.append(torch.autograd.grad(output, x, torch.ones_like(output))[0])
    assert torch.allclose(*grads)
