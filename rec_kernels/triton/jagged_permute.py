"""jagged_permute in plain torch, for any GPU: computes the source index of each value from the offsets.

Most of it is copying, for which torch has kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from rec_kernels.ops.layout_records import ID_DTYPES
from rec_kernels.triton.inputs import check, check_one_device, check_tensor
from rec_kernels.triton.kernels import BAD_LAYOUT, NOTHING_BAD

# dtypes that values are copied as, by size: torch cannot zero tensors of every dtype.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def jagged_permute(
    values: Tensor,
    offsets: Tensor,
    permute: Sequence[int],
    strides: Sequence[int],
    weights: Tensor | None = None,
    total: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes torch.ops.rec_kernels.jagged_permute on a GPU, with its bits: about 24 launches for any number of
    features."""
    starts = _checked(values, offsets, permute, strides, weights, total)
    count = values.shape[0]
    # Concatenates views: no bag counts are sent to the GPU.
    none = offsets[:0]
    first = torch.cat([none, *(offsets[starts[f] : starts[f + 1]] for f in permute)]).long()
    last = torch.cat([none, *(offsets[starts[f] + 1 : starts[f + 1] + 1] for f in permute)]).long()
    good = (first >= 0) & (last >= first) & (last <= count)
    ends = torch.where(good, last - first, 0).cumsum(0)
    bounds = torch.cat([ends.new_zeros(1), ends])
    if total is None:
        once = len(permute) == len(strides) == len(set(permute))
        total = count if once else int(bounds[-1])
    check(
        offsets.dtype == torch.int64 or total < 2**31,
        f"the result has {total} values, more than int32 offsets can name",
    )
    # Output position -> its bag -> its input position.
    place = torch.arange(total, device=values.device)
    bag = torch.searchsorted(ends, place, right=True)
    inside = bag < ends.shape[0]
    shift = torch.cat([first - bounds[:-1], bounds[:1]])  # none after the last bag
    source = torch.where(inside, place + shift[bag], 0)
    out, new_weights = _chosen(values, source, inside), values.new_empty(0, dtype=torch.float32)
    if weights is not None:
        new_weights = _chosen(weights, source, inside)
    return out, bounds.clamp(max=total).to(offsets.dtype), new_weights, _status(offsets, count, bounds, total)


def _chosen(t: Tensor, source: Tensor, inside: Tensor) -> Tensor:
    """t[source], and zeros where ``inside`` is False."""
    if t.shape[0] == 0:
        return t.new_zeros(source.shape)
    words = t.view(_WORDS[t.element_size()])[source]
    return torch.where(inside, words, words.new_zeros(())).view(t.dtype)


def _status(offsets: Tensor, count: int, bounds: Tensor, total: int) -> Tensor:
    """Status [2]: index of the first bad offset, or the number of bags if they do not have ``total`` values."""
    before = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    bad = (offsets < before) | (offsets > count)
    missed = torch.where(bounds[-1] == total, NOTHING_BAD.value, bounds.shape[0] - 1)
    # argmax: index of the first True.
    found = torch.where(bad.any(), bad.long().argmax() + (BAD_LAYOUT.value + 1), missed)
    return torch.stack([found, torch.zeros_like(found)])


def _checked(
    values: Tensor,
    offsets: Tensor,
    permute: Sequence[int],
    strides: Sequence[int],
    weights: Tensor | None,
    total: int | None,
) -> list[int]:
    """First bag of each feature, [F + 1]. Raises ValueError like the compiled op."""
    check_one_device(SimpleNamespace(values=values, offsets=offsets, weights=weights))
    check(values.dim() == 1, f"values must have 1 dimension(s), got shape {list(values.shape)}")
    check_tensor(offsets, "offsets", ID_DTYPES, rank=1)
    bags = offsets.shape[0] - 1
    check(bags >= 0, "offsets must have one element more than there are rows, got none")
    if weights is not None:
        check_tensor(weights, "weights", (torch.float32,), shape=tuple(values.shape))
    starts = [0]
    for f, stride in enumerate(strides):
        left = bags - starts[-1]
        fits = 0 <= stride <= left
        check(fits, f"strides[{f}] = {stride} must be in [0, {left}]: offsets describe {bags} bags")
        starts.append(starts[-1] + stride)
    check(starts[-1] == bags, f"strides are of {starts[-1]} bags, and offsets of {bags}")
    for i, f in enumerate(permute):
        check(0 <= f < len(strides), f"permute[{i}] = {f} must be in [0, {len(strides)}), the features")
    check((total or 0) >= 0, f"total = {total} must be 0 or more")
    return starts
