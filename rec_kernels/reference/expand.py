"""Reference of expand and the sum of its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.reference.numerics import chunked_sum


def expand(x: Tensor, inverse: Tensor) -> Tensor:
    """[U, D] -> [M, D]."""
    return x[inverse.long()]


def expand_backward(grad: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """[M, D] -> [rows, D]: each row's terms in ascending order, in chunks."""
    out = torch.zeros(rows, grad.shape[1])
    for u in range(rows):
        terms = grad[inverse == u]
        if len(terms):
            out[u] = chunked_sum(terms)
    return out
