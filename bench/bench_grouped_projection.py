"""grouped_projection compared with a loop of torch's linear, one batched product of padded groups, and two limits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import rec_kernels as rk
from bench.cases import INPUTS, Case, Way, op_case, trained_case
from bench.limits import limits

BATCH = 2048
# 26 features with rk.mixed_dimensions' widths for Criteo; wider ones; few large ones, which are compute-bound.
GROUPS = {
    "26 of 1-16 to 16": ([(1, 2, 3, 4, 8, 9, 10, 11, 15, 16)[g % 10] for g in range(26)], 16),
    "26 of 4-64 to 64": ([4 + 60 * g // 25 for g in range(26)], 64),
    "4 of 300 to 512": ([300] * 4, 512),
}


def cases() -> Iterator[Case]:
    """Yields the cases. Every group has its own block of equal width; training makes three such products."""
    for name, (in_dims, out_dim) in GROUPS.items():
        yield from _cases(name, in_dims, out_dim)


def _cases(name: str, in_dims: list[int], out_dim: int) -> Iterator[Case]:
    groups, widest = len(in_dims), max(in_dims)
    inputs = [torch.randn(BATCH, sum(in_dims), requires_grad=True) for _ in range(INPUTS)]
    matrices = [torch.randn(out_dim, d, requires_grad=True) for d in in_dims if d != out_dim]
    weights = torch.cat([m.detach().view(-1) for m in matrices]).requires_grad_()
    padded = torch.randn(groups, BATCH, widest, requires_grad=True)
    stacked = torch.randn(groups, widest, out_dim, requires_grad=True)
    out = torch.empty(BATCH, groups * out_dim)

    def ours(x: Tensor, weights: Tensor) -> Tensor:
        return rk.grouped_projection(x, weights, in_dims, [out_dim] * groups)

    def recipe(x: Tensor, *matrices: Tensor) -> Tensor:
        """A linear layer for each group that needs one, as a user would write it."""
        left = iter(matrices)
        return torch.cat([c if c.shape[1] == out_dim else F.linear(c, next(left)) for c in x.split(in_dims, 1)], 1)

    def move(i: int, passes: int) -> None:
        for _ in range(passes):
            inputs[i].detach().sum()
            out.fill_(1)

    ways = {
        "ours": Way(ours, [(x, weights) for x in inputs]),
        "torch": Way(recipe, [(x, *matrices) for x in inputs]),
        # Pads every group with zeros to the widest; [F, B, out_dim].
        "bmm": Way(torch.bmm, [(padded, stacked)] * INPUTS),
    }
    size, products = 4 * (inputs[0].numel() + out.numel()), BATCH * sum(m.numel() for m in matrices)
    for make, title, passes in (
        (op_case, f"grouped_projection {name}", 1),
        (trained_case, f"grouped_projection, trained, {name}", 3),
    ):
        least = {
            "bytes": lambda i, passes=passes: move(i, passes),
            "products": lambda i, passes=passes: limits().multiply_add(passes * products),
        }
        yield make(title, ways, passes * size, least)
