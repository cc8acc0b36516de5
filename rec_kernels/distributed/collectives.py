"""Tensors from every rank to every other."""

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
