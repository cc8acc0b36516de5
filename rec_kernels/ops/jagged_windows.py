"""jagged_windows: rows that are windows of one buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import jagged_copies
from rec_kernels.ops.autograd import call, register_autograd

_ops = torch.ops.rec_kernels


def jagged_windows(
    values: Tensor, starts: Tensor, lengths: Tensor, *, total: int | None = None
) -> tuple[Tensor, Tensor]:
    """Makes rows of windows of one buffer, which may overlap, be empty and come in any order.

    Args:
        values: [N] or [N, D] of any dtype.
        starts: [M] int32 or int64 in [0, N]: row m is ``values[starts[m] : starts[m] + lengths[m]]``.
        lengths: [M] int32 or int64 in [0, N - ``starts``].
        total: how many values the windows have, if it is known: without it, the host waits for a GPU to learn it.

    Returns:
        values [total] or [total, D] and offsets [M + 1], of the dtype of ``lengths``, of the rows. Differentiable in
        ``values`` if they are float32, float16 or bfloat16; what a value gets from several windows is summed as
        ``rk.expand`` does, in the order of the windows.

    Raises:
        IndexError: on the CPU, a window that is not within the values, with its position; on a GPU it is empty, and the
        op's ``status`` (docs/ops.md) tells. ValueError: sizes, dtypes or devices do not fit, or ``values`` of another
        dtype require a gradient; on the CPU also for a wrong ``total``.

    Source: partial deduplication of Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model
    Training Infrastructure", MLSys 2023, arXiv:2211.05239. ``rk.KeyedJaggedWindows`` makes batches of such rows.
    """
    return call(_ops.jagged_windows.default, values, starts, lengths, total)[:2]


@torch.library.register_fake("rec_kernels::jagged_windows")
def _(values, starts, lengths, total=None):
    return jagged_copies.fake(values, (starts, lengths), starts.shape[0], lengths, total)


register_autograd(
    "jagged_windows",
    jagged_copies.backward_of("jagged_windows"),
    setup_context=jagged_copies.setup_context,
)
