"""Autograd and autocast of embedding_bag: what its backwards keep, and which ops they call."""

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
    places_of,
    refuse_tangents,
    register_autograd,
)
from rec_kernels.ops.embedding_bag import NARROW, table_starts
from rec_kernels.ops.table_layout import Column, Flag, Size
from rec_kernels.ops.version_counters import call_in_place

_ops = torch.ops.rec_kernels
_implementations = torch.library.Library("rec_kernels", "IMPL")

# Arguments of the forward that the backward ops need beside the saved tensors. The layout is kept, not saved: its
# frozen features may change before the backward, and a layout made in inference mode cannot be saved.
_BAGS = ("layout", "layout_sizes", "groups", "bounds_check")

# Tensors that are saved for the backward.
_SAVED = ("values", "offsets", "per_sample_weights", "inverse", "bag_starts")

_UPDATE_OP = "embedding_bag_backward_fused_.layout"

_LARGEST = torch.finfo(torch.float32).max


def _keep(ctx, op: str, a: dict) -> None:
    """Keeps the arguments by name that a backward of the ops with a layout needs; ``a`` is this call's own."""
    factors = a["per_sample_weights"]
    # The rows themselves are needed for the gradient of factors, and where they are multiplied. The tables, whose
    # memory is that of the weights, go with them because a change of theirs between forward and backward shows in
    # their own version counters.
    trains_factors = factors is not None and factors.requires_grad
    needs_rows = bool(a["layout_sizes"][Size.flags] & Flag.multiplies) or trains_factors
    wants_rows = needs_rows and op != "embedding_bag_fused.layout"
    rows = (a["weights"], *a.get("tables", ())) if wants_rows else ()
    ctx.places = places_of(op)
    ctx.set_materialize_grads(False)  # an output without a gradient trains nothing, where zeros would be an update
    ctx.save_for_backward(*map(a.pop, _SAVED), *rows)
    # Without reads of rows, later changes to the weights are harmless; a saved tensor would be checked for its version.
    if wants_rows:
        del a["weights"]
    elif a["weights"].requires_grad:
        a["weights"] = a["weights"].detach()
    a.pop("tables", None)
    ctx.kept, ctx.needs_rows = a, needs_rows


def _saved(ctx) -> tuple[Tensor, dict]:
    """The weights of the forward, and its arguments by name, as far as they were kept.

    Activation checkpointing allows one look at ``ctx.saved_tensors``.
    """
    saved, kept = ctx.saved_tensors, ctx.kept
    weights = saved[len(_SAVED)] if len(saved) > len(_SAVED) else kept["weights"]
    return weights, kept | dict(zip(_SAVED, saved, strict=False))


def _grads(ctx, **by_name) -> list:
    """Gradients in schema order, None for the arguments that have none."""
    grads: list[Any] = [None] * len(ctx.places)
    for name, grad in by_name.items():
        grads[ctx.places[name]] = grad
    return grads


def _wanted(ctx, name: str) -> Any:
    return ctx.needs_input_grad[ctx.places[name]]


def _bags(given: dict, *without: str) -> dict[str, Any]:
    """The arguments of a lookup that say which bags it has."""
    return {name: given[name] for name in (*_SAVED, *_BAGS) if name not in without}


def _factors_gradient(ctx, grad: Tensor, weights: Tensor, given: dict) -> Tensor | None:
    if given["per_sample_weights"] is None or not _wanted(ctx, "per_sample_weights"):
        return None
    bags = _bags(given, "per_sample_weights", "bounds_check")
    if given.get("cache_rows") is not None:
        bags |= _rows_in_cache(given)
    return _ops.embedding_bag_backward_per_sample_weights.layout(grad, weights, **bags)


def _rows_in_cache(given: dict) -> dict[str, Tensor]:
    """Finds the slots of a lookup's cached rows again if the cache may have changed since the forward."""
    slots = given["cache_slots"]
    if given["cache_tags"] is not None:
        bags = _bags(given, "per_sample_weights", "inverse", "groups")
        slots = _ops.row_cache_lookup.layout(given["cache_tags"], given["cache_marks"], **bags)
    return {"cache_rows": given["cache_rows"], "cache_slots": slots}


def _setup(ctx, inputs, output) -> None:
    _keep(ctx, "embedding_bag.layout", arguments_of("embedding_bag.layout", inputs))


def _backward(ctx, grad: Tensor, _):
    weights, given = _saved(ctx)
    grad = grad.float()  # exact, from an output of half precision
    grad_weights = None
    if ctx.needs_input_grad[0] and ctx.kept["sparse"]:
        raise ValueError("sparse gradients of a flat `weights` tensor do not exist; use embedding_bag_tables")
    if ctx.needs_input_grad[0]:
        grad_weights = _ops.embedding_bag_backward_dense.layout(grad, weights, **_bags(given))
    return _grads(ctx, weights=grad_weights, per_sample_weights=_factors_gradient(ctx, grad, weights, given))


