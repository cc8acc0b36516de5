"""The summation order of docs/numerics.md in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
PARTIALS = 128


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fmaf in float32: a * b + c rounded once.

    The product of two float32 is exact in float64. The float64 sum is rounded, and rounding it again to float32
    could be wrong if it lies exactly between two float32; so the sum is rounded to odd first (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    product, addend = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + addend
    # Knuth's two-sum: the exact error of the float64 addition.
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.contiguous().view(torch.int64)
    inexact = (error != 0) & torch.isfinite(total) & (bits % 2 == 0)
    toward_zero = (error > 0) != (total > 0)
    odd = torch.where(toward_zero, bits - 1, bits + 1)
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded float32 square root. torch may be off by 1 ulp."""
    return torch.as_tensor(np.sqrt(x.numpy()))


def chunked_sum(terms: Tensor, coefficients: Tensor | None = None) -> Tensor:
    """Sums [n, D] terms (n >= 1) in chunks of 64, each starting from its first term; chunk sums likewise."""
    sums = []
    for start in range(0, len(terms), CHUNK):
        total = terms[start] if coefficients is None else coefficients[start] * terms[start]
        for i in range(start + 1, min(start + CHUNK, len(terms))):
            total = total + terms[i] if coefficients is None else fused_multiply_add(coefficients[i], terms[i], total)
        sums.append(total)
    return sums[0] if len(sums) == 1 else chunked_sum(torch.stack(sums))


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """[N, D] x [N, D] -> [N]: 128 partial sums, fours added pairwise, then the xor butterfly 16, 8, 4, 2, 1."""
    rows, columns = a.shape
    partials = torch.zeros(rows, PARTIALS)
    for c in range(0, columns, PARTIALS):
        width = min(PARTIALS, columns - c)
        partials[:, :width] = fused_multiply_add(a[:, c : c + width], b[:, c : c + width], partials[:, :width])
    s = partials.view(rows, 32, 4)
    t = (s[..., 0] + s[..., 1]) + (s[..., 2] + s[..., 3])
    lanes = torch.arange(32)
    for distance in (16, 8, 4, 2, 1):
        t = t + t[:, lanes ^ distance]
    return t[:, 0]
