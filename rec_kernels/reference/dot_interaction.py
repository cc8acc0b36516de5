"""References of dot_interaction: summed in the order of docs/numerics.md, and as models usually write it in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.reference.numerics import fused_multiply_add


def pairs(vectors: int, self_interaction: bool, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Indices (i, j) of the vectors of each pair, in output order."""
    return tuple(torch.tril_indices(vectors, vectors, 0 if self_interaction else -1, device=device))


def interaction_reference(dense: Tensor, sparse: Tensor, self_interaction: bool = False) -> Tensor:
    """Composition of torch ops with autograd: dense [B, D], sparse [B, F, D] of any float dtype -> [B, D + pairs]."""
    x = torch.cat([dense.unsqueeze(1), sparse], dim=1)
    i, j = pairs(x.shape[1], self_interaction, x.device)
    return torch.cat([dense, torch.bmm(x, x.transpose(1, 2))[:, i, j]], dim=1)


def dot_interaction(dense: Tensor, sparse: Tensor, self_interaction: bool = False, precision: str = "ieee") -> Tensor:
    """dense [B, D], sparse [B, F, D] -> [B, D + pairs] of their dtype, accumulated in float32 in column order."""
    x = torch.cat([dense.unsqueeze(1), sparse], dim=1).float()
    i, j = pairs(x.shape[1], self_interaction)
    sums = torch.zeros(len(x), len(i))
    for d in range(x.shape[2]):
        sums = fused_multiply_add(x[:, i, d], x[:, j, d], sums)
    return torch.cat([dense, sums.to(dense.dtype)], dim=1)


def dot_interaction_backward(
    grad: Tensor, dense: Tensor, sparse: Tensor, self_interaction: bool = False, precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """Gradients of dense and sparse, of their dtype: each sums over the other vectors in ascending order."""
    x = torch.cat([dense.unsqueeze(1), sparse], dim=1).float()
    vectors, columns = x.shape[1:]
    i, j = pairs(vectors, self_interaction)
    pair_grad = torch.zeros(len(x), vectors, vectors)
    pair_grad[:, i, j] = pair_grad[:, j, i] = grad[:, columns:].float()
    pair_grad.diagonal(dim1=1, dim2=2).mul_(2)
    sums = torch.zeros_like(x)
    for other in range(vectors):
        sums = fused_multiply_add(pair_grad[:, :, other, None], x[:, other, None], sums)
    sums[:, 0] += grad[:, :columns].float()
    sums = sums.to(dense.dtype)
    return sums[:, 0], sums[:, 1:]
