"""dot_interaction compared with torch's bmm, index and cat, eager and compiled, and two limits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import rec_kernels as rk
from bench.cases import Case, dense_cases

BATCH = 2048


@functools.cache
def _triangle(vectors: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.tril_indices(vectors, vectors, -1))


def recipe(dense: Tensor, sparse: Tensor) -> Tensor:
    """The recipe that a user would write."""
    x = torch.cat([dense.unsqueeze(1), sparse], 1)
    rows, columns = _triangle(x.shape[1])
    return torch.cat([dense, torch.bmm(x, x.transpose(1, 2))[:, rows, columns]], 1)


class _PairwiseDots(torch.autograd.Function):
    """Strictly lower triangle of x x^T. The gradient is gathered into a symmetric matrix: one product instead of two.

    Plain autograd scatters it, which takes longer than all else.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Maps [B, F, D] to [B, pairs]."""
        ctx.save_for_backward(x)
        rows, columns = _triangle(x.shape[1])
        return torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, rows * x.shape[1] + columns)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        """Column ``pairs`` of the gradient, which the diagonal indexes, is zeros."""
        (x,) = ctx.saved_tensors
        square = torch.nn.functional.pad(grad, (0, 1)).index_select(1, _places(x.shape[1]))
        return torch.bmm(square.view(-1, x.shape[1], x.shape[1]), x)


@functools.cache
def _places(vectors: int) -> Tensor:
    """Index of the pair for each cell of the symmetric matrix; diagonal cells get the index after the last pair."""
    rows, columns = _triangle(vectors)
    cells = torch.full((vectors, vectors), len(rows))
    cells[rows, columns] = cells[columns, rows] = torch.arange(len(rows))
    return cells.flatten()


def tuned(dense: Tensor, sparse: Tensor) -> Tensor:
    """The recipe with its own backward."""
    return torch.cat([dense, _PairwiseDots.apply(torch.cat([dense.unsqueeze(1), sparse], 1))], 1)


def cases() -> Iterator[Case]:
    """Yields the cases: samples of F sparse vectors and one dense vector of D columns."""
    for vectors, columns in itertools.product((13, 27), (16, 32, 64, 128)):
        _triangle(vectors + 1)  # not while it is compiled
        shapes = (BATCH, columns), (BATCH, vectors, columns)
        products = BATCH * vectors * (vectors + 1) // 2 * columns
        yield from dense_cases(
            "dot_interaction",
            f"F={vectors} D={columns}",
            rk.dot_interaction,
            recipe,
            lambda shapes=shapes: tuple(map(torch.randn, shapes)),
            # In the backward, a pair's gradient is multiplied by both of its vectors.
            (products, 3 * products),
            tuned,
        )
