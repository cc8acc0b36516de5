"""Rows in their formats: initialization, encoding and decoding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rec_kernels.nn.tables.config import StoredTable
from rec_kernels.ops.row_formats import FLOAT_DTYPES, dequantize_rows, quantize_rows

# Values that are initialized and encoded per chunk, which avoids a float32 copy of the table.
_FLOATS_AT_ONCE = 1 << 20
# Initializers that treat each value independently. The first is the default of TorchRec's configs.
_ELEMENTWISE_INITS = (nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.zeros_, nn.init.ones_)


def initialize(
    weight: Tensor,
    table: StoredTable,
    max_rows: int | None = None,
    before_write: Callable[[int, int], object] | None = None,
) -> None:
    """Initializes a table's rows, a view from ``Storage.view``, with its ``init``.

    ``before_write(first, count)`` is called before each write of at most ``max_rows`` rows. An ``init`` that
    ``takes_chunks`` is called for consecutive chunks of rows; any other is called once with all rows.
    """
    rows = table.num_embeddings
    if table.format == "fp32" and before_write is None:
        fill(weight, table, 0)
        return
    at_once = -(-_FLOATS_AT_ONCE // table.embedding_dim)
    step = min(max_rows or rows, at_once) if takes_chunks(table.init) else rows
    # One buffer for all chunks: glibc cannot always reuse a freed allocation with torch's alignment.
    chunk = torch.empty(min(step, rows), table.embedding_dim, dtype=torch.float32, device=weight.device)
    for first in range(0, rows, step):
        floats = chunk[: rows - first]
        fill(floats, table, first)
        if not weight.is_meta:
            write(weight, encode(floats, table.format), first, max_rows, before_write)


def takes_chunks(init: Callable[[Tensor], object] | None) -> bool:
    """True if an ``init`` may be called several times, with consecutive rows."""
    own = init.func if isinstance(init, functools.partial) else init
    return own is None or own in _ELEMENTWISE_INITS or getattr(init, "in_chunks", False)


def fill(floats: Tensor, table: StoredTable, first: int) -> None:
    """Initializes float32 rows of a table, from row ``first`` on, with its ``init``."""
    if table.init is not None:
        returned = table.init(floats.zero_())
        if type(returned) is Tensor and type(floats) in (Tensor, nn.Parameter) and _memory(returned) != _memory(floats):
            raise ValueError(
                f"table {table.name!r}: init returned a tensor other than its argument: it must fill the weight "
                "in place"
            )
        return
    floats.uniform_(-table.bound, table.bound)
    if table.padding_row is not None and 0 <= table.padding_row - first < len(floats):
        floats[table.padding_row - first] = 0


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def write(
    weight: Tensor, rows: Tensor, first: int, max_rows: int | None, before_write: Callable[[int, int], object] | None
) -> None:
    """Writes encoded rows to a table from row ``first`` on; ``max_rows``, ``before_write``: see ``initialize``."""
    for chunk in rows.split(max_rows or len(rows)):
        if before_write is not None:
            before_write(first, len(chunk))
        weight[first : first + len(chunk)] = chunk
        first += len(chunk)


def encode(floats: Tensor, format: str) -> Tensor:
    """Encodes floats [N, D] as rows of a format, rounded to the nearest: of its dtype, or uint8 [N, row_bytes]."""
    if format in FLOAT_DTYPES:
        return floats.to(FLOAT_DTYPES[format])
    return quantize_rows(floats, format)


def convert(rows: Tensor, found: str, format: str, embedding_dim: int) -> Tensor:
    """Converts rows from format ``found`` to ``format``, rounded to the nearest, in chunks to save memory."""
    step = max(1, _FLOATS_AT_ONCE // embedding_dim)
    chunks = (encode(decode(chunk, found, embedding_dim), format) for chunk in rows.split(step))
    first = next(chunks)
    converted = first.new_empty(rows.shape[0], first.shape[1])
    for i, chunk in enumerate(itertools.chain((first,), chunks)):
        converted[i * step : i * step + len(chunk)] = chunk
    return converted


def decode(rows: Tensor, format: str, embedding_dim: int) -> Tensor:
    """Decodes rows of a format to float32 [N, D]."""
    return rows.float() if format in FLOAT_DTYPES else dequantize_rows(rows, format, embedding_dim)
