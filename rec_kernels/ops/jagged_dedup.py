"""jagged_dedup: which samples of a batch have the same bags."""

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

    Two samples are the same in a group if all their bags of its features are: as many ids, the same in the same order,
    and the same bits of their weights. Found by hash and verified: nothing is merged that differs.

    Args:
        values: [N] ids, int32 or int64.
        offsets: [F * B + 1] int32 or int64: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.
        groups: F numbers: the group of each feature, from 0 on, none left out; -1: none.
        weights: [N] float32, or None.

    Returns:
        rows [G, B] int64: for distinct sample u of group g, u < counts[g], the sample in which it occurs first, in
        ascending order; -1 behind them. inverse [G, B] int64: which distinct one each sample is. counts [G] int64. A
        GPU is not waited for.

    Raises:
        ValueError: sizes, dtypes or devices do not fit, or groups are not numbered as above; on the CPU also for bad
        offsets. On a GPU bags with bad offsets are empty, and the op's ``status`` (docs/ops.md) tells.

    Source: Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model Training
    Infrastructure", MLSys 2023, arXiv:2211.05239. ``rk.InverseKeyedJaggedTensor.from_kjt`` makes a batch of the
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
