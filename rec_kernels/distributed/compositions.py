"""Compressed tables whose parts are combined after pooling, or projected: computed on the rank that pools."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.pooled_lookups import finish, finish_each


class Composition:
    """Columns of a rank's tables, computed from what it has looked up for all ranks, and their backward.

    Args:
        shards: this rank's. pooled: output of the lookup. counts: bags of each feature, if bags have rows, or None.
        saves_for_backward: whether a backward may run.

    Attributes:
        columns: of the tables, for each sample or bag, to be sent to the samples' ranks.
    """

    def __init__(
        self, shards: TableCollection, pooled: Tensor, counts: list[int] | None, *, saves_for_backward: bool
    ) -> None:
        self._pooled = pooled.detach().requires_grad_(saves_for_backward)
        with torch.set_grad_enabled(saves_for_backward):
            self._output = _columns(shards, self._pooled, counts)
        self.columns = self._output.detach()
        projected = [shards._projection(table) for table in shards.tables if table.projection]
        self._projections = [matrix for matrix in projected if matrix.requires_grad]
        self._projection_grads: list[Tensor] = []

    def backward(self, grad: Tensor, *, trains: bool) -> Tensor:
        """Returns the gradients of what was looked up, from those of the columns.

        Args:
            trains: whether to compute those of the projections, too, for the backward of ``token``.
        """
        inputs = [self._pooled, *(self._projections if trains else [])]
        pooled, *found = torch.autograd.grad(self._output, inputs, grad, retain_graph=True)
        self._projection_grads = found if trains else self._projection_grads
        return pooled.contiguous()

    def token(self, token: Tensor) -> Tensor:
        """Returns a token whose backward gives the projections their gradients, of all ranks' samples."""
        return _Projections.apply(token, self, *self._projections) if self._projections else token


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, composition: Composition, *projections: Tensor) -> Tensor:
        ctx.composition = composition
        return token.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.composition._projection_grads


def _columns(shards: TableCollection, pooled: Tensor, counts: list[int] | None) -> Tensor:
    """[samples, columns of this rank's features], or with ``counts`` [bags, largest D], padded with zeros."""
    if counts is None:
        return finish(shards, pooled)
    width = max(shards._features.output_dims)
    blocks = finish_each(shards, pooled, counts)
    return torch.cat([torch.nn.functional.pad(block, (0, width - block.shape[1])) for block in blocks])
