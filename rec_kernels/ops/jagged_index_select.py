"""jagged_index_select: rows of a jagged tensor, chosen by their numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.ops.fakes import check_one_device, dynamic_size
from rec_kernels.ops.row_formats import FLOAT_DTYPES

_ops = torch.ops.rec_kernels


def jagged_index_select(
    values: Tensor, offsets: Tensor, index: Tensor, *, total: int | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses rows of a jagged tensor, in any order and as often as wanted.

    Args:
        values: [N] or [N, D] of any dtype; row r is ``values[offsets[r] : offsets[r+1]]``.
        offsets: [R + 1] int32 or int64.
        index: [M] int32 or int64, numbers of rows in [0, R).
        total: how many values these rows have, if it is known: without it, the host waits for a GPU to learn it.

    Returns:
        values [total] or [total, D] and offsets [M + 1] of the chosen rows. Differentiable in ``values`` if they are
        float32, float16 or bfloat16; what a value gets from several copies is summed as ``rk.expand`` does.

    Raises:
        IndexError: on the CPU, a number out of range, with its position; on a GPU such a row is empty.
        ValueError: sizes, dtypes or devices do not fit, or ``values`` of another dtype require a gradient; on the CPU
        also for bad offsets and a wrong ``total``. On a GPU rows with bad offsets are empty, and the op's ``status``
        (docs/ops.md) tells.
    """
    return _ops.jagged_index_select(values, offsets, index, total)[:2]


@torch.library.register_fake("rec_kernels::jagged_index_select")
def _(values, offsets, index, total=None):
    check_one_device((values, offsets, index))
    size = dynamic_size() if total is None else total
    chosen = values.new_empty((size, *values.shape[1:]))
    return chosen, offsets.new_empty((index.shape[0] + 1,)), offsets.new_empty((2,), dtype=torch.int64)


def _setup(ctx, inputs, output) -> None:
    values, offsets, index = inputs[:3]
    if values.dtype not in FLOAT_DTYPES.values():
        raise ValueError(
            f"values are {values.dtype} and require a gradient, which is of float32, float16 and bfloat16 only: "
            "detach them"
        )
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.dtype, ctx.total = values.shape, values.dtype, output[0].shape[0]
    ctx.save_for_backward(offsets, index)


@once_differentiable
def _backward(ctx, grad: Tensor | None, *_):
    if grad is None:
        return None, None, None, None
    offsets, index = ctx.saved_tensors
    # Counted from 1: what a total that is too large leaves empty on a GPU then comes from -1, which is left out.
    places = torch.arange(1, ctx.shape[0] + 1, device=grad.device)
    sources = _ops.jagged_index_select(places, offsets, index, ctx.total)[0] - 1
    rows = grad.float().reshape(ctx.total, ctx.shape[1:].numel())
    summed = _ops.expand_backward(rows, sources, ctx.shape[0])
    return summed.view(ctx.shape).to(ctx.dtype), None, None, None


torch.library.register_autograd("rec_kernels::jagged_index_select", _backward, setup_context=_setup)
