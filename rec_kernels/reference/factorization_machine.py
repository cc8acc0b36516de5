"""References of factorization_machine: summed in the order of docs/numerics.md, and the plain formula."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.reference.numerics import chunked_sum, fused_multiply_add


def formula(x: Tensor, y: Tensor) -> Tensor:
    """x [B, F, D], y [F, K] or [B, F, K] of any float dtype -> [B, F, K], with autograd."""
    return x @ (x.transpose(1, 2) @ y)


def product(left: Tensor, right: Tensor, sums: Tensor | None = None) -> Tensor:
    """Adds left [..., N, T] @ right [..., T, M] to ``sums``, term by term in ascending t."""
    if sums is None:
        sums = torch.zeros(*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    for t in range(left.shape[-1]):
        sums = fused_multiply_add(left[..., t, None], right[..., t, None, :], sums)
    return sums


def factorization_machine(x: Tensor, y: Tensor, precision: str = "ieee") -> Tensor:
    """x [B, F, D], y [F, K] or [B, F, K] -> [B, F, K] of their dtype."""
    wide = x.float()
    return product(wide, product(wide.transpose(1, 2), y.float())).to(x.dtype)


def factorization_machine_backward(
    grad: Tensor, x: Tensor, y: Tensor, precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """Gradients of x and y, of their dtype."""
    dtype = x.dtype
    grad, x, y = grad.float(), x.float(), y.float()
    inner, grad_inner = product(x.transpose(1, 2), y), product(x.transpose(1, 2), grad)
    grad_x = product(grad, inner.transpose(1, 2))
    grad_x = product(y.expand(len(x), *y.shape[-2:]), grad_inner.transpose(1, 2), grad_x)
    if y.dim() == 3:
        return grad_x.to(dtype), product(x, grad_inner).to(dtype)
    # The op accumulates from +0, so a sum of only -0 terms is +0.
    grad_y = chunked_sum(product(x, grad_inner).flatten(1)).view(y.shape) + 0 if len(x) else torch.zeros_like(y)
    return grad_x.to(dtype), grad_y.to(dtype)
