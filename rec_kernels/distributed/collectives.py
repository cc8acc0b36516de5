"""Collectives on objects and tensors; those on tensors are asynchronous."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Returns the picklable values of all ranks, by rank; blocks."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


class TensorAwaitable:
    """The output of an asynchronous collective.

    Args:
        out: the tensor. work: the collective, or None if ``out`` is complete.
    """

    def __init__(self, out: Tensor, work: dist.Work | None) -> None:
        self._out, self._work = out, work

    def wait(self) -> Tensor:
        """Waits for the collective, on a GPU on the current stream, and returns the tensor."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._out


def all_to_all(
    x: Tensor, input_splits: list[int], output_splits: list[int], group: dist.ProcessGroup
) -> TensorAwaitable:
    """Exchanges flat blocks: ``input_splits`` and ``output_splits`` are elements to and from each rank."""
    flat = x.reshape(-1)
    if dist.get_world_size(group) == 1:
        return TensorAwaitable(flat, None)
    out = flat.new_empty(sum(output_splits))
    return TensorAwaitable(
        out, dist.all_to_all_single(out, flat, output_splits, input_splits, group=group, async_op=True)
    )


def reduce_scatter(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> TensorAwaitable:
    """Sums ``x`` over ranks and returns this rank's rows; ``sizes`` are the rows of each rank, in order."""
    if dist.get_world_size(group) == 1:
        return TensorAwaitable(x, None)
    out = x.new_empty(sizes[dist.get_rank(group)], x.shape[1])
    blocks = [block.contiguous() for block in x.split(sizes)]
    return TensorAwaitable(out, dist.reduce_scatter(out, blocks, group=group, async_op=True))
