"""jagged_overlaps: rows that continue one another, with their common ids stored once."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.fakes import check_one_device, dynamic_size

_ops = torch.ops.rec_kernels


def jagged_overlaps(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Finds windows: a buffer that stores ids once where a row begins with the end of an earlier one.

    A row goes on from an earlier one if it begins with the last ids of that one, 4 or more, as histories of one user's
    samples do, the later the sample the further. Only the rest of it is stored then. Rows come in the order of their
    time; what is not found costs memory and nothing else. Found by hash and compared, in linear time, on the CPU by the
    calling thread: meant for a loader's.

    Args:
        values: [N] ids, int32 or int64.
        offsets: [R + 1] int32 or int64: row r is ``values[offsets[r] : offsets[r+1]]``.

    Returns:
        values [stored] and starts [R], of the dtype of ``offsets``: row r is ``rk.jagged_windows(values, starts,
        offsets.diff())``'s.

    Raises:
        ValueError: sizes or dtypes do not fit, or bad offsets. NotImplementedError: the tensors are not on the CPU.
    """
    return _ops.jagged_overlaps(values, offsets)[:2]


@torch.library.register_fake("rec_kernels::jagged_overlaps")
def _(values, offsets):
    check_one_device((values, offsets))
    rows = offsets.shape[0] - 1
    status = offsets.new_empty((2,), dtype=torch.int64)
    return values.new_empty((dynamic_size(),)), offsets.new_empty((rows,)), status
