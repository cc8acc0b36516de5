"""jagged_overlaps: store the common ids of overlapping rows once."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.fakes import check_one_device, dynamic_size

_ops = torch.ops.rec_kernels


def jagged_overlaps(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Stores rows as windows of one buffer, so that ids shared by the end of one row and the start of a later are once.

    A row continues an earlier row if its first ids, 4 or more, are the last ids of that row, as in the growing history
    of one user's samples; only the remaining ids are appended to the buffer. Rows must be in time order; a missed
    overlap only costs memory. Overlaps are found by hash and then compared, in linear time, on the CPU in the calling
    thread, which is meant to be a data loader's.

    Args:
        values: [N] ids, int32 or int64.
        offsets: [R + 1] int32 or int64: row r is ``values[offsets[r] : offsets[r+1]]``.

    Returns:
        values [stored] and starts [R], of the dtype of ``offsets``. ``rk.jagged_windows(values, starts,
        offsets.diff())`` restores the rows.

    Raises:
        ValueError: sizes or dtypes do not match, or bad offsets. NotImplementedError: the tensors are not on the CPU.
    """
    return _ops.jagged_overlaps(values, offsets)[:2]


@torch.library.register_fake("rec_kernels::jagged_overlaps")
def _(values, offsets):
    check_one_device((values, offsets))
    rows = offsets.shape[0] - 1
    status = offsets.new_empty((2,), dtype=torch.int64)
    return values.new_empty((dynamic_size(),)), offsets.new_empty((rows,)), status
