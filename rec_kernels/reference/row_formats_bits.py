"""Bit-level helpers of the row formats: packed code planes, rounding to a grid, 16-bit floats."""

from __future__ import annotations

import numpy as np

# The fields of a float32.
MANTISSA_BITS = 23
EXPONENT_BIAS = 127
NOT_FINITE = 255


def exponent_field(x: np.ndarray) -> np.ndarray:
    """float32 -> int64, same shape: bits 23 to 30; 0 for zeros and subnormals, 255 for NaN and Inf."""
    return (x.view(np.uint32) >> MANTISSA_BITS & 0xFF).astype(np.int64)


def power_of_two(exponent: np.ndarray) -> np.ndarray:
    """Integers in [-149, 127] -> float32 2^exponent, exact."""
    return np.ldexp(np.float32(1), exponent).astype(np.float32)


def pack(codes: np.ndarray, width: int) -> np.ndarray:
    """[..., n] codes of ``width`` bits -> uint8 [..., ceil(n * width / 8)], the first code in the lowest bits."""
    bits = (codes.astype(np.int64)[..., None] >> np.arange(width) & 1).astype(np.uint8)
    return np.packbits(bits.reshape(*codes.shape[:-1], codes.shape[-1] * width), axis=-1, bitorder="little")


def unpack(plane: np.ndarray, width: int, count: int) -> np.ndarray:
    """uint8 [..., bytes] -> int64 [..., count]: the first ``count`` codes written by ``pack``."""
    bits = np.unpackbits(plane, axis=-1, count=count * width, bitorder="little").astype(np.int64)
    return (bits.reshape(*plane.shape[:-1], count, width) << np.arange(width)).sum(-1)


def to_grid(t: np.ndarray, words: np.ndarray | None) -> np.ndarray:
    """float32 t, in units of the grid -> integers as float32.

    Without words: nearest, ties to even. With int64 words of t's shape: floor(t) + [(word >> 8) * 2^-24 < frac(t)].
    """
    if words is None:
        return np.rint(t)
    floor = np.floor(t)
    return floor + ((words >> 8).astype(np.float32) * np.float32(2**-24) < t - floor)


def bf16_bits(x: np.ndarray, words: np.ndarray | None) -> np.ndarray:
    """float32 -> uint16, same shape: the bits of the bfloat16.

    Without words: nearest, ties to even; beyond the largest finite, Inf. With int64 words: (bits + (word >> 16)) >> 16,
    and finite values stay finite. NaN becomes 0x7FC0.
    """
    bits = x.view(np.uint32).astype(np.int64)
    if words is None:
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    else:
        rounded = (bits + (words >> 16)) >> 16
        rounded = np.where((rounded & 0x7FFF) == 0x7F80, rounded - 1, rounded)
    rounded = np.where(np.isinf(x), bits >> 16, rounded)
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def fp16_bits(x: np.ndarray, words: np.ndarray | None) -> np.ndarray:
    """float32 -> uint16, same shape: the bits of the IEEE half.

    Without words: nearest, ties to even; beyond the largest finite, Inf. With int64 words: truncation after adding the
    word's highest bits below the kept mantissa, s = 13 bits, or 13 + (-14 - exponent) for subnormal halves; in one
    formula for every s, (floor(mantissa * 2^(32 - s)) + word) >> 32. Finite values stay finite, at most 65504.
    NaN becomes 0x7E00.
    """
    if words is None:
        with np.errstate(over="ignore"):
            bits = x.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(x), 0x7E00, bits).astype(np.uint16)
    field = exponent_field(x)
    mantissa = (x.view(np.uint32) & 0x7FFFFF).astype(np.int64) | np.where(field > 0, 1 << MANTISSA_BITS, 0)
    exponent = np.maximum(field, 1) - EXPONENT_BIAS
    shift = 13 + np.maximum(-14 - exponent, 0)
    left, right = np.maximum(32 - shift, 0), np.clip(shift - 32, 0, 63)
    kept = ((mantissa << left >> right) + words) >> 32
    magnitude = np.minimum(kept + (np.maximum(exponent + 14, 0) << 10), 0x7BFF)
    magnitude = np.where(np.isinf(x), 0x7C00, magnitude)
    return np.where(np.isnan(x), 0x7E00, magnitude | np.where(np.signbit(x), 0x8000, 0)).astype(np.uint16)
