"""Autograd and autocast of the embedding_bag ops: what the forwards save, and which ops the backwards call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rec_kernels.ops import autocast
from rec_kernels.ops.autograd import (
    Differentiable,
    arguments_of,
    differentiable_once,
    positions_of,
    refuse_tangents,
    register_autograd,
)
from rec_kernels.ops.embedding_bag import NARROW, split_tables
from rec_kernels.ops.table_layout import Column, Flag, Size
from rec_kernels.ops.version_counters import call_in_place

_ops = torch.ops.rec_kernels
_implementations = torch.library.Library("rec_kernels", "IMPL")

# Arguments of the forward that the backward ops need besides the saved tensors. The layout is an attribute, not a saved
# tensor: its frozen features may change before the backward, and a layout created in inference mode cannot be saved.
_BAG_ARGUMENTS = ("layout", "layout_sizes", "groups", "bounds_check")

# Arguments that are saved for the backward as tensors.
_SAVED_TENSORS = ("values", "offsets", "per_sample_weights", "inverse", "bag_starts")

_UPDATE_OP = "embedding_bag_backward_fused_.layout"

_LARGEST = torch.finfo(torch.float32).max


def _save_arguments(ctx, op: str, a: dict) -> None:
    """Saves the arguments that the backward of an op with a layout needs; it modifies ``a``, the arguments by name."""
    factors = a["per_sample_weights"]
    # The backward reads rows for the gradient of factors and for multiplied parts. The tables, views of the weights,
    # are saved, too: a change of a table between forward and backward shows in its own version counter.
    trains_factors = factors is not None and factors.requires_grad
    needs_rows = bool(a["layout_sizes"][Size.flags] & Flag.multiplies) or trains_factors
    saves_rows = needs_rows and op != "embedding_bag_fused.layout"
    rows = (a["weights"], *a.get("tables", ())) if saves_rows else ()
    ctx.positions = positions_of(op)
    ctx.set_materialize_grads(False)  # without a gradient nothing is updated; zeros would be an update
    ctx.save_for_backward(*map(a.pop, _SAVED_TENSORS), *rows)
    # If no rows are read, later changes to the weights are harmless; autograd would check a saved tensor's version.
    if saves_rows:
        del a["weights"]
    elif a["weights"].requires_grad:
        a["weights"] = a["weights"].detach()
    a.pop("tables", None)
    ctx.arguments, ctx.needs_rows = a, needs_rows


def _saved_arguments(ctx) -> tuple[Tensor, dict]:
    """Returns the forward's weights, and its saved arguments by name.

    Activation checkpointing allows reading ``ctx.saved_tensors`` only once.
    """
    saved, kept = ctx.saved_tensors, ctx.arguments
    weights = saved[len(_SAVED_TENSORS)] if len(saved) > len(_SAVED_TENSORS) else kept["weights"]
    return weights, kept | dict(zip(_SAVED_TENSORS, saved, strict=False))


def _grads(ctx, **by_name) -> list:
    """Returns gradients in schema order, None for arguments without one."""
    grads: list[Any] = [None] * len(ctx.positions)
    for name, grad in by_name.items():
        grads[ctx.positions[name]] = grad
    return grads


def _needs_grad(ctx, name: str) -> Any:
    return ctx.needs_input_grad[ctx.positions[name]]


def _bags(given: dict, *without: str) -> dict[str, Any]:
    """Returns the arguments of a lookup that describe its bags."""
    return {name: given[name] for name in (*_SAVED_TENSORS, *_BAG_ARGUMENTS) if name not in without}


def _per_sample_weights_gradient(ctx, grad: Tensor, weights: Tensor, given: dict) -> Tensor | None:
    if given["per_sample_weights"] is None or not _needs_grad(ctx, "per_sample_weights"):
        return None
    bags = _bags(given, "per_sample_weights", "bounds_check")
    if given.get("cache_rows") is not None:
        bags |= _cache_arguments(given)
    return _ops.embedding_bag_backward_per_sample_weights.layout(grad, weights, **bags)


def _cache_arguments(given: dict) -> dict[str, Tensor]:
    """Returns the cache arguments; finds slots by tag if the cache may have changed since the forward."""
    slots = given["cache_slots"]
    if given["cache_tags"] is not None:
        bags = _bags(given, "per_sample_weights", "inverse", "groups")
        slots = _ops.row_cache_lookup.layout(given["cache_tags"], given["cache_marks"], **bags)
    return {"cache_rows": given["cache_rows"], "cache_slots": slots}


def _setup(ctx, inputs, output) -> None:
    _save_arguments(ctx, "embedding_bag.layout", arguments_of("embedding_bag.layout", inputs))


def _backward(ctx, grad: Tensor, _):
    weights, given = _saved_arguments(ctx)
    grad = grad.float()  # exact, from an output of half precision
    grad_weights = None
    if ctx.needs_input_grad[0] and ctx.arguments["sparse"]:
        raise ValueError("sparse gradients of a flat `weights` tensor are not supported; use embedding_bag_tables")
    if ctx.needs_input_grad[0]:
        grad_weights = _ops.embedding_bag_backward_dense.layout(grad, weights, **_bags(given))
    return _grads(ctx, weights=grad_weights, per_sample_weights=_per_sample_weights_gradient(ctx, grad, weights, given))


# Arguments that the backward ops of one table need besides the tensors.
_TABLE_BAGS = ("pooling", "include_last_offset", "padding_idx")


def _setup_table(ctx, inputs, output) -> None:
    a = arguments_of("embedding_bag.table", inputs)
    factors = a["per_sample_weights"]
    reads_rows = factors is not None and factors.requires_grad
    ctx.set_materialize_grads(False)
    # Weights are saved only if the backward reads rows; otherwise later changes are harmless.
    ctx.save_for_backward(a["values"], a["offsets"], factors, *([a["weights"]] if reads_rows else ()))
    ctx.bags, ctx.bounds_check = [a[name] for name in _TABLE_BAGS], a["bounds_check"]
    ctx.rows = {"format": a["format"], "embedding_dim": a["embedding_dim"]}
    ctx.sparse, ctx.shape, ctx.dtype = a["sparse"], a["weights"].shape, a["weights"].dtype


def _backward_table(ctx, grad: Tensor, _):
    values, offsets, factors, *weights = ctx.saved_tensors
    grad = grad.float()  # exact, from an output of half precision
    given = (grad, ctx.shape, values, offsets, factors, *ctx.bags, ctx.bounds_check)
    grad_weights = grad_factors = None
    if ctx.needs_input_grad[0] and ctx.sparse:
        rows, row_grads, _ = _ops.embedding_bag_backward_sparse.table(*given)
        grad_weights = _sparse(rows, row_grads, ctx.shape)
    elif ctx.needs_input_grad[0]:
        grad_weights = _ops.embedding_bag_backward_dense.table(*given)
    if grad_weights is not None and ctx.dtype != torch.float32:
        grad_weights = grad_weights.to(ctx.dtype)
    if factors is not None and ctx.needs_input_grad[3]:
        given = (grad, *weights, values, offsets, *ctx.bags)
        grad_factors = _ops.embedding_bag_backward_per_sample_weights.table(*given, **ctx.rows)
    return grad_weights, None, None, grad_factors


def _sparse(rows: Tensor, row_grads: Tensor, shape) -> Tensor:
    return torch.sparse_coo_tensor(
        rows[None], row_grads.view(-1, shape[1]), tuple(shape), is_coalesced=True, check_invariants=False
    )


def _setup_tables(ctx, inputs, output) -> None:
    a = arguments_of("embedding_bag_tables.layout", inputs)
    ctx.table_shapes, ctx.table_dtypes = [t.shape for t in a["tables"]], [t.dtype for t in a["tables"]]
    _save_arguments(ctx, "embedding_bag_tables.layout", a)


def _backward_tables(ctx, grad: Tensor, _):
    weights, given = _saved_arguments(ctx)
    grad = grad.float()  # exact, from an output of half precision
    shapes, needs_grad = ctx.table_shapes, _needs_grad(ctx, "tables")
    grads: list[Any] = [None] * len(shapes)
    if any(needs_grad):
        bags = _bags(given)
        if not all(needs_grad):
            bags["layout"] = _freeze_unneeded(bags, shapes, needs_grad)
        grads = _gradients_of_tables(ctx, grad, weights, bags, shapes)
        if not all(needs_grad):  # a view would keep the memory of unneeded gradients alive
            grads = [t.clone() if need else None for t, need in zip(grads, needs_grad, strict=True)]
    return _grads(ctx, tables=grads, per_sample_weights=_per_sample_weights_gradient(ctx, grad, weights, given))


def _gradients_of_tables(ctx, grad: Tensor, weights: Tensor, bags: dict, shapes) -> list[Tensor]:
    if ctx.arguments["sparse"]:
        rows, row_grads, row_counts = _ops.embedding_bag_backward_sparse.layout(grad, weights, **bags)
        found = _split_sparse(rows, row_grads, row_counts, bags["layout"][:, Column.row_offset], shapes)
        return [t.to(dtype) for t, dtype in zip(found, ctx.table_dtypes, strict=True)]
    flat = _ops.embedding_bag_backward_dense.layout(grad, weights, **bags)
    return split_tables(flat, shapes, ctx.table_dtypes)


def _freeze_unneeded(bags: dict, shapes, needs_grad) -> Tensor:
    """Returns the layout with features of tables that need no gradient frozen, without synchronizing with a GPU."""
    layout = bags["layout"]
    if bags["layout_sizes"][Size.most_parts] > 1:
        return layout  # a feature can only be frozen whole, and its parts read several tables
    frozen, first_row = layout.clone(), 0
    row_offsets = layout[:, Column.row_offset]
    for shape, need in zip(shapes, needs_grad, strict=True):
        end = first_row + shape[0]
        if not need and shape[0]:
            frozen[:, Column.frozen] |= ((row_offsets >= first_row) & (row_offsets < end)).long()
        first_row = end
    return frozen


def _split_sparse(rows: Tensor, row_grads: Tensor, row_counts: Tensor, row_offsets: Tensor, shapes) -> list[Tensor]:
    """Splits the sparse gradients of all features into one coalesced gradient per table, in table order."""
    touched: dict[int, int] = {}
    for first_row, count in torch.stack((row_offsets, row_counts), 1).tolist():  # one synchronization with a GPU
        # A table without rows has the same first row as the next one.
        touched[first_row] = max(count, touched.get(first_row, 0))
    grads, first_row, row, element = [], 0, 0, 0
    for shape in shapes:
        count = touched.get(first_row, 0) if shape[0] else 0
        values = row_grads[element : element + count * shape[1]]
        grads.append(_sparse(rows[row : row + count], values, shape))
        first_row, row, element = first_row + shape[0], row + count, element + count * shape[1]
    return grads


def _setup_fused(ctx, inputs, output) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "rec_kernels::embedding_bag_fused.layout updates tables in its backward, which torch.func transforms may "
            "never call, or call several times: compute its gradient by torch.autograd, outside of them"
        )
    a = arguments_of("embedding_bag_fused.layout", inputs)
    # Attributes, not saved tensors: if a module is used twice in one graph, the first update changes them between the
    # second forward and its backward. The update takes all of the forward's arguments except two.
    a["status"], ctx.token = output[1], a.pop("token")
    del a["output_dtype"]
    _save_arguments(ctx, "embedding_bag_fused.layout", a)
    # Cache insertions and evictions write to `weights` but keep the rows' values; only updates change `step`.
    ctx.watched = a["weights"] if a["cache_rows"] is None else a["step"]
    ctx.version = ctx.watched._version if ctx.needs_rows and not ctx.watched.is_inference() else None


def _backward_fused(ctx, grad: Tensor, _, updates: Sequence[dict[str, Any]] | None = None):
    if ctx.version is not None:
        if torch.compiler.is_compiling():  # compiled autograd, whose graphs do not change version counters
            from rec_kernels.ops.graph_breaks import check_version

            check_version(_check_version, ctx.watched, ctx.version)
        else:
            _check_version(ctx.watched, ctx.version)
    weights, given = _saved_arguments(ctx)
    grad = grad.float()
    # Before the update: the gradient of per_sample_weights uses the rows that the forward read.
    grad_factors = _per_sample_weights_gradient(ctx, grad, weights, given)
    token = ctx.token
    if getattr(token, "has_other_scaler", False):
        raise RuntimeError(
            "set_grad_scaler() was called between a lookup and its backward, which would apply the wrong scale to its "
            "gradients: call it before the lookup; no table was changed"
        )
    if getattr(token, "has_moved", False):
        raise RuntimeError(
            "the collection was moved to other memory between a lookup and its backward, which would update the old "
            "memory: move it before the lookup; no table was changed"
        )
    # The token's owner may run the update. It is an attribute of the tensor, because autograd passes only tensors on.
    take_over = getattr(token, "take_over", None)
    # Empty zeros would cost a tenth of a small step. Compiled code, without an owner, needs them for its hook.
    grad_token = grad.new_zeros(token.shape) if take_over is None or token.numel() else None
    if take_over is not None and take_over(grad, given):
        return _grads(ctx, token=grad_token, per_sample_weights=grad_factors)
    given["grad"] = grad
    if given["grad_scale"] is not None:
        given["found_inf"] = overflow_of(grad)
        grad_token = grad_token + given["found_inf"]
    if updates is None:
        call_in_place(_UPDATE_OP, given)
    else:
        update_by_each(given, updates)
    return _grads(ctx, token=grad_token, per_sample_weights=grad_factors)


def update_by_each(arguments: dict[str, Any], updates: Sequence[dict[str, Any]]) -> None:
    """Calls ``embedding_bag_backward_fused_.layout`` once per element of ``updates``, and counts one step.

    Args:
        arguments: the common arguments, by name.
        updates: the arguments by which each call differs.
    """
    step = arguments["step"]
    for own in updates[:-1]:
        call_in_place(_UPDATE_OP, {**arguments, **own, "step": step.clone()})
    call_in_place(_UPDATE_OP, {**arguments, **updates[-1]})


class _InputsWithUpdates(list):
    """Arguments of a lookup by position, and ``updates``: the arguments by which each of its updates differs."""

    updates: Sequence[dict[str, Any]]


def _setup_with_updates(ctx, inputs, output) -> None:
    _setup_fused(ctx, inputs, output)
    ctx.updates = inputs.updates


def _backward_with_updates(ctx, grad: Tensor, status: Tensor):
    return _backward_fused(ctx, grad, status, ctx.updates)


def call_with_updates(updates: Sequence[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """Calls ``embedding_bag_fused.layout`` with a backward that runs several updates, each of a subset of the tables.

    Args:
        updates: the arguments by which each update differs from the lookup: optimizer, state, and a layout in which
            only the features of its tables are not frozen.
        args, kwargs: arguments of the lookup.
    """
    if torch.compiler.is_compiling():
        from rec_kernels.ops.graph_breaks import look_up_and_update

        return look_up_and_update(updates, args, kwargs)
    return look_up_with_updates(updates, args, kwargs)


def look_up_with_updates(updates: Sequence[dict[str, Any]], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs ``call_with_updates`` outside of compiled code."""
    inputs = _InputsWithUpdates(_with_updates.completed(_with_updates.inputs(args, kwargs)))
    inputs.updates = updates
    refuse_tangents("embedding_bag_fused.layout", inputs)
    return _with_updates(inputs)


