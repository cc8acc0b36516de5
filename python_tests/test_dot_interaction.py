"""dot_interaction on the CPU has the reference's bits; test_products.py tests gradients and errors."""

from __future__ import annotations

import pytest
import torch
from dot_interaction_cases import FLOATS, LONG, MANY, SIZES, Call, make_call
from product_checks import check_bits
from tiers import full

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels.ops.dot_interaction import num_pairs
from rec_kernels.reference import dot_interaction as reference
from rec_kernels.reference.dot_interaction import pairs

ops = torch.ops.rec_kernels


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("self_interaction", [False, True])
@pytest.mark.parametrize("batch", [1, 37, *full(16)])
def test_matches_reference(size: tuple[int, int], self_interaction: bool, batch: int) -> None:
    """Whole and partial registers, of samples and of columns."""
    check_bits(make_call(size, batch, self_interaction), reference)


@pytest.mark.parametrize("size", [MANY, LONG], ids=str)
@pytest.mark.parametrize("self_interaction", [False, True])
def test_many_vectors_and_columns(size: tuple[int, int], self_interaction: bool) -> None:
    check_bits(make_call(size, 18, self_interaction), reference)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("size", [(0, 3), (4, 16), (13, 10)], ids=str)
def test_half_precision(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Sums are float32 and rounded once."""
    for self_interaction in (False, True):
        check_bits(make_call(size, 35, self_interaction, dtype), reference)


@pytest.mark.parametrize("self_interaction", [False, True])
def test_negative_zeros_among_gradients(self_interaction: bool) -> None:
    """A pair's gradient of -0 keeps its sign in both vectors, next to the diagonal and far from it."""
    call = make_call((20, 3), 2, self_interaction)
    call.grad[:] = -0.0
    first, second = pairs(21, self_interaction)
    call.grad[:, 3:][:, first - second == 1] = -1e-30
    # Products underflow to -0, to which products of -0 are added.
    mine = Call(torch.full_like(call.dense, 1e-30), torch.full_like(call.sparse, 1e-30), call.grad, self_interaction)
    check_bits(mine, reference)
    _, grad_dense, grad_sparse = mine.each(ops)
    assert bool(torch.signbit(grad_dense).all())
    assert bool(torch.signbit(grad_sparse).any())


def test_order_of_pairs() -> None:
    """Pairs are ordered row by row below the diagonal, optionally with it."""
    dense, sparse = torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0, 1.0], [3.0, 5.0]]])
    assert rk.dot_interaction(dense, sparse).tolist() == [[1, 0, 2, 3, 11]]
    assert rk.dot_interaction(dense, sparse, True).tolist() == [[1, 0, 1, 2, 5, 3, 11, 34]]
    assert [num_pairs(f) for f in (0, 1, 26)] == [0, 1, 351]
    assert [num_pairs(f, True) for f in (0, 1, 26)] == [1, 3, 378]


def test_without_sparse_vectors() -> None:
    """A lone dense vector and its gradient are copied."""
    call = make_call((0, 6), 5, False)
    out, grad_dense, grad_sparse = call.each(ops)
    assert torch.equal(out, call.dense)
    assert torch.equal(grad_dense, call.grad)
    assert grad_sparse.shape == (5, 0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_are_read_right(dtype: torch.dtype) -> None:
    """Samples with any stride are read, others copied; inputs are not written to."""
    call = make_call((5, 7), 20, True, dtype)
    wide = call.map(lambda t: torch.randn(2 * len(t), *(2 * n for n in t.shape[1:])).to(dtype))
    before = [t.clone() for t in wide[:3]]
    pairs = call.grad.shape[1]
    rows = Call(wide.dense[::2, :7], wide.sparse.view(40, -1)[::2, 3:38].view(20, 5, 7), wide.grad[::2, :pairs], True)
    assert not any(t.is_contiguous() for t in rows[:3])
    strided = Call(wide.dense[:20, ::2], wide.sparse[:20, ::2, 1::2], wide.grad[:20, ::2], True)
    expanded = Call(*(t[:1].expand(20, *t.shape[1:]) for t in call[:3]), True)._replace(
        grad=torch.ones(1, 1, dtype=dtype).expand(20, pairs)
    )
    for given in (rows, strided, expanded):
        plain = given.map(torch.Tensor.contiguous)
        assert all(map(testing.same_bits, given.each(ops), plain.each(ops)))
    assert all(map(testing.same_bits, wide[:3], before))


def test_nan_and_inf_stay_in_their_places() -> None:
    """NaN and Inf reach only their sample and their vector's pairs, including the vector's gradient."""
    call = make_call((3, 5), 20, False)
    call.sparse[1, 1, 2] = torch.nan
    call.dense[6, 0] = torch.inf
    out, grad_dense, grad_sparse = call.each(ops)
    bad = torch.zeros(out.shape, dtype=torch.bool)
    bad[1, [5 + 1, 5 + 2, 5 + 5]] = True  # pairs (2, 0), (2, 1), (3, 2)
    bad[6, [0, 5, 6, 8]] = True  # the copied column, pairs (1, 0), (2, 0), (3, 0)
    assert torch.equal(~out.isfinite(), bad)
    assert torch.equal((~grad_dense.isfinite()).nonzero(), torch.tensor([[1, 2], [6, 0]]))
    bad = torch.zeros(grad_sparse.shape, dtype=torch.bool)
    bad[1, :, 2], bad[6, :, 0] = True, True
    assert torch.equal(~grad_sparse.isfinite(), bad)


def test_torch_agrees_with_itself() -> None:
    """The tests' formula has correct gradients, and precision changes nothing on the CPU."""
    call = make_call((3, 2), 3, True, torch.float64)
    given = call.dense.requires_grad_(), call.sparse.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: reference.interaction_reference(*x, True), given)
    call = make_call((3, 2), 3, True)
    assert all(map(testing.same_bits, call.each(ops, "tf32"), call.each(ops, "ieee")))
