"""Reference of scale_rows in plain torch."""

from __future__ import annotations

from torch import Tensor

from rec_kernels.reference import numerics


def scale_rows(x: Tensor, scale: Tensor) -> Tensor:
    """x [N, D], scale [N] -> [N, D]."""
    return x * scale[:, None]


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """a, b [N, D] -> [N], in the order of docs/numerics.md."""
    return numerics.row_dot(a, b)