def overflow_of(grad: Tensor) -> Tensor:
    """Returns 0-dim float32: inf if an element of ``grad``, float32, is infinite or NaN, else 0; no synchronization.

    Update ops take it as ``found_inf``; as a parameter's gradient, it makes ``torch.amp.GradScaler`` skip the step.
    """
    count = grad.numel()
    if not isinstance(count, int):  # traced: the size may be unknown, and the comparison is fused into the reduction
        return torch.where((grad.abs() <= _LARGEST).all(), 0.0, torch.inf).float()
    if not count:
        return grad.new_zeros(())
    low, high = grad.aminmax()  # reads grad once and allocates nothing of its size
    # A NaN compares false. torch.where of two Python numbers has torch's default dtype.
    return torch.where(torch.maximum(-low, high) <= _LARGEST, 0.0, torch.inf).float()


def _check_version(watched: Tensor, version: int) -> None:
    # Only gradients that read rows are checked; all others tolerate updated tables.
    if watched._version != version:
        raise RuntimeError(
            "the tables have changed since this lookup, but its gradients (of products of rows or of "
            "per_sample_weights) need the rows that the forward read. This lookup updates nothing; updates by "
            "other lookups of the same backward are kept. If one of those changed the tables, run both lookups "
            "and their backwards inside accumulate() of the collection, which updates once, at its end"
        )