# Arguments that the backward ops of one table need beside the tensors.
_TABLE_BAGS = ("pooling", "include_last_offset", "padding_idx")


def _setup_table(ctx, inputs, output) -> None:
    a = arguments_of("embedding_bag.table", inputs)
    factors = a["per_sample_weights"]
    reads_rows = factors is not None and factors.requires_grad
    ctx.set_materialize_grads(False)
    # Saved only where rows are read: elsewhere a change of theirs does no harm.
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
    ctx.table_shapes = [t.shape for t in a["tables"]]
    _keep(ctx, "embedding_bag_tables.layout", a)


def _backward_tables(ctx, grad: Tensor, _):
    weights, given = _saved(ctx)
    grad = grad.float()  # exact, from an output of half precision
    shapes, wanted = ctx.table_shapes, _wanted(ctx, "tables")
    grads: list[Any] = [None] * len(shapes)
    if any(wanted):
        bags = _bags(given)
        shown = bags if all(wanted) else bags | {"layout": _frozen_with(bags, shapes, wanted)}
        grads = _gradients_of_tables(ctx, grad, weights, shown, shapes)
        # A view would keep the memory of gradients that nobody wants.
        grads = grads if all(wanted) else [t.clone() if want else None for t, want in zip(grads, wanted, strict=True)]
    return _grads(ctx, tables=grads, per_sample_weights=_factors_gradient(ctx, grad, weights, given))


def _gradients_of_tables(ctx, grad: Tensor, weights: Tensor, bags: dict, shapes) -> list[Tensor]:
    if ctx.kept["sparse"]:
        rows, row_grads, row_counts = _ops.embedding_bag_backward_sparse.layout(grad, weights, **bags)
        return _split_sparse(rows, row_grads, row_counts, bags["layout"][:, Column.row_offset], shapes)
    flat = _ops.embedding_bag_backward_dense.layout(grad, weights, **bags)
    starts = table_starts([shape.numel() for shape in shapes])
    return [flat[s : s + shape.numel()].view(shape) for s, shape in zip(starts, shapes, strict=False)]


def _frozen_with(bags: dict, shapes, wanted) -> Tensor:
    """The layout with the features frozen, too, whose table wants no gradient. Waits for no GPU."""
    layout = bags["layout"]
    if bags["layout_sizes"][Size.most_parts] > 1:
        return layout  # a feature is frozen as a whole, and its parts are of several tables
    shown, first_row = layout.clone(), 0
    row_offsets = layout[:, Column.row_offset]
    for shape, want in zip(shapes, wanted, strict=True):
        end = first_row + shape[0]
        if not want and shape[0]:
            shown[:, Column.frozen] |= ((row_offsets >= first_row) & (row_offsets < end)).long()
        first_row = end
    return shown


def _split_sparse(rows: Tensor, row_grads: Tensor, row_counts: Tensor, row_offsets: Tensor, shapes) -> list[Tensor]:
    """One coalesced sparse gradient per table, in table order, from those of all features."""
    touched: dict[int, int] = {}
    for first_row, count in torch.stack((row_offsets, row_counts), 1).tolist():  # a GPU is waited for once
        # A table without rows has its row number in common with the next one.
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
            "rec_kernels::embedding_bag_fused.layout updates tables in its backward, which transforms of torch.func "
            "would call never or several times: take its gradient by torch.autograd, outside of them"
        )
    a = arguments_of("embedding_bag_fused.layout", inputs)
    # Plain attributes, not saved tensors: the update changes them on purpose, also between a forward and its own
    # backward when a module is used twice in one graph.
    # The update takes all of the forward's arguments but two.
    a["status"], ctx.token = output[1], a.pop("token")
    del a["output_dtype"]
    _keep(ctx, "embedding_bag_fused.layout", a)
    # A cache that inserts or evicts rows writes to `weights` without changing a row's value; only updates change
    # `step`.
    ctx.watched = a["weights"] if a["cache_rows"] is None else a["step"]
    ctx.version = ctx.watched._version if ctx.needs_rows and not ctx.watched.is_inference() else None


