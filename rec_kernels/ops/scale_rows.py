"""scale_rows: the template op. Copy this file (and its stem in every other layer) to add an op."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.autograd import call, register_autograd
from rec_kernels.ops.fakes import check_one_device


def scale_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Multiplies each row by its own factor: ``y[n, :] = scale[n] * x[n, :]``.

    Args:
        x: [N, D] float32.
        scale: [N] float32, on x's device.

    Returns:
        [N, D] float32. Differentiable in both arguments; the gradient of ``scale`` is the row-wise dot product in the
        order of docs/numerics.md ("Row statistics"), the same bits on every backend.

    Raises:
        ValueError: a shape, dtype or device is not as above; the message names the argument.
    """
    return call(torch.ops.rec_kernels.scale_rows.default, x, scale)


@torch.library.register_fake("rec_kernels::scale_rows")
def _scale_rows_fake(x: Tensor, scale: Tensor) -> Tensor:
    check_one_device((x, scale))
    return x.new_empty(x.shape)


@torch.library.register_fake("rec_kernels::row_dot")
def _row_dot_fake(a: Tensor, b: Tensor) -> Tensor:
    check_one_device((a, b))
    return a.new_empty(a.shape[:1])


def _scale_rows_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _scale_rows_backward(ctx, grad: Tensor):
    x, scale = ctx.saved_tensors
    grad_x = torch.ops.rec_kernels.scale_rows(grad, scale) if ctx.needs_input_grad[0] else None
    grad_scale = torch.ops.rec_kernels.row_dot(grad, x) if ctx.needs_input_grad[1] else None
    return grad_x, grad_scale


def _row_dot_backward(ctx, grad: Tensor):
    a, b = ctx.saved_tensors
    grad_a = torch.ops.rec_kernels.scale_rows(b, grad) if ctx.needs_input_grad[0] else None
    grad_b = torch.ops.rec_kernels.scale_rows(a, grad) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b


register_autograd("scale_rows", _scale_rows_backward, setup_context=_scale_rows_setup)
register_autograd("row_dot", _row_dot_backward, setup_context=_scale_rows_setup)
