"""jagged_bucketize: distribute the ids of a key-major batch to the shards of row-wise sharded tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.ops.autograd import call, differentiable_once, register_autograd
from rec_kernels.ops.fakes import check_one_device
from rec_kernels.ops.layout_records import listed

_ops = torch.ops.rec_kernels


class Bucketized(NamedTuple):
    """Result of ``jagged_bucketize``.

    Args:
        values: [N] ids, relative to the first row of their bucket's block.
        offsets: [num_buckets * bags + 1], of bags ordered by bucket, feature and sample.
        weights: [N] float32, or None.
        positions: [N] int64, the position in ``values`` of each id of the input.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    positions: Tensor


def jagged_bucketize(
    values: Tensor,
    offsets: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    strides: Sequence[int],
    weights: Tensor | None = None,
) -> Bucketized:
    """Distributes the ids of a key-major batch to the shards (buckets) of row-wise sharded tables.

    Args:
        values: [N] ids, int32 or int64; those of feature f are in [0, block_sizes[f] * num_buckets).
        offsets: [sum(strides) + 1] int32 or int64, from 0 to N.
        block_sizes: [F] int64, at least 1: rows per bucket of each feature's table. Id i becomes
            ``i % block_sizes[f]`` in bucket ``i // block_sizes[f]``.
        num_buckets: number of buckets.
        strides: [F] batch size of each feature.
        weights: [N] float32, or None.

    Returns:
        Bucketized. The ids of a bag keep their order within each bucket. Differentiable in ``weights``. The host does
        not wait for a GPU.

    Raises:
        IndexError: on the CPU, an id is out of range; the message has its feature and bag. On a GPU, the id goes to the
        first or last bucket with a value that is out of range there.
        ValueError: sizes, dtypes or devices do not match; on the CPU also for bad offsets and block sizes. On a GPU,
        these make every bag empty, and the op's ``status`` (docs/ops.md) reports them.
    """
    given = values, offsets, block_sizes, num_buckets, listed(strides, "strides"), weights
    out = call(_ops.jagged_bucketize.default, *given)
    return Bucketized(out[0], out[1], None if weights is None else out[2], out[3])


@torch.library.register_fake("rec_kernels::jagged_bucketize")
def _(values, offsets, block_sizes, num_buckets, strides, weights=None):
    check_one_device((values, offsets, block_sizes, weights))
    new_offsets = offsets.new_empty((num_buckets * (offsets.shape[0] - 1) + 1,))
    new_weights = values.new_empty((0,) if weights is None else values.shape, dtype=torch.float32)
    index = {"dtype": torch.int64}
    return (
        values.new_empty(values.shape),
        new_offsets,
        new_weights,
        values.new_empty(values.shape, **index),
        values.new_empty((2,), **index),
    )


def _setup(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(output[0], output[1], output[3], output[4])
    ctx.set_materialize_grads(False)
    ctx.weighted = inputs[5] is not None
    ctx.save_for_backward(output[3])


def _backward(ctx, _values, _offsets, grad: Tensor | None, _positions, _status):
    if grad is None or not ctx.weighted:
        return None, None, None, None, None, None
    (positions,) = ctx.saved_tensors
    return None, None, None, None, None, _ops.expand(grad[:, None], positions)[0].squeeze(1)


register_autograd("jagged_bucketize", differentiable_once("jagged_bucketize", _backward), setup_context=_setup)
