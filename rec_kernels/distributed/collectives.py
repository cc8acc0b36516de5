"""Objects and tensors of all ranks; tensors and their sums are under way while the caller does something else."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

Told = TypeVar("Told")


def gathered(value: Told, group: dist.ProcessGroup) -> list[Told]:
    """The values of all ranks, objects that are pickled, by rank; nothing else goes on meanwhile."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


class UnderWay:
    """A tensor that a collective has begun to write.

    Args:
        out: the tensor. work: the collective, or None if ``out`` is there.
    """

    def __init__(self, out: Tensor, work: dist.Work | None) -> None:
        self._out, self._work = out, work

    def wait(self) -> Tensor:
        """The tensor, once it has been written; on a GPU, once the stream gets there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._out


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> UnderWay:
    """Flat blocks from all ranks, in their order; ``sent`` and ``received`` are elements to and from each."""
    flat = x.reshape(-1)
    if dist.get_world_size(group) == 1:
        return UnderWay(flat, None)
    out = flat.new_empty(sum(received))
    return UnderWay(out, dist.all_to_all_single(out, flat, received, sent, group=group, async_op=True))


def reduce_scatter(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> UnderWay:
    """Rows of this rank in the sum of all ranks' ``x``, whose rows are ``sizes`` of each rank, one after the other."""
    if dist.get_world_size(group) == 1:
        return UnderWay(x, None)
    out = x.new_empty(sizes[dist.get_rank(group)], x.shape[1])
    blocks = [block.contiguous() for block in x.split(sizes)]
    return UnderWay(out, dist.reduce_scatter(out, blocks, group=group, async_op=True))
