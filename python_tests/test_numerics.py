"""The reference: its arithmetic against exact fractions, its orders of summation against independent loops."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rec_kernels.reference import embedding_bag as reference
from rec_kernels.reference import numerics
from rec_kernels.testing import assert_same_sum, jagged_batch, rounding_bound, same_bits

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Close to ties, where double rounding fails.
HARD = st.builds(
    lambda mantissa, exponent, sign: sign * math.ldexp(mantissa, exponent),
    st.integers(2**23, 2**24 - 1),
    st.integers(-149, 80),
    st.sampled_from([1, -1]),
)


def rounded(exact: Fraction) -> float:
    """The float32 nearest to a number, ties to even, computed without floating-point arithmetic."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    step = Fraction(2) ** (max(exponent, -126) - 23)
    whole, rest = divmod(size, step)
    whole += (rest * 2 > step) or (rest * 2 == step and whole % 2 == 1)
    value = whole * step
    if value >= Fraction(2) ** 128:
        return math.copysign(math.inf, exact)
    return math.copysign(float(value), exact)


def fma(a: float, b: float, c: float) -> float:
    """The reference's fused multiply-add of three numbers."""
    return numerics.fused_multiply_add(*(torch.tensor(x, dtype=torch.float32) for x in (a, b, c))).item()


@settings(max_examples=400)
@given(FLOATS | HARD, FLOATS | HARD, FLOATS | HARD)
def test_fused_multiply_add(a: float, b: float, c: float) -> None:
    """a * b + c is rounded once; an exact zero has the sign of IEEE 754."""
    found, exact = fma(a, b, c), Fraction(a) * Fraction(b) + Fraction(c)
    assert found == rounded(exact)
    if exact == 0:
        product = math.copysign(1, a) * math.copysign(1, b)
        negative = product < 0 and math.copysign(1, c) < 0 and (a == 0 or b == 0) and c == 0
        assert math.copysign(1, found) == (-1 if negative else 1)


@settings(max_examples=200)
@given(HARD, HARD, st.sampled_from([1, -1]), st.integers(-149, 127))
def test_fused_multiply_add_near_ties(a: float, b: float, sign: int, exponent: int) -> None:
    """A tiny addend decides a product's tie beyond float64's precision."""
    assert fma(a, b, sign * 2.0**exponent) == rounded(Fraction(a) * Fraction(b) + sign * Fraction(2) ** exponent)


def test_fused_multiply_add_rounds_once() -> None:
    """Known cases: double rounding of the product, double rounding by float64, special values."""
    x = 1 + 2.0**-12
    assert fma(x, x, -1 - 2.0**-11) == 2.0**-24
    assert fma(1 + 2.0**-23, 1 + 2.0**-23, 2.0**-100) == rounded(Fraction(1 + 2.0**-23) ** 2 + Fraction(2) ** -100)
    # 1 + 2^-24 is a tie; 2^-80 beyond it is lost in float64.
    assert fma(2.0**-24, 1 + 2.0**-23, 1.0) == 1 + 2.0**-23
    assert fma(1 + 2.0**-12, 2.0**-24 * (1 - 2.0**-12 + 2.0**-23), 1.0) == 1 + 2.0**-23
    assert math.isnan(fma(math.inf, 0.0, 1.0))
    assert fma(math.inf, 1.0, 1.0) == math.inf
    assert math.isnan(fma(math.inf, 1.0, -math.inf))
    assert fma(3e38, 2.0, -3e38) == float(np.float32(3e38))
    assert fma(2.0**-140, 0.5, 2.0**-149) == 2.0**-141 + 2.0**-149


@settings(max_examples=200)
@given(st.floats(min_value=0, width=32, allow_infinity=False))
def test_square_root(x: float) -> None:
    """The float32 nearest to the root: half a unit above and below enclose it."""
    root = numerics.square_root(torch.tensor(x, dtype=torch.float32)).item()
    below, above = (Fraction(float(np.nextafter(np.float32(root), np.float32(to)))) for to in (-math.inf, math.inf))
    low, high = (Fraction(root) + below) / 2, (Fraction(root) + above) / 2
    assert max(low, 0) ** 2 <= Fraction(x) <= high**2


def _lane_sum(partials: list[np.float32]) -> np.float32:
    """Sums the 128 partials in the documented order, element by element."""
    t = [
        (partials[4 * lane] + partials[4 * lane + 1]) + (partials[4 * lane + 2] + partials[4 * lane + 3])
        for lane in range(32)
    ]
    for distance in (16, 8, 4, 2, 1):
        t = [t[lane] + t[lane ^ distance] for lane in range(32)]
    return t[0]


@pytest.mark.parametrize("columns", [1, 3, 4, 15, 16, 17, 100, 127, 128, 129, 200, 256, 300])
def test_row_dot(columns: int) -> None:
    """128 partial sums, each a chain of fused multiply-adds, are summed in fours, then by the butterfly."""
    a, b = torch.randn(2, 3, columns) * torch.exp2(torch.randint(-20, 20, (2, 3, columns)))
    found = numerics.row_dot(a, b)
    for row in range(3):
        partials = []
        for p in range(128):
            s = 0.0
            for c in range(p, columns, 128):
                s = rounded(Fraction(a[row, c].item()) * Fraction(b[row, c].item()) + Fraction(s))
            partials.append(np.float32(s))
        assert found[row].item() == _lane_sum(partials)
    assert_same_sum(found, (a.double() * b.double()).sum(1), (a.double() * b.double()).abs().sum(1), terms=9)


