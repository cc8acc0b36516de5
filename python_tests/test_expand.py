"""expand and its backward: reference, gradients, odd sizes, bad input."""

from __future__ import annotations

import pytest
import torch
from backends import device_backends, every_backend
from hypothesis import given
from hypothesis import strategies as st
from jagged_cases import INT64_MAX, INTEGERS, NOTHING_BAD

import rec_kernels as rk
from rec_kernels.reference import expand as reference
from rec_kernels.testing import assert_same_sum, same_bits, use_threads

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int32, torch.int64]
ops = torch.ops.rec_kernels


def numbers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values [rows, columns] of a dtype."""
    if dtype.is_floating_point:
        return torch.randn(rows, columns).to(dtype)
    return torch.randint(-(2**30), 2**30, (rows, columns), dtype=dtype)


def check_expand(x: torch.Tensor, inverse: torch.Tensor) -> None:
    """Compares forward and backward with the reference, bit for bit, on every backend."""
    grad = torch.randn(len(inverse), x.shape[1])
    expected = reference.expand(x, inverse), reference.expand_backward(grad, inverse, len(x))
    for backend in every_backend():
        out, status = backend.ops.expand(x, inverse)
        assert same_bits(out, expected[0]), backend.name
        assert status.tolist() == NOTHING_BAD
        assert same_bits(backend.ops.expand_backward(grad, inverse, len(x)), expected[1]), backend.name


@pytest.mark.parametrize("size", [(5, 0, 3), (5, 9, 0), (1, 1, 1), (4, 7, 2), (3, 8, 3), (6, 300, 17), (9, 40, 130)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Rows are aligned to words of any size."""
    rows, count, columns = size
    check_expand(numbers(rows, columns, dtype), torch.randint(rows, (count,)))


@pytest.mark.parametrize("columns", [1, 3, 64, 600, 4099])
def test_a_row_that_many_name(columns: int) -> None:
    """A frequent row has sums of more than 64 chunks of 64 terms."""
    inverse = torch.randint(3, (64 * 64 + 70 if columns < 100 else 200,), dtype=torch.int32)
    inverse[torch.rand(len(inverse)) < 0.99] = 1
    check_expand(numbers(3, columns, torch.float32), inverse)


@given(st.integers(1, 8), st.integers(0, 150), st.integers(0, 40), st.sampled_from(DTYPES), st.sampled_from(INTEGERS))
def test_any_size(rows: int, count: int, columns: int, dtype: torch.dtype, integer: torch.dtype) -> None:
    check_expand(numbers(rows, columns, dtype), torch.randint(rows, (count,), dtype=integer))


def test_no_rows() -> None:
    check_expand(torch.randn(0, 4), torch.zeros(0, dtype=torch.int64))


def test_strided_and_unaligned_inputs() -> None:
    """Inputs may be strided and may start at an odd address."""
    x, inverse = torch.randn(8, 12)[::2, 1::3], torch.tensor([3, 9, 0, 9, 2, 9, 3, 9])[::2]
    check_expand(x, inverse)
    check_expand(torch.randn(6 * 8 + 1)[1:].view(6, 8), torch.tensor([5, 0, 5]))
    assert same_bits(rk.expand(x, inverse), x[inverse])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    """The gradient equals torch's in float64: a float32 sum, rounded once."""
    x, inverse, weight = torch.randn(5, 33), torch.randint(5, (3, 100)), torch.randn(3, 100, 33)
    mine = x.to(dtype).requires_grad_()
    (rk.expand(mine, inverse) * weight.to(dtype)).sum().backward()
    wide, magnitude = (torch.zeros(5, 33, dtype=torch.float64) for _ in range(2))
    terms = weight.to(dtype).double().view(-1, 33)
    wide.index_add_(0, inverse.view(-1), terms)
    magnitude.index_add_(0, inverse.view(-1), terms.abs())
    assert mine.grad.dtype == dtype
    if dtype == torch.float32:
        assert_same_sum(mine.grad, wide, magnitude, terms=300)
    else:
        torch.testing.assert_close(mine.grad, wide.to(dtype))


def test_shapes() -> None:
    """inverse and rows may have any shape."""
    x, inverse = torch.randn(5, 2, 3, requires_grad=True), torch.tensor([[4, 0], [1, 4], [2, 2]])
    out = rk.expand(x, inverse)
    assert same_bits(out.detach(), x.detach()[inverse])
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * torch.tensor([1.0, 1, 2, 0, 2])[:, None, None])
    assert rk.expand(torch.randn(5), inverse).shape == (3, 2)
    assert rk.expand(torch.randn(5, 0), inverse).shape == (3, 2, 0)
    assert rk.expand(torch.randn(5, 3), torch.zeros(0, 4, dtype=torch.int32)).shape == (0, 4, 3)


