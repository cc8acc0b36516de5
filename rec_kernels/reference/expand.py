"""Reference of expand and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.reference.numerics import chunked_sum


def expand(x: Tensor, inverse: Tensor) -> Tensor:
    """[U, D] -> [M, D]."""
    return x[inverse.long()]


def expand_backward(grad: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """[M, D] -> [rows, D]: the chunked sum of each row's gradients, in ascending position."""
    out = torch.zeros(rows, grad.shape[1])
    for u in range(rows):
        terms = grad[inverse == u]
        if len(terms):
            out[u] = chunked_sum(terms)
    return out
