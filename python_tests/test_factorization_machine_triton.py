"""factorization_machine in Triton against float64, within the bounds of docs/numerics.md.

test_products_triton.py tests errors; triton_device.py describes how the file is run.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from backends import PASSED
from factorization_machine_cases import FLOATS, SIZES, Call, make_call
from product_checks import check_tiles, on_device
from tiers import cross, full
from triton_device import DEVICE

from rec_kernels.triton import factorization_machine as module

KINDS = list(itertools.product(FLOATS, [True, False]))  # dtypes, and a shared y or one per sample


def check(call: Call, precision: str = "ieee") -> None:
    """The result and both gradients differ from float64 by at most their bounds."""
    found = [t.cpu() for t in on_device(call, DEVICE).each(module, precision)]
    check_tiles(found, call, precision)
    PASSED["triton"] += 3


@pytest.mark.parametrize(("kind", "size"), cross(KINDS, SIZES, (3, 10, 5)), ids=str)
def test_matches_float64(size: tuple[int, int, int], kind: tuple[torch.dtype, bool]) -> None:
    """Whole and partial tiles, one and several."""
    dtype, shared = kind
    check(make_call(size, 3, shared, dtype))


@pytest.mark.parametrize("value", [math.inf, math.nan, *full(-math.inf)], ids=str)
@pytest.mark.parametrize("changed", Call._fields)
@pytest.mark.parametrize("shared", [False, True])
def test_infinite_inputs(shared: bool, changed: str, value: float) -> None:
    """Inf and NaN reach the elements that they reach in the CPU's op: tiles are wider than D and K."""
    call = make_call((3, 10, 5), 2, shared).map(lambda t: torch.randint_like(t, 1, 4))
    getattr(call, changed).view(-1)[0] = value
    for mine, right in zip(on_device(call, DEVICE).each(module), call.each(torch.ops.rec_kernels), strict=True):
        torch.testing.assert_close(mine.cpu(), right, rtol=0, atol=0, equal_nan=True)
        PASSED["triton"] += 1


@pytest.mark.parametrize("shared", [False, True])
def test_tf32(shared: bool) -> None:
    """Results in TF32 are within its wider bound."""
    check(make_call((27, 64, 24), 3, shared), "tf32")


def test_many_samples() -> None:
    """The gradient of a shared y is summed by two programs; the last has few samples."""
    check(make_call((2, 3, 2), module.SUMMED_SAMPLES + 5, True))


def test_strided_inputs() -> None:
    """Samples with any stride are read, others copied."""
    call = make_call((4, 6, 3), 10, False)
    wide = call.map(lambda t: torch.randn(2 * len(t), *(2 * n for n in t.shape[1:])))
    rows = Call(*(t.flatten(1)[::2, 1 : 1 + a[0].numel()].view(a.shape) for t, a in zip(wide, call, strict=True)))
    check(rows)
    check(Call(wide.x[:10, ::2, ::2], wide.y[0, ::2, ::2], wide.grad[:10, ::2, 1::2]))
    check(call._replace(grad=torch.ones(()).expand(call.grad.shape)))
