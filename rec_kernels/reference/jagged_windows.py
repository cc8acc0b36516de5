"""Reference of jagged_windows: a loop over slices."""

from __future__ import annotations

import torch
from torch import Tensor


def jagged_windows(values: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values [total, ...] and offsets [M + 1]."""
    rows = [values[i : i + count] for i, count in zip(starts.tolist(), lengths.tolist(), strict=True)]
    ends = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    return torch.cat([values[:0], *rows]), ends.to(lengths.dtype)
