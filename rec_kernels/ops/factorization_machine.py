"""factorization_machine: a sample's pairwise dot products, projected without being computed."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import autocast, in_triton
from rec_kernels.ops.autograd import call, refuse_second, register_autograd
from rec_kernels.ops.fakes import check_one_device, check_rank, check_shape

_ops = torch.ops.rec_kernels


def factorization_machine(x: Tensor, y: Tensor, *, precision: str = "ieee") -> Tensor:
    """``x (x^T y)`` of each sample, in one pass: all pairwise dot products x x^T, projected from F to K columns.

    The optimized factorization machine of Wukong (B. Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale
    Recommendation", arXiv:2403.02545). Neither x x^T [B, F, F] nor x^T y [B, D, K] is ever in memory, and the work
    grows with F, not with its square.

    Args:
        x: [B, F, D] float32, float16 or bfloat16, D from 1 to 2^20, F up to 2^20. Samples may lie at any distance from
            each other; of other strides, a copy is taken.
        y: [F, K] of x's dtype, a projection that the samples share, or [B, F, K], one of each sample's own, which a
            model has computed from it. K from 1 to 2^20.
        precision: of products of float32 on a GPU: "ieee" (off by at most 2^-21 of themselves) or "tf32" (tensor cores:
            inputs cut to 11 significant bits; on an AMD GPU "ieee"). On the CPU all are float32's own.

    Returns:
        [B, F, K] of x's dtype, contiguous. Differentiable in x and y, once. Sums, and x^T y, are float32 (on a GPU, of
        half-precision arguments, x^T y is cut to 11 significant bits before it is multiplied); the result is rounded
        once. On the CPU the same bits for every instruction set and number of threads; on a GPU, where the op is a
        Triton kernel, within the bound of docs/numerics.md ("factorization_machine"). Under autocast, as of
        torch.bmm, both tensors are cast to its dtype, which the result has, and a gradient has the dtype of the
        argument.

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
refuse_second("factorization_machine_backward")
autocast.register("factorization_machine", autocast.to_lower_precision)
