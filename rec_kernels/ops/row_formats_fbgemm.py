"""Conversion of int8, int4 and int2 rows to and from the layout of FBGEMM's inference tables.

A row of fbgemm_gpu's ``IntNBitTableBatchedEmbeddingBagsCodegen`` starts with a float16 scale and a float16 bias, then
has the codes, and is padded to a multiple of the module's ``row_alignment``. The *fused* row-wise quantization of
FBGEMM and torch (``torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized`` and its variants,
``torch.ops.quantized.embedding_bag_byte_prepack``) already has the row layout of ``rk.quantize_rows``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.layout_records import check_tensor, integer
from rec_kernels.ops.row_formats import row_bytes

_CODE_BITS = {"int8": 8, "int4": 4, "int2": 2}
_HEADER_BYTES = 4  # a float16 scale and a float16 bias


def rows_to_fbgemm(rows: Tensor, format: str, embedding_dim: int, *, row_alignment: int = 1) -> Tensor:
    """Converts rows of ``rk.quantize_rows`` to the layout of FBGEMM's inference tables.

    Args:
        rows: [N, row_bytes(format, embedding_dim)] uint8, from ``rk.quantize_rows``.
        format: "int8", "int4" or "int2", which are fbgemm_gpu's ``SparseType.INT8``, ``INT4``, ``INT2``.
        embedding_dim: columns D of a row; the codes must fill whole bytes. FBGEMM requires a multiple of 4.
        row_alignment: the FBGEMM module's, in bytes; its default is 1 on a CPU, 16 on a GPU.

    Returns:
        uint8 [N, W], where W is 4 + D * bits / 8 rounded up to a multiple of ``row_alignment``. The module's
        ``split_embedding_weights(split_scale_shifts=False)`` has a tensor of this shape for each table.

    Raises:
        ValueError: wrong arguments; an int8 row with a scale or bias that overflows float16.

    int4 and int2 rows keep their values. The scale and bias of int8 rows are rounded to float16, as in FBGEMM's own
    conversion: all values of a row shift by up to 2^-11 of the bias, and a scale below 2^-14 loses precision. The
    overflow check of int8 rows synchronizes with a GPU.
    """
    size = _code_bytes(format, embedding_dim)
    _check_width(rows, row_bytes(format, embedding_dim), format, embedding_dim)
    if integer(row_alignment, "row_alignment") < 1:
        raise ValueError(f"row_alignment = {row_alignment} must be at least 1")
    grid = rows[:, size:]
    if format == "int8":
        stored = _view(grid, torch.float32)
        half = stored.half()
        lost = (half.isinf() & stored.isfinite()).any(1)
        if lost.any():
            row = int(lost.nonzero()[0])
            scale, bias = stored[row].tolist()
            raise ValueError(f"rows[{row}] has scale {scale:g} and bias {bias:g}, beyond the largest float16, 65504")
        grid = half.view(torch.uint8)
    end = _HEADER_BYTES + size
    out = rows.new_zeros((rows.shape[0], -(-end // row_alignment) * row_alignment))
    out[:, :_HEADER_BYTES] = grid
    out[:, _HEADER_BYTES:end] = rows[:, :size]
    return out


def rows_from_fbgemm(rows: Tensor, format: str, embedding_dim: int) -> Tensor:
    """Converts rows of FBGEMM's inference tables to those of ``rk.quantize_rows``: the inverse of ``rows_to_fbgemm``.

    Args:
        rows: [N, W] uint8, a table of FBGEMM's inference module; W at least 4 + D * bits / 8. The padding at the end
            of a row is not read.
        format: "int8", "int4" or "int2".
        embedding_dim: columns D of a row; the codes must fill whole bytes.

    Returns:
        uint8 [N, row_bytes(format, embedding_dim)] with the same values.

    Raises:
        ValueError: wrong arguments.
    """
    size = _code_bytes(format, embedding_dim)
    end = _HEADER_BYTES + size
    _check_width(rows, end, format, embedding_dim, or_more=True)
    grid = rows[:, :_HEADER_BYTES]
    if format == "int8":
        grid = _view(grid, torch.float16).float().view(torch.uint8)
    return torch.cat([rows[:, _HEADER_BYTES:end], grid], dim=1)


def _code_bytes(format: str, embedding_dim: int) -> int:
    if format not in _CODE_BITS:
        raise ValueError(f'format must be one of {", ".join(_CODE_BITS)}; got "{format}"')
    of_byte, embedding_dim = 8 // _CODE_BITS[format], integer(embedding_dim, "embedding_dim")
    if embedding_dim < 1 or embedding_dim % of_byte:
        raise ValueError(f'embedding_dim = {embedding_dim} must be a positive multiple of {of_byte} for "{format}"')
    return embedding_dim // of_byte


def _check_width(rows: Tensor, width: int, format: str, embedding_dim: int, or_more: bool = False) -> None:
    check_tensor("rows", rows)
    if rows.dtype != torch.uint8 or rows.dim() != 2:
        raise ValueError(f"rows must be uint8 with 2 dimensions, got {rows.dtype} {list(rows.shape)}")
    found = rows.shape[1]
    if found < width or (found > width and not or_more):
        least = "at least " if or_more else ""
        raise ValueError(
            f'rows must be {least}{width} bytes wide for format "{format}" and embedding_dim = {embedding_dim}, '
            f"got {found}"
        )


def _view(bytes_: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterprets [N, n] uint8 as ``dtype``, in a copy, because a slice of a row may be misaligned."""
    return bytes_.clone(memory_format=torch.contiguous_format).view(dtype)
