"""expand and its backward in Triton, for GPUs and installs without the compiled CUDA library.

The functions have the names, arguments and results of the ops in docs/ops.md; ``help()`` shows the signatures.
``expand`` has the bits of the compiled kernel; the gradient is that of ``embedding_bag`` with bags of one id: the same
FP32 terms, in an order chosen by the compiler (rec_kernels.triton.embedding_bag).
"""

# ruff: noqa: N803 (kernel constants and D are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rec_kernels.ops.layout_records import ID_DTYPES
from rec_kernels.triton.embedding_bag import embedding_bag_backward_dense
from rec_kernels.triton.inputs import FLOATS, check, check_tensor
from rec_kernels.triton.kernels import NOTHING_BAD


@triton.jit(do_not_specialize=["count", "num_rows"])
def expand_kernel(
    x,  # [num_rows, D]
    inverse,  # [count]
    out,  # [count, D], written
    status,  # [2]
    count,
    num_rows,
    D,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program writes BLOCK_ROWS rows of the output, BLOCK_COLUMNS columns at a time; zeros for bad indices."""
    b = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = b < count
    row = tl.load(inverse + b, mask=there, other=0).to(tl.int64)
    good = there & (row >= 0) & (row < num_rows)
    bad = there & ~good
    left_out = tl.sum(bad.to(tl.int64), axis=0)
    if left_out > 0:
        tl.atomic_min(status, tl.min(tl.where(bad, b, NOTHING_BAD), axis=0))
        tl.atomic_add(status + 1, left_out)
    for column in range(0, D, BLOCK_COLUMNS):
        c = column + tl.arange(0, BLOCK_COLUMNS)
        inside = (c < D)[None, :]
        values = tl.load(x + row[:, None] * D + c[None, :], mask=good[:, None] & inside, other=0)
        tl.store(out + b[:, None] * D + c[None, :], values, mask=there[:, None] & inside)


def _check_inverse(inverse: Tensor, other: Tensor, name: str, shape: tuple[int, ...] | None = None) -> None:
    check_tensor(inverse, "inverse", ID_DTYPES, rank=1, shape=shape)
    check(inverse.device == other.device, f"inverse must be on the same device as {name}")


def expand(x: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """``x[inverse]``: (output [M, D], status [2] int64)."""
    check_tensor(x, "x", (x.dtype,), rank=2)
    name = str(x.dtype).removeprefix("torch.")
    check(x.dtype in (*FLOATS, *ID_DTYPES), f"x must be float32, float16, bfloat16, int32 or int64, got {name}")
    _check_inverse(inverse, x, "x")
    x, inverse, (count, columns) = x.contiguous(), inverse.contiguous(), (inverse.shape[0], x.shape[1])
    out, status = x.new_empty((count, columns)), inverse.new_zeros((2,), dtype=torch.int64)
    status[0].fill_(NOTHING_BAD.value)
    if count:
        # A tile of 2048 elements keeps 128 threads busy.
        width = min(triton.next_power_of_2(max(columns, 1)), 1024)
        blocks = {"BLOCK_ROWS": 2048 // width, "BLOCK_COLUMNS": width, "enable_fp_fusion": False}
        grid = (triton.cdiv(count, blocks["BLOCK_ROWS"]),)
        # Triton launches on the current device, which may differ from the tensors' device.
        with torch.accelerator.device_index(x.device.index):
            expand_kernel[grid](x, inverse, out, status, count, x.shape[0], columns, **blocks)
    return out, status


def expand_backward(grad: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """Sums the gradients of each row: [rows, D] float32; skips indices out of range."""
    check_tensor(grad, "grad", (torch.float32,), rank=2)
    _check_inverse(inverse, grad, "grad", (grad.shape[0],))
    check(rows >= 0, f"rows = {rows} must be 0 or more")
    shape = [rows, grad.shape[1]]
    if not rows * grad.shape[1]:
        return grad.new_zeros(shape)
    each = torch.arange(grad.shape[0] + 1, device=grad.device)
    return embedding_bag_backward_dense.table(grad, shape, inverse, each, bounds_check="ignore")
