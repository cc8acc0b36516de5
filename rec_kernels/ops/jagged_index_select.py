"""jagged_index_select: gather rows of a jagged tensor by index."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import jagged_copies
from rec_kernels.ops.autograd import call, register_autograd

_ops = torch.ops.rec_kernels


def jagged_index_select(
    values: Tensor, offsets: Tensor, index: Tensor, *, total: int | None = None
) -> tuple[Tensor, Tensor]:
    """Gathers rows of a jagged tensor by index, in any order, with repeats.

    Args:
        values: [N] or [N, D] of any dtype; row r is ``values[offsets[r] : offsets[r+1]]``.
        offsets: [R + 1] int32 or int64.
        index: [M] int32 or int64, row indices in [0, R).
        total: number of values in the selected rows, if known; with None, the host waits for a GPU to compute it.

    Returns:
        values [total] or [total, D] and offsets [M + 1] of the selected rows. Differentiable in ``values`` of float32,
        float16 or bfloat16; the gradients of a value's copies are summed as in ``rk.expand``.

    Raises:
        IndexError: on the CPU, an index is out of range; the message has its position. On a GPU, its row is empty.
        ValueError: sizes, dtypes or devices do not match, or ``values`` of another dtype require a gradient; on the CPU
        also for bad offsets and a wrong ``total``. On a GPU, rows with bad offsets are empty, and the op's ``status``
        (docs/ops.md) reports them.
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
