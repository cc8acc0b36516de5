"""State of a fused optimizer: one flat tensor of all tables for each of its kinds."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.nn.tables.config import StoredTable
from rec_kernels.ops.embedding_bag import table_starts

#: The kinds of state that optimizers have.
KINDS = ("sum", "exp_avg", "exp_avg_sq")


class StatePlaces:
    """The places of the tables in flat tensors.

    Args:
        tables: the tables, in this order.
        kinds: name of a kind -> whether it has an element for every element of a table, and not only for every row.
        dtype: of state for every element; state for rows is float32.
    """

    def __init__(self, tables: list[StoredTable], kinds: dict[str, bool], dtype: torch.dtype = torch.float32) -> None:
        self.kinds, self._tables, self._dtype = kinds, tables, dtype
        self.starts = table_starts([t.num_embeddings * t.embedding_dim for t in tables])
        self.rows = [0]
        for table in tables:
            self.rows.append(self.rows[-1] + table.num_embeddings)

    @property
    def is_rounded(self) -> bool:
        """True if some kind is kept in fewer bits than it is computed in."""
        return any(self.dtype(kind) != torch.float32 for kind in self.kinds)

    def dtype(self, kind: str) -> torch.dtype:
        """dtype of the flat tensor."""
        return self._dtype if self.kinds[kind] else torch.float32

    def size(self, kind: str) -> int:
        """Elements of the flat tensor."""
        return self.starts[-1] if self.kinds[kind] else self.rows[-1]

    def view(self, kind: str, flat: Tensor, i: int) -> Tensor:
        """Table i in the flat tensor: [E, D], or [E]."""
        rows, start = self._tables[i].num_embeddings, self.starts[i]
        if not self.kinds[kind]:
            return flat[self.rows[i] : self.rows[i] + rows]
        columns = self._tables[i].embedding_dim
        return flat[start : start + rows * columns].view(rows, columns)

    def bytes(self, i: int) -> int:
        """Bytes of table i's state."""
        table = self._tables[i]
        sizes = {kind: table.embedding_dim if each else 1 for kind, each in self.kinds.items()}
        return sum(self.dtype(kind).itemsize * table.num_embeddings * size for kind, size in sizes.items())
