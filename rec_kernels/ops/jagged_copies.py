"""Fake and gradient of the ops that copy rows: ``op(values, *where, total) -> (output, output_offsets, status)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rec_kernels.ops.autograd import differentiable_once
from rec_kernels.ops.fakes import check_one_device, dynamic_size
from rec_kernels.ops.row_formats import FLOAT_DTYPES

_ops = torch.ops.rec_kernels


def fake(
    values: Tensor, where: tuple[Tensor, Tensor], rows: int, like: Tensor, total: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fake result: ``rows`` jagged rows of ``values``, offsets of the dtype of ``like``, a status."""
    check_one_device((values, *where))
    size = dynamic_size() if total is None else total
    copied = values.new_empty((size, *values.shape[1:]))
    return copied, like.new_empty((rows + 1,)), like.new_empty((2,), dtype=torch.int64)


def setup_context(ctx, inputs, output) -> None:
    """Keeps where the rows are. Raises ValueError for dtypes without a gradient."""
    values, *where, _ = inputs
    if values.dtype not in FLOAT_DTYPES.values():
        raise ValueError(
            f"values are {values.dtype} and require a gradient, which is of float32, float16 and bfloat16 only: "
            "detach them"
        )
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.dtype, ctx.total = values.shape, values.dtype, output[0].shape[0]
    ctx.save_for_backward(*where)


def backward_of(op: str) -> Callable:
    """The gradient of ``values``: of their copies summed up by ``expand_backward``'s rule, in the output's order."""

    def backward(ctx, grad: Tensor | None, *_):
        if grad is None:
            return None, None, None, None
        # Counted from 1: what a total that is too large leaves empty on a GPU then comes from -1, which is left out.
        places = torch.arange(1, ctx.shape[0] + 1, device=grad.device)
        sources = getattr(_ops, op)(places, *ctx.saved_tensors, ctx.total)[0] - 1
        rows = grad.float().reshape(ctx.total, ctx.shape[1:].numel())
        summed = _ops.expand_backward(rows, sources, ctx.shape[0])
        return summed.view(ctx.shape).to(ctx.dtype), None, None, None

    return differentiable_once(op, backward)
