"""Reference of jagged_dedup: a dictionary keyed by the contents of a sample."""

from __future__ import annotations

import torch
from torch import Tensor


def jagged_dedup(
    values: Tensor, offsets: Tensor, groups: list[int], weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows [G, B], inverse [G, B] and counts [G]."""
    features, bounds, ids = len(groups), offsets.tolist(), values.tolist()
    bits = [None] * len(ids) if weights is None else weights.view(torch.int32).tolist()
    batch = (len(bounds) - 1) // features if features else 0
    num_groups = max(groups, default=-1) + 1
    rows = torch.full((num_groups, batch), -1, dtype=torch.int64)
    inverse = torch.zeros((num_groups, batch), dtype=torch.int64)
    counts = torch.zeros(num_groups, dtype=torch.int64)
    for g in range(num_groups):
        members = [f for f in range(features) if groups[f] == g]
        seen: dict[tuple, int] = {}
        for b in range(batch):
            spans = [(bounds[f * batch + b], bounds[f * batch + b + 1]) for f in members]
            contents = tuple((tuple(ids[i:j]), tuple(bits[i:j])) for i, j in spans)
            if contents not in seen:
                rows[g, len(seen)] = b
                seen[contents] = len(seen)
            inverse[g, b] = seen[contents]
        counts[g] = len(seen)
    return rows, inverse, counts
