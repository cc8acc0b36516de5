"""fake_quantize: rows of numbers as a row format would hold them. docs/numerics.md ("Row formats") has every bit."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import in_triton
from rec_kernels.ops.autograd import call, register_autograd
from rec_kernels.ops.fake_quantize_traced import fake_quantize_rows
from rec_kernels.ops.fakes import check_one_device
from rec_kernels.ops.layout_records import check_tensor
from rec_kernels.ops.row_formats import FLOAT_DTYPES, as_scalar, row_bytes

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
    """Encodes x in a row format and decodes it; the gradient is the identity (straight-through estimator).

    Under ``torch.vmap`` the slices are rows of one tensor, which the dimension that is mapped leads.

    For activations: a model is trained or evaluated as if they were stored in the format, without storing them so.
    Under torch.compile on a GPU, "nearest" becomes torch's own ops, which are fused with their neighbours: the same
    bits, but for int8, int4 and int2, which may then be one rounding apart. "stochastic" stays one kernel.

    Args:
        x: [..., D] float32, float16 or bfloat16, D at least 1. A row has a scale, or blocks, of its own; the rows of
            all leading dimensions are numbered from ``first_row`` in their order in memory.
        format: one of ``rk.ROW_FORMATS``.
        rounding, seed, step, table, first_row, scale_rule: as in ``rk.quantize_rows``. Two tensors with the same seed,
            step and table are rounded with the same random numbers.

    Returns:
        A new tensor of x's shape and dtype: ``rk.dequantize_rows(rk.quantize_rows(x))``, except that nothing is raised
        for NaN and Inf: a row of int8, int4 or int2, or a block of an mx format, that holds one comes out as NaN.

    Raises:
        ValueError: a wrong shape, dtype, device or name; table or first_row out of range.
    """
    check_tensor("x", x)
    noise = as_scalar(seed, "seed", rounding, x), as_scalar(step, "step", rounding, x)
    # Measured on a CPU, a compiler's loops are no faster than the op. Nor can they draw random numbers four at a time.
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
    """Checks the arguments as the CPU's op does, for implementations in Python.

    Raises:
        ValueError: as ``fake_quantize``.
    """
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must have at least one column, got shape {list(x.shape)}")
    row_bytes(format, 1)  # raises for an unknown format
    if x.dtype not in FLOAT_DTYPES.values():
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
    """fake_quantize to the nearest for a compiler: x [..., D] and a format in, torch's own ops out."""

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
    """Under ``torch.vmap``: slices are rows of one tensor, so that each has random numbers of its own."""
    if any(dim is not None for dim in in_dims[1:]):
        raise NotImplementedError("fake_quantize: torch.vmap over seed or step; x alone may have a dimension of it")
    return _ops.fake_quantize(x.movedim(in_dims[0], 0), *how), 0


torch.library.register_vmap("rec_kernels::fake_quantize", _of_slices)


@torch.library.register_fake("rec_kernels::fake_quantize")
def _(x, format, rounding="nearest", seed=None, step=None, table=0, first_row=0, scale_rule=None):
    check_one_device((x, seed, step))
    row_bytes(format, x.shape[-1])  # raises for an unknown format and for no columns
    return x.new_empty(x.shape)


in_triton.register("fake_quantize", "fake_quantize")
register_autograd("fake_quantize", _straight_through)
