"""Reference of jagged_permute: a loop over features."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rec_kernels.reference.jagged_index_select import jagged_index_select


def jagged_permute(
    values: Tensor, offsets: Tensor, permute: list[int], strides: list[int], weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns values, offsets and weights ([0] without weights) of the selected features."""
    starts = list(itertools.accumulate(strides, initial=0))
    bags = [bag for f in permute for bag in range(starts[f], starts[f + 1])]
    index = torch.tensor(bags, dtype=torch.int64)
    chosen, new_offsets = jagged_index_select(values, offsets, index)
    empty = torch.zeros(0)
    return chosen, new_offsets, empty if weights is None else jagged_index_select(weights, offsets, index)[0]