def test_row_dot_depends_on_the_order() -> None:
    """The tests' data distinguish this order from plain summation."""
    a, b = torch.randn(2, 200, 128)
    assert not same_bits(numerics.row_dot(a, b), (a * b).sum(1))


@pytest.mark.parametrize("columns", [128, 130, 200, 256, 300])
def test_row_dot_of_underflows(columns: int) -> None:
    """A negative product that underflows leaves -0 in its partial, and no absent column turns it into +0."""
    a = torch.full((1, columns), 2.0**-100)
    assert math.copysign(1, numerics.row_dot(a, -a).item()) == -1


def _chunks(terms: list[Tensor]) -> Tensor:
    """Sums of 64 in order, and of these again, by an independent loop."""
    while len(terms) > 1:
        sums = []
        for start in range(0, len(terms), 64):
            total = terms[start]
            for t in terms[start + 1 : start + 64]:
                total = total + t
            sums.append(total)
        terms = sums
    return terms[0]


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 128, 129, 4096, 4097, 4161])
def test_chunked_sum(count: int) -> None:
    """Terms are summed in chunks of 64, and in chunks of chunk sums."""
    terms = torch.randn(count, 2) * torch.exp2(torch.randint(-12, 12, (count, 2)))
    found = numerics.chunked_sum(terms)
    assert same_bits(found, _chunks(list(terms)))
    assert same_bits(numerics.chunked_sum(terms, torch.ones(count)), found)


@pytest.mark.parametrize("count", [1, 3, 65, 200])
def test_chunked_sum_with_coefficients(count: int) -> None:
    """The first term of a chunk is multiplied, the others are fused; chunk sums are added without multiplication."""
    terms, factors = torch.randn(2, count)
    sums = []
    for start in range(0, count, 64):
        total = rounded(Fraction(factors[start].item()) * Fraction(terms[start].item()))
        for i in range(start + 1, min(start + 64, count)):
            total = rounded(Fraction(factors[i].item()) * Fraction(terms[i].item()) + Fraction(total))
        sums.append(torch.tensor([total]))
    assert same_bits(numerics.chunked_sum(terms[:, None], factors), _chunks(sums))


def test_long_runs_need_chunks() -> None:
    """The data of the hot-row tests distinguish chunks from one long chain."""
    terms = torch.randn(4097, 8)
    chain = terms[0]
    for t in terms[1:]:
        chain = chain + t
    assert not same_bits(numerics.chunked_sum(terms), chain)


def test_rowwise_adagrad_vector() -> None:
    """The worked example of docs/numerics.md."""
    weight, state = torch.tensor([[0.5, -0.25, 1.0, 0.0]]), torch.zeros(1)
    expected = [
        ([0.1, -0.2, 0.3, 0.4], 0.075, [0.46348515, -0.17697033, 0.8904555, -0.14605935]),
        ([-0.05, 0.0, 0.2, 0.1], 0.088125005, [0.4803282, -0.17697033, 0.82308334, -0.17974542]),
    ]
    for gradient, v, w in expected:
        reference.rowwise_adagrad_(weight, state, {0: torch.tensor(gradient)}, 0.1, 1e-8)
        assert state.item() == torch.tensor(v).item()
        assert torch.equal(weight[0], torch.tensor(w))


def test_rounding_bound() -> None:
    """u for one operation, nearly n u for n; at least the error of a sum that loses every term."""
    assert rounding_bound(1) == pytest.approx(2.0**-24, rel=1e-6)
    assert rounding_bound(1000) == pytest.approx(1000 * 2.0**-24, rel=1e-3)
    assert rounding_bound(1, torch.bfloat16) == pytest.approx(2.0**-8, rel=1e-2)
    total = torch.tensor(1.0)
    for _ in range(100):
        total = total + 2.0**-25  # lost
    exact = torch.tensor(1.0).double() + 100 * 2.0**-25
    assert_same_sum(total, exact, exact, terms=100)
    with pytest.raises(AssertionError, match="more than the rounding of 20 operations"):
        assert_same_sum(total, exact, exact, terms=20)
    with pytest.raises(AssertionError, match=r"must have the same shape, got \[\[0\], \[1\], \[1\]\]"):
        assert_same_sum(torch.zeros(0), torch.ones(1), torch.ones(1).double(), terms=3)
    infinite = torch.full((1,), torch.inf)
    assert_same_sum(infinite, infinite, torch.ones(1).double(), terms=3)
    with pytest.raises(AssertionError):
        assert_same_sum(infinite, -infinite, torch.ones(1).double(), terms=3)


def test_arguments_of_batches() -> None:
    """Invalid names and numbers are named in the error."""
    with pytest.raises(ValueError, match='ids must be "uniform" or "zipf", got \'zip\''):
        jagged_batch([10], 4, ids="zip")
    with pytest.raises(ValueError, match="num_embeddings must be at least 1 each, got 0"):
        jagged_batch([10, 0], 4)


def test_same_bits() -> None:
    """Zeros are compared more strictly than by torch.equal, NaN less."""
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert same_bits(nan, -nan)
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, nan)
    assert not same_bits(zero, torch.zeros(2))
    assert not same_bits(zero, zero.double())
    assert same_bits(torch.tensor([1, 2]), torch.tensor([1, 2]))
    sparse = torch.tensor([0.0, 2.0]).to_sparse()
    assert same_bits(sparse, sparse.clone())
    assert not same_bits(sparse, -sparse)
    assert not same_bits(sparse, sparse.to_dense())
    assert same_bits(torch.ones(1).to(torch.float8_e4m3fn), torch.ones(1).to(torch.float8_e4m3fn))
