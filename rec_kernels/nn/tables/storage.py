"""Storage of a collection's tables in one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels.nn.tables.config import StoredTable
from rec_kernels.ops.embedding_bag import table_starts
from rec_kernels.ops.row_formats import FLOAT_DTYPES

_ops = torch.ops.rec_kernels


class Storage:
    """The layout of a collection's tables in its flat tensor.

    The flat tensor is float32 if all tables are, else uint8. Each table starts at a cache line (64 bytes).

    Args:
        tables: the tables, in memory order.

    Attributes:
        is_mixed: True if tables have several formats.
        has_codes: True if some table has a format other than torch's fp32, fp16 and bf16.
    """

    def __init__(self, tables: list[StoredTable]) -> None:
        self.is_bytes = any(t.format != "fp32" for t in tables)
        self.is_mixed = len({t.format for t in tables}) > 1
        self.has_codes = any(t.format not in FLOAT_DTYPES for t in tables)
        self.dtype = torch.uint8 if self.is_bytes else torch.float32
        self._tables = tables
        self.starts = table_starts([self._size(t) for t in tables], self.dtype.itemsize)

    def _size(self, table: StoredTable) -> int:
        row = table.row_bytes if self.is_bytes else table.embedding_dim
        return table.num_embeddings * row

    def view(self, flat: Tensor, i: int) -> Tensor:
        """View of table i in the flat tensor: [E, D] of the format's dtype, or uint8 [E, row_bytes]."""
        table, start = self._tables[i], self.starts[i]
        rows = flat[start : start + self._size(table)]
        return rows.view(FLOAT_DTYPES.get(table.format, torch.uint8)).view(table.num_embeddings, -1)

    def joined(self, rows: Sequence[Tensor]) -> Tensor:
        """The flat tensor of tables' rows, each as ``view`` returns it: their own memory if it is one, else a copy."""
        memory, size = rows[0].untyped_storage(), self.starts[-1]
        places = [(own.untyped_storage()._cdata, own.storage_offset() * own.itemsize) for own in rows]
        is_one = places == [(memory._cdata, start * self.dtype.itemsize) for start in self.starts[:-1]]
        if is_one and memory.nbytes() >= size * self.dtype.itemsize and type(rows[0].detach()) is Tensor:
            return torch.empty(0, dtype=self.dtype, device=rows[0].device).set_(memory, 0, (size,), (1,))
        flat = zeros(size, self.dtype, rows[0].device)
        for i, own in enumerate(rows):
            self.view(flat, i).copy_(own.detach())
        return flat


@torch.library.register_fake("rec_kernels::_advise_huge_pages")
def _(flat: Tensor) -> bool:
    return False  # a fake tensor has no memory


def zeros(size: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """A tensor [size] of zeros, on huge pages if it is in CPU memory and the system supports them."""
    flat = torch.empty(size, dtype=dtype, device=device)
    if flat.device.type == "cpu":
        _ops._advise_huge_pages(flat)  # before the first touch, which is what allocates the pages
    return flat.zero_()
