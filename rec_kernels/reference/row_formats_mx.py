"""Block formats with a shared power-of-two scale per block: shared microexponents and the OCP microscaling formats.

Sources: B. Darvish Rouhani et al., "With Shared Microexponents, A Little Shifting Goes a Long Way", ISCA 2023; Open
Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .row_formats_bits import EXPONENT_BIAS, NOT_FINITE, exponent_field, pack, power_of_two, to_grid, unpack

SHARED_BLOCK = 16
PAIRS = 8
OCP_BLOCK = 32
LOWEST_STEP = -126


class Element(NamedTuple):
    """An OCP element type: field widths, exponent bias, largest finite value."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    twos_complement: bool = False

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def largest_exponent(self) -> int:
        """emax: exponent of the largest finite value."""
        return int(np.frexp(self.largest)[1]) - 1


ELEMENTS = {
    "mxfp8_e4m3": Element(4, 3, 7, 448.0),
    "mxfp8_e5m2": Element(5, 2, 15, 57344.0),
    "mxfp6_e3m2": Element(3, 2, 3, 28.0),
    "mxfp6_e2m3": Element(2, 3, 1, 7.5),
    "mxfp4_e2m1": Element(2, 1, 1, 6.0),
    # Up to 127, the magnitudes k / 64 equal those of a float with one exponent bit.
    "mxint8": Element(1, 6, 1, 127 / 64, twos_complement=True),
}


