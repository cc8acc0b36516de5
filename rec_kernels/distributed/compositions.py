"""Tables of parts that are combined once pooled, and of narrow rows: their columns are made on the rank that pools."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.pooled_lookups import finish, finish_each


class Composition:
    """The columns of a rank's tables, made of what it has looked up for all ranks, and the way back.

    Args:
        shards: this rank's. pooled: what its op has returned. counts: of bags of each feature, if each has a row of its
            own, or None. keeps: whether a backward may come.

    Attributes:
        columns: what the tables have for each sample, or each bag: those that are sent to their ranks.
    """

    def __init__(self, shards: TableCollection, pooled: Tensor, counts: list[int] | None, *, keeps: bool) -> None:
        self._pooled = pooled.detach().requires_grad_(keeps)
        with torch.set_grad_enabled(keeps):
            self._made = _columns(shards, self._pooled, counts)
        self.columns = self._made.detach()
        projected = [shards._projection(table) for table in shards.tables if table.projection]
        self._projections = [matrix for matrix in projected if matrix.requires_grad]
        self._found: list[Tensor] = []

    def backward(self, grad: Tensor, *, trains: bool) -> Tensor:
        """The gradients of what was looked up, of those of the columns.

        Args:
            trains: whether the projections get theirs, too, once autograd comes to the ``token``.
        """
        inputs = [self._pooled, *(self._projections if trains else [])]
        pooled, *found = torch.autograd.grad(self._made, inputs, grad, retain_graph=True)
        self._found = found if trains else self._found
        return pooled.contiguous()

    def token(self, token: Tensor) -> Tensor:
        """A token behind which autograd finds the projections: their gradients are those of all ranks' samples."""
        return _Projections.apply(token, self, *self._projections) if self._projections else token


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, composition: Composition, *projections: Tensor) -> Tensor:
        ctx.composition = composition
        return token.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.composition._found


def _columns(shards: TableCollection, pooled: Tensor, counts: list[int] | None) -> Tensor:
    """[samples, columns of this rank's features], or with ``counts`` [bags, the most columns of any]."""
    if counts is None:
        return finish(shards, pooled)
    width = max(shards._features.output_dims)
    blocks = finish_each(shards, pooled, counts)
    return torch.cat([torch.nn.functional.pad(block, (0, width - block.shape[1])) for block in blocks])
