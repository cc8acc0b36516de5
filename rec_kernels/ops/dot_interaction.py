"""dot_interaction: DLRM's interaction, a sample's dense vector followed by the dot products of its vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import autocast, in_triton
from rec_kernels.ops.autograd import call, refuse_second_derivative, register_autograd
from rec_kernels.ops.fakes import check_one_device, check_rank, check_shape

_ops = torch.ops.rec_kernels


def dot_interaction(
    dense: Tensor, sparse: Tensor, self_interaction: bool = False, *, precision: str = "ieee"
) -> Tensor:
    """Concatenates ``dense`` with the dot products of all pairs of ``dense`` and the vectors of ``sparse``.

    This is the interaction of DLRM (M. Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", arXiv:1906.00091). It equals ``torch.bmm``, the lower triangle and ``torch.cat``, but
    allocates neither the [B, F + 1, F + 1] products nor a copy of the vectors.

    Args:
        dense: [B, D] float32, float16 or bfloat16, D from 1 to 2^20.
        sparse: [B, F, D] of dense's dtype, F from 0 to 2^20 - 1. The batch stride is arbitrary, as in
            ``pooled[:, : F * D].view(B, F, D)``; tensors with other strides are copied.
        self_interaction: whether to include the dot product of each vector with itself.
        precision: precision of float32 products on a GPU: "ieee" (relative error at most 2^-21) or "tf32" (tensor
            cores, inputs reduced to 11 significant bits; on an AMD GPU the same as "ieee"). Products of float16 and
            bfloat16 are exact, and so are all products on the CPU.

    Returns:
        [B, D + pairs] of dense's dtype, contiguous. Vector 0 is the dense one, vector 1 + f is sparse vector f. The
        pairs are the strictly lower triangle in row-major order, (1, 0), (2, 0), (2, 1), (3, 0), ..., (F + 1) F / 2 of
        them; with ``self_interaction``, (0, 0), (1, 0), (1, 1), ..., (F + 1) (F + 2) / 2 of them. Differentiable in
        both tensors, once. Sums are float32 and rounded once. On the CPU, the bits are the same for every instruction
        set and number of threads; on a GPU (a Triton kernel) the result is within the bound of docs/numerics.md
        ("dot_interaction"). Under autocast, as for torch.bmm, both tensors and the result have autocast's dtype;
        a gradient has its argument's dtype.

    Raises:
        ValueError: a shape, dtype, device or precision is not as above; the message names the argument, the value and
            what is allowed.
    """
    return call(_ops.dot_interaction.default, dense, sparse, self_interaction, precision)


def num_pairs(num_sparse: int, self_interaction: bool = False) -> int:
    """Number of pairs of a dense and ``num_sparse`` sparse vectors: the output's columns after the first D."""
    return (num_sparse + 1) * (num_sparse + (2 if self_interaction else 0)) // 2


@torch.library.register_fake("rec_kernels::dot_interaction")
def _(dense, sparse, self_interaction=False, precision="ieee"):
    check_one_device((dense, sparse))
    check_rank("dense", dense, 2)
    check_rank("sparse", sparse, 3)
    check_shape("sparse", sparse, (dense.shape[0], sparse.shape[1], dense.shape[1]))
    return dense.new_empty((dense.shape[0], dense.shape[1] + num_pairs(sparse.shape[1], self_interaction)))


@torch.library.register_fake("rec_kernels::dot_interaction_backward")
def _(grad, dense, sparse, self_interaction=False, precision="ieee"):
    check_one_device((grad, dense, sparse))
    return dense.new_empty(dense.shape), sparse.new_empty(sparse.shape)


in_triton.register("dot_interaction", "dot_interaction", "dot_interaction_backward")


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _backward(ctx, grad: Tensor):
    grads = _ops.dot_interaction_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*(g if wanted else None for g, wanted in zip(grads, ctx.needs_input_grad, strict=False)), None, None)


register_autograd("dot_interaction", _backward, setup_context=_setup)
refuse_second_derivative("dot_interaction_backward")
autocast.register("dot_interaction", autocast.to_lower_precision)
