"""Integer rows with a scale and a bias: int8, int4, int2."""

from __future__ import annotations

import numpy as np
import torch

from .numerics import fused_multiply_add
from .row_formats_bits import pack, to_grid, unpack

ONE = np.float32(1)
SMALLEST_NORMAL = np.float32(2**-126)


def quantize(x: np.ndarray, bits: int, words: np.ndarray | None) -> np.ndarray:
    """float32 [N, D] -> uint8 [N, ceil(D * bits / 8) + 8 or 4]; a row that cannot be represented becomes a NaN row.

    Args:
        x: the rows.
        bits: 8 (float32 scale and bias), 4 or 2 (float16).
        words: int64 [N, D] for stochastic rounding, None for rounding to nearest.
    """
    indices = np.arange(len(x))
    # argmin and argmax return the first of equal elements, so the first of -0 and 0 determines the sign.
    low, high = x[indices, x.argmin(1)], x[indices, x.argmax(1)]
    with np.errstate(all="ignore"):
        scale, bias, inverse = _grid8(low, high, words) if bits == 8 else _grid16(low, high, bits, words)
        valid = np.isfinite(x).all(1) & np.isfinite(scale) & np.isfinite(bias)
        codes = to_grid((x - bias[:, None]) * inverse[:, None], words)
    codes = np.where(valid[:, None], codes, 0).clip(0, 2**bits - 1)
    parameter = np.float32 if bits == 8 else np.float16
    stored = np.stack([np.where(valid, scale, np.nan), np.where(valid, bias, 0)], 1).astype(parameter)
    return np.concatenate([pack(codes, bits), stored.view(np.uint8)], axis=1)


def dequantize(rows: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """uint8 [N, bytes] -> float32 [N, D]: fmaf(code, scale, bias)."""
    size = -(-columns * bits // 8)
    parameters = np.ascontiguousarray(rows[:, size:]).view(np.float32 if bits == 8 else np.float16).astype(np.float32)
    codes = unpack(rows[:, :size], bits, columns).astype(np.float32)
    return fused_multiply_add(*(torch.as_tensor(a) for a in (codes, parameters[:, :1], parameters[:, 1:]))).numpy()


def _grid8(low: np.ndarray, high: np.ndarray, words: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[N] minima and maxima -> [N] scales, biases, and factors from (x - bias) to codes."""
    scale = (high - low) / np.float32(255)
    if words is None:
        return scale, low, np.float32(255) / ((high - low) + np.float32(1e-8))
    return scale, low, np.where(scale < SMALLEST_NORMAL, 0, ONE / scale)


def _grid16(
    low: np.ndarray, high: np.ndarray, bits: int, words: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``_grid8`` with float16 scales and biases."""
    steps = np.float32(2**bits - 1)
    if words is None:
        bias = _half(low)
        scale = _half((high - bias) / steps)
        scale = np.where((scale == 0) | np.isinf(ONE / scale), ONE, scale)
        return scale, bias, ONE / scale
    bias = _half(low, -np.inf)
    scale = _half((high - bias) / steps, np.inf)
    degenerate = scale < SMALLEST_NORMAL
    scale = np.where(degenerate, ONE, scale)
    return scale, bias, np.where(degenerate, 0, ONE / scale)


def _half(x: np.ndarray, toward: float | None = None) -> np.ndarray:
    """Rounds float32 to float16 precision: to nearest, or toward -inf or inf if ``toward`` is given."""
    half = x.astype(np.float16)
    if toward is not None:
        wrong_side = half > x if toward < 0 else half < x
        half = np.where(wrong_side, np.nextafter(half, np.float16(toward)), half)
    return half.astype(np.float32)
