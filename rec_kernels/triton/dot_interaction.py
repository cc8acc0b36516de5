"""dot_interaction and its gradients in Triton, each in one launch: the kernels select the triangle.

Used for GPU tensors, and for CPU tensors under TRITON_INTERPRET=1. Tiles of vectors are multiplied by ``tl.dot``,
sums are float32; docs/numerics.md ("dot_interaction") bounds the error. No float is added atomically: the same call
on the same GPU gives the same bits. ``tile_precision`` says how float32 tiles are multiplied. Fused
multiply-adds made slower kernels: on sm_90, the backward of 27 vectors of 64 columns had 6040 instructions, of which
2318 moved registers to memory and back; in three TF32 passes it has 656 and moves none. This version has
not run on a GPU.
"""

# ruff: noqa: N803 (kernel constants and D are upper-case)
from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from rec_kernels.ops.dot_interaction import num_pairs
from rec_kernels.triton.inputs import FLOATS, check, check_tensor
from rec_kernels.triton.row_formats import narrow, widen
from rec_kernels.triton.vectors import (
    MOST,
    MOST_PROGRAMS,
    by_sample,
    check_columns,
    check_precision,
    tile_precision,
    tile_size,
)

#: Vectors and columns of a tile at the most.
VECTORS, COLUMNS = 64, 64
#: Warps of a program for every 32 vectors of its tile.
FORWARD_WARPS, BACKWARD_WARPS = 2, 4
#: Loads of how many steps are under way at once, where the tile holds all vectors. A second buffer takes shared memory
#: and registers from other programs.
STAGES = 1


@triton.jit
def _load_vectors(dense, sparse, v, d, num_vectors, D, WIDEN: tl.constexpr):
    """Columns d [COLUMNS] of the vectors v [VECTORS] of a sample; zeros outside."""
    inside = (v < num_vectors)[:, None] & (d < D)[None, :]
    x = tl.load(sparse + (v - 1)[:, None] * D + d[None, :], mask=inside & (v > 0)[:, None], other=0.0)
    first = tl.load(dense + d, mask=d < D, other=0.0)
    x = tl.where((v == 0)[:, None], first[None, :], x)
    if WIDEN:
        x = widen(x)
    return x


@triton.jit
def _first_pair(i, SELF: tl.constexpr):
    """Index of vector i's first pair."""
    return i * (i + 1) // 2 if SELF else i * (i - 1) // 2


