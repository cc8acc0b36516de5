"""grouped_projection on the CPU has the reference's bits; test_products.py tests gradients and errors."""

from __future__ import annotations

import pytest
import torch
from grouped_projection_cases import DIMS, LARGE, TRAINED, Call, Dims, make_call
from product_checks import check_bits

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels.reference import grouped_projection as reference

ops = torch.ops.rec_kernels


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("batch", [1, 7, 64, 131])
def test_matches_reference(dims: Dims, batch: int) -> None:
    """Tiles of every height, one chunk of samples and several."""
    check_bits(make_call(dims, batch), reference)


def test_large_dimensions() -> None:
    """300 to 512 columns, and the identity of as many."""
    check_bits(make_call(LARGE, 9), reference)


def test_many_samples() -> None:
    """Chunks of chunks: more than 64 * 64 samples, split among the threads."""
    check_bits(make_call(Dims([3, 2], [2], [0, 0]), 64 * 64 + 70), reference)


def test_identity_only() -> None:
    """Only identities: copies, and weights without elements."""
    x = torch.randn(50, 12)
    assert torch.equal(rk.grouped_projection(x, torch.ones(0), [4, 8], [4, 8]), x)
    assert torch.equal(rk.grouped_projection(x, torch.ones(0), [6, 6], [6], [0, 0]), x[:, :6] + x[:, 6:])


def test_strided_inputs_are_read_right() -> None:
    """Non-contiguous arguments are read correctly; inputs are not written to."""
    call = make_call(DIMS[4], 40)
    x, weights, grad = (torch.randn(*(2 * n for n in t.shape)) for t in call[:3])
    strided = Call(x[::2, ::2], weights[::2], grad[1::2, 1::2], call.dims)
    plain = Call(*(t.contiguous() for t in strided[:3]), call.dims)
    before = [t.clone() for t in (x, weights, grad)]
    assert all(map(testing.same_bits, strided.each(ops), plain.each(ops)))
    assert all(map(testing.same_bits, (x, weights, grad), before))
    expanded = plain._replace(grad=torch.ones(1, 1).expand(40, sum(call.dims.out_dims)))
    again = expanded._replace(grad=expanded.grad.contiguous())
    assert all(map(testing.same_bits, expanded.each(ops), again.each(ops)))


def test_every_group_has_a_block_of_its_own() -> None:
    """By default, every group has a separate block of outputs; lists may be any sequence of integers."""
    call = make_call(DIMS[3], 5)
    found = rk.grouped_projection(call.x, call.weights, tuple(call.dims.in_dims), tuple(call.dims.out_dims))
    assert torch.equal(found, call.each(ops)[0])


def test_autocast() -> None:
    """Half-precision arguments are widened, and their gradients have their dtype."""
    call = make_call(TRAINED, 6)
    x, weights = (t.bfloat16().requires_grad_() for t in (call.x, call.weights))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rk.grouped_projection(x, weights, *TRAINED)
    assert testing.same_bits(
        out.detach(), rk.grouped_projection(x.detach().float(), weights.detach().float(), *TRAINED)
    )
    out.sum().backward()
    assert x.grad.dtype == weights.grad.dtype == torch.bfloat16


def test_nan_and_inf_stay_in_their_places() -> None:
    """NaN and Inf reach only their sample and block, and the columns of the matrices that they are multiplied with."""
    call = make_call(Dims([3, 2], [4, 4], [0, 1]), 10)
    call.x[4, 1], call.x[6, 3] = torch.nan, torch.inf
    out, _, grad_weights = call.each(ops)
    bad = torch.zeros(10, 8, dtype=torch.bool)
    bad[4, :4], bad[6, 4:] = True, True
    assert torch.equal(~out.isfinite(), bad)
    first, second = grad_weights.split([12, 8])
    assert torch.equal(~first.view(4, 3).isfinite(), torch.tensor([False, True, False]).expand(4, 3))
    assert torch.equal(~second.view(4, 2).isfinite(), torch.tensor([True, False]).expand(4, 2))


def test_torch_agrees_with_itself() -> None:
    """The tests' formula has correct gradients."""
    call = make_call(Dims([2, 3, 3], [3, 2], [0, 0, 1]), 3, torch.float64)
    given = call.x.requires_grad_(), call.weights.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weights: call.by_torch(x, weights), given)
