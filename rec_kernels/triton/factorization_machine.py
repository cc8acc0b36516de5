"""factorization_machine and its gradients in Triton: x^T y stays in the kernels' registers.

Used for GPU tensors, and for CPU tensors under TRITON_INTERPRET=1. Tiles are multiplied by ``tl.dot``: float32 by
``tile_precision``, half-precision values by the tensor cores in TF32, which holds them exactly; sums are float32.
docs/numerics.md ("factorization_machine") bounds the error. No float is added atomically: the same call on the same
GPU gives the same bits. This version has not run on a GPU.
"""

# ruff: noqa: N803 (kernel constants and sizes are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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

#: Vectors, columns of x and columns of y of a tile at the most.
VECTORS, COLUMNS, FACTORS = 32, 64, 32
#: Columns of x of a gradient's tile at the most: with more, registers do not suffice.
GRADIENT_COLUMNS = 32
#: Samples whose gradients of a shared y a program sums: few, as a program takes one after the other.
SUMMED_SAMPLES = 8
#: Warps of a program, and how many steps' loads are under way at once: a second buffer takes shared memory and
#: registers from other programs.
WARPS, STAGES = 4, 1


@triton.jit
def _load(matrix, row, column, rows, columns):
    """Loads a tile of a matrix [rows, columns] as float32; zeros outside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return widen(tl.load(matrix + row[:, None] * columns + column[None, :], mask=inside, other=0.0))


@triton.jit
def _inside(inner, d, k, D, K):
    """Zeroes a tile [FACTORS, COLUMNS] of y^T x outside the matrix."""
    # Inf or NaN times a padding 0 is NaN; such products occur where only one of the two vectors ends.
    return tl.where((k < K)[:, None] & (d < D)[None, :], inner, 0.0)


@triton.jit
def _inner_product(
    x, y, d, k, F, D, K, PRECISION: tl.constexpr, VECTORS: tl.constexpr, COLUMNS: tl.constexpr, FACTORS: tl.constexpr
):
    """Rows k [FACTORS] and columns d [COLUMNS] of y^T x, of one sample, zeros outside."""
    total = tl.zeros([FACTORS, COLUMNS], tl.float32)
    for first in range(0, F, VECTORS):
        f = first + tl.arange(0, VECTORS).to(tl.int64)
        total = tl.dot(tl.trans(_load(y, f, k, F, K)), _load(x, f, d, F, D), total, input_precision=PRECISION)
    return _inside(total, d, k, D, K)


@triton.jit(do_not_specialize=["F"])
def factorization_kernel(
    x,  # [B, F, D], samples x_stride apart
    y,  # [F, K], y_stride from one sample's to the next
    out,  # [B, F, K], written
    F,
    D,
    K,
    x_stride,
    y_stride,
    ONE_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Each program computes a tile of a sample's result (ONE_TILE: of all vectors)."""
    sample = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, VECTORS) if ONE_TILE else tl.program_id(1).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    k = tl.program_id(2) * FACTORS + tl.arange(0, FACTORS)
    x += sample * x_stride
    y += sample * y_stride
    total = tl.zeros([FACTORS, VECTORS], tl.float32)
    if ONE_TILE:
        factors = tl.trans(_load(y, f, k, F, K))
    for column in range(0, D, COLUMNS):
        d = column + tl.arange(0, COLUMNS)
        own = _load(x, f, d, F, D)
        if ONE_TILE:
            inner = _inside(tl.dot(factors, own, input_precision=PRECISION), d, k, D, K)
        else:
            inner = _inner_product(x, y, d, k, F, D, K, PRECISION, VECTORS, COLUMNS, FACTORS)
        total = tl.dot(inner, tl.trans(own), total, input_precision=PRECISION)
    at = out + sample * F * K + f[:, None] * K + k[None, :]
    tl.store(at, narrow(tl.trans(total), out.dtype.element_ty), mask=(f < F)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["F"])
