"""jagged_index_select: rows of a jagged tensor, chosen by their numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import jagged_copies
from rec_kernels.ops.autograd import call, register_autograd

_ops = torch.ops.rec_kernels


def jagged_index_select(
    values: Tensor, offsets: Tensor, index: Tensor, *, total: int | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses rows of a jagged tensor, in any order and as often as wanted.

    Args:
        values: [N] or [N, D] of any dtype; row r is ``values[offsets[r] : offsets[r+1]]``.
        offsets: [R + 1] int32 or int64.
        index: [M] int32 or int64, numbers of rows in [0, R).
        total: how many values these rows have, if it is known: without it, the host waits for a GPU to learn it.

    Returns:
        values [total] or [total, D] and offsets [M + 1] of the chosen rows. Differentiable in ``values`` if they are
        float32, float16 or bfloat16; what a value gets from several copies is summed as ``rk.expand`` does.

    Raises:
        IndexError: on the CPU, a number out of range, with its position; on a GPU such a row is empty.
        ValueError: sizes, dtypes or devices do not fit, or ``values`` of another dtype require a gradient; on the CPU
        also for bad offsets and a wrong ``total``. On a GPU rows with bad offsets are empty, and the op's ``status``
        (docs/ops.md) tells.
    """
    return call(_ops.jagged_index_select.default, values, offsets, index, total)[:2]


@torch.library.register_fake("rec_kernels::jagged_index_select")
def _(values, offsets, index, total=None):
    return jagged_copies.fake(values, (offsets, index), index.shape[0], offsets, total)


register_autograd(
    "jagged_index_select",
    jagged_copies.backward_of("jagged_index_select"),
    setup_context=jagged_copies.setup_context,
)
