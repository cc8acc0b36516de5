"""jagged_permute: reorder the features of a key-major batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels.ops.autograd import call, differentiable_once, register_autograd
from rec_kernels.ops.fakes import check_one_device, dynamic_size
from rec_kernels.ops.layout_records import listed

_ops = torch.ops.rec_kernels


def jagged_permute(
    values: Tensor,
    offsets: Tensor,
    permute: Sequence[int],
    strides: Sequence[int],
    weights: Tensor | None = None,
    *,
    total: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reorders the features of a key-major batch.

    Args:
        values: [N] of any dtype; the bags of feature 0, then those of feature 1, and so on.
        offsets: [sum(strides) + 1] int32 or int64.
        permute: feature indices in [0, F), in output order; features may be repeated or omitted.
        strides: [F] batch size of each feature.
        weights: [N] float32, or None.
        total: number of values in the output, if known. With None, the host waits for a GPU to compute it, unless
            ``permute`` has every feature once; then ``offsets`` must go from 0 to N. With a total, values before the
            first and after the last offset may be in no bag.

    Returns:
        values [total], offsets and weights (or None) of the output features. Differentiable in ``weights``, not in
        ``values``.

    Raises:
        ValueError: sizes, dtypes or devices do not match, or ``permute`` has a feature out of range; on the CPU also
        for bad offsets and a wrong ``total``. On a GPU, bags with bad offsets are empty, and the op's ``status``
        (docs/ops.md) reports them.
    """
    given = values, offsets, listed(permute, "permute"), listed(strides, "strides"), weights, total
    out = call(_ops.jagged_permute.default, *given)
    return out[0], out[1], None if weights is None else out[2]


def _names_each_once(permute: Sequence[int], features: int) -> bool:
    return len(permute) == features and len(set(permute)) == features


@torch.library.register_fake("rec_kernels::jagged_permute")
def _(values, offsets, permute, strides, weights=None, total=None):
    check_one_device((values, offsets, weights))
    # The kernels know the output size without reading data in the same cases.
    if total is None:
        total = values.shape[0] if _names_each_once(permute, len(strides)) else dynamic_size()
    bags = sum(strides[f] for f in permute)
    new_weights = values.new_empty((0 if weights is None else total,), dtype=torch.float32)
    status = offsets.new_empty((2,), dtype=torch.int64)
    return values.new_empty((total,)), offsets.new_empty((bags + 1,)), new_weights, status


def _setup(ctx, inputs, output) -> None:
    _, offsets, permute, strides, weights, total = inputs
    ctx.mark_non_differentiable(output[0], output[1], output[3])
    ctx.set_materialize_grads(False)
    ctx.permute, ctx.strides = permute, strides
    ctx.size, ctx.total = None if weights is None else weights.shape[0], output[0].shape[0]
    # In compiled code, sizes may depend on data and cannot be compared.
    ctx.covers = total is None or (type(total) is type(ctx.size) is int and total == ctx.size)
    ctx.save_for_backward(offsets, output[1])


def _inverse(permute: Sequence[int]) -> list[int]:
    return sorted(range(len(permute)), key=permute.__getitem__)


def _backward(ctx, _values, _offsets, grad: Tensor | None, _status):
    if grad is None or ctx.size is None:
        return None, None, None, None, None, None
    offsets, new_offsets = ctx.saved_tensors
    # Each weight is in the output once: permute back. Weights of ids in no bag get 0.
    if _names_each_once(ctx.permute, len(ctx.strides)) and ctx.covers:
        strides = [ctx.strides[f] for f in ctx.permute]
        back = _ops.jagged_permute(grad, new_offsets, _inverse(ctx.permute), strides, None, ctx.size)[0]
        return None, None, None, None, back, None
    # Positions count from 1: on a GPU, places left empty by a too large total are then -1, which the sum skips.
    places = torch.arange(1, ctx.size + 1, device=grad.device)
    sources = _ops.jagged_permute(places, offsets, ctx.permute, ctx.strides, None, ctx.total)[0] - 1
    summed = _ops.expand_backward(grad[:, None], sources, ctx.size)
    return None, None, None, None, summed.squeeze(1), None


register_autograd("jagged_permute", differentiable_once("jagged_permute", _backward), setup_context=_setup)
