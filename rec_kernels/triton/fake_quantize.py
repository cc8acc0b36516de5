"""fake_quantize in Triton: quantizes and dequantizes rows in one pass, without storing encoded rows.

Used for GPU tensors, with or without the compiled CUDA library, and for CPU tensors under TRITON_INTERPRET=1. The
formats are in rec_kernels/triton/row_formats.py. It has run on an H200.
"""

# ruff: noqa: N803, N806 (kernel constants and D are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rec_kernels.ops.fake_quantize import check_arguments
from rec_kernels.triton.row_formats import (
    block_of,
    fake_quantize_tile,
    integer_tile,
    is_integer_format,
    narrow,
    random_words,
    row_ends,
    widen,
)

#: Numbers of a tile: 16 of each thread, so that they and their words stay in registers.
TILE = 2048

# D may be specialized: if it is a multiple of 16, loads are vectorized.
_VARYING = ["num_rows", "num_tiles", "table", "first_row"]


@triton.jit
def _scalar(pointer):
    """Loads an int64 scalar; None is 0."""
    value = tl.zeros([], tl.int64)
    if pointer is not None:
        value = tl.load(pointer)
    return value


@triton.jit(do_not_specialize=_VARYING)
def tile_kernel(
    x,  # [num_rows, D]
    out,  # [num_rows, D], written
    seed,  # int64, or None: 0
    step,
    num_rows,
    D,
    num_tiles,  # in a row
    table,
    first_row,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROUND_UP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program takes ROWS rows of COLUMNS columns; all columns for int8, int4 and int2."""
    program = tl.program_id(0)
    row = (program // num_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_column = (program % num_tiles).to(tl.int64) * COLUMNS
    c = tl.arange(0, COLUMNS)[None, :]
    inside = c < tl.minimum(D - first_column, COLUMNS).to(tl.int32)
    mask = (row < num_rows)[:, None] & inside
    at = (row * D + first_column)[:, None] + c
    words = None
    if STOCHASTIC:
        words = random_words(_scalar(seed), _scalar(step), table, first_row + row, first_column, COLUMNS)
    y = fake_quantize_tile(widen(tl.load(x + at, mask=mask, other=0.0)), words, inside, FORMAT, ROUND_UP)
    tl.store(out + at, narrow(y, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def long_row_kernel(
    x,  # [num_rows, D]
    out,  # [num_rows, D], written
    seed,
    step,
    D,
    table,
    first_row,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """For int8, int4, int2: each program takes a row that does not fit a tile, and reads it twice."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    x += row[:, None] * D
    out += row[:, None] * D
    low = tl.full([1, 1], 0x7FFFFFFF, tl.int32)
    high = -1 - low
    for first_column in range(0, D, COLUMNS):
        c = (first_column + tl.arange(0, COLUMNS))[None, :]
        tile_low, tile_high = row_ends(widen(tl.load(x + c, mask=c < D, other=0.0)), c < D)
        low, high = tl.minimum(low, tile_low), tl.maximum(high, tile_high)
    for first_column in range(0, D, COLUMNS):
        c = (first_column + tl.arange(0, COLUMNS))[None, :]
        words = None
        if STOCHASTIC:
            words = random_words(_scalar(seed), _scalar(step), table, first_row + row, first_column, COLUMNS)
        y = integer_tile(widen(tl.load(x + c, mask=c < D, other=0.0)), words, low, high, BITS)
        tl.store(out + c, narrow(y, out.dtype.element_ty), mask=c < D)


def fake_quantize(
    x: Tensor,
    format: str,
    rounding: str = "nearest",
    seed: Tensor | None = None,
    step: Tensor | None = None,
    table: int = 0,
    first_row: int = 0,
    scale_rule: str | None = None,
) -> Tensor:
    """Computes the op, without a gradient: encodes x in a row format and decodes it.

    Does not synchronize. Can be captured in a CUDA graph, which reads seed and step in each replay.

    Args:
        x: [..., D] float32, float16 or bfloat16, D at least 1, of any strides. Row n has the number first_row + n.
        format: one of ``rk.ROW_FORMATS``.
        rounding: "nearest" or "stochastic".
        seed, step: int64 [] on x's device, modulo 2^64 and 2^32; None is 0.
        table: in [0, 2^16).
        first_row: the last row's number is below 2^44.
        scale_rule: "floor" or "rceil"; None is "floor" with "nearest" and "rceil" with "stochastic".

    Returns:
        A new, contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: a wrong shape, dtype, device or name; table or first_row out of range.
    """
    check_arguments(x, format, rounding, seed, step, table, first_row, scale_rule)
    x = x.contiguous()
    out = torch.empty_like(x)
    # fp32 is the identity; without random words, seed and step must not trigger another compilation.
    stochastic = rounding == "stochastic" and format != "fp32"
    words = {"seed": seed, "step": step} if stochastic else {"seed": None, "step": None}
    round_up = rounding == "stochastic" if scale_rule is None else scale_rule == "rceil"
    if x.numel():
        # Triton launches on the current device, which may differ from the tensors' device.
        with torch.accelerator.device_index(x.device.index):
            _launch(x, out, format, round_up, table=table, first_row=first_row, STOCHASTIC=stochastic, **words)
    return out


def _launch(x: Tensor, out: Tensor, format: str, round_up: bool, **given: object) -> None:
    D = x.shape[-1]
    num_rows = x.numel() // D
    columns = min(max(triton.next_power_of_2(D), block_of(format)), TILE)
    # Products and sums must round separately, hence no fusion.
    given |= {"x": x, "out": out, "D": D, "COLUMNS": columns, "enable_fp_fusion": False}
    if is_integer_format(format) and columns < D:
        long_row_kernel[(num_rows,)](BITS=int(format.removeprefix("int")), **given)
        return
    rows, num_tiles = TILE // columns, triton.cdiv(D, columns)
    tile_kernel[(triton.cdiv(num_rows, rows) * num_tiles,)](
        num_rows=num_rows, num_tiles=num_tiles, FORMAT=format, ROUND_UP=round_up, ROWS=rows, **given
    )
