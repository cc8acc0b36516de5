"""Blocks of row formats, read and written byte by byte as docs/numerics.md describes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rec_kernels.reference import row_formats_mx as mx
from rec_kernels.reference.row_formats import dequantize_rows, quantize_rows, row_bytes

INTEGERS = {"int8": 8, "int4": 4, "int2": 2}
SHARED = {"mx9": 7, "mx6": 4, "mx4": 2}
BLOCKS = [*SHARED, *mx.ELEMENTS]
ROUNDINGS = ["nearest", "stochastic"]


def round_trip(x: Tensor, name: str, **options: object) -> Tensor:
    """Encodes x and decodes it again."""
    return dequantize_rows(quantize_rows(x, name, **options), name, x.shape[1])


def read_shared(row: list[int], name: str) -> tuple[int, list[int], list[int], list[int]]:
    """Parses a block of shared microexponents: exponent, microexponents, magnitudes, signs."""
    if name == "mx9":
        magnitudes, signs = [b & 127 for b in row[:16]], [b >> 7 for b in row[:16]]
    else:
        of_byte, plane = (2, 8) if name == "mx6" else (4, 4)
        width = 8 // of_byte
        magnitudes = [row[c // of_byte] >> width * (c % of_byte) & (1 << width) - 1 for c in range(16)]
        signs = [row[plane + c // 8] >> c % 8 & 1 for c in range(16)]
    return row[-2], [row[-1] >> p & 1 for p in range(8)], magnitudes, signs


def read_ocp(row: list[int], name: str) -> tuple[int, list[int]]:
    """Parses an OCP block: scale, codes."""
    if "mxfp6" in name:
        return row[24], [
            (row[c // 2] >> 4 * (c % 2) & 15) | (row[16 + c // 4] >> 2 * (c % 4) & 3) << 4 for c in range(32)
        ]
    if name == "mxfp4_e2m1":
        return row[16], [row[c // 2] >> 4 * (c % 2) & 15 for c in range(32)]
    return row[32], row[:32]


def write_ocp(scale: int, codes: list[int], name: str) -> Tensor:
    """The inverse of ``read_ocp``, [1, bytes]."""
    row = [0] * row_bytes(name, 32)
    row[-1] = scale
    for c, code in enumerate(codes):
        if "mxfp6" in name:
            row[c // 2] |= (code & 15) << 4 * (c % 2)
            row[16 + c // 4] |= code >> 4 << 2 * (c % 4)
        elif name == "mxfp4_e2m1":
            row[c // 2] |= code << 4 * (c % 2)
        else:
            row[c] = code
    return torch.tensor([row], dtype=torch.uint8)


def random_blocks(name: str, count: int) -> Tensor:
    """Random float32 [count, D] that a block format represents exactly, without NaN and Inf."""
    generator = np.random.default_rng(2)
    row = generator.integers(0, 256, (count, row_bytes(name, 32)), dtype=np.uint8)
    if name in SHARED:
        row[:, -4:-2] = generator.integers(0, 255, (count, 2))
        row[: count // 4, -4:-2] %= 12
        return dequantize_rows(torch.from_numpy(row), name, 32)
    element = mx.ELEMENTS[name]
    row[:, -1] = generator.integers(0, 255 - element.largest_exponent, count)
    row[: count // 4, -1] %= 12
    x = dequantize_rows(torch.from_numpy(row), name, 32)
    scale = torch.from_numpy(row[:, -1:].astype(np.float64) - 127).exp2() * element.largest
    return torch.where(x.abs().double() <= scale, x, 0.0)