def _backward_fused(ctx, grad: Tensor, _, updates: Sequence[dict[str, Any]] | None = None):
    if ctx.version is not None:
        if torch.compiler.is_compiling():  # by compiled autograd, in whose graphs version counters stay as they are
            from rec_kernels.ops.graph_breaks import check_in_python

            check_in_python(_check_version, ctx.watched, ctx.version)
        else:
            _check_version(ctx.watched, ctx.version)
    weights, given = _saved(ctx)
    grad = grad.float()
    # Before the update: the gradient of per_sample_weights is of the rows that were looked up.
    grad_factors = _factors_gradient(ctx, grad, weights, given)
    token = ctx.token
    if getattr(token, "has_other_scaler", False):
        raise RuntimeError(
            "set_grad_scaler() was called between a lookup and its backward, whose gradients would be taken for those "
            "of another scale: call it before the lookup; no table was changed"
        )
    if getattr(token, "has_moved", False):
        raise RuntimeError(
            "the collection was moved, to other memory, between a lookup and its backward, which would update the "
            "tables where they were: move it before the lookup; no table was changed"
        )
    # The token's owner may make the update: an attribute of the tensor, as autograd hands on tensors only.
    take_over = getattr(token, "take_over", None)
    # A gradient of nothing would cost a tenth of a small step. Without the owner, in compiled code, its hook needs one.
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
    """Calls ``embedding_bag_backward_fused_.layout`` once for each of ``updates``, and counts one step.

    Args:
        arguments: of all of them, by name. updates: the arguments of each that are others.
    """
    step = arguments["step"]
    for own in updates[:-1]:
        call_in_place(_UPDATE_OP, {**arguments, **own, "step": step.clone()})
    call_in_place(_UPDATE_OP, {**arguments, **updates[-1]})


class _WithUpdates(list):
    """Arguments of a lookup by place, with ``updates``: those in which the updates of its backward differ from it."""

    updates: Sequence[dict[str, Any]]


def _setup_with_updates(ctx, inputs, output) -> None:
    _setup_fused(ctx, inputs, output)
    ctx.updates = inputs.updates


def _backward_with_updates(ctx, grad: Tensor, status: Tensor):
    return _backward_fused(ctx, grad, status, ctx.updates)


def call_with_updates(updates: Sequence[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """``embedding_bag_fused.layout``, whose backward makes several updates, each of some tables.

    Args:
        updates: the arguments of each that are others than the lookup's: its optimizer and state, and a layout in which
            all features are frozen but those of its tables. args, kwargs: the lookup's.
    """
    if torch.compiler.is_compiling():
        from rec_kernels.ops.graph_breaks import look_up_and_update

        return look_up_and_update(updates, args, kwargs)
    return look_up_with_updates(updates, args, kwargs)


def look_up_with_updates(updates: Sequence[dict[str, Any]], args: tuple, kwargs: dict[str, Any]) -> Any:
    """``call_with_updates`` where torch does not compile."""
    inputs = _WithUpdates(_with_updates.completed(_with_updates.inputs(args, kwargs)))
    inputs.updates = updates
    refuse_tangents("embedding_bag_fused.layout", inputs)
    return _with_updates(inputs)


def overflow_of(grad: Tensor) -> Tensor:
    """0-dim float32: inf if an element of ``grad``, float32, is infinite or NaN, else 0. Waits for no GPU.

    Update ops take it as ``found_inf``; as the gradient of a parameter, ``torch.amp.GradScaler`` finds it.
    """
    count = grad.numel()
    if not isinstance(count, int):  # traced, where it may be known to no one, and the comparison is fused into the sum
        return torch.where((grad.abs() <= _LARGEST).all(), 0.0, torch.inf).float()
    if not count:
        return grad.new_zeros(())
    low, high = grad.aminmax()  # reads it once, and makes nothing of its size
    # A NaN is not. Two numbers have torch's default dtype.
    return torch.where(torch.maximum(-low, high) <= _LARGEST, 0.0, torch.inf).float()


def _check_version(watched: Tensor, version: int) -> None:
    # Other gradients need no rows: they may be taken of tables that have gone on.
    if watched._version != version:
        raise RuntimeError(
            "the tables have changed since this lookup, and its gradients, of products of rows or of "
            "per_sample_weights, need the rows as they were. "
            "This lookup updates nothing; what another one of the same backward has updated stays so. If that is what "
            "has changed them: make both lookups and their backwards inside accumulate() of the collection, which "
            "updates once, at its end"
        )


for _op, _backward_of, _keep_for in (
    ("embedding_bag.table", _backward_table, _setup_table),
    ("embedding_bag.layout", _backward, _setup),
    ("embedding_bag_fused.layout", _backward_fused, _setup_fused),
    ("embedding_bag_tables.layout", _backward_tables, _setup_tables),
):
    register_autograd(_op, differentiable_once(_op, _backward_of), setup_context=_keep_for)


_with_updates = Differentiable(
    "embedding_bag_fused.layout",
    differentiable_once("embedding_bag_fused.layout", _backward_with_updates),
    _setup_with_updates,
)


def _register_autocast(op: str) -> None:
    """Under autocast, per-sample weights in half precision are widened.

    torch's own registration would widen every argument, also state that is kept in bfloat16, and update the copy.
    """
    place = places_of(op)["per_sample_weights"]

    def prepare(inputs: tuple, _device: str) -> tuple:
        factors = inputs[place] if len(inputs) > place else None
        if factors is None or factors.dtype not in NARROW:
            return inputs
        return *inputs[:place], factors.float(), *inputs[place + 1 :]

    autocast.register(op, prepare)


for _op in ("embedding_bag.table", "embedding_bag.layout", "embedding_bag_tables.layout", "embedding_bag_fused.layout"):
    _register_autocast(_op)