@triton.jit(do_not_specialize=["num_vectors"])
def interaction_kernel(
    dense,  # [B, D], samples dense_stride apart
    sparse,  # [B, num_vectors - 1, D], samples sparse_stride apart
    out,  # [B, out_stride], written: D columns, then the pairs
    num_vectors,
    D,
    dense_stride,
    sparse_stride,
    out_stride,
    SELF: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    ONE_TILE: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program computes a tile of a sample's pairs: VECTORS vectors with VECTORS others (ONE_TILE: themselves)."""
    sample = tl.program_id(0).to(tl.int64)
    down, across = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if across > down:
        return
    dense += sample * dense_stride
    sparse += sample * sparse_stride
    out += sample * out_stride
    # Offsets in the only tile fit int32: at most 64 vectors of 2^20 columns.
    i = tl.arange(0, VECTORS) if ONE_TILE else down * VECTORS + tl.arange(0, VECTORS)
    j = tl.arange(0, VECTORS) if ONE_TILE else across * VECTORS + tl.arange(0, VECTORS)
    total = tl.zeros([VECTORS, VECTORS], tl.float32)
    for column in range(0, D, COLUMNS):
        d = column + tl.arange(0, COLUMNS)
        a = _load_vectors(dense, sparse, i, d, num_vectors, D, WIDEN)
        b = a if ONE_TILE else _load_vectors(dense, sparse, j, d, num_vectors, D, WIDEN)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        if down == 0:
            tl.store(out + d, tl.load(dense + d, mask=d < D, other=0.0), mask=d < D)
    below = i[:, None] >= j[None, :] if SELF else i[:, None] > j[None, :]
    at = out + D + _first_pair(i, SELF)[:, None] + j[None, :]
    tl.store(at, narrow(total, out.dtype.element_ty), mask=below & (i < num_vectors)[:, None])


@triton.jit
def _load_square(pairs, i, num_vectors, SELF: tl.constexpr, WIDEN: tl.constexpr):
    """Gradients [VECTORS, VECTORS] of the pairs if i is all vectors: each is loaded once and mirrored.

    A row of the triangle is contiguous, a column is not.
    """
    below = i[:, None] >= i[None, :] if SELF else i[:, None] > i[None, :]
    at = pairs + _first_pair(i, SELF)[:, None] + i[None, :]
    g = tl.load(at, mask=below & (i < num_vectors)[:, None], other=0.0)
    if WIDEN:
        g = widen(g)
    return tl.where(below, g, tl.trans(g))


@triton.jit
def _load_tile(pairs, i, j, num_vectors, SELF: tl.constexpr, WIDEN: tl.constexpr):
    """Gradients [VECTORS, VECTORS] of the pairs of vectors i and j."""
    low, high = tl.minimum(i[:, None], j[None, :]), tl.maximum(i[:, None], j[None, :])
    is_pair = high < num_vectors if SELF else (high < num_vectors) & (low < high)
    g = tl.load(pairs + _first_pair(high, SELF) + low, mask=is_pair, other=0.0)
    if WIDEN:
        g = widen(g)
    return g


@triton.jit(do_not_specialize=["num_vectors"])
def interaction_gradient_kernel(
    grad,  # [B, num_columns], samples grad_stride apart
    dense,  # [B, D], samples dense_stride apart
    sparse,  # [B, num_vectors - 1, D], samples sparse_stride apart
    grad_dense,  # [B, D], written
    grad_sparse,  # [B, num_vectors - 1, D], written
    num_vectors,
    D,
    grad_stride,
    dense_stride,
    sparse_stride,
    SELF: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    ONE_TILE: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program computes the gradients of VECTORS vectors of a sample (ONE_TILE: all), from all its vectors."""
    sample, tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * VECTORS
    grad += sample * grad_stride
    dense += sample * dense_stride
    sparse += sample * sparse_stride
    grad_dense += sample * D
    grad_sparse += sample * (num_vectors - 1) * D
    i = tl.arange(0, VECTORS) if ONE_TILE else tile + tl.arange(0, VECTORS)
    there = (i < num_vectors)[:, None]
    if SELF:
        own = widen(tl.load(grad + D + _first_pair(i, SELF) + i, mask=i < num_vectors, other=0.0))
    if ONE_TILE:
        square = _load_square(grad + D, i, num_vectors, SELF, WIDEN)
    for column in range(0, D, COLUMNS):
        d = column + tl.arange(0, COLUMNS)
        total = tl.zeros([VECTORS, COLUMNS], tl.float32)
        if ONE_TILE:
            x = _load_vectors(dense, sparse, i, d, num_vectors, D, WIDEN)
            total = tl.dot(square, x, total, input_precision=PRECISION)
            if SELF:
                # Doubling may overflow half precision: add the second one in float32.
                total += own[:, None] * widen(x)
        else:
            for first in range(0, num_vectors, VECTORS):
                j = first + tl.arange(0, VECTORS).to(tl.int64)
                g = _load_tile(grad + D, i, j, num_vectors, SELF, WIDEN)
                x = _load_vectors(dense, sparse, j, d, num_vectors, D, WIDEN)
                total = tl.dot(g, x, total, input_precision=PRECISION)
                if SELF:  # noqa: SIM102 (known when the kernel is compiled)
                    if first == tile:
                        total += own[:, None] * widen(x)
        copied = widen(tl.load(grad + d, mask=d < D, other=0.0))
        total = narrow(tl.where((i == 0)[:, None], total + copied[None, :], total), grad_dense.dtype.element_ty)
        inside = there & (d < D)[None, :]
        tl.store(grad_sparse + (i - 1)[:, None] * D + d[None, :], total, mask=inside & (i > 0)[:, None])
        tl.store(grad_dense + (i * 0)[:, None] + d[None, :], total, mask=inside & (i == 0)[:, None])


def _check(dense: Tensor, sparse: Tensor, precision: str) -> None:
    """Checks the arguments as the CPU op does, with the same messages."""
    check_tensor(dense, "dense", (dense.dtype,), rank=2)
    name = str(dense.dtype).removeprefix("torch.")
    check(dense.dtype in FLOATS, f"dense must be float32, float16 or bfloat16, got {name}")
    check_columns(dense, "dense")
    check_tensor(sparse, "sparse", (dense.dtype,), rank=3)
    few = f"sparse must have fewer than {MOST} vectors per sample, got shape {list(sparse.shape)}"
    check(sparse.shape[1] < MOST, few)
    check_tensor(sparse, "sparse", (dense.dtype,), shape=(len(dense), sparse.shape[1], dense.shape[1]))
    check(sparse.device == dense.device, "sparse must be on the same device as dense")
    check_precision(precision)
    check(len(dense) <= MOST_PROGRAMS, f"dense must have at most {MOST_PROGRAMS} rows on a GPU, got {len(dense)}")


def _options(dense: Tensor, sparse: Tensor, self_interaction: bool, precision: str) -> dict[str, object]:
    """Arguments shared by both kernels."""
    vectors, columns = sparse.shape[1] + 1, dense.shape[1]
    block = tile_size(vectors, VECTORS)
    return {
        "num_vectors": vectors,
        "D": columns,
        "dense_stride": dense.stride(0),
        "sparse_stride": sparse.stride(0),
        "SELF": self_interaction,
        "PRECISION": tile_precision(dense.dtype, precision),
        # The interpreter multiplies the bit patterns of bfloat16 values.
        "WIDEN": dense.dtype == torch.bfloat16 and not dense.is_cuda,
        "ONE_TILE": vectors <= block,
        "VECTORS": block,
        "COLUMNS": tile_size(columns, COLUMNS),
        "enable_fp_fusion": True,
    }


def _launch(options: dict[str, object], warps: int) -> dict[str, int]:
    """Warps and stages of a launch."""
    block = cast("int", options["VECTORS"])
    # On sm_90, a second group of four warps would repeat the rows of the first in two of three TF32 passes.
    return {"num_warps": min(4, warps * block // 32), "num_stages": STAGES}


def dot_interaction(dense: Tensor, sparse: Tensor, self_interaction: bool = False, precision: str = "ieee") -> Tensor:
    """Computes the op, without a gradient: arguments, result and errors as in docs/ops.md."""
    _check(dense, sparse, precision)
    vectors = sparse.shape[1] + 1
    pairs = num_pairs(sparse.shape[1], self_interaction)
    out = dense.new_empty((len(dense), dense.shape[1] + pairs))
    if not len(dense):
        return out
    dense, sparse = by_sample(dense), by_sample(sparse)
    options = _options(dense, sparse, self_interaction, precision)
    tiles = triton.cdiv(vectors, options["VECTORS"])
    # Triton launches on the current device, which may differ from the tensors' device.
    with torch.accelerator.device_index(dense.device.index):
        interaction_kernel[(len(dense), tiles, tiles)](
            dense, sparse, out, out_stride=out.shape[1], **_launch(options, FORWARD_WARPS), **options
        )
    return out


def dot_interaction_backward(
    grad: Tensor, dense: Tensor, sparse: Tensor, self_interaction: bool = False, precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """Computes the op: arguments, results and errors as in docs/ops.md."""
    _check(dense, sparse, precision)
    vectors = sparse.shape[1] + 1
    pairs = num_pairs(sparse.shape[1], self_interaction)
    check_tensor(grad, "grad", (dense.dtype,), shape=(len(dense), dense.shape[1] + pairs))
    check(grad.device == dense.device, "grad must be on the same device as dense")
    grads = dense.new_empty(dense.shape), sparse.new_empty(sparse.shape)
    if not len(dense):
        return grads
    grad, dense, sparse = by_sample(grad), by_sample(dense), by_sample(sparse)
    options = _options(dense, sparse, self_interaction, precision)
    tiles = triton.cdiv(vectors, options["VECTORS"])
    with torch.accelerator.device_index(dense.device.index):
        interaction_gradient_kernel[(len(dense), tiles)](
            grad, dense, sparse, *grads, grad_stride=grad.stride(0), **_launch(options, BACKWARD_WARPS), **options
        )
    return grads
