"""Rows of floats as rows of bytes in a row format, and back. docs/numerics.md ("Row formats") has every bit.

The ops (schemas in csrc/rows/row_formats.cpp, contract in csrc/rows/row_formats.h): ``quantize_rows``,
``dequantize_rows``. Neither is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.fakes import check_one_device
from rec_kernels.ops.layout_records import integer_or_symbol
from rec_kernels.ops.status import cannot_read

_ops = torch.ops.rec_kernels

# Format -> columns of a block, bytes of a block, bytes that the row has besides. A last, partial block is whole.
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
# Formats whose rows are tensors of a torch dtype.
FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_FINITE_ONLY = ("int8", "int4", "int2")
_NO_POSITION = torch.iinfo(torch.int64).max


def row_bytes(format: str, embedding_dim: int) -> int:
    """Bytes of a row of ``embedding_dim`` columns D, which is at least 1, in the row format ``format``.

    Raises:
        ValueError: unknown format, with the names of all; D is no integer, or below 1.
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
    """Encodes rows.

    Args:
        x: [N, D] float32, float16 or bfloat16, D in [1, 2^31).
        format: one of ``rk.ROW_FORMATS``.
        rounding: "nearest" (ties to even), or "stochastic": up or down with probabilities whose mean is the number.
        seed, step: of the random numbers of "stochastic": an int (seed modulo 2^64, step modulo 2^32), or an int64
            tensor [] on x's device. A compiled function wants step as a tensor, or compiles anew as it changes.
        table, first_row: where the rows are in a model: table in [0, 65536), x[n] is row ``first_row + n`` in
            [0, 2^44). Every element of a model draws a number of its own, whoever encodes it; a shard passes its
            own first row.
        scale_rule: of the formats in blocks, how the scale of a block is found: "floor", as their definitions have
            it; "rceil", which rounds it up so that nothing is clipped. None: "floor" for "nearest", "rceil" for
            "stochastic". The other formats do not read it.

    Returns:
        uint8 [N, row_bytes(format, D)], the same bytes on every device. Not differentiable.

    Raises:
        ValueError: a wrong shape, dtype, device or name; table or first_row out of range; with int8, int4 and int2 a
            number in x that is not finite, with its place.

    On a GPU the last of these costs a synchronisation in every call with these three formats. A function that is being
    compiled or captured into a CUDA graph cannot wait, hence does not raise: the row then reads as NaN, and
    ``torch.ops.rec_kernels.quantize_rows`` returns ``status``, which tells.
    """
    scalars = as_scalar(seed, "seed", rounding, x), as_scalar(step, "step", rounding, x)
    rows, status = _ops.quantize_rows(x, format, rounding, *scalars, table, first_row, scale_rule)
    if format in _FINITE_ONLY and x.is_cuda and not cannot_read(x):
        raise_not_finite(x, format, status)
    return rows


def dequantize_rows(rows: Tensor, format: str, embedding_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decodes rows.

    Args:
        rows: [N, row_bytes(format, embedding_dim)] uint8.
        format: one of ``rk.ROW_FORMATS``, the one that the rows were encoded in.
        embedding_dim: columns D of a row.
        dtype: torch.float32, torch.float16 or torch.bfloat16.

    Returns:
        [N, D] of ``dtype``: the float32 values, rounded to the nearest (ties to even) where it is narrower.

    Raises:
        ValueError: a wrong shape or dtype, with the width that rows of this format and D have; an unknown format.
    """
    return _ops.dequantize_rows(rows, format, embedding_dim, dtype)


def raise_not_finite(x: Tensor, format: str, status: Tensor) -> None:
    """Raises for the place in ``status``, the second result of the op on a GPU, what the CPU's op raises itself.

    Raises:
        ValueError: ``status`` [1] int64 names an element of x [N, D].
    """
    position = int(status)
    if position != _NO_POSITION:
        row, column = divmod(position, x.shape[1])
        value = x[row, column].item()
        raise ValueError(f'x[{row}, {column}] = {value}: format "{format}" holds finite numbers only')


def as_scalar(value: int | Tensor, name: str, rounding: str, x: Tensor) -> Tensor | None:
    """A number as the op takes it: a tensor on x's device, or None for 0."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (int, torch.SymInt)):
        raise ValueError(f"{name} must be an int or an int64 tensor with 0 dimensions, got {value!r}")
    if value == 0 or rounding == "nearest":
        return None
    if not -(2**63) <= value < 2**63:
        value = (value + 2**63) % 2**64 - 2**63
    # Filled on the device: a copy from the host would make a GPU's caller wait.
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