for _op, _backward_op, _setup_op in (
    ("embedding_bag.table", _backward_table, _setup_table),
    ("embedding_bag.layout", _backward, _setup),
    ("embedding_bag_fused.layout", _backward_fused, _setup_fused),
    ("embedding_bag_tables.layout", _backward_tables, _setup_tables),
):
    register_autograd(_op, differentiable_once(_op, _backward_op), setup_context=_setup_op)


_with_updates = Differentiable(
    "embedding_bag_fused.layout",
    differentiable_once("embedding_bag_fused.layout", _backward_with_updates),
    _setup_with_updates,
)


def _register_autocast(op: str) -> None:
    """Widens half-precision per-sample weights to float32 under autocast.

    torch's own registration would widen every argument, including bfloat16 state, and update the copy.
    """
    position = positions_of(op)["per_sample_weights"]

    def prepare(inputs: tuple, _device: str) -> tuple:
        factors = inputs[position] if len(inputs) > position else None
        if factors is None or factors.dtype not in NARROW:
            return inputs
        return *inputs[:position], factors.float(), *inputs[position + 1 :]

    autocast.register(op, prepare)


for _op in ("embedding_bag.table", "embedding_bag.layout", "embedding_bag_tables.layout", "embedding_bag_fused.layout"):
    _register_autocast(_op)
