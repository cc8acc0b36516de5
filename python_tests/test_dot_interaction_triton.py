"""dot_interaction in Triton against float64, within the bounds of docs/numerics.md.

triton_device.py says how the file is run.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import PASSED
from dot_interaction_cases import BAD_CALLS, FLOATS, LONG, MANY, SIZES, Call, bad_arguments, make_call
from product_checks import check_refused, check_repeats, check_tiles
from tiers import cross
from torch import Tensor
from triton_device import DEVICE, INTERPRETED

from rec_kernels.testing import same_bits
from rec_kernels.triton import dot_interaction as module

KINDS, PRECISIONS = (list(itertools.product(of, [True, False])) for of in (FLOATS, ["ieee", "tf32"]))
#: F, D that take several tiles.
SEVERAL = [MANY, LONG, (2 * module.VECTORS, module.COLUMNS + 1)]


def on_device(call: Call) -> Call:
    """Makes the call on the device where the kernels run."""
    return call.map(lambda t: t.to(DEVICE))


def check(call: Call, precision: str = "ieee") -> None:
    """The result and both gradients: apart from float64 by at most the bound of each."""
    found = [t.cpu() for t in on_device(call).each(module, precision)]
    # A factor cut to TF32 is off by less than 2^-10 of itself, a product of two by twice that.
    check_tiles(found, call, cut=2.0**-9 if precision == "tf32" and call.dense.dtype == torch.float32 else 0.0)
    PASSED["triton"] += 3
    columns = call.dense.shape[1]
    assert same_bits(found[0][:, :columns], call.dense)


@pytest.mark.parametrize(("kind", "size"), cross(KINDS, SIZES, (4, 16)), ids=str)
def test_matches_float64(size: tuple[int, int], kind: tuple[torch.dtype, bool]) -> None:
    """Whole tiles and partial ones."""
    dtype, self_interaction = kind
    check(make_call(size, 3, self_interaction, dtype))


@pytest.mark.parametrize(("kind", "size"), cross(PRECISIONS, SEVERAL, LONG), ids=str)
def test_several_tiles(size: tuple[int, int], kind: tuple[str, bool]) -> None:
    """More vectors, or more columns, than a tile has."""
    precision, self_interaction = kind
    check(make_call(size, 2, self_interaction), precision)


def test_large_halves() -> None:
    """Twice the gradient of a vector with itself is more than float16 has, the result is not."""
    call = make_call((2, 16), 2, True, torch.float16)
    call.grad[:, 16:] = 40000.0
    check(Call(call.dense * 1e-3, call.sparse * 1e-3, call.grad, True))


def test_again() -> None:
    """A second call has equal bits; nothing is written to the arguments."""
    check_repeats(on_device(make_call((27, 64), 5, False)), module)


def test_strided_inputs() -> None:
    """Samples at any distance, and arguments that are copied."""
    call = make_call((4, 6), 10, True)
    wide = call.map(lambda t: torch.randn(len(t), *(2 * n for n in t.shape[1:])))
    check(Call(wide.dense[:, :6], wide.sparse[:, 4:, :6], wide.grad[:, : call.grad.shape[1]], True))
    check(Call(wide.dense[::2, ::2], wide.sparse[::2, ::2, ::2], wide.grad[::2, ::2], True))
    check(call._replace(grad=torch.ones(1, 1).expand(call.grad.shape)))


def test_without_samples() -> None:
    """Empty results."""
    call = on_device(make_call((4, 6), 0, False))
    out, *grads = call.each(module)
    assert out.shape == call.grad.shape
    assert [g.shape for g in grads] == [call.dense.shape, call.sparse.shape]


def test_nothing_but_its_pairs_meets_a_vector() -> None:
    """NaN stays in its sample and in the pairs of its vector."""
    call = make_call((3, 5), 4, False)
    call.sparse[1, 1, 2] = torch.nan
    out: Tensor = on_device(call).each(module)[0].cpu()
    bad = torch.zeros(out.shape, dtype=torch.bool)
    bad[1, [5 + 1, 5 + 2, 5 + 5]] = True  # pairs (2, 0), (2, 1), (3, 2)
    assert torch.equal(out.isnan(), bad)


@pytest.mark.parametrize(("op", "message"), BAD_CALLS)
def test_bad_arguments(op: str, message: str) -> None:
    """Errors have the words of the CPU's op."""
    _, bad = bad_arguments(op, message)
    check_refused(getattr(module, op), bad, message, DEVICE)


def test_registered() -> None:
    """GPU tensors reach these kernels."""
    for op in ("dot_interaction", "dot_interaction_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"rec_kernels::{op}", "CUDA")
    if not INTERPRETED:
        call = on_device(make_call((27, 64), 9, False))
        assert all(map(same_bits, call.each(torch.ops.rec_kernels), call.each(module)))
