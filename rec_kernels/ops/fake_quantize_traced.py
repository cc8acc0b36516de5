"""fake_quantize with rounding "nearest" in torch ops, which torch.compile fuses with their neighbours.

docs/numerics.md ("Row formats") has the formulas. Codes are decoded at once, never packed. Powers of two are built from
their bits. Divisions are once per row, in float64 and rounded to float32, which gives the correctly rounded quotient
however the compiler implements division. Values are rounded by integer arithmetic on their bits, because a compiler may
eliminate a conversion to a narrow dtype and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LARGEST_HALF = 65504.0


class _Element(NamedTuple):
    """An element type of the OCP microscaling (MX) formats."""

    bias: int
    mantissa_bits: int
    largest_exponent: int
    largest: float


_SHARED_MAGNITUDE_BITS = {"mx9": 7, "mx6": 4, "mx4": 2}
_ELEMENTS = {
    "mxfp8_e4m3": _Element(7, 3, 8, 448.0),
    "mxfp8_e5m2": _Element(15, 2, 15, 57344.0),
    "mxfp6_e3m2": _Element(3, 2, 4, 28.0),
    "mxfp6_e2m3": _Element(1, 3, 2, 7.5),
    "mxfp4_e2m1": _Element(1, 1, 2, 6.0),
    "mxint8": _Element(1, 6, 0, 127 / 64),
}


def fake_quantize_rows(x: Tensor, format: str, round_up: bool) -> Tensor:
    """Quantizes rows to the nearest value of a row format and dequantizes them.

    Args:
        x: [N, D] float32.
        format: a row format.
        round_up: whether block formats use scale rule "rceil" instead of "floor".

    Returns:
        A new float32 [N, D] with the bits of the op; int8, int4 and int2 are within one rounding.
    """
    if format == "fp32":
        return x.clone()
    if format == "fp16":
        return _half(x)
    if format == "bf16":
        return _bfloat16(x)
    if format in _SHARED_MAGNITUDE_BITS:
        bits = _SHARED_MAGNITUDE_BITS[format]
        return _in_blocks(x, 16, lambda blocks: _shared_microexponents(blocks, bits, round_up))
    if format in _ELEMENTS:
        return _in_blocks(x, 32, lambda blocks: _microscaling(blocks, _ELEMENTS[format], round_up))
    return _affine(x, int(format.removeprefix("int")))


def _magnitude(x: Tensor) -> Tensor:
    """The bits of |x|, int32."""
    return x.view(torch.int32) & 0x7FFFFFFF


def _exponent_field(x: Tensor) -> Tensor:
    return _magnitude(x) >> 23


def _power_of_two(exponent: Tensor) -> Tensor:
    """int32 in [-149, 127] -> float32."""
    denormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 22)
    return torch.where(exponent < -126, denormal, (exponent + 127) << 23).view(torch.float32)


def _bfloat16(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def _half(x: Tensor) -> Tensor:
    exponent = _exponent_field(x).clamp(113, 254) - 127 - 10
    rounded = (x * _power_of_two(-exponent)).round() * _power_of_two(exponent)
    beyond = torch.copysign(torch.full_like(x, math.inf), x)
    return torch.where(x.isfinite(), torch.where(rounded.abs() > _LARGEST_HALF, beyond, rounded), x)


def _quotient(a: Any, b: Any) -> Tensor:
    a, b = (v.double() if isinstance(v, Tensor) else v for v in (a, b))  # one of them may be a number
    return (a / b).float()


def _affine(x: Tensor, bits: int) -> Tensor:
    low, high, most = x.amin(1, keepdim=True), x.amax(1, keepdim=True), 2**bits - 1
    if bits == 8:
        bias, scale = low, _quotient(high - low, most)
        inverse = _quotient(most, (high - low) + 1e-8)
    else:
        bias = _half(low)
        scale = _half(_quotient(high - bias, most))
        scale = torch.where(scale == 0, 1.0, scale)
        inverse = _quotient(1.0, scale)
    codes = ((x - bias) * inverse).round().clamp(0, most).abs()  # a code has no -0
    good = low.isfinite() & high.isfinite() & scale.isfinite() & bias.isfinite()
    return torch.where(good, torch.addcmul(bias, codes, scale), math.nan)


def _in_blocks(x: Tensor, size: int, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    columns = x.shape[1]
    behind = -columns % size
    if behind:
        x = torch.nn.functional.pad(x, (0, behind))
    result = quantize(x.unflatten(1, ((columns + behind) // size, size))).flatten(1)
    # A view, also in the end: Inductor's CPU code for a copy of it leaves columns out (torch 2.13).
    return result[:, :columns] if behind else result


def _shared_microexponents(x: Tensor, bits: int, round_up: bool) -> Tensor:
    """[N, blocks, 16]."""
    pairs = x.abs().unflatten(2, (8, 2)).amax(3)
    exponent = _exponent_field(pairs)
    finite = exponent.amax(2, keepdim=True) < 255
    if round_up:
        largest = (2**bits - 1) * _power_of_two(exponent - 126 - bits)
        exponent = (exponent + (pairs > largest)).clamp_max(254)
    shared = exponent.amax(2, keepdim=True)
    step = (shared - 126 - bits - (shared - exponent).clamp_max(1)).clamp_min(-126)
    step = step[..., None].expand(*pairs.shape, 2).flatten(2)
    value = (x.abs() * _power_of_two(-step)).round().clamp_max(2**bits - 1) * _power_of_two(step)
    return torch.where(finite, torch.copysign(value, x), math.nan)


def _microscaling(x: Tensor, element: _Element, round_up: bool) -> Tensor:
    """[N, blocks, 32]."""
    largest = x.abs().amax(2, keepdim=True)
    if round_up:
        bits = _magnitude(largest * torch.tensor(1 / element.largest, dtype=torch.float32, device="cpu").item())
        # The smallest scale, 2^-127, is a denormal: its mantissa is not 0 although nothing is to be rounded up.
        exact = torch.where(bits < 1 << 23, 1 << 22, 0)
        scale = (bits >> 23) + ((bits & 0x7FFFFF) > exact)
    else:
        scale = _exponent_field(largest) - element.largest_exponent
    scale = scale.clamp(0, 254 - element.largest_exponent) - 127
    v = x.abs() * _power_of_two(-scale)
    step = (_exponent_field(v) - 127).clamp_min(1 - element.bias) - element.mantissa_bits
    value = ((v * _power_of_two(-step)).round() * _power_of_two(step)).clamp_max(element.largest)
    value = value * _power_of_two(scale)
    signed = torch.copysign(value, x)
    if element is _ELEMENTS["mxint8"]:  # two's complement has no -0
        signed = torch.where(value == 0, value, signed)
    return torch.where(largest.isfinite(), signed, math.nan)
