"""Resolves lengths, offsets and batch sizes, in the combinations that TorchRec's callers pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels.nn.jagged.checks import check_integers, has_data, integers_of
from rec_kernels.ops.layout_records import integer_or_symbol, listed
from rec_kernels.ops.tracing import is_exporting


def to_offsets(lengths: Tensor) -> Tensor:
    """[len(lengths) + 1] offsets, with the dtype of ``lengths``."""
    offsets = lengths.new_zeros(lengths.shape[0] + 1)
    if has_data(lengths):  # in place: half the time of a copy into fresh memory
        torch.cumsum(lengths, 0, dtype=lengths.dtype, out=offsets[1:])
    else:
        offsets[1:] = torch.cumsum(lengths, 0, dtype=lengths.dtype)
    return offsets


def read_at(offsets: Tensor, places: list[int]) -> list[int]:
    """Reads the offsets at the given positions."""
    if is_exporting():  # an exported program would store a list index as constants
        return torch.stack([offsets[place] for place in places]).tolist()
    return offsets[places].tolist()


def resolve_offsets(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """[bags + 1] offsets for ``values`` [N, ...]. ``check_bounds`` checks their contents.

    Empty tensors may have any dtype, and empty offsets mean no bags if ``values`` is empty.

    Raises:
        ValueError: ``values`` is not empty and neither argument is given; a dtype, shape or device does not match;
            lengths and offsets are inconsistent. TypeError: an argument is not a tensor.
    """
    if offsets is None:
        if lengths is None:
            if len(values):
                raise ValueError("lengths or offsets must be given with values")
            return torch.zeros(1, dtype=torch.int64, device=values.device)
        return to_offsets(_checked_integers("lengths", lengths, values))
    offsets = _checked_integers("offsets", offsets, values)
    if has_data(offsets) and not len(offsets) and not len(values):
        offsets = offsets.new_zeros(1)
    if lengths is not None:
        _check_both(_checked_integers("lengths", lengths, values), offsets)
    return offsets


def _checked_integers(name: str, t: Tensor, values: Tensor) -> Tensor:
    if isinstance(t, Tensor) and t.is_floating_point() and t.shape == (0,):
        t = t.long()  # torch.tensor([]) is float32
    check_integers(name, t, values)
    return t


def _check_both(lengths: Tensor, offsets: Tensor) -> None:
    if lengths.shape[0] + 1 != offsets.shape[0]:
        raise ValueError(
            f"lengths describe {lengths.shape[0]} bags, but offsets {offsets.shape[0] - 1}: give only one of "
            "them, or both for the same bags"
        )
    if has_data(lengths) and has_data(offsets) and len(other := (lengths != offsets.diff()).nonzero()):
        i = int(other[0])
        raise ValueError(
            f"lengths[{i}] = {int(lengths[i])} must be {int(offsets[i + 1] - offsets[i])}, the length that offsets give"
        )


def resolve_strides(
    stride: int | None, per_rank: Tensor | Sequence[Sequence[int]] | None, strides: Sequence[int] | None
) -> list[int] | None:
    """Batch size per feature; None if all features share one batch size.

    Args:
        stride: B, or None. per_rank: [F][ranks] parts that sum to each batch size, or None. strides: F batch sizes, or
            None. Batch sizes that all equal ``stride`` count as shared.

    Raises:
        ValueError: two arguments are inconsistent, or one does not consist of integers.
    """
    stride = None if stride is None else integer_or_symbol(stride, "stride")
    strides = None if strides is None else integers_of(strides, "stride_per_key")
    if per_rank is not None:
        own = _sums(per_rank.tolist() if isinstance(per_rank, Tensor) else per_rank)
        if strides is not None and strides != own:
            raise ValueError(f"stride_per_key must be the sums of stride_per_key_per_rank, {own}, got {strides}")
        return own
    if strides is None or (stride is not None and all(size == stride for size in strides)):
        return None
    return strides


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    name = "stride_per_key_per_rank"
    return [sum(integers_of(row, f"{name}[{f}]")) for f, row in enumerate(listed(rows, name))]


def check_stride(stride: int | None, keys: list[str], bags: int) -> None:
    """Raises ValueError unless ``bags`` equals ``stride`` bags per key."""
    if stride is not None and keys and bags != stride * len(keys):
        raise ValueError(
            f"stride must be {bags // len(keys)}, the number of bags of each of {len(keys)} keys, got {stride!r}"
        )


def resolve_starts(length_per_key: Sequence[int] | None, offset_per_key: Sequence[int] | None) -> list[int] | None:
    """[F + 1] starts of each feature's ids, from the arguments; None if neither is given.

    Raises:
        ValueError: the arguments are inconsistent, or one does not consist of integers.
    """
    lengths = None if length_per_key is None else integers_of(length_per_key, "length_per_key")
    if offset_per_key is None:
        return None if lengths is None else list(itertools.accumulate(lengths, initial=0))
    starts = integers_of(offset_per_key, "offset_per_key")
    if lengths is not None and [b - a for a, b in itertools.pairwise(starts)] != lengths:
        raise ValueError(f"length_per_key must be the differences of offset_per_key, {offset_per_key}, got {lengths}")
    return starts


def have_gaps(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
    """[1] bool: True if concatenating the batches would put values that are in no bag between bags."""
    ends = [each[-1:] != ids.shape[0] for ids, each in zip(values[:-1], offsets, strict=False)]
    return torch.cat([*ends, *(each[:1] != 0 for each in offsets[1:])]).any(0, keepdim=True)
