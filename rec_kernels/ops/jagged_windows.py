"""jagged_windows: gather windows of one buffer into jagged rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import jagged_copies
from rec_kernels.ops.autograd import call, register_autograd

_ops = torch.ops.rec_kernels


def jagged_windows(
    values: Tensor, starts: Tensor, lengths: Tensor, *, total: int | None = None
) -> tuple[Tensor, Tensor]:
    """Gathers windows of one buffer into jagged rows; windows may overlap, be empty and come in any order.

    Args:
        values: [N] or [N, D] of any dtype.
        starts: [M] int32 or int64 in [0, N]: row m is ``values[starts[m] : starts[m] + lengths[m]]``.
        lengths: [M] int32 or int64 in [0, N - ``starts``].
        total: number of values in all windows, if known; with None, the host waits for a GPU to compute it.

    Returns:
        values [total] or [total, D] and offsets [M + 1], of the dtype of ``lengths``. Differentiable in ``values`` of
        float32, float16 or bfloat16; the gradients of a value's copies are summed as in ``rk.expand``, in the order
        of the windows.

    Raises:
        IndexError: on the CPU, a window is not within the values; the message has its position. On a GPU, it is empty,
        and the op's ``status`` (docs/ops.md) reports it.
        ValueError: sizes, dtypes or devices do not match, or ``values`` of another dtype require a gradient; on the CPU
        also for a wrong ``total``.

    Source: partial deduplication of Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model
    Training Infrastructure", MLSys 2023, arXiv:2211.05239. ``rk.KeyedJaggedWindows`` builds batches of these rows.
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
