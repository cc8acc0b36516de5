"""Encoding and decoding of blocks of rows in messages between ranks, in the formats of ``Wire``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.ops.row_formats import as_scalar, dequantize_rows, row_bytes

_ops = torch.ops.rec_kernels
#: Formats with float16 values or scales, and the largest finite float16.
_HALVES, _LARGEST_HALF = ("fp16", "int4", "int2"), 65504.0


class BlockShape(NamedTuple):
    """[rows, columns] of a message, encoded ``width`` columns at a time."""

    rows: int
    columns: int
    width: int


class NoiseKey(NamedTuple):
    """Key of a lookup's random numbers in stochastic rounding.

    Args:
        step: of the model, int64 []. lookup: lookups since the last update.
    """

    step: Tensor
    lookup: int


class BlockNoise(NamedTuple):
    """Key of a block's random numbers.

    Args:
        seed: of its message. step: of the model, int64 []. block: index in the message.
    """

    seed: int
    step: Tensor
    block: int


def wire_format(format: str | None, width: int) -> str | None:
    """The format in which rows of ``width`` columns are sent, given the one chosen; None: float32."""
    return format if format is not None and width and row_bytes(format, width) < 4 * width else None


def wire_row_bytes(format: str | None, width: int) -> int:
    """Bytes of a row of ``width`` columns in ``wire_format(format, width)``."""
    own = wire_format(format, width)
    return 4 * width if own is None else row_bytes(own, width)


def overflow_to_inf(grad: Tensor, format: str | None) -> Tensor:
    """Returns ``grad`` with infinity where it exceeds the range of the format in which it is sent."""
    return torch.where(grad.abs() <= _LARGEST_HALF, grad, torch.inf) if format in _HALVES else grad


def block_bytes(format: str | None, block: BlockShape) -> int:
    """Bytes of an encoded block, padded to a multiple of 4 to align the float32 that follow."""
    rows = block.rows * (block.columns // block.width) if block.width else 0
    return -(-rows * wire_row_bytes(format, block.width) // 4) * 4


def encode_block(
    out: Tensor, columns: Sequence[Tensor], block: BlockShape, format: str | None, noise: BlockNoise | None
) -> None:
    """Encodes a block into ``out``, uint8 [block_bytes].

    Args:
        columns: float32 [rows, *], concatenated along dim 1. noise: of stochastic rounding; None: to nearest.
    """
    own = wire_format(format, block.width)
    if own is None:
        torch.cat([*columns], dim=1, out=out.view(torch.float32).view(block.rows, block.columns))
        return
    whole = columns[0] if len(columns) == 1 else torch.cat([*columns], dim=1)
    rows = _quantize(whole.reshape(-1, block.width), own, noise)
    out[: rows.numel()].view_as(rows).copy_(rows)


def decode_block(data: Tensor, block: BlockShape, format: str | None) -> Tensor:
    """Decodes uint8 [block_bytes] to float32 [rows, columns]; returns a view if the block is float32."""
    own = wire_format(format, block.width)
    if own is None:
        return data.view(torch.float32).view(block.rows, block.columns)
    size = row_bytes(own, block.width)
    count = block.rows * (block.columns // block.width)
    rows = dequantize_rows(data[: count * size].view(count, size), own, block.width)
    return rows.view(block.rows, block.columns)


def _quantize(rows: Tensor, format: str, noise: BlockNoise | None) -> Tensor:
    """Encodes rows; rows with values that the format lacks, infinity or NaN, decode to NaN. Does not sync a GPU."""
    options: tuple = ("nearest", None, None, 0)
    if noise is not None:
        seed = as_scalar(noise.seed, "seed", "stochastic", rows)
        options = ("stochastic", seed, noise.step, noise.block % 65536)
    try:
        return _ops.quantize_rows(rows, format, *options)[0]  # on a GPU, such rows decode to NaN without an error
    except ValueError:
        finite = rows.isfinite().all(1)
        encoded = _ops.quantize_rows(torch.where(finite[:, None], rows, 0), format, *options)[0]
        encoded[~finite] = 255  # all-ones float16 or float32 scales are NaN
        return encoded
