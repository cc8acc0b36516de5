"""factorization_machine: projected pairwise dot products x x^T y of a sample's vectors, without computing x x^T."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import autocast, in_triton
from rec_kernels.ops.autograd import call, refuse_second_derivative, register_autograd
from rec_kernels.ops.fakes import check_one_device, check_rank, check_shape

_ops = torch.ops.rec_kernels


def factorization_machine(x: Tensor, y: Tensor, *, precision: str = "ieee") -> Tensor:
    """Computes ``x (x^T y)`` per sample: the pairwise dot products x x^T, projected from F to K columns.

    This is the optimized factorization machine of Wukong (B. Zhang et al., "Wukong: Towards a Scaling Law for
    Large-Scale Recommendation", arXiv:2403.02545). Neither x x^T [B, F, F] nor x^T y [B, D, K] is allocated, and the
    work is linear in F.

    Args:
        x: [B, F, D] float32, float16 or bfloat16, D from 1 to 2^20, F up to 2^20. The batch stride is arbitrary;
            tensors with other strides are copied.
        y: projection of x's dtype: [F, K], shared by all samples, or [B, F, K], one per sample. K from 1 to 2^20.
        precision: precision of float32 products on a GPU: "ieee" (relative error at most 2^-21) or "tf32" (tensor
            cores, inputs reduced to 11 significant bits; on an AMD GPU the same as "ieee"). The CPU computes in
            float32.

    Returns:
        [B, F, K] of x's dtype, contiguous. Differentiable in x and y, once. Sums and x^T y are float32, and the result
        is rounded once (on a GPU, x^T y of half-precision arguments is reduced to 11 significant bits before the
        second product). On the CPU, the bits are the same for every instruction set and number of threads; on a GPU
        (a Triton kernel) the result is within the bound of docs/numerics.md ("factorization_machine"). Under
        autocast, as for torch.bmm, both tensors and the result have autocast's dtype; a gradient has its argument's
        dtype.

    Raises:
        ValueError: a shape, dtype, device or precision is not as above; the message names the argument, the value and
            what is allowed.
    """
    return call(_ops.factorization_machine.default, x, y, precision)


@torch.library.register_fake("rec_kernels::factorization_machine")
def _(x, y, precision="ieee"):
    check_one_device((x, y))
    check_rank("x", x, 3)
    check_rank("y", y, 2, 3)
    check_shape("y", y, (*x.shape[3 - y.dim() : 2], y.shape[-1]))
    return x.new_empty((*x.shape[:2], y.shape[-1]))


@torch.library.register_fake("rec_kernels::factorization_machine_backward")
def _(grad, x, y, precision="ieee"):
    check_one_device((grad, x, y))
    return x.new_empty(x.shape), y.new_empty(y.shape)


in_triton.register("factorization_machine", "factorization_machine", "factorization_machine_backward")


def _setup(ctx, inputs, output) -> None:
    x, y, ctx.precision = inputs
    ctx.save_for_backward(x, y)


def _backward(ctx, grad: Tensor):
    grads = _ops.factorization_machine_backward(grad, *ctx.saved_tensors, ctx.precision)
    return (*(g if wanted else None for g, wanted in zip(grads, ctx.needs_input_grad, strict=False)), None)


register_autograd("factorization_machine", _backward, setup_context=_setup)
refuse_second_derivative("factorization_machine_backward")
autocast.register("factorization_machine", autocast.to_lower_precision)
