"""factorization_machine on the CPU has the reference's bits; test_products.py tests gradients and errors."""

from __future__ import annotations

import pytest
import torch
from factorization_machine_cases import FLOATS, SIZES, Call, make_call
from product_checks import check_bits, magnitudes

from rec_kernels import testing
from rec_kernels.reference import factorization_machine as reference

ops = torch.ops.rec_kernels


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("batch", [1, 37])
def test_matches_reference(size: tuple[int, int, int], shared: bool, batch: int) -> None:
    """Whole and partial registers, of columns and of factors."""
    check_bits(make_call(size, batch, shared), reference)


@pytest.mark.parametrize("batch", [64, 65, 64 * 64 + 70])
def test_many_samples(batch: int) -> None:
    """The gradient of a shared y has one chunk, two, and chunks of chunks."""
    check_bits(make_call((2, 3, 2), batch, True), reference)


def test_large_columns() -> None:
    """1024 columns, 200 factors, 300 vectors."""
    for size in ((2, 1024, 3), (3, 5, 200), (300, 4, 3)):
        check_bits(make_call(size, 2, True), reference)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_half_precision(dtype: torch.dtype, shared: bool) -> None:
    """Sums and intermediate results are float32; results are rounded once."""
    check_bits(make_call((5, 10, 6), 70, shared, dtype), reference)


def test_of_two_orders_one() -> None:
    """(x x^T) y in float64 differs from the result by at most rounding."""
    call = make_call((27, 64, 24), 70, False)
    x = call.x.double()
    square = x @ x.transpose(1, 2) @ call.y.double()
    testing.assert_same_sum(call.each(ops)[0], square, magnitudes(call)[0], 27 + 64 + 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_are_read_right(dtype: torch.dtype) -> None:
    """Samples with any stride are read, others copied; inputs are not written to."""
    call = make_call((5, 7, 3), 20, False, dtype)
    wide = call.map(lambda t: torch.randn(2 * len(t), *(2 * n for n in t.shape[1:])).to(dtype))
    before = [t.clone() for t in wide]
    rows = Call(*(t.flatten(1)[::2, 1 : 1 + a[0].numel()].view(a.shape) for t, a in zip(wide, call, strict=True)))
    assert not any(t.is_contiguous() for t in rows)
    strided = Call(wide.x[:20, ::2, ::2], wide.y[:20, ::2, 1::2], wide.grad[:20, ::2, ::2])
    shared = strided._replace(y=wide.y[0, ::2, ::2])
    expanded = call._replace(
        y=call.y[:1].expand(call.y.shape), grad=torch.ones((), dtype=dtype).expand(call.grad.shape)
    )
    for given in (rows, strided, shared, expanded):
        plain = given.map(torch.Tensor.contiguous)
        assert all(map(testing.same_bits, given.each(ops), plain.each(ops)))
    assert all(map(testing.same_bits, wide, before))


def test_products_that_underflow() -> None:
    """A product underflows to -0: the gradient of a sample's own y is no sum that starts at +0."""
    call = make_call((1, 1, 1), 2, False)
    call.x[:], call.y[:], call.grad[:] = 1e-20, 1.0, -1e-10
    expected = call.each(reference)
    assert torch.signbit(expected[2]).all()
    assert all(map(testing.same_bits, call.each(ops), expected))


def test_nan_stays_in_its_sample() -> None:
    """NaN stays in its sample, and reaches the factors that it is multiplied with."""
    call = make_call((3, 5, 4), 20, True)
    call.x[1, 2, 0] = torch.nan
    call.y[1, 3] = torch.nan
    bad = torch.zeros(20, 3, 4, dtype=torch.bool)
    bad[1], bad[:, :, 3] = True, True
    assert torch.equal(call.each(ops)[0].isnan(), bad)


def test_precision_is_the_gpus() -> None:
    """precision changes nothing on the CPU."""
    call = make_call((3, 4, 2), 3, True)
    assert all(map(testing.same_bits, call.each(ops, "tf32"), call.each(ops, "ieee")))
