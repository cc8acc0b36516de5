"""Reference of jagged_bucketize: a loop over buckets, bags and ids."""

from __future__ import annotations

import torch
from torch import Tensor


def jagged_bucketize(
    values: Tensor,
    offsets: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    strides: list[int],
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns values, offsets, weights ([0] without weights) and positions."""
    feature_of = [f for f, stride in enumerate(strides) for _ in range(stride)]
    bounds, ids, blocks = offsets.tolist(), values.tolist(), block_sizes.tolist()
    sources, local_ids, ends = [], [], [0]
    for bucket in range(num_buckets):
        for bag, f in enumerate(feature_of):
            for i in range(bounds[bag], bounds[bag + 1]):
                if ids[i] // blocks[f] == bucket:
                    sources.append(i)
                    local_ids.append(ids[i] % blocks[f])
            ends.append(len(sources))
    order = torch.tensor(sources, dtype=torch.int64)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order))
    new_weights = torch.zeros(0) if weights is None else weights[order]
    return torch.tensor(local_ids, dtype=values.dtype), torch.tensor(ends, dtype=offsets.dtype), new_weights, positions
