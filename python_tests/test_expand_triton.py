"""The Triton kernel of expand: copies have the reference's bits, sums are within their rounding.

triton_device.py describes how the file is run.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from backends import PASSED
from hypothesis import strategies as st
from jagged_cases import INTEGERS, NOTHING_BAD
from test_expand import BAD_GRADIENTS, BAD_ROWS, DTYPES, numbers
from tiers import cross, drawn, full
from torch import Tensor
from triton_device import DEVICE

from rec_kernels import triton
from rec_kernels.reference import expand as reference
from rec_kernels.testing import assert_same_sum, same_bits

SIZES = [(5, 0, 3), (5, 9, 0), (1, 1, 1), (4, 70, 8), (9, 40, 130), (3, 5, 4099)]  # rows, samples, columns


def expand(x: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the kernel on copies of CPU tensors."""
    out, status = triton.expand(x.to(DEVICE), inverse.to(DEVICE))
    return out.cpu(), status.cpu()


def expand_backward(grad: Tensor, inverse: Tensor, rows: int) -> Tensor:
    return triton.expand_backward(grad.to(DEVICE), inverse.to(DEVICE), rows).cpu()


def check_expand(x: Tensor, inverse: Tensor) -> None:
    """Compares forward and backward with the reference."""
    out, status = expand(x, inverse)
    assert same_bits(out, reference.expand(x, inverse))
    assert status.tolist() == NOTHING_BAD
    grad = torch.randn(len(inverse), x.shape[1])
    found = expand_backward(grad, inverse, len(x))
    expected = reference.expand_backward(grad.double(), inverse, len(x))
    magnitude = reference.expand_backward(grad.abs().double(), inverse, len(x))
    assert found.dtype == torch.float32
    assert_same_sum(found, expected, magnitude.double() * (1 + 1e-3), terms=len(inverse) + 1)
    PASSED["triton"] += 2


@pytest.mark.parametrize(("dtype", "size"), cross(DTYPES, SIZES, (9, 40, 130)), ids=str)
def test_matches_reference(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, count, columns = size
    check_expand(numbers(rows, columns, dtype), torch.randint(rows, (count,)))


@pytest.mark.parametrize("dtype", [DTYPES[0], *full(DTYPES[1])], ids=str)
def test_many_samples_of_few_rows(dtype: torch.dtype) -> None:
    """Each row has 50 occurrences."""
    check_expand(numbers(2, 17, dtype), torch.randint(2, (100,)))


@drawn(
    15, st.integers(1, 8), st.integers(0, 70), st.integers(0, 40), st.sampled_from(DTYPES), st.sampled_from(INTEGERS)
)
def test_any_size(rows: int, count: int, columns: int, dtype: torch.dtype, integer: torch.dtype) -> None:
    check_expand(numbers(rows, columns, dtype), torch.randint(rows, (count,), dtype=integer))


def test_strided_inputs() -> None:
    check_expand(torch.randn(8, 12)[::2, 1::3], torch.tensor([3, 9, 0, 9, 2, 9, 3, 9])[::2])


@pytest.mark.parametrize("columns", [0, 9])
def test_numbers_out_of_range(columns: int) -> None:
    """Indices out of range give zeros and a status with the first and their number; their gradients are ignored."""
    x, grad = torch.randn(4, columns), torch.randn(7, columns)
    inverse, good = torch.tensor([3, 0, 4, -1, 2, 2**40, 1]), torch.tensor([0, 1, 4, 6])
    expected = torch.zeros(7, columns)
    expected[good] = x[inverse[good]]
    out, status = expand(x, inverse)
    assert same_bits(out, expected)
    assert status.tolist() == [2, 3]
    assert same_bits(expand_backward(grad, inverse, 4), expand_backward(grad[good], inverse[good], 4))


@pytest.mark.parametrize(("args", "message"), BAD_ROWS)
def test_bad_input(args: tuple, message: str) -> None:
    """Bad input raises as in the compiled op."""
    with pytest.raises(ValueError, match=message):
        triton.expand(*args)


@pytest.mark.parametrize(("args", "message"), BAD_GRADIENTS)
def test_bad_gradient(args: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton.expand_backward(*args)


def test_signatures_are_those_of_the_ops() -> None:
    for name in ("expand", "expand_backward"):
        arguments = getattr(torch.ops.rec_kernels, name).default._schema.arguments
        assert [a.name for a in arguments] == list(inspect.signature(getattr(triton, name)).parameters)
