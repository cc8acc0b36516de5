"""dot_interaction in Triton against float64, within the bounds of docs/numerics.md.

test_products_triton.py tests errors; triton_device.py describes how the file is run.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import PASSED
from dot_interaction_cases import FLOATS, LONG, MANY, SIZES, Call, make_call
from product_checks import check_tiles, on_device
from tiers import cross
from torch import Tensor
from triton_device import DEVICE

from rec_kernels.testing import same_bits
from rec_kernels.triton import dot_interaction as module

KINDS, PRECISIONS = (list(itertools.product(of, [True, False])) for of in (FLOATS, ["ieee", "tf32"]))
#: F, D that take several tiles.
SEVERAL = [MANY, LONG, (2 * module.VECTORS, module.COLUMNS + 1)]


def check(call: Call, precision: str = "ieee") -> None:
    """The result and both gradients differ from float64 by at most their bounds."""
    found = [t.cpu() for t in on_device(call, DEVICE).each(module, precision)]
    check_tiles(found, call, precision)
    PASSED["triton"] += 3
    columns = call.dense.shape[1]
    assert same_bits(found[0][:, :columns], call.dense)


@pytest.mark.parametrize(("kind", "size"), cross(KINDS, SIZES, (4, 16)), ids=str)
def test_matches_float64(size: tuple[int, int], kind: tuple[torch.dtype, bool]) -> None:
    """Whole and partial tiles."""
    dtype, self_interaction = kind
    check(make_call(size, 3, self_interaction, dtype))


@pytest.mark.parametrize(("kind", "size"), cross(PRECISIONS, SEVERAL, LONG), ids=str)
def test_several_tiles(size: tuple[int, int], kind: tuple[str, bool]) -> None:
    """Several tiles of vectors or columns."""
    precision, self_interaction = kind
    check(make_call(size, 2, self_interaction), precision)


def test_large_halves() -> None:
    """A vector's doubled gradient with itself may overflow float16 if the result does not."""
    call = make_call((2, 16), 2, True, torch.float16)
    call.grad[:, 16:] = 40000.0
    check(Call(call.dense * 1e-3, call.sparse * 1e-3, call.grad, True))


def test_strided_inputs() -> None:
    """Samples with any stride are read, others copied."""
    call = make_call((4, 6), 10, True)
    wide = call.map(lambda t: torch.randn(len(t), *(2 * n for n in t.shape[1:])))
    check(Call(wide.dense[:, :6], wide.sparse[:, 4:, :6], wide.grad[:, : call.grad.shape[1]], True))
    check(Call(wide.dense[::2, ::2], wide.sparse[::2, ::2, ::2], wide.grad[::2, ::2], True))
    check(call._replace(grad=torch.ones(1, 1).expand(call.grad.shape)))


def test_nothing_but_its_pairs_meets_a_vector() -> None:
    """NaN stays in its sample and in the pairs of its vector."""
    call = make_call((3, 5), 4, False)
    call.sparse[1, 1, 2] = torch.nan
    out: Tensor = on_device(call, DEVICE).each(module)[0].cpu()
    bad = torch.zeros(out.shape, dtype=torch.bool)
    bad[1, [5 + 1, 5 + 2, 5 + 5]] = True  # pairs (2, 0), (2, 1), (3, 2)
    assert torch.equal(out.isnan(), bad)
