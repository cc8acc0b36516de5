"""jagged_dedup: find the distinct samples of a key-major batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels.ops.fakes import check_one_device
from rec_kernels.ops.layout_records import listed

_ops = torch.ops.rec_kernels


def jagged_dedup(
    values: Tensor, offsets: Tensor, groups: Sequence[int], weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the distinct samples of a key-major batch, for groups of features.

    Two samples are equal in a group if, for each of its features, their bags have equal ids in equal order and weights
    with equal bits. Candidates are found by hash and then compared, so a collision never merges different samples.

    Args:
        values: [N] ids, int32 or int64.
        offsets: [F * B + 1] int32 or int64: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.
        groups: [F] group of each feature, numbered from 0 without gaps; -1: no group.
        weights: [N] float32, or None.

    Returns:
        rows [G, B] int64: the first occurrence of each distinct sample of group g, ascending, and -1 from
        ``counts[g]`` on. inverse [G, B] int64: index in ``rows[g]`` of each sample. counts [G] int64: number of
        distinct samples. The host does not wait for a GPU.

    Raises:
        ValueError: sizes, dtypes or devices do not match, or groups are not numbered as above; on the CPU also for bad
        offsets. On a GPU, bags with bad offsets are empty, and the op's ``status`` (docs/ops.md) reports them.

    Source: Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model Training
    Infrastructure", MLSys 2023, arXiv:2211.05239. ``rk.InverseKeyedJaggedTensor.from_kjt`` builds a batch of the
    distinct samples.
    """
    return _ops.jagged_dedup(values, offsets, listed(groups, "groups"), weights)[:3]


@torch.library.register_fake("rec_kernels::jagged_dedup")
def _(values, offsets, groups, weights=None, hash_bits=64):
    check_one_device((values, offsets, weights))
    count, batch = max(groups, default=-1) + 1, (offsets.shape[0] - 1) // max(len(groups), 1)
    index = {"dtype": torch.int64}
    rows, inverse = values.new_empty((count, batch), **index), values.new_empty((count, batch), **index)
    return rows, inverse, values.new_empty((count,), **index), values.new_empty((2,), **index)
