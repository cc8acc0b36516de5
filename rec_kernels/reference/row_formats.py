"""Row formats: each encodes a row of D values as ``row_bytes(format, D)`` self-contained bytes.

Multibyte values are little endian; codes narrower than a byte are packed from the lowest bits. The planes of a block
format span the whole row, padded to nb whole blocks; padding columns hold encoded zeros.

================  ==========================================================================================
fp32, fp16, bf16  D values
int8              D codes, float32 scale, float32 bias
int4, int2        D packed codes, float16 scale, float16 bias
mx9               [sign << 7 | magnitude: 16 nb] [exponents: nb] [microexponents: nb], blocks of 16, pairs of 2
mx6, mx4          [magnitudes, 4 or 2 bits: 8 nb or 4 nb] [signs: 2 nb] [exponents: nb] [microexponents: nb]
mxfp8_*, mxint8   [codes: 32 nb] [E8M0 scales: nb], blocks of 32; the codes of torch's float8, two's complement
mxfp6_*           [low 4 bits of the codes: 16 nb] [high 2 bits: 8 nb] [scales: nb]
mxfp4_e2m1        [codes: 16 nb] [scales: nb]
================  ==========================================================================================

Bit p of a microexponent byte belongs to pair p. A block with a NaN or Inf has exponent or scale 255 and is zero
otherwise. An integer row with NaN or Inf has codes 0, scale NaN, bias 0. A stored NaN is 0x7FC00000, 0x7E00, 0x7FC0.

Choices that the format definitions leave open:

- fp16 and bf16 under ``nearest`` overflow to Inf as in IEEE 754; only ``stochastic`` stays finite.
- Integer rows: an overflowing range or float16 parameter gives a NaN row, never an error. int4 and int2 derive the
  range from the stored bias, so a constant row that float16 cannot represent still has a grid; under
  ``stochastic``, codes are 0 where the scale is below 2^-126 before it is replaced by 1.
- If a division by a power of two underflows, the quotient is rounded to float32 as usual; an OCP element is divided
  first by its block's scale and then by its own step.
- Sign-magnitude codes keep the sign of a value that rounds to 0; two's complement (mxint8) has no -0.
- Shared microexponents: a block's exponent is at most 254 and a pair's increased exponent is clamped to that before the
  microexponent is computed. Below the smallest step all microexponents are 0.
- Stochastic OCP elements round |x| / scale on the grid of its own binade, subnormals on that of the lowest, then
  saturate. ``rceil`` rounds a subnormal ratio up to 2^-127 or 2^-126 as if E8M0 represented both as normal numbers. The
  scale stays at most 254 - emax, so that no finite value decodes to Inf.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import row_formats_affine as affine
from . import row_formats_mx as mx
from .philox import row_words
from .row_formats_bits import bf16_bits, fp16_bits

FLOAT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
INTEGER_BITS = {"int8": 8, "int4": 4, "int2": 2}
MAGNITUDE_BITS = {"mx9": 7, "mx6": 4, "mx4": 2}
ROW_FORMATS = (*FLOAT_BYTES, *INTEGER_BITS, *MAGNITUDE_BITS, *mx.ELEMENTS)
DEFAULT_SCALE_RULE = {"nearest": "floor", "stochastic": "rceil"}


def row_bytes(format: str, embedding_dim: int) -> int:
    """Bytes per row of ``embedding_dim`` columns.

    Raises:
        ValueError: unknown format, or embedding_dim below 1.
    """
    _check_name("format", format, ROW_FORMATS)
    if embedding_dim < 1:
        raise ValueError(f"embedding_dim must be at least 1, got {embedding_dim}")
    if format in FLOAT_BYTES:
        return FLOAT_BYTES[format] * embedding_dim
    if format in INTEGER_BITS:
        bits = INTEGER_BITS[format]
        return -(-embedding_dim * bits // 8) + (8 if bits == 8 else 4)
    if format in MAGNITUDE_BITS:
        return -(-embedding_dim // mx.SHARED_BLOCK) * (2 * (MAGNITUDE_BITS[format] + 1) + 2)
    return -(-embedding_dim // mx.OCP_BLOCK) * (4 * mx.ELEMENTS[format].bits + 1)


def quantize_rows(
    x: Tensor,
    format: str,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    table: int = 0,
    first_row: int = 0,
    stream: int = 0,
    scale_rule: str | None = None,
    raise_not_finite: bool = True,
) -> Tensor:
    """Encodes rows.

    Args:
        x: float32, float16 or bfloat16 [N, D] on the CPU, D >= 1.
        format: one of ROW_FORMATS.
        rounding: "nearest" (ties to even) or "stochastic".
        seed, step, table, first_row, stream: arguments of ``philox.row_words``; unused with "nearest".
        scale_rule: "floor" or "rceil" for block formats, by default "floor" with "nearest" and "rceil" with
            "stochastic"; ignored by other formats.
        raise_not_finite: whether integer formats reject NaN and Inf; if False, the affected rows decode to NaN.

    Returns:
        uint8 [N, row_bytes(format, D)].

    Raises:
        ValueError: an unknown name, a wrong shape or dtype, or a value that an integer format cannot represent.
    """
    _check_name("rounding", rounding, tuple(DEFAULT_SCALE_RULE))
    rule = DEFAULT_SCALE_RULE[rounding] if scale_rule is None else scale_rule
    _check_name("scale_rule", rule, ("floor", "rceil"))
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"x must be float32, float16 or bfloat16 [N, D], got {x.dtype} {list(x.shape)}")
    rows, columns = x.shape
    size = row_bytes(format, columns)
    values = x.detach().float().contiguous().numpy()
    words = None
    if rounding == "stochastic":
        words = row_words(seed, step, table, first_row, rows, columns, stream).numpy()
    if format in FLOAT_BYTES:
        encoded = _quantize_float(values, format, words)
    elif format in INTEGER_BITS:
        if raise_not_finite:
            _check_finite(values, format)
        encoded = affine.quantize(values, INTEGER_BITS[format], words)
    elif format in MAGNITUDE_BITS:
        encoded = mx.quantize_shared(values, MAGNITUDE_BITS[format], words, rule)
    else:
        encoded = mx.quantize_ocp(values, mx.ELEMENTS[format], words, rule)
    return torch.from_numpy(np.ascontiguousarray(encoded)).view(rows, size)


def dequantize_rows(rows: Tensor, format: str, embedding_dim: int) -> Tensor:
    """Decodes rows.

    Args:
        rows: uint8 [N, row_bytes(format, embedding_dim)] on the CPU.
        format: one of ROW_FORMATS.
        embedding_dim: columns D of a row.

    Returns:
        float32 [N, D].

    Raises:
        ValueError: unknown format, or wrong dtype or shape of rows.
    """
    size = row_bytes(format, embedding_dim)
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != size:
        raise ValueError(f"rows must be uint8 [N, {size}], got {rows.dtype} {list(rows.shape)}")
    encoded = rows.contiguous().numpy()
    if format in FLOAT_BYTES:
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[format]
        return rows.clone(memory_format=torch.contiguous_format).view(dtype).float()
    if format in INTEGER_BITS:
        value = affine.dequantize(encoded, INTEGER_BITS[format], embedding_dim)
    elif format in MAGNITUDE_BITS:
        value = mx.dequantize_shared(encoded, MAGNITUDE_BITS[format], embedding_dim)
    else:
        value = mx.dequantize_ocp(encoded, mx.ELEMENTS[format], embedding_dim)
    return torch.from_numpy(np.ascontiguousarray(value))


def _quantize_float(x: np.ndarray, format: str, words: np.ndarray | None) -> np.ndarray:
    """float32 [N, D] -> uint8 [N, bytes]."""
    if format == "fp32":
        return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint8)
    return (fp16_bits if format == "fp16" else bf16_bits)(x, words).view(np.uint8)


def _check_name(argument: str, name: str, allowed: tuple[str, ...]) -> None:
    if name not in allowed:
        raise ValueError(f"{argument} must be one of {', '.join(allowed)}, got {name!r}")


def _check_finite(x: np.ndarray, format: str) -> None:
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(f"{format} rows must be finite, got {x[row, column]} at row {row}, column {column}")
