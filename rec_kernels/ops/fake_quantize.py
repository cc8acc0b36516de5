"""fake_quantize: round rows to the values of a row format. docs/numerics.md ("Row formats") defines every bit."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import in_triton
from rec_kernels.ops.autograd import call, register_autograd
from rec_kernels.ops.fake_quantize_traced import fake_quantize_rows
from rec_kernels.ops.fakes import check_one_device
from rec_kernels.ops.layout_records import check_tensor
from rec_kernels.ops.row_formats import FLOAT_FORMATS, as_scalar, row_bytes

_ops = torch.ops.rec_kernels


def fake_quantize(
    x: Tensor,
    format: str,
    *,
    rounding: str = "nearest",
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    table: int = 0,
    first_row: int = 0,
    scale_rule: str | None = None,
) -> Tensor:
    """Quantizes and dequantizes x; the gradient is the identity (straight-through estimator).

    It trains or evaluates a model as if its activations were stored in the format. Under torch.compile on a GPU,
    "nearest" is traced as torch ops, which Inductor fuses with their neighbours: the bits are the same, except that
    int8, int4 and int2 may differ by one rounding. "stochastic" remains one kernel. Under ``torch.vmap``, the slices
    are the rows of one tensor whose leading dimension is the mapped one.

    Args:
        x: [..., D] float32, float16 or bfloat16, D at least 1. Each row has its own scale or blocks. The rows of all
            leading dimensions are numbered from ``first_row`` in row-major order.
        format: one of ``rk.ROW_FORMATS``.
        rounding, seed, step, table, first_row, scale_rule: as in ``rk.quantize_rows``. Two tensors with the same seed,
            step and table are rounded with the same random numbers.

    Returns:
        A new tensor of x's shape and dtype, ``rk.dequantize_rows(rk.quantize_rows(x))``. NaN and Inf raise no error:
        a row of int8, int4 or int2, or a block of an mx format, that contains one becomes NaN.

    Raises:
        ValueError: a wrong shape, dtype, device or name; table or first_row out of range.
    """
    check_tensor("x", x)
    noise = as_scalar(seed, "seed", rounding, x), as_scalar(step, "step", rounding, x)
    # On a CPU, Inductor's loops were measured to be no faster than the op, and cannot draw random numbers in fours.
    if x.is_cuda and rounding == "nearest" and torch.compiler.is_compiling():
        check_arguments(x, format, rounding, *noise, table, first_row, scale_rule)
        return Traced.apply(x, format, scale_rule == "rceil")
    how = format, rounding, *noise, table, first_row, scale_rule
    return call(_ops.fake_quantize.default, x, *how)


def check_arguments(
    x: Tensor,
    format: str,
    rounding: str,
    seed: Tensor | None,
    step: Tensor | None,
    table: int,
    first_row: int,
    scale_rule: str | None,
) -> None:
    """Checks the arguments as the CPU op does, for implementations in Python.

    Raises:
        ValueError: as ``fake_quantize``.
    """
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must have at least one column, got shape {list(x.shape)}")
    row_bytes(format, 1)  # raises for an unknown format
    if x.dtype not in FLOAT_FORMATS:
        raise ValueError(f"x must be float32, float16 or bfloat16, got {str(x.dtype).removeprefix('torch.')}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'rounding must be "nearest" or "stochastic", got "{rounding}"')
    if scale_rule not in (None, "floor", "rceil"):
        raise ValueError(f'scale_rule must be "floor", "rceil" or None, got "{scale_rule}"')
    for name, scalar in (("seed", seed), ("step", step)):
        if scalar is None:
            continue
        if scalar.dim():
            raise ValueError(f"{name} must have 0 dimension(s), got shape {list(scalar.shape)}")
        if scalar.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {str(scalar.dtype).removeprefix('torch.')}")
        if scalar.device != x.device:
            raise ValueError(f"{name} must be on the same device as x")
    if not 0 <= table < 2**16:
        raise ValueError(f"table = {table} must be in [0, 65536)")
    rows = x.numel() // x.shape[-1]
    if not 0 <= first_row <= 2**44 - rows:
        raise ValueError(f"first_row = {first_row} must be in [0, 2^44 - {rows}]")


class Traced(torch.autograd.Function):
    """fake_quantize with rounding "nearest" as torch ops, for torch.compile: x [..., D] float32 or half precision."""

    @staticmethod
    def forward(ctx, x: Tensor, format: str, round_up: bool) -> Tensor:
        rows = x.float().reshape(x.numel() // x.shape[-1], x.shape[-1])
        return fake_quantize_rows(rows, format, round_up).to(x.dtype).reshape(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


def _straight_through(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (grad, *[None] * 7)


def _of_slices(info, in_dims, x, *how):
    """Implements ``torch.vmap`` by one call on all slices, so that each draws its own random numbers."""
    if any(dim is not None for dim in in_dims[1:]):
        raise NotImplementedError("fake_quantize does not support torch.vmap over seed or step, only over x")
    return _ops.fake_quantize(x.movedim(in_dims[0], 0), *how), 0


torch.library.register_vmap("rec_kernels::fake_quantize", _of_slices)


@torch.library.register_fake("rec_kernels::fake_quantize")
def _(x, format, rounding="nearest", seed=None, step=None, table=0, first_row=0, scale_rule=None):
    check_one_device((x, seed, step))
    row_bytes(format, x.shape[-1])  # raises for an unknown format and for no columns
    return x.new_empty(x.shape)


in_triton.register("fake_quantize", "fake_quantize")
register_autograd("fake_quantize", _straight_through)
