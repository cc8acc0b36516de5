"""expand: gather the rows of distinct samples into one row per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.autograd import call, differentiable_once, register_autograd
from rec_kernels.ops.fakes import check_one_device
from rec_kernels.ops.layout_records import check_tensor

_ops = torch.ops.rec_kernels


def expand(x: Tensor, inverse: Tensor) -> Tensor:
    """Gathers rows, ``x[inverse]``, with a gradient that has the same bits in every run.

    Args:
        x: [U, ...] float32, float16, bfloat16, int32 or int64.
        inverse: int32 or int64 row indices in [0, U), of any shape.

    Returns:
        A new tensor ``[*inverse.shape, ...]`` of x's dtype. Differentiable in ``x``: the gradients of a row are summed
        in float32, in ascending position in ``inverse``, by the rule of docs/numerics.md ("Row gradients"), and rounded
        once if x is float16 or bfloat16.

    Raises:
        IndexError: on the CPU, an index is out of range; the message has its position. On a GPU, its row is zeros and
        the op's ``status`` (docs/ops.md) reports it.
        ValueError: a dtype, shape or device is not as above. TypeError: an argument is not a tensor.
    """
    check_tensor("x", x)
    check_tensor("inverse", inverse)
    if x.dim() == 0:
        raise ValueError("x must be [U, ...], got a tensor without dimensions")
    shape = (*inverse.shape, *x.shape[1:])
    # reshape(len(x), -1) fails where x has no elements: torch cannot infer the columns.
    columns = x.shape[1:].numel()
    x, inverse = x.reshape(x.shape[0], columns), inverse.reshape(-1)
    return call(_ops.expand.default, x, inverse)[0].view(shape)


@torch.library.register_fake("rec_kernels::expand")
def _(x, inverse):
    check_one_device((x, inverse))
    return x.new_empty((inverse.shape[0], x.shape[1])), x.new_empty((2,), dtype=torch.int64)


@torch.library.register_fake("rec_kernels::expand_backward")
def _(grad, inverse, rows):
    check_one_device((grad, inverse))
    return grad.new_empty((rows, grad.shape[1]))


def _setup(ctx, inputs, output) -> None:
    x, inverse = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.rows, ctx.dtype = x.shape[0], x.dtype
    ctx.save_for_backward(inverse)


def _backward(ctx, grad: Tensor | None, _):
    if grad is None:
        return None, None
    (inverse,) = ctx.saved_tensors
    return _ops.expand_backward(grad.float(), inverse, ctx.rows).to(ctx.dtype), None


register_autograd("expand", differentiable_once("expand", _backward), setup_context=_setup)