def blocks(x: np.ndarray, size: int) -> np.ndarray:
    """[N, D] -> [N, ceil(D / size), size], zero padded."""
    rows, columns = x.shape
    count = -(-columns // size)
    return np.pad(x, ((0, 0), (0, count * size - columns))).reshape(rows, count, size)


def quantize_shared(x: np.ndarray, bits: int, words: np.ndarray | None, scale_rule: str) -> np.ndarray:
    """float32 [N, D] -> uint8 [N, bytes] in shared microexponents with magnitudes of 7, 4 or 2 bits."""
    x, words = blocks(x, SHARED_BLOCK), None if words is None else blocks(words, SHARED_BLOCK)
    invalid = ~np.isfinite(x).all(-1, keepdims=True)
    magnitude = np.where(invalid, 0, np.abs(x))
    pair_max = magnitude.reshape(*x.shape[:2], PAIRS, 2).max(-1)
    pair = exponent_field(pair_max)
    if scale_rule == "rceil":
        largest = np.float32(2**bits - 1) * power_of_two(pair - EXPONENT_BIAS + 1 - bits)
        pair = np.minimum(pair + (pair_max > largest), NOT_FINITE - 1)
    shared = pair.max(-1, keepdims=True)
    down = np.minimum(shared - pair, 1)
    down, step = _shared_step(shared, down, bits)
    codes = np.minimum(to_grid(magnitude / step, words), 2**bits - 1).astype(np.int64)
    sign = np.signbit(x) & ~invalid
    shared = np.where(invalid, NOT_FINITE, shared)
    planes = [codes | sign << 7] if bits == 7 else [codes, sign]
    widths = [8] if bits == 7 else [bits, 1]
    return _join([*planes, shared, down], [*widths, 8, 1])


def dequantize_shared(rows: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """uint8 [N, bytes] -> float32 [N, D]: sign * magnitude * step, NaN in a block whose exponent is 255."""
    count = -(-columns // SHARED_BLOCK)
    widths = [8] if bits == 7 else [bits, 1]
    *planes, shared, down = _split(rows, count, [*widths, 8, 1], [SHARED_BLOCK] * len(widths) + [1, PAIRS])
    codes, sign = (planes[0] & 127, planes[0] >> 7) if bits == 7 else planes
    finite = np.where(shared == NOT_FINITE, 0, shared)
    value = codes.astype(np.float32) * _shared_step(finite, down, bits)[1]
    value = np.where(shared == NOT_FINITE, np.float32(np.nan), np.where(sign == 1, -value, value))
    return value.reshape(len(rows), count * SHARED_BLOCK)[:, :columns]


def _shared_step(shared: np.ndarray, down: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Exponents [N, nb, 1], microexponents [N, nb, 8] -> effective microexponents [N, nb, 8], steps [N, nb, 16]."""
    exponent = shared - EXPONENT_BIAS - down + 1 - bits
    down = np.where(exponent < LOWEST_STEP, 0, down)
    return down, power_of_two(np.maximum(exponent, LOWEST_STEP)).repeat(2, axis=-1)


def quantize_ocp(x: np.ndarray, element: Element, words: np.ndarray | None, scale_rule: str) -> np.ndarray:
    """float32 [N, D] -> uint8 [N, bytes] in an OCP microscaling format."""
    x, words = blocks(x, OCP_BLOCK), None if words is None else blocks(words, OCP_BLOCK)
    invalid = ~np.isfinite(x).all(-1, keepdims=True)
    x = np.where(invalid, 0, x)
    scale = scale_byte(np.abs(x).max(-1, keepdims=True), element, scale_rule)
    codes = element_codes(x / power_of_two(scale - EXPONENT_BIAS), element, words)
    scale = np.where(invalid, NOT_FINITE, scale)
    if element.bits == 6:
        return _join([codes & 15, codes >> 4, scale], [4, 2, 8])
    return _join([codes, scale], [element.bits, 8])


def dequantize_ocp(rows: np.ndarray, element: Element, columns: int) -> np.ndarray:
    """uint8 [N, bytes] -> float32 [N, D]: element * 2^(scale - 127), NaN in a block whose scale is 255."""
    count = -(-columns // OCP_BLOCK)
    widths = [4, 2] if element.bits == 6 else [element.bits]
    *planes, scale = _split(rows, count, [*widths, 8], [OCP_BLOCK] * len(widths) + [1])
    codes = planes[0] | planes[1] << 4 if element.bits == 6 else planes[0]
    power = power_of_two(np.minimum(scale, NOT_FINITE - 1) - EXPONENT_BIAS)
    with np.errstate(over="ignore"):
        value = np.where(scale == NOT_FINITE, np.float32(np.nan), element_values(element)[codes] * power)
    return value.reshape(len(rows), count * OCP_BLOCK)[:, :columns]


def scale_byte(largest: np.ndarray, element: Element, scale_rule: str) -> np.ndarray:
    """float32 largest magnitudes of blocks -> int64 E8M0 scales in [0, 254 - emax]: no element then decodes to Inf."""
    most = NOT_FINITE - 1 - element.largest_exponent
    if scale_rule == "floor":
        return np.clip(exponent_field(largest) - element.largest_exponent, 0, most)
    ratio = largest * (np.float32(1) / np.float32(element.largest))
    # The smallest scale, 2^-127, is subnormal: its mantissa is nonzero although it is exact.
    exact = np.where(exponent_field(ratio) > 0, 0, 1 << 22)
    return np.minimum(exponent_field(ratio) + ((ratio.view(np.uint32) & 0x7FFFFF) > exact), most)


def element_codes(v: np.ndarray, element: Element, words: np.ndarray | None) -> np.ndarray:
    """float32 v, already divided by the scale -> int64 codes, same shape; saturating."""
    lowest = 1 - element.bias
    exponent = np.maximum(np.frexp(v)[1] - 1, lowest)
    step = power_of_two(exponent - element.mantissa_bits)
    rounded = np.minimum(to_grid(np.abs(v) / step, words) * step, np.float32(element.largest))
    magnitudes = element_values(element)[: 1 << (element.bits - 1)]
    finite = magnitudes[: np.searchsorted(magnitudes, element.largest) + 1]
    codes = np.searchsorted(finite, rounded)
    if element.twos_complement:
        return np.where(np.signbit(v), -codes, codes) & 0xFF
    return codes | np.signbit(v).astype(np.int64) << (element.bits - 1)


def element_values(element: Element) -> np.ndarray:
    """Value of each code, float32 [2^bits], for E4M3 and E5M2 with the NaN and Inf of torch's float8 types."""
    if element.twos_complement:
        return np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32) / np.float32(64)
    code = np.arange(1 << (element.bits - 1))
    field, mantissa = code >> element.mantissa_bits, code & ((1 << element.mantissa_bits) - 1)
    significand = mantissa + np.where(field > 0, 1 << element.mantissa_bits, 0)
    value = np.ldexp(significand.astype(np.float32), np.maximum(field, 1) - element.bias - element.mantissa_bits)
    if element is ELEMENTS["mxfp8_e4m3"]:
        value[-1] = np.nan
    if element is ELEMENTS["mxfp8_e5m2"]:
        value[-4:] = [np.inf, np.nan, np.nan, np.nan]
    return np.concatenate([value, -value])


def _join(planes: list[np.ndarray], widths: list[int]) -> np.ndarray:
    """Planes [N, nb, codes per block] -> uint8 [N, bytes], each plane spanning the whole row."""
    rows = len(planes[0])
    return np.concatenate(
        [pack(p.reshape(rows, p.shape[1] * p.shape[2]), w) for p, w in zip(planes, widths, strict=True)], axis=1
    )


def _split(rows: np.ndarray, count: int, widths: list[int], block_codes: list[int]) -> list[np.ndarray]:
    """Inverse of ``_join``: int64 [N, count, codes per block] of each plane."""
    ends = np.cumsum([count * n * w // 8 for n, w in zip(block_codes, widths, strict=True)])
    parts = np.split(rows, ends[:-1], axis=1)
    return [
        unpack(part, w, count * n).reshape(len(rows), count, n)
        for part, n, w in zip(parts, block_codes, widths, strict=True)
    ]
