"""jagged_index_select and jagged_windows: any kind of values, gradients, compilation, wrong totals.

test_<op>.py test each op's rows and errors.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from backends import device_backends, every_backend
from jagged_cases import check_tensors, make_batch
from torch import Tensor

import rec_kernels as rk
from rec_kernels.ops import jagged_copies
from rec_kernels.reference.jagged_index_select import jagged_index_select
from rec_kernels.reference.jagged_windows import jagged_windows
from rec_kernels.testing import assert_same_sum, same_bits

ops = torch.ops.rec_kernels
#: Rows with values 2 to 6 of seven, then values 0 and 1; the CPU's message for a wrong total.
TWO_ROWS = {
    "jagged_index_select": (torch.tensor([0, 2, 2, 7]), torch.tensor([2, 0]), "rows that index names"),
    "jagged_windows": (torch.tensor([2, 0]), torch.tensor([5, 2]), "windows"),
}
REFERENCES = {"jagged_index_select": jagged_index_select, "jagged_windows": jagged_windows}
every_op = pytest.mark.parametrize("op", TWO_ROWS)
every_shape = pytest.mark.parametrize("shape", [(), (9,)], ids=["[N]", "[N, 9]"])


def rows_of(op: str, rows: int) -> tuple[int, tuple[Tensor, Tensor]]:
    """Number of values, and rows of 0 to 19 of them, which overlap."""
    if op == "jagged_windows":
        return 49, (torch.randint(30, (rows,), dtype=torch.int32), torch.arange(rows) % 20)
    offsets = make_batch(1, 12, seed=1).offsets
    return int(offsets[-1]), (offsets, torch.randint(12, (rows,), dtype=torch.int32))


#: Dtypes of each size; only one size has two, since the kernels depend on the size only.
KINDS = [
    *itertools.product(
        (torch.bool, torch.int16, torch.int32, torch.float64, torch.complex128),
        ((), (0,), (1,), (3,), (4,), (17,), (4100,)),
    ),
    (torch.int8, (17,)),
    (torch.bfloat16, (17,)),
]


@every_op
@pytest.mark.parametrize(("dtype", "shape"), KINDS, ids=str)
def test_values_of_any_kind(op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Elements of 1 to 16 bytes, with rows aligned to any word."""
    count, where = rows_of(op, 5)
    values = torch.randint(-100, 100, (count, *shape)).to(dtype)
    for backend in every_backend():
        check_tensors(backend, getattr(backend.ops, op)(values, *where), REFERENCES[op](values, *where))


@every_op
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients(op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Gradients equal torch's; copies of a value are summed in float32."""
    count, where = rows_of(op, 200)
    mine = torch.randn(count, *shape).to(dtype).requires_grad_()
    out, _ = getattr(rk, op)(mine, *where)
    weight = torch.randn(out.shape).to(dtype)
    (out * weight).sum().backward()
    sources = REFERENCES[op](torch.arange(count), *where)[0]
    expected, magnitude = (torch.zeros(mine.shape, dtype=torch.float64) for _ in range(2))
    expected.index_add_(0, sources, weight.double())
    magnitude.index_add_(0, sources, weight.double().abs())
    assert mine.grad.dtype == dtype
    if dtype == torch.float32:
        assert_same_sum(mine.grad, expected, magnitude, terms=len(sources))
    else:
        torch.testing.assert_close(mine.grad, expected.to(dtype))


@every_op
@pytest.mark.parametrize("known", [False, True])
def test_compiled(op: str, known: bool) -> None:
    """One graph for known and for data-dependent totals."""

    def step(values, first, second, total):
        out, bounds = getattr(rk, op)(values * 2, first, second, total=total)
        return out.square().sum(), bounds

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (5, 12):
        (count, where), grads = rows_of(op, rows), []
        total = len(REFERENCES[op](torch.arange(count), *where)[0]) if known else None
        for function in (step, compiled):
            values = torch.linspace(-1, 2, count, requires_grad=True)
            loss, bounds = function(values, *where, total)
            loss.backward()
            grads.append((values.grad, bounds))
        assert all(map(same_bits, *grads))


@every_op
@every_shape
@pytest.mark.parametrize("total", [0, 1, 6, 8, 300])
def test_a_wrong_total(op: str, total: int, shape: tuple[int, ...]) -> None:
    """On a device, ids beyond the total are left out, and missing ones are zeros."""
    *where, rows = TWO_ROWS[op]
    values = torch.randint(1, 9, (7, *shape))
    with pytest.raises(ValueError, match=f"total = {total}, and the {rows} have 7 values"):
        getattr(ops, op)(values, *where, total)
    whole = torch.cat([values[2:], values[:2]])[:total]
    expected = torch.cat([whole, whole.new_zeros(total - len(whole), *shape)])
    for backend in device_backends():
        out, offsets, status = getattr(backend.ops, op)(values, *where, total)
        assert same_bits(out, expected), backend.name
        assert offsets.tolist() == [0, min(5, total), min(7, total)], backend.name
        assert status.tolist() == [2, 0], backend.name


@every_op
@pytest.mark.parametrize("total", [5, 9])
def test_the_gradient_with_a_wrong_total(op: str, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids left out get no gradient; the zeros after the last row give none."""
    ctx = SimpleNamespace(saved_tensors=TWO_ROWS[op][:2], shape=torch.Size([7]), dtype=torch.float32, total=total)
    for backend in device_backends():
        monkeypatch.setattr(jagged_copies, "_ops", backend.ops)
        found = jagged_copies.backward_of(op)(ctx, torch.arange(1.0, total + 1), None, None)[0]
        assert found.tolist() == [6.0 * (total > 5), 7.0 * (total > 5), 1, 2, 3, 4, 5], backend.name


@every_op
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_gradients_of_other_dtypes(op: str, dtype: torch.dtype) -> None:
    """Other dtypes are rejected: their gradients would be float32."""
    values, where = torch.ones(7, dtype=dtype), TWO_ROWS[op][:2]
    assert getattr(ops, op)(values, *where)[0].dtype == dtype
    with pytest.raises(ValueError, match="require a gradient, which only float32, float16 and bfloat16 support"):
        getattr(ops, op)(values.requires_grad_(), *where)