def factorization_x_gradient_kernel(
    grad,  # [B, F, K], samples grad_stride apart
    x,  # [B, F, D], samples x_stride apart
    y,  # [F, K], y_stride from one sample's to the next
    out,  # [B, F, D], written
    F,
    D,
    K,
    grad_stride,
    x_stride,
    y_stride,
    PRECISION: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Each program computes a tile of a sample's gradient: grad (x^T y)^T + y (x^T grad)^T."""
    sample = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    grad += sample * grad_stride
    x += sample * x_stride
    y += sample * y_stride
    total = tl.zeros([VECTORS, COLUMNS], tl.float32)
    for factor in range(0, K, FACTORS):
        k = factor + tl.arange(0, FACTORS)
        inner = _inner_product(x, y, d, k, F, D, K, PRECISION, VECTORS, COLUMNS, FACTORS)
        total = tl.dot(_load(grad, f, k, F, K), inner, total, input_precision=PRECISION)
        inner = _inner_product(x, grad, d, k, F, D, K, PRECISION, VECTORS, COLUMNS, FACTORS)
        total = tl.dot(_load(y, f, k, F, K), inner, total, input_precision=PRECISION)
    at = out + sample * F * D + f[:, None] * D + d[None, :]
    tl.store(at, narrow(total, out.dtype.element_ty), mask=(f < F)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["B", "F"])
def factorization_y_gradient_kernel(
    grad,  # [B, F, K], samples grad_stride apart
    x,  # [B, F, D], samples x_stride apart
    out,  # [., F, K], written: sums over SAMPLES samples each
    B,
    F,
    D,
    K,
    grad_stride,
    x_stride,
    SAMPLES: tl.constexpr,
    PRECISION: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Each program computes a tile of the gradient x (x^T grad) over SAMPLES samples."""
    part = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    k = tl.program_id(2) * FACTORS + tl.arange(0, FACTORS)
    total = tl.zeros([FACTORS, VECTORS], tl.float32)
    for number in range(SAMPLES):
        sample = part * SAMPLES + number
        # Programs after the last sample have no work.
        vectors = tl.where(sample < B, F, 0)
        for column in range(0, D, COLUMNS):
            d = column + tl.arange(0, COLUMNS)
            own, of = x + sample * x_stride, grad + sample * grad_stride
            inner = _inner_product(own, of, d, k, vectors, D, K, PRECISION, VECTORS, COLUMNS, FACTORS)
            total = tl.dot(inner, tl.trans(_load(own, f, d, vectors, D)), total, input_precision=PRECISION)
    at = out + part * F * K + f[:, None] * K + k[None, :]
    tl.store(at, narrow(tl.trans(total), out.dtype.element_ty), mask=(f < F)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["B", "F"])
def factorization_gradients_kernel(
    grad,  # [B, F, K], samples grad_stride apart
    x,  # [B, F, D], samples x_stride apart
    y,  # [F, K], y_stride from one sample's to the next
    x_out,  # [B, F, D], written
    y_out,  # [., F, K], written: sums over SAMPLES samples each
    B,
    F,
    D,
    K,
    grad_stride,
    x_stride,
    y_stride,
    SAMPLES: tl.constexpr,
    PRECISION: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Each program computes both gradients of SAMPLES samples that fit one tile, and reads x once."""
    part = tl.program_id(0).to(tl.int64)
    f, k = tl.arange(0, VECTORS), tl.arange(0, FACTORS)
    total = tl.zeros([FACTORS, VECTORS], tl.float32)
    for number in range(SAMPLES):
        sample = part * SAMPLES + number
        # Programs after the last sample have no work.
        vectors = tl.where(sample < B, F, 0)
        of = _load(grad + sample * grad_stride, f, k, vectors, K)
        factors = _load(y + sample * y_stride, f, k, vectors, K)
        for column in range(0, D, COLUMNS):
            d = column + tl.arange(0, COLUMNS)
            own = _load(x + sample * x_stride, f, d, vectors, D)
            inner = _inside(tl.dot(tl.trans(factors), own, input_precision=PRECISION), d, k, D, K)
            x_total = tl.dot(of, inner, input_precision=PRECISION)
            inner = _inside(tl.dot(tl.trans(of), own, input_precision=PRECISION), d, k, D, K)
            x_total = tl.dot(factors, inner, x_total, input_precision=PRECISION)
            total = tl.dot(inner, tl.trans(own), total, input_precision=PRECISION)
            at = x_out + sample * F * D + f[:, None] * D + d[None, :]
            tl.store(at, narrow(x_total, x_out.dtype.element_ty), mask=(f < vectors)[:, None] & (d < D)[None, :])
    at = y_out + part * F * K + f[:, None] * K + k[None, :]
    tl.store(at, narrow(tl.trans(total), y_out.dtype.element_ty), mask=(f < F)[:, None] & (k < K)[None, :])


def _check(x: Tensor, y: Tensor, precision: str) -> None:
    """Checks the arguments as the CPU op does, with the same messages."""
    check_tensor(x, "x", (x.dtype,), rank=3)
    name = str(x.dtype).removeprefix("torch.")
    check(x.dtype in FLOATS, f"x must be float32, float16 or bfloat16, got {name}")
    check_columns(x, "x")
    batch, vectors, _ = x.shape
    check(vectors <= MOST, f"x must have at most {MOST} vectors per sample, got shape {list(x.shape)}")
    check(y.dim() in (2, 3), f"y must have 2 or 3 dimensions, got shape {list(y.shape)}")
    check_tensor(y, "y", (x.dtype,))
    check_columns(y, "y")
    shape = (vectors, y.shape[-1]) if y.dim() == 2 else (batch, vectors, y.shape[-1])
    check_tensor(y, "y", (x.dtype,), shape=shape)
    check(y.device == x.device, "y must be on the same device as x")
    check_precision(precision)
    check(batch <= MOST_PROGRAMS, f"x must have at most {MOST_PROGRAMS} samples on a GPU, got {batch}")


def _options(x: Tensor, y: Tensor, precision: str, most_columns: int) -> dict[str, object]:
    """Arguments shared by all kernels."""
    _, vectors, columns = x.shape
    return {
        "F": vectors,
        "D": columns,
        "K": y.shape[-1],
        "x_stride": x.stride(0),
        # TF32 holds half-precision numbers exactly.
        "PRECISION": tile_precision(x.dtype, precision if x.dtype == torch.float32 else "tf32"),
        "enable_fp_fusion": True,
        "num_warps": WARPS,
        "num_stages": STAGES,
        "VECTORS": tile_size(vectors, VECTORS),
        "COLUMNS": tile_size(columns, most_columns),
        "FACTORS": tile_size(y.shape[-1], FACTORS),
    }


def factorization_machine(x: Tensor, y: Tensor, precision: str = "ieee") -> Tensor:
    """Computes the op, without a gradient: arguments, result and errors as in docs/ops.md."""
    _check(x, y, precision)
    out = x.new_empty((*x.shape[:2], y.shape[-1]))
    if not out.numel():
        return out
    x, y = by_sample(x), by_sample(y) if y.dim() == 3 else y.contiguous()
    options = _options(x, y, precision, COLUMNS)
    grid = (len(x), triton.cdiv(x.shape[1], options["VECTORS"]), triton.cdiv(y.shape[-1], options["FACTORS"]))
    # Triton launches on the current device, which may differ from the tensors' device.
    with torch.accelerator.device_index(x.device.index):
        factorization_kernel[grid](
            x, y, out, y_stride=y.stride(0) if y.dim() == 3 else 0, ONE_TILE=grid[1] == 1, **options
        )
    return out


def factorization_machine_backward(
    grad: Tensor, x: Tensor, y: Tensor, precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """Computes the op: arguments, results and errors as in docs/ops.md. Torch adds the sums of several programs."""
    _check(x, y, precision)
    check_tensor(grad, "grad", (x.dtype,), shape=(*x.shape[:2], y.shape[-1]))
    check(grad.device == x.device, "grad must be on the same device as x")
    grad_x, shared = x.new_empty(x.shape), y.dim() == 2
    if not x.numel():
        return grad_x, y.new_zeros(y.shape)
    grad, x, y = by_sample(grad), by_sample(x), y.contiguous() if shared else by_sample(y)
    options = _options(x, y, precision, GRADIENT_COLUMNS) | {"grad_stride": grad.stride(0)}
    samples = SUMMED_SAMPLES if shared else 1
    parts = triton.cdiv(len(x), samples)
    sums = grad.new_empty((parts, *grad.shape[1:]), dtype=torch.float32 if shared else x.dtype)
    down, across = triton.cdiv(x.shape[1], options["VECTORS"]), triton.cdiv(x.shape[2], options["COLUMNS"])
    factors = triton.cdiv(y.shape[-1], options["FACTORS"])
    y_stride = 0 if shared else y.stride(0)
    with torch.accelerator.device_index(x.device.index):
        if down == factors == 1:
            given = {"SAMPLES": samples, "y_stride": y_stride, **options}
            factorization_gradients_kernel[(parts,)](grad, x, y, grad_x, sums, len(x), **given)
        else:
            factorization_x_gradient_kernel[(len(x), down, across)](grad, x, y, grad_x, y_stride=y_stride, **options)
            factorization_y_gradient_kernel[(parts, down, factors)](grad, x, sums, len(x), SAMPLES=samples, **options)
    return grad_x, sums.sum(0).to(x.dtype) if shared else sums
