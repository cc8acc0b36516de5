"""factorization_machine in Triton against float64, within the bounds of docs/numerics.md.

triton_device.py says how the file is run.
"""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from backends import PASSED
from factorization_machine_cases import (
    BAD_CALLS,
    FLOATS,
    SIZES,
    Call,
    bad_arguments,
    each_by_torch,
    magnitudes,
    make_call,
    most_terms,
)
from tiers import cross, full
from torch import Tensor
from triton_device import DEVICE, INTERPRETED

from rec_kernels.testing import same_bits
from rec_kernels.triton import factorization_machine as module

KINDS = list(itertools.product(FLOATS, [True, False]))  # dtypes, and a shared y or each its own
UNITS = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def on_device(call: Call) -> Call:
    """Makes the call on the device where the kernels run."""
    return call.map(lambda t: t.to(DEVICE))


def check(call: Call, precision: str = "ieee") -> None:
    """The result and both gradients: apart from float64 by at most the bound of each."""
    found = [t.cpu() for t in on_device(call).each(module, precision)]
    unit = UNITS[call.x.dtype]
    # Factors cut to TF32: four in a row, or of half-precision numbers only what is between the products.
    cut = 2.0**-8 if precision == "tf32" else 2.0**-10 if unit else 0.0
    compared = zip(found, each_by_torch(call), magnitudes(call), most_terms(call), strict=True)
    for mine, right, magnitude, terms in compared:
        assert mine.shape == right.shape
        assert mine.dtype == call.x.dtype
        assert mine.is_contiguous()
        allowed = ((terms + 16) * 2.0**-22 + cut) * magnitude
        allowed += unit * (right.abs() + allowed) + (2.0**-25 if mine.dtype == torch.float16 else 0.0)
        assert bool(((mine.double() - right).abs() <= allowed).all())
        PASSED["triton"] += 1


@pytest.mark.parametrize(("kind", "size"), cross(KINDS, SIZES, (3, 10, 5)), ids=str)
def test_matches_float64(size: tuple[int, int, int], kind: tuple[torch.dtype, bool]) -> None:
    """Whole tiles and partial ones, one and several."""
    dtype, shared = kind
    check(make_call(size, 3, shared, dtype))


@pytest.mark.parametrize("value", [math.inf, math.nan, *full(-math.inf)], ids=str)
@pytest.mark.parametrize("changed", Call._fields)
@pytest.mark.parametrize("shared", [False, True])
def test_infinite_inputs(shared: bool, changed: str, value: float) -> None:
    """Inf and NaN reach what the CPU's op has them in, and nothing else: tiles are wider than D and K."""
    call = make_call((3, 10, 5), 2, shared).map(lambda t: torch.randint_like(t, 1, 4))
    getattr(call, changed).view(-1)[0] = value
    for mine, right in zip(on_device(call).each(module), call.each(torch.ops.rec_kernels), strict=True):
        torch.testing.assert_close(mine.cpu(), right, rtol=0, atol=0, equal_nan=True)
        PASSED["triton"] += 1


@pytest.mark.parametrize("shared", [False, True])
def test_tf32(shared: bool) -> None:
    """Results in TF32 are within its wider bound."""
    check(make_call((27, 64, 24), 3, shared), "tf32")


def test_many_samples() -> None:
    """The gradient of a shared y is summed by two programs, the last of which has few samples."""
    check(make_call((2, 3, 2), module.SUMMED_SAMPLES + 5, True))


def test_again() -> None:
    """A second call has equal bits; nothing is written to the arguments."""
    call = on_device(make_call((27, 64, 16), 20, True))
    before = [t.clone() for t in call]
    assert all(map(same_bits, call.each(module), call.each(module)))
    assert all(map(same_bits, call, before))


def test_strided_inputs() -> None:
    """Samples at any distance, and arguments that are copied."""
    call = make_call((4, 6, 3), 10, False)
    wide = call.map(lambda t: torch.randn(2 * len(t), *(2 * n for n in t.shape[1:])))
    rows = Call(*(t.flatten(1)[::2, 1 : 1 + a[0].numel()].view(a.shape) for t, a in zip(wide, call, strict=True)))
    check(rows)
    check(Call(wide.x[:10, ::2, ::2], wide.y[0, ::2, ::2], wide.grad[:10, ::2, 1::2]))
    check(call._replace(grad=torch.ones(()).expand(call.grad.shape)))


def test_without_samples_or_vectors() -> None:
    """Empty results, and a gradient of zeros."""
    for size, batch in (((4, 6, 3), 0), ((0, 6, 3), 5)):
        for shared in (False, True):
            call = make_call(size, batch, shared)
            out, grad_x, grad_y = (t.cpu() for t in on_device(call).each(module))
            assert (out.shape, grad_x.shape) == (call.grad.shape, call.x.shape)
            assert same_bits(grad_y, torch.zeros_like(call.y))


@pytest.mark.parametrize(("op", "message"), BAD_CALLS)
def test_bad_arguments(op: str, message: str) -> None:
    """Errors have the words of the CPU's op."""
    good, bad = ([a.to(DEVICE) if isinstance(a, Tensor) else a for a in given] for given in bad_arguments(op, message))
    getattr(module, op)(*good)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        getattr(module, op)(*bad)


def test_registered() -> None:
    """GPU tensors reach these kernels."""
    for op in ("factorization_machine", "factorization_machine_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"rec_kernels::{op}", "CUDA")
    if not INTERPRETED:
        call = on_device(make_call((27, 64, 16), 9, True))
        assert all(map(same_bits, call.each(torch.ops.rec_kernels), call.each(module)))
