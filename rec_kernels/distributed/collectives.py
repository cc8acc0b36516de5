"""Tensors from every rank to every other, and their sums."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Flat blocks from all ranks, in their order; ``sent`` and ``received`` are elements to and from each."""
    flat = x.reshape(-1)
    if dist.get_world_size(group) == 1:
        return flat
    out = flat.new_empty(sum(received))
    dist.all_to_all_single(out, flat, received, sent, group=group)
    return out


def reduce_scatter(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of this rank in the sum of all ranks' ``x``, whose rows are ``sizes`` of each rank, one after the other."""
    if dist.get_world_size(group) == 1:
        return x
    out = x.new_empty(sizes[dist.get_rank(group)], x.shape[1])
    dist.reduce_scatter(out, [block.contiguous() for block in x.split(sizes)], group=group)
    return out
