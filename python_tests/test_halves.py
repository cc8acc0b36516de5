"""Half-precision conversions, exhaustively: every code, and every float32 at, next to and halfway between codes.

Hardware instructions (F16C on the CPU, PTX's cvt on a GPU) and integer arithmetic (the baseline instruction set, the
emulated kernels) have equal bits.
"""

from __future__ import annotations

import torch
from backends import every_backend
from torch import Tensor

from rec_kernels import testing
from rec_kernels.reference import row_formats as reference

CODES = torch.arange(2**16).to(torch.uint16)
NAN = 0x7E00
COLUMNS = 1024


def numbers() -> Tensor:
    """[N, COLUMNS] float32: finite halves, midpoints and their neighbours, overflows, of both signs."""
    half = CODES[:0x7C00].view(torch.float16).float()
    following = torch.cat([half[1:], torch.tensor([65536.0])])
    middle = (half + following) / 2
    beyond = torch.tensor([2.0**-149, 2.0**-126, 65536.0, 1e38, torch.inf, torch.nan])
    positive = torch.cat([half, torch.nextafter(middle, half), middle, torch.nextafter(middle, following), beyond])
    x = torch.cat([positive, -positive])
    return torch.cat([x, x[: -len(x) % COLUMNS]]).view(-1, COLUMNS)


def test_every_code_is_read() -> None:
    rows = CODES.view(torch.uint8).view(64, 2 * COLUMNS)
    expected = CODES.view(torch.float16).float().view(64, COLUMNS)
    for backend in every_backend():
        found = backend.ops.dequantize_rows(rows, "fp16", COLUMNS, torch.float32)
        assert testing.same_bits(found, expected), backend.name


def test_every_half_is_rounded_to() -> None:
    x = numbers()
    expected = torch.where(x.isnan(), NAN, x.half().view(torch.int16)).short()
    for backend in every_backend():
        rows, _ = backend.ops.quantize_rows(x, "fp16")
        assert torch.equal(rows.view(torch.int16), expected), backend.name


def test_grids_are_rounded_outwards() -> None:
    """int4 rows with stochastic rounding store a half at or below the minimum, and one at or above the step."""
    x = numbers()
    low = x[x.isfinite()][::17]
    low = low[low.abs() <= 65504]
    rows = torch.stack([low, (low + low.abs() / 3).clamp(max=65504)], 1)  # steps of all sizes, mostly not representable
    expected = reference.quantize_rows(rows, "int4", rounding="stochastic", seed=1)
    for backend in every_backend():
        found, _ = backend.ops.quantize_rows(rows, "int4", "stochastic", seed=torch.tensor(1), step=torch.tensor(0))
        assert torch.equal(found, expected), backend.name
