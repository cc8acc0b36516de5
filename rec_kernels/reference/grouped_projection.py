"""Reference of grouped_projection and its gradients in plain torch, summed in the order of docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.reference.numerics import chunked_sum, fused_multiply_add


class Group(NamedTuple):
    """Columns of x, output columns and weights of one group."""

    inputs: slice
    outputs: slice
    weights: slice | None  # None: identity
    shape: tuple[int, int]  # of W: (output columns, input columns)


def groups(in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]) -> Iterator[Group]:
    """Yields the groups in order."""
    first, weight = 0, 0
    for in_dim, block in zip(in_dims, outputs, strict=True):
        out_dim, column = out_dims[block], sum(out_dims[:block])
        size = 0 if in_dim == out_dim else in_dim * out_dim
        weights = slice(weight, weight + size) if size else None
        yield Group(slice(first, first + in_dim), slice(column, column + out_dim), weights, (out_dim, in_dim))
        first, weight = first + in_dim, weight + size


def grouped_projection(
    x: Tensor, weights: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]
) -> Tensor:
    """x [B, sum(in_dims)], flat weights -> [B, sum(out_dims)]."""
    out = torch.zeros(len(x), sum(out_dims))
    for group in groups(in_dims, out_dims, outputs):
        matrix = None if group.weights is None else weights[group.weights].view(group.shape).T
        out[:, group.outputs] = _add_product(out[:, group.outputs], x[:, group.inputs], matrix)
    return out


def grouped_projection_backward_input(
    grad: Tensor, weights: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]
) -> Tensor:
    """grad [B, sum(out_dims)], flat weights -> gradient of x [B, sum(in_dims)]."""
    grad_x = torch.zeros(len(grad), sum(in_dims))
    for group in groups(in_dims, out_dims, outputs):
        matrix = None if group.weights is None else weights[group.weights].view(group.shape)
        grad_x[:, group.inputs] = _add_product(grad_x[:, group.inputs], grad[:, group.outputs], matrix)
    return grad_x


def grouped_projection_backward_weights(
    grad: Tensor, x: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]
) -> Tensor:
    """grad [B, sum(out_dims)], x [B, sum(in_dims)] -> gradient of the flat weights."""
    grads = [torch.zeros(0)]
    for group in groups(in_dims, out_dims, outputs):
        if group.weights is not None:
            grads.append(_weight_gradient(grad[:, group.outputs], x[:, group.inputs]).reshape(-1))
    return torch.cat(grads)


def _add_product(sums: Tensor, rows: Tensor, matrix: Tensor | None) -> Tensor:
    """Returns sums [B, N] + rows [B, K] @ matrix [K, N], term by term in ascending k; None is the identity."""
    if matrix is None:
        return sums + rows
    for k in range(len(matrix)):
        sums = fused_multiply_add(rows[:, k, None], matrix[k], sums)
    return sums


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad [B, O], x [B, K] -> [O, K]: chunked sum over samples, with the gradient as the coefficient."""
    if not len(x):
        return torch.zeros(grad.shape[1], x.shape[1])
    return chunked_sum(x[:, None, :], grad[:, :, None])
