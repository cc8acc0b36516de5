"""int8, int4 and int2 rows for FBGEMM's inference tables, and from there.

A row of fbgemm_gpu's ``IntNBitTableBatchedEmbeddingBagsCodegen`` has scale and bias, both float16, in front of the
codes and is filled up to a multiple of the module's ``row_alignment``. The rows of FBGEMM's and torch's *fused*
quantization (``torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized`` and its kin,
``torch.ops.quantized.embedding_bag_byte_prepack``) are those of ``rk.quantize_rows`` already: nothing to convert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.layout_records import check_tensor, integer
from rec_kernels.ops.row_formats import row_bytes

_CODE_BITS = {"int8": 8, "int4": 4, "int2": 2}
_FRONT = 4  # bytes of a float16 scale and a float16 bias


def rows_to_fbgemm(rows: Tensor, format: str, embedding_dim: int, *, row_alignment: int = 1) -> Tensor:
    """Rows as FBGEMM's inference tables hold them.

    Args:
        rows: [N, row_bytes(format, embedding_dim)] uint8, from ``rk.quantize_rows``.
        format: "int8", "int4" or "int2": fbgemm_gpu's ``SparseType.INT8``, ``INT4``, ``INT2``.
        embedding_dim: columns D of a row; the codes must fill whole bytes. FBGEMM wants a multiple of 4.
        row_alignment: the module's: by default 1 on a CPU, 16 on a GPU.

    Returns:
        uint8 [N, W], W the least multiple of ``row_alignment`` that is not below 4 + D * bits / 8. The module's
        ``split_embedding_weights(split_scale_shifts=False)`` has a tensor of this shape for each table.

    Raises:
        ValueError: wrong arguments; an int8 row whose float32 scale or bias is beyond what a float16 holds.

    int4 and int2 rows keep their values. The scale and bias of int8 rows are rounded to float16, as FBGEMM's own
    conversion does it: all of a row shifts by up to 2^-11 of the bias, and a scale below 2^-14 loses precision. Looks
    at the data of int8 rows, which makes the caller of a GPU wait.
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
            raise ValueError(f"rows[{row}] has scale {scale:g} and bias {bias:g}: a float16 ends at 65504")
        grid = half.view(torch.uint8)
    width = -(-(_FRONT + size) // row_alignment) * row_alignment
    out = rows.new_zeros((rows.shape[0], width))
    out[:, :_FRONT] = grid
    out[:, _FRONT : _FRONT + size] = rows[:, :size]
    return out


def rows_from_fbgemm(rows: Tensor, format: str, embedding_dim: int) -> Tensor:
    """The reverse of ``rows_to_fbgemm``: rows that ``rk.dequantize_rows`` and every op here reads.

    Args:
        rows: [N, W] uint8, a table of FBGEMM's inference module; W at least 4 + D * bits / 8. What fills a row up is
            not read.
        format: "int8", "int4" or "int2".
        embedding_dim: columns D of a row; the codes must fill whole bytes.

    Returns:
        uint8 [N, row_bytes(format, embedding_dim)] with the same values.

    Raises:
        ValueError: wrong arguments.
    """
    size = _code_bytes(format, embedding_dim)
    _check_width(rows, _FRONT + size, format, embedding_dim, or_more=True)
    grid = rows[:, :_FRONT]
    if format == "int8":
        grid = _view(grid, torch.float16).float().view(torch.uint8)
    return torch.cat([rows[:, _FRONT : _FRONT + size], grid], dim=1)


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
    """[N, n] uint8 as numbers, in memory of their own: a part of a row may lie at any address."""
    return bytes_.clone(memory_format=torch.contiguous_format).view(dtype)
