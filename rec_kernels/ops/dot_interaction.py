"""dot_interaction: the pairwise dot products of a sample's vectors, behind its dense vector."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops import autocast, in_triton
from rec_kernels.ops.autograd import call, refuse_second, register_autograd
from rec_kernels.ops.fakes import check_one_device, check_rank, check_shape

_ops = torch.ops.rec_kernels


def dot_interaction(
    dense: Tensor, sparse: Tensor, self_interaction: bool = False, *, precision: str = "ieee"
) -> Tensor:
    """``dense`` followed by the dot product of each pair among it and the vectors of ``sparse``, in one pass.

    The interaction of DLRM (M. Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", arXiv:1906.00091). Equal to ``torch.bmm`` of all vectors with themselves, its triangle, and
    ``torch.cat``, but neither [B, F + 1, F + 1] products nor a copy of the vectors are ever in memory.

    Args:
        dense: [B, D] float32, float16 or bfloat16, D from 1 to 2^20.
        sparse: [B, F, D] of dense's dtype, F from 0 to 2^20 - 1. Samples may lie at any distance from each other, as
            in ``pooled[:, : F * D].view(B, F, D)``; of other strides, a copy is taken.
        self_interaction: whether a vector makes a pair with itself, too.
        precision: of products of float32 on a GPU: "ieee" (off by at most 2^-21 of themselves) or "tf32" (tensor cores:
            inputs cut to 11 significant bits; on an AMD GPU "ieee"). Products of float16 and bfloat16 are exact. On
            the CPU all are.

    Returns:
        [B, D + pairs] of dense's dtype, contiguous. With vector 0 the dense one and 1 + f sparse vector f, the pairs
        are (1, 0), (2, 0), (2, 1), (3, 0), ...: row-major below the diagonal, (F + 1) F / 2 of them; with
        ``self_interaction`` (0, 0), (1, 0), (1, 1), ...: (F + 1) (F + 2) / 2. Differentiable in both tensors, once.
        Sums are float32, rounded once. On the CPU the same bits for every instruction set and number of threads; on a
        GPU, where the op is a Triton kernel, within the bound of docs/numerics.md ("dot_interaction"). Under autocast,
        as of torch.bmm, both tensors are cast to its dtype, which the result has, and a gradient has the dtype of the
        argument.

    Raises:
        ValueError: a shape, dtype, device or precision is not as above; the message names the argument, the value and
            what is allowed.
    """
    return call(_ops.dot_interaction.default, dense, sparse, self_interaction, precision)


def num_pairs(num_sparse: int, self_interaction: bool = False) -> int:
    """Pairs among a dense vector and so many sparse ones: columns of the result behind the first D."""
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
refuse_second("dot_interaction_backward")
autocast.register("dot_interaction", autocast.to_lower_precision)
