"""FlopCounterMode counts of ops and networks equal those of torch's own operations, and formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

import rec_kernels as rk

B, F, D, K = 5, 4, 6, 3


def count(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[int, int]:
    """Operations of a forward, and of the backward to all inputs."""
    given = [t.clone().requires_grad_() for t in inputs]
    with FlopCounterMode(display=False) as forward:
        out = function(*given)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, given, torch.ones_like(out))
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("self_interaction", [False, True])
def test_dot_interaction(self_interaction: bool) -> None:
    """Each pair of F + 1 vectors counts once; torch's bmm multiplies all with all."""
    interaction = functools.partial(rk.dot_interaction, self_interaction=self_interaction)
    pairs = (F + 1) * (F + 2) // 2 if self_interaction else (F + 1) * F // 2
    forward = 2 * B * pairs * D
    assert count(interaction, torch.randn(B, D), torch.randn(B, F, D)) == (forward, 2 * forward)
    positional = count(
        lambda d, s: torch.ops.rec_kernels.dot_interaction(d, s, self_interaction, "ieee"),
        torch.randn(B, D),
        torch.randn(B, F, D),
    )
    assert positional == (forward, 2 * forward)


@pytest.mark.parametrize("shared", [False, True])
def test_factorization_machine(shared: bool) -> None:
    """The op counts as two of torch's products."""
    x, y = torch.randn(B, F, D), torch.randn(F, K) if shared else torch.randn(B, F, K)
    right = count(lambda x, y: x.bmm(x.mT.bmm(y.expand(B, F, K))), x, y)
    assert count(rk.factorization_machine, x, y) == right == (4 * B * F * D * K, 8 * B * F * D * K)


def test_grouped_projection() -> None:
    """The op counts as a linear layer per group; a group copied by the identity counts nothing."""
    matrices = [torch.randn(6, 2), torch.randn(6, 3)]
    x, weights = torch.randn(B, 11), torch.cat([m.view(-1) for m in matrices])

    def by_torch(x: Tensor, weights: Tensor) -> Tensor:
        first, second = weights.split([12, 18])
        return torch.cat([linear(x[:, :2], first.view(6, 2)), x[:, 2:8], linear(x[:, 8:], second.view(6, 3))], 1)

    ours = count(lambda x, w: rk.grouped_projection(x, w, [2, 6, 3], [6, 6, 6]), x, weights)
    assert ours == count(by_torch, x, weights) == (2 * B * 30, 4 * B * 30)


def test_low_rank_cross() -> None:
    """Two matrices N x r in each layer."""
    net = rk.LowRankCrossNet(7, 3, 2)
    assert count(net, torch.randn(B, 7))[0] == 3 * 2 * 2 * B * 7 * 2


def test_wukong() -> None:
    """Each layer counts its factorization machine, MLP and compression; the first one its residual, too."""
    net = rk.Wukong(F, D, 2, fm_features=1, linear_features=2, factors=K, hidden=(8,))

    def layer(n: int, residual: bool) -> int:
        mlp = n * K * 8 + 8 * D
        return 2 * B * (2 * n * D * K + mlp + 2 * n * D + (3 * n * D if residual else 0))

    assert count(net, torch.randn(B, F, D))[0] == layer(F, True) + layer(3, False)
