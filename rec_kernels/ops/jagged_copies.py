"""Fake kernel and gradient of the ops that copy jagged rows, jagged_index_select and jagged_windows.

They are called as ``op(values, *where, total) -> (output, output_offsets, status)``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rec_kernels.ops.autograd import differentiable_once
from rec_kernels.ops.fakes import check_one_device, dynamic_size
from rec_kernels.ops.row_formats import FLOAT_FORMATS

_ops = torch.ops.rec_kernels


def fake(
    values: Tensor, where: tuple[Tensor, Tensor], rows: int, like: Tensor, total: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fake result of an op: ``rows`` jagged rows of ``values``, offsets of the dtype of ``like``, and a status."""
    check_one_device((values, *where))
    size = dynamic_size() if total is None else total
    copied = values.new_empty((size, *values.shape[1:]))
    return copied, like.new_empty((rows + 1,)), like.new_empty((2,), dtype=torch.int64)


def setup_context(ctx, inputs, output) -> None:
    """Saves the row positions for the backward. Raises ValueError for dtypes without a gradient."""
    values, *where, _ = inputs
    if values.dtype not in FLOAT_FORMATS:
        raise ValueError(
            f"values are {values.dtype} and require a gradient, which only float32, float16 and bfloat16 "
            "support: detach them"
        )
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.dtype, ctx.total = values.shape, values.dtype, output[0].shape[0]
    ctx.save_for_backward(*where)


def backward_of(op: str) -> Callable:
    """The backward of ``op``: sums the gradients of a value's copies by ``expand_backward``, in output order."""

    def backward(ctx, grad: Tensor | None, *_):
        if grad is None:
            return None, None, None, None
        # Positions count from 1: on a GPU, places left empty by a too large total are then -1, which the sum skips.
        places = torch.arange(1, ctx.shape[0] + 1, device=grad.device)
        sources = getattr(_ops, op)(places, *ctx.saved_tensors, ctx.total)[0] - 1
        rows = grad.float().reshape(ctx.total, ctx.shape[1:].numel())
        summed = _ops.expand_backward(rows, sources, ctx.shape[0])
        return summed.view(ctx.shape).to(ctx.dtype), None, None, None

    return differentiable_once(op, backward)
