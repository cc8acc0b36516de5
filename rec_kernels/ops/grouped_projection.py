"""grouped_projection: project features of mixed-dimension embedding tables to the widths that a model uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels.ops import in_triton
from rec_kernels.ops.autograd import call, refuse_second_derivative, register_autograd
from rec_kernels.ops.fakes import check_one_device, check_rank, check_size
from rec_kernels.ops.layout_records import check, listed

_ops = torch.ops.rec_kernels
MOST_COLUMNS = 2**20
#: in_dims, out_dims, outputs.
Dims = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def grouped_projection(
    x: Tensor,
    weights: Tensor,
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    outputs: Sequence[int] | None = None,
) -> Tensor:
    """Projects groups of columns, each by its own matrix, in one call.

    It follows the pooling of mixed-dimension embedding tables (A. Ginart et al., "Mixed Dimension Embeddings with
    Application to Memory-Efficient Recommendation Systems", arXiv:1909.11810; ``rk.mixed_dimensions`` chooses the
    widths). It equals a ``torch.nn.functional.linear`` without bias per group, and ``torch.cat``. A block with several
    groups is the output of a table that is split by popularity into parts of different widths.

    Args:
        x: [B, sum(in_dims)] float32, the columns of all groups, in order.
        weights: flat float32, the row-major matrices W_g [out_dims[outputs[g]], in_dims[g]] of all groups g, in order.
            A group as wide as its block has no matrix: its columns are copied, or added, unchanged.
        in_dims: columns of each group, from 1 to 2^20.
        out_dims: columns of each block of the result, from 1 to 2^20.
        outputs: the block of each group. The first is 0, each next one is equal or one more, the last is
            ``len(out_dims) - 1``. None: one block per group.

    Returns:
        [B, sum(out_dims)] float32, contiguous: block o is the sum of ``x_g @ W_g.T`` over its groups, in order.
        Differentiable in x and weights, once. On the CPU, the bits are the same for every instruction set and number
        of threads; on a GPU (a Triton kernel) the result is within the bound of docs/numerics.md
        ("grouped_projection"). Under autocast, half-precision arguments are converted to float32.

    Raises:
        ValueError: a shape, dtype, device or list is not as above; the message names the argument, the value, its place
            and what is allowed.
    """
    dims = listed(in_dims, "in_dims"), listed(out_dims, "out_dims")
    lists = *dims, listed(range(len(dims[0])) if outputs is None else outputs, "outputs")
    return call(_ops.grouped_projection.default, x, weights, *lists)


def num_weights(in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]) -> int:
    """Number of elements of the flat ``weights``."""
    pairs = ((in_dim, out_dims[block]) for in_dim, block in zip(in_dims, outputs, strict=True))
    return sum(in_dim * out_dim for in_dim, out_dim in pairs if in_dim != out_dim)


def check_dims(in_dims: Sequence[int], out_dims: Sequence[int], outputs: Sequence[int]) -> Dims:
    """Checks the lists as the kernels do, with the same messages, and returns them as tuples."""
    for name, dims in (("in_dims", in_dims), ("out_dims", out_dims)):
        for i, dim in enumerate(dims):
            check(1 <= dim <= MOST_COLUMNS, f"{name}[{i}] = {dim} must be in [1, {MOST_COLUMNS}]")
    one_each = f"outputs must have one element for each of the {len(in_dims)} in_dims, got {len(outputs)}"
    check(len(outputs) == len(in_dims), one_each)
    last = -1
    for g, output in enumerate(outputs):
        follows = output == last + 1 or (g > 0 and output == last)
        rule = f"outputs[{g - 1}] = {last} or one more" if g else "0"
        check(follows, f"outputs[{g}] = {output} must be {rule}")
        last = output
    blocks = f"out_dims must have one element for each of the {last + 1} blocks that outputs names"
    check(len(out_dims) == last + 1, f"{blocks}, got {len(out_dims)}")
    return tuple(in_dims), tuple(out_dims), tuple(outputs)


@torch.library.register_fake("rec_kernels::grouped_projection")
def _(x, weights, in_dims, out_dims, outputs):
    check_one_device((x, weights))
    check_dims(in_dims, out_dims, outputs)
    check_rank("x", x, 2)
    columns, count = sum(in_dims), num_weights(in_dims, out_dims, outputs)
    check_size(x.shape[1], columns, f"x must have sum(in_dims) = {columns} columns, got shape {list(x.shape)}")
    check_rank("weights", weights, 1)
    what, found = "the matrices of all groups that are not the identity", weights.shape[0]
    check_size(found, count, f"weights must have {count} elements, {what}, got {found}")
    return x.new_empty((x.shape[0], sum(out_dims)))


@torch.library.register_fake("rec_kernels::grouped_projection_backward_input")
def _(grad, weights, in_dims, out_dims, outputs):
    check_one_device((grad, weights))
    return grad.new_empty((grad.shape[0], sum(in_dims)))


@torch.library.register_fake("rec_kernels::grouped_projection_backward_weights")
def _(grad, x, in_dims, out_dims, outputs):
    check_one_device((grad, x))
    return x.new_empty((num_weights(in_dims, out_dims, outputs),))


in_triton.register(
    "grouped_projection",
    "grouped_projection",
    "grouped_projection_backward_input",
    "grouped_projection_backward_weights",
)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.layout = inputs[2:]


def _backward(ctx, grad: Tensor):
    (x, weights), wanted = ctx.saved_tensors, ctx.needs_input_grad
    grad_x = _ops.grouped_projection_backward_input(grad, weights, *ctx.layout) if wanted[0] else None
    grad_weights = _ops.grouped_projection_backward_weights(grad, x, *ctx.layout) if wanted[1] else None
    return grad_x, grad_weights, None, None, None


register_autograd("grouped_projection", _backward, setup_context=_setup)
refuse_second_derivative("grouped_projection_backward_input")
refuse_second_derivative("grouped_projection_backward_weights")
for _device in ("cpu", "cuda"):
    torch.library.register_autocast("rec_kernels::grouped_projection", _device, torch.float32)
