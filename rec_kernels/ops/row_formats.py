"""Quantization of float rows to a row format, and dequantization. docs/numerics.md ("Row formats") defines every bit.

The ops (schemas in csrc/rows/row_formats.cpp, contract in csrc/rows/row_formats.h): ``quantize_rows``,
``dequantize_rows``. Neither is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.fakes import check_one_device
from rec_kernels.ops.layout_records import integer_or_symbol
from rec_kernels.ops.tracing import cannot_read

_ops = torch.ops.rec_kernels

# Format -> columns per block, bytes per block, bytes per row outside of blocks. A partial last block is padded.
_SIZES = {
    "fp32": (1, 4, 0),
    "fp16": (1, 2, 0),
    "bf16": (1, 2, 0),
    "int8": (1, 1, 8),
    "int4": (2, 1, 4),
    "int2": (4, 1, 4),
    "mx9": (16, 18, 0),
    "mx6": (16, 12, 0),
    "mx4": (16, 8, 0),
    "mxfp8_e4m3": (32, 33, 0),
    "mxfp8_e5m2": (32, 33, 0),
    "mxfp6_e3m2": (32, 25, 0),
    "mxfp6_e2m3": (32, 25, 0),
    "mxfp4_e2m1": (32, 17, 0),
    "mxint8": (32, 33, 0),
}
#: The names of the row formats.
ROW_FORMATS = tuple(_SIZES)
# Formats that are a torch dtype.
FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLOAT_FORMATS = {dtype: format for format, dtype in FLOAT_DTYPES.items()}

_FINITE_ONLY = ("int8", "int4", "int2")
_NO_POSITION = torch.iinfo(torch.int64).max


def row_bytes(format: str, embedding_dim: int) -> int:
    """Bytes of a row of ``embedding_dim`` (at least 1) columns in row format ``format``.

    Raises:
        ValueError: the format is unknown (the message has all names); ``embedding_dim`` is not an integer or below 1.
    """
    if format not in _SIZES:
        raise ValueError(f'format must be one of {", ".join(ROW_FORMATS)}; got "{format}"')
    embedding_dim = integer_or_symbol(embedding_dim, "embedding_dim")
    if embedding_dim < 1:
        raise ValueError(f"embedding_dim = {embedding_dim} must be at least 1")
    columns, size, besides = _SIZES[format]
    return -(-embedding_dim // columns) * size + besides


def quantize_rows(
    x: Tensor,
    format: str,
    *,
    rounding: str = "nearest",
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    table: int = 0,
    first_row: int = 0,
    scale_rule: str | None = None,
) -> Tensor:
    """Quantizes rows to a row format.

    Args:
        x: [N, D] float32, float16 or bfloat16, D in [1, 2^31).
        format: one of ``rk.ROW_FORMATS``.
        rounding: "nearest" (ties to even), or "stochastic" (up or down; the expected result is the value itself).
        seed, step: seed of the random numbers of "stochastic" and training step: each an int (seed modulo 2^64, step
            modulo 2^32) or a 0-dim int64 tensor on x's device. In compiled code, pass step as a tensor: an int
            recompiles whenever it changes.
        table, first_row: position of the rows in a model: table in [0, 65536); x[n] is row ``first_row + n``, in
            [0, 2^44). They select the random number of each element, so a shard that passes its own first row
            rounds like the whole table.
        scale_rule: scale of a block in block formats: "floor", as in their definitions, or "rceil", which rounds the
            scale up so that no value is clipped. None: "floor" for "nearest", "rceil" for "stochastic". Other formats
            ignore it.

    Returns:
        uint8 [N, row_bytes(format, D)], the same bytes on every device. Not differentiable.

    Raises:
        ValueError: a wrong shape, dtype, device or name; table or first_row out of range; with int8, int4 and int2, a
            value in x that is not finite (the message has its place).

    On a GPU, the last check synchronizes in every call with these three formats. During compilation or CUDA graph
    capture it cannot, and nothing is raised: the row dequantizes to NaN, and ``torch.ops.rec_kernels.quantize_rows``
    reports it in ``status``.
    """
    scalars = as_scalar(seed, "seed", rounding, x), as_scalar(step, "step", rounding, x)
    rows, status = _ops.quantize_rows(x, format, rounding, *scalars, table, first_row, scale_rule)
    if format in _FINITE_ONLY and x.is_cuda and not cannot_read(x):
        raise_not_finite(x, format, status)
    return rows


def dequantize_rows(rows: Tensor, format: str, embedding_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantizes rows of a row format.

    Args:
        rows: [N, row_bytes(format, embedding_dim)] uint8.
        format: format of the rows, one of ``rk.ROW_FORMATS``.
        embedding_dim: columns D of a row.
        dtype: torch.float32, torch.float16 or torch.bfloat16.

    Returns:
        [N, D] of ``dtype``: the float32 values, rounded to nearest (ties to even) if ``dtype`` is narrower.

    Raises:
        ValueError: a wrong shape or dtype (the message has the width of rows of this format and D); an unknown format.
    """
    return _ops.dequantize_rows(rows, format, embedding_dim, dtype)


def raise_not_finite(x: Tensor, format: str, status: Tensor) -> None:
    """Raises the CPU op's error for the position in ``status``, the second result of the op on a GPU.

    Raises:
        ValueError: ``status`` [1] int64 names an element of x [N, D].
    """
    position = int(status)
    if position != _NO_POSITION:
        row, column = divmod(position, x.shape[1])
        value = x[row, column].item()
        raise ValueError(f'x[{row}, {column}] = {value}: format "{format}" holds finite numbers only')


def as_scalar(value: int | Tensor, name: str, rounding: str, x: Tensor) -> Tensor | None:
    """Converts seed or steps to the op's argument: a 0-dim tensor on x's device, or None for 0."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (int, torch.SymInt)):
        raise ValueError(f"{name} must be an int or an int64 tensor with 0 dimensions, got {value!r}")
    if value == 0 or rounding == "nearest":
        return None
    if not -(2**63) <= value < 2**63:
        value = (value + 2**63) % 2**64 - 2**63
    # Filled on the device, because a copy from the host would synchronize with a GPU.
    return torch.full((), value, dtype=torch.int64, device=x.device)


@torch.library.register_fake("rec_kernels::quantize_rows")
def _(x, format, rounding="nearest", seed=None, step=None, table=0, first_row=0, scale_rule=None):
    check_one_device((x, seed, step))
    shape = (x.shape[0], row_bytes(format, x.shape[1]))
    return x.new_empty(shape, dtype=torch.uint8), x.new_empty((1,), dtype=torch.int64)


@torch.library.register_fake("rec_kernels::dequantize_rows")
def _(rows, format, embedding_dim, dtype):
    row_bytes(format, embedding_dim)  # raises for an unknown format
    return rows.new_empty((rows.shape[0], embedding_dim), dtype=dtype)