def test_integers_have_no_gradient() -> None:
    out = rk.expand(torch.arange(4)[:, None], torch.tensor([3, 3]))
    assert not out.requires_grad
    assert out.tolist() == [[3], [3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(dtype: torch.dtype) -> None:
    """One graph has eager's bits."""

    def step(x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return rk.expand(x * 2, inverse).float().square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for count in (7, 70):
        x, inverse, grads = torch.randn(6, 5).to(dtype), torch.randint(6, (count,)), []
        for function in (step, compiled):
            given_ = x.clone().requires_grad_()
            function(given_, inverse).backward()
            grads.append(given_.grad)
        assert same_bits(*grads)


def test_numbers_out_of_range() -> None:
    """Indices out of range raise on the CPU; a device returns zeros, and a status with the first and their number."""
    x, inverse = torch.randn(4, 9), torch.tensor([3, 0, 4, -1, 2, 2**40, 1])
    with pytest.raises(IndexError, match=r"inverse\[2\] = 4"):
        ops.expand(x, inverse)
    with pytest.raises(IndexError, match=r"inverse\[2\] = 4"):
        ops.expand_backward(torch.randn(7, 9), inverse, 4)
    good = torch.tensor([0, 1, 4, 6])
    for columns in (9, 8, 0):
        x, grad = torch.randn(4, columns), torch.randn(7, columns)
        expected = torch.zeros(7, columns)
        expected[good] = x[inverse[good]]
        for backend in device_backends():
            out, status = backend.ops.expand(x, inverse)
            assert same_bits(out, expected), backend.name
            assert status.tolist() == [2, 3], backend.name
            found = backend.ops.expand_backward(grad, inverse, 4)
            assert same_bits(found, reference.expand_backward(grad[good], inverse[good], 4)), backend.name
    for backend in device_backends():
        out, status = backend.ops.expand(torch.randn(0, 3), torch.zeros(2, dtype=torch.int32))
        assert not out.any()
        assert status.tolist() == [0, 2]
        assert backend.ops.expand(x, inverse[:2])[1].tolist() == [INT64_MAX, 0]


ROWS, INVERSE = torch.ones(3, 2), torch.zeros(4, dtype=torch.int64)


BAD_ROWS = [
    ((torch.ones(3), INVERSE), r"x must have 2 dimension\(s\), got shape \[3\]"),
    ((ROWS.double(), INVERSE), "x must be float32, float16, bfloat16, int32 or int64, got float64"),
    ((ROWS, INVERSE[None]), r"inverse must have 1 dimension\(s\), got shape \[1, 4\]"),
    ((ROWS, INVERSE.short()), "inverse must be int32 or int64, got int16"),
    ((ROWS, INVERSE.to("meta")), "must be on the same device"),
]


@pytest.mark.parametrize(("args", "message"), BAD_ROWS)
def test_bad_input(args: tuple, message: str) -> None:
    """The message names the argument and what is allowed."""
    with pytest.raises(ValueError, match=message):
        ops.expand(*args)


BAD_GRADIENTS = [
    ((torch.ones(4), INVERSE, 3), r"grad must have 2 dimension\(s\), got shape \[4\]"),
    ((torch.ones(4, 2).half(), INVERSE, 3), "grad must be float32, got float16"),
    ((torch.ones(5, 2), INVERSE, 3), r"inverse must have shape \[5\], got \[4\]"),
    ((torch.ones(4, 2), INVERSE.float(), 3), "inverse must be int32 or int64, got float32"),
    ((torch.ones(4, 2), INVERSE, -1), "rows = -1 must be 0 or more"),
    ((torch.ones(4, 2), INVERSE.to("meta"), 3), "must be on the same device"),
]


@pytest.mark.parametrize(("args", "message"), BAD_GRADIENTS)
def test_bad_gradient(args: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.expand_backward(*args)


def test_x_without_dimensions() -> None:
    with pytest.raises(ValueError, match="got a tensor without dimensions"):
        rk.expand(torch.tensor(1.0), INVERSE)


@pytest.mark.parametrize("rows", [1, 3, 1000, 200_000])
@pytest.mark.parametrize("order", ["random", "rising", "one row"])
def test_numbers_that_several_threads_sort(rows: int, order: str) -> None:
    """Sums of integers are exact in any order of threads."""
    count = 150_000
    inverse = {"random": torch.randint(rows, (count,)), "one row": torch.full((count,), rows - 1)}
    inverse["rising"] = inverse["random"].sort().values
    grad = torch.randint(-4, 5, (count, 2)).float()
    expected = torch.zeros(rows, 2).index_add_(0, inverse[order], grad)
    for threads in (1, 2, 3):
        for dtype in (torch.int64, torch.int32):
            with use_threads(threads):
                assert torch.equal(ops.expand_backward(grad, inverse[order].to(dtype), rows), expected)
