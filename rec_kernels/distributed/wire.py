"""Row formats in which rows and gradients travel between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.nn.arguments import check_choice
from rec_kernels.ops.row_formats import ROW_FORMATS, as_scalar, dequantize_rows, row_bytes

_ops = torch.ops.rec_kernels
#: Formats with numbers, or scales, in float16, and the largest number that they have.
_HALVES, _LARGEST_HALF = ("fp16", "int4", "int2"), 65504.0


@dataclass(frozen=True)
class Wire:
    """Row formats in which pooled columns, or rows of ids, and their gradients travel between ranks.

    A row that travels is that of a bag, or of an id, in one shard. Ranks that have the row themselves round it, too, so
    that numbers do not depend on who has what. Rows that would take no fewer bytes than in float32 travel as float32.

    Args:
        forward: of what was looked up; None: float32, which rounds nothing.
        backward: of gradients; None: float32.
        rounding: "nearest", or "stochastic": the mean of what arrives is what was sent.

    Raises:
        ValueError: an unknown format or rounding.
    """

    forward: str | None = None
    backward: str | None = None
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) is not None:
                check_choice(f"wire.{name}", getattr(self, name), ROW_FORMATS)
        check_choice("wire.rounding", self.rounding, ("nearest", "stochastic"))


class Block(NamedTuple):
    """Rows of a message: ``rows`` x ``columns`` numbers, each ``width`` columns of which are a row of the format."""

    rows: int
    columns: int
    width: int


class Draw(NamedTuple):
    """A lookup that rounds stochastically, by which its random numbers are found again.

    Args:
        step: of the model, int64 []. lookup: how many lookups were between the last update and this one.
    """

    step: Tensor
    lookup: int


class Noise(NamedTuple):
    """Random numbers of a block.

    Args:
        seed: of its message. step: of the model, int64 []. block: its number in the message.
    """

    seed: int
    step: Tensor
    block: int


def travelling_format(format: str | None, width: int) -> str | None:
    """The format in which rows of ``width`` columns travel where ``format`` is asked for; None: float32."""
    return format if format is not None and width and row_bytes(format, width) < 4 * width else None


def travelling_bytes(format: str | None, width: int) -> int:
    """Bytes of such a row."""
    own = travelling_format(format, width)
    return 4 * width if own is None else row_bytes(own, width)


def as_travelled(grad: Tensor, format: str | None) -> Tensor:
    """Gradients, infinite where they are too large for the format in which they travel."""
    return torch.where(grad.abs() <= _LARGEST_HALF, grad, torch.inf) if format in _HALVES else grad


def block_bytes(format: str | None, block: Block) -> int:
    """Bytes of a block in a message, rounded up to a multiple of 4, as float32 behind it needs."""
    rows = block.rows * (block.columns // block.width) if block.width else 0
    return -(-rows * travelling_bytes(format, block.width) // 4) * 4


def write_block(out: Tensor, pieces: Sequence[Tensor], block: Block, format: str | None, noise: Noise | None) -> None:
    """Writes a block to ``out``, uint8 [block_bytes].

    Args:
        pieces: float32 [rows, *], its columns, which lie one after the other. noise: None: rounds to nearest.
    """
    own = travelling_format(format, block.width)
    if own is None:
        torch.cat([*pieces], dim=1, out=out.view(torch.float32).view(block.rows, block.columns))
        return
    columns = pieces[0] if len(pieces) == 1 else torch.cat([*pieces], dim=1)
    rows = _encoded(columns.reshape(-1, block.width), own, noise)
    out[: rows.numel()].view_as(rows).copy_(rows)


def read_block(data: Tensor, block: Block, format: str | None) -> Tensor:
    """The numbers of a block, float32 [rows, columns], from uint8 [block_bytes]: a view where nothing was encoded."""
    own = travelling_format(format, block.width)
    if own is None:
        return data.view(torch.float32).view(block.rows, block.columns)
    size = row_bytes(own, block.width)
    count = block.rows * (block.columns // block.width)
    rows = dequantize_rows(data[: count * size].view(count, size), own, block.width)
    return rows.view(block.rows, block.columns)


def _encoded(rows: Tensor, format: str, noise: Noise | None) -> Tensor:
    """Rows in a format; those with a number that it cannot have, an infinity or NaN, read as NaN. Waits for no GPU."""
    options: tuple = ("nearest", None, None, 0)
    if noise is not None:
        seed = as_scalar(noise.seed, "seed", "stochastic", rows)
        options = ("stochastic", seed, noise.step, noise.block % 65536)
    try:
        return _ops.quantize_rows(rows, format, *options)[0]  # on a GPU such rows read as NaN by themselves
    except ValueError:
        finite = rows.isfinite().all(1)
        encoded = _ops.quantize_rows(torch.where(finite[:, None], rows, 0), format, *options)[0]
        encoded[~finite] = 255  # scales, float16 or float32, of ones only are NaN
        return encoded
