"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the ops that multiply matrices.

As torch counts: two operations for each multiplication with its addition, none for anything else. An op counts as the
work that it is, whatever a backend does again to keep less in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import register_flop_formula

from rec_kernels.ops.dot_interaction import num_pairs
from rec_kernels.ops.grouped_projection import num_weights

_ops = torch.ops.rec_kernels
Shape = Sequence[int]


def _dot_interaction(dense: Shape, sparse: Shape, self_interaction: bool = False, *_, **__) -> int:
    """A product of D terms for each pair."""
    batch, columns = dense
    return 2 * batch * num_pairs(sparse[1], self_interaction) * columns


def _dot_interaction_backward(grad: Shape, *forward, **options) -> int:
    """A pair's gradient goes to both of its vectors."""
    return 2 * _dot_interaction(*forward, **options)


def _factorization_machine(x: Shape, y: Shape, *_, **__) -> int:
    """x^T y, and x times that."""
    batch, vectors, columns = x
    return 2 * 2 * batch * vectors * columns * y[-1]


def _factorization_machine_backward(grad: Shape, *forward, **options) -> int:
    """The gradients of both factors of both products."""
    return 2 * _factorization_machine(*forward, **options)


def _grouped_projection(
    x: Shape, weights: Shape, in_dims: Shape, out_dims: Shape, outputs: Shape, *, out_shape: Shape
) -> int:
    """A matrix for each group but those that are copied; also of the gradients, where x is grad."""
    return 2 * x[0] * num_weights(in_dims, out_dims, outputs)


register_flop_formula(_ops.dot_interaction)(_dot_interaction)
register_flop_formula(_ops.dot_interaction_backward)(_dot_interaction_backward)
register_flop_formula(_ops.factorization_machine)(_factorization_machine)
register_flop_formula(_ops.factorization_machine_backward)(_factorization_machine_backward)
register_flop_formula(
    [
        _ops.grouped_projection,
        _ops.grouped_projection_backward_input,
        _ops.grouped_projection_backward_weights,
    ]
)(_grouped_projection)
