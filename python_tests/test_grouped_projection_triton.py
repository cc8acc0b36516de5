"""grouped_projection in Triton against float64, within the bound of docs/numerics.md.

test_products_triton.py tests errors; triton_device.py describes how the file is run.
"""

from __future__ import annotations

import pytest
import torch
from backends import PASSED
from grouped_projection_cases import DIMS, LARGE, Call, Dims, make_call
from product_checks import check_tiles, on_device
from tiers import cross
from torch import Tensor
from triton_device import DEVICE

from rec_kernels.triton import grouped_projection as module


def check(call: Call) -> None:
    """All three ops differ from float64 by at most their bounds."""
    check_tiles([t.cpu() for t in on_device(call, DEVICE).each(module)], call)
    PASSED["triton"] += 3


@pytest.mark.parametrize(("batch", "dims"), cross([module.ROWS + 3, module.ROWS, 1], DIMS, DIMS[4]), ids=str)
def test_matches_float64(dims: Dims, batch: int) -> None:
    """Whole and partial tiles."""
    check(make_call(dims, batch))


@pytest.mark.full
def test_large_dimensions() -> None:
    """Many tiles of a matrix."""
    check(make_call(LARGE, 5))


def test_many_samples() -> None:
    """The weights' gradient is summed by several programs; the last has few samples."""
    check(make_call(Dims([3, 2], [2], [0, 0]), 2 * module.SUMMED_ROWS + 5))


def test_strided_inputs() -> None:
    """Non-contiguous arguments are read correctly."""
    call = make_call(DIMS[4], 20)
    x, weights, grad = (torch.randn(*(2 * n for n in t.shape)) for t in call[:3])
    check(Call(x[::2, ::2], weights[::2], grad[1::2, 1::2], call.dims))


def test_nothing_but_a_sample_meets_its_numbers() -> None:
    """NaN stays in its sample and block: elements past a tile's end are not multiplied by zero."""
    call = make_call(Dims([3, 2, 4], [4, 5, 4], [0, 1, 2]), 10)
    call.x[4, 1] = torch.nan
    out: Tensor = on_device(call, DEVICE).each(module)[0].cpu()
    bad = torch.zeros(10, 13, dtype=torch.bool)
    bad[4, :4] = True
    assert torch.equal(out.isnan(), bad)
