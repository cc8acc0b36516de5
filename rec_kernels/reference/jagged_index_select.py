"""Reference of jagged_index_select: a loop over rows."""

from __future__ import annotations

import torch
from torch import Tensor


def jagged_index_select(values: Tensor, offsets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values [total, ...] and offsets [M + 1]."""
    bounds = offsets.tolist()
    rows = [values[bounds[i] : bounds[i + 1]] for i in index.tolist()]
    lengths = torch.tensor([0] + [len(row) for row in rows])
    return torch.cat([values[:0], *rows]), lengths.cumsum(0).to(offsets.dtype)
