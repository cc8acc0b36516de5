"""Autograd and autocast of embedding_bag: what its backwards keep, and which ops they call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rec_kernels.ops import autocast
from rec_kernels.ops.autograd import arguments_of, differentiable_once, register_autograd, signature_of
from rec_kernels.ops.embedding_bag import NARROW, table_starts
from rec_kernels.ops.version_counters import call_in_place

_ops = torch.ops.rec_kernels
_implementations = torch.library.Library("rec_kernels", "IMPL")

# Keyword arguments that every op of the family takes, in schema order.
_LAYOUT = (
    "weight_offsets",
    "row_offsets",
    "num_embeddings",
    "embedding_dims",
    "output_offsets",
    "mean",
    "output_dim",
    "num_rows",
    "max_embedding_dim",
    "formats",
    "format_of",
    "embedding_dim",
    "bag_starts",
    "inverse",
    "groups",
    "frozen",
    "partition_starts",
    "divisors",
    "moduli",
    "id_limits",
    "combine",
    "max_parts",
    "multiplies",
    "pooling",
    "padding_idx",
    "bounds_check",
)

# Keyword arguments of the fused update, as far as they do not change; and the tensors that may change before it runs.
_UPDATE = (
    "optimizer",
    "eps",
    "beta1",
    "beta2",
    "weight_decay",
    "weight_decay_mode",
    "clip_grad_value",
    "clip_grad_norm",
    "moment_offsets",
    "rounding",
    "seed",
    "table_ids",
)
# What finds rows in a row cache. Where they were in the forward does not matter to the backward: others may have come
# in since.
_CACHE = ("cache_rows", "cache_offsets", "cache_tags", "cache_marks", "cache_sets", "cache_set_starts", "cache_ways")
_STATE = ("weights", "sum", "step", "lr", "exp_avg", "exp_avg_sq", "beta_powers")

_LARGEST = torch.finfo(torch.float32).max


def _may_multiply(a: dict) -> bool:
    """Whether a feature multiplies rows of its parts, or nobody has said that none does.

    ``combine`` knows, but is not read: on a GPU, that would wait.
    """
    if a["partition_starts"] is None or a["multiplies"] is not None:
        return bool(a["multiplies"])
    return a["embedding_dims"].shape[0] >= a["partition_starts"].shape[0]  # a feature has two parts or more


def _keep(ctx, op: str, inputs: tuple) -> dict:
    """Saves what every backward of the family needs; returns the arguments by name."""
    a = arguments_of(op, inputs)
    values, offsets, factors = a["values"], a["offsets"], a["per_sample_weights"]
    if not a.get("include_last_offset", True):
        offsets = torch.cat([offsets, offsets.new_full((1,), values.shape[0])])
    # The rows themselves are needed for the gradient of factors, and where they are multiplied. The tables, whose
    # memory is that of the weights, go with them because a change of theirs between forward and backward shows in
    # their own version counters.
    trains_factors = factors is not None and factors.requires_grad
    wants_rows = (_may_multiply(a) or trains_factors) and op != "embedding_bag_fused"
    ctx.depends = wants_rows or trains_factors  # gradients, on what may require some itself
    rows = (a["weights"], *a.get("tables", ())) if wants_rows else (None,)
    ctx.save_for_backward(values, offsets, factors, a["inverse"], *rows)
    ctx.layout = {name: a[name] for name in _LAYOUT if name != "inverse"}
    ctx.cache = {name: a[name] for name in (*_CACHE, "cache_slots")} if a.get("cache_rows") is not None else None
    ctx.shape, ctx.names = a["weights"].shape, list(a)
    return a


def _grads(ctx, **by_name) -> tuple:
    """Gradients in schema order, None for the arguments that have none."""
    return tuple(by_name.get(name) for name in ctx.names)


def _factors_gradient(
    ctx, layout: dict, grad: Tensor, weights: Tensor | None, values: Tensor, offsets: Tensor, factors: Tensor | None
) -> Tensor | None:
    # The saved tensors are arguments: activation checkpointing allows one look at ctx.saved_tensors.
    if factors is None or not ctx.needs_input_grad[ctx.names.index("per_sample_weights")]:
        return None
    cache = _rows_in_cache(ctx, layout, values, offsets) if ctx.cache else {}
    return _ops.embedding_bag_backward_per_sample_weights(grad, weights, values, offsets, **layout, **cache)


def _rows_in_cache(ctx, layout: dict, values: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    """Where the cached rows of a lookup are now."""
    c = ctx.cache
    slots = c["cache_slots"]
    if c["cache_tags"] is not None:
        places = (c[name] for name in _CACHE[2:])
        slots = _ops.row_cache_lookup(*places, values, offsets, **layout)
    return {"cache_rows": c["cache_rows"], "cache_offsets": c["cache_offsets"], "cache_slots": slots}


def _setup(ctx, inputs, output) -> None:
    ctx.sparse = _keep(ctx, "embedding_bag", inputs)["sparse"]


def _backward(ctx, grad: Tensor, _):
    *bags, inverse, weights = ctx.saved_tensors[:5]
    layout = ctx.layout | {"inverse": inverse}
    grad = grad.float()  # exact, from an output of half precision
    arguments = (grad, ctx.shape, *bags)
    grad_weights = None
    if ctx.needs_input_grad[0] and ctx.sparse:
        if len(ctx.shape) != 2:
            raise ValueError("sparse gradients of a flat `weights` tensor do not exist; use embedding_bag_tables")
        rows, row_grads, _ = _ops.embedding_bag_backward_sparse(*arguments, **layout, weights=weights)
        grad_weights = _sparse(rows, row_grads, ctx.shape)
    elif ctx.needs_input_grad[0]:
        grad_weights = _ops.embedding_bag_backward_dense(*arguments, **layout, weights=weights)
    return _grads(ctx, weights=grad_weights, per_sample_weights=_factors_gradient(ctx, layout, grad, weights, *bags))


def _sparse(rows: Tensor, row_grads: Tensor, shape) -> Tensor:
    return torch.sparse_coo_tensor(
        rows[None], row_grads.view(-1, shape[1]), tuple(shape), is_coalesced=True, check_invariants=False
    )


def _setup_tables(ctx, inputs, output) -> None:
    a = _keep(ctx, "embedding_bag_tables", inputs)
    ctx.sparse, ctx.table_shapes = a["sparse"], [t.shape for t in a["tables"]]


def _backward_tables(ctx, grad: Tensor, _):
    *bags, inverse, weights = ctx.saved_tensors[:5]
    layout = ctx.layout | {"inverse": inverse}
    grad = grad.float()  # exact, from an output of half precision
    arguments = (grad, ctx.shape, *bags)
    shapes, wanted = ctx.table_shapes, ctx.needs_input_grad[ctx.names.index("tables")]
    grads: list[Any] = [None] * len(shapes)
    if any(wanted):
        shown = layout if all(wanted) else layout | {"frozen": _frozen_with(layout, shapes, wanted)}
        grads = _gradients_of_tables(ctx, shown, weights, arguments, shapes)
        # A view would keep the memory of gradients that nobody wants.
        grads = grads if all(wanted) else [t.clone() if want else None for t, want in zip(grads, wanted, strict=True)]
    return _grads(ctx, tables=grads, per_sample_weights=_factors_gradient(ctx, layout, grad, weights, *bags))


def _gradients_of_tables(ctx, layout: dict, weights: Tensor | None, arguments: tuple, shapes) -> list[Tensor]:
    if ctx.sparse:
        rows, row_grads, row_counts = _ops.embedding_bag_backward_sparse(*arguments, **layout, weights=weights)
        return _split_sparse(rows, row_grads, row_counts, layout["row_offsets"], shapes)
    flat = _ops.embedding_bag_backward_dense(*arguments, **layout, weights=weights)
    starts = table_starts([shape.numel() for shape in shapes])
    return [flat[s : s + shape.numel()].view(shape) for s, shape in zip(starts, shapes, strict=False)]


def _frozen_with(layout: dict, shapes, wanted) -> Tensor | None:
    """``frozen``, and the features whose table wants no gradient. Waits for no GPU: compares with numbers only."""
    frozen, row_offsets = layout["frozen"], layout["row_offsets"]
    if layout["partition_starts"] is not None:
        return frozen  # of features, the layout's other tensors of their parts
    first_row = 0
    for shape, want in zip(shapes, wanted, strict=True):
        end = first_row + shape[0]
        if not want and shape[0]:
            here = (row_offsets >= first_row) & (row_offsets < end)
            frozen = here if frozen is None else frozen | here
        first_row = end
    return frozen


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
    a = _keep(ctx, "embedding_bag_fused", inputs)
    # Plain attributes, not saved tensors: the update changes them on purpose, also between a forward and its own
    # backward when a module is used twice in one graph.
    ctx.state = {name: a[name] for name in _STATE}
    ctx.options = {name: a[name] for name in _UPDATE} | {"status": output[1]}
    if a["grad_scale"] is not None:  # it may change, too
        ctx.options["grad_scale"] = a["grad_scale"]
    if ctx.cache:
        ctx.options |= {name: a[name] for name in (*_CACHE, "cache_slots", "cache_dirty")}
    ctx.token_shape = a["token"].shape
    factors, weights = a["per_sample_weights"], a["weights"]
    needs_rows = _may_multiply(a) or (factors is not None and factors.requires_grad)
    # With a cache, rows that come in or go change `weights` and are what they were; only an update changes `step`.
    ctx.watched = a["step"] if ctx.cache else weights
    ctx.version = ctx.watched._version if needs_rows and not ctx.watched.is_inference() else None


def _backward_fused(ctx, grad: Tensor, _):
    weights = ctx.state["weights"]
    if ctx.version is not None:
        _check_version(ctx.watched, ctx.version)
    *bags, inverse, _ = ctx.saved_tensors
    values, offsets, factors = bags
    layout = ctx.layout | {"inverse": inverse}
    grad = grad.float()
    # Before the update: the gradient of per_sample_weights is of the rows that were looked up.
    grad_factors = _factors_gradient(ctx, layout, grad, weights, *bags)
    options, grad_token = ctx.options, grad.new_zeros(ctx.token_shape)
    if "grad_scale" in options:
        overflow = overflow_of(grad)
        options, grad_token = options | {"found_inf": overflow}, grad_token + overflow
    given = {"grad": grad, "values": values, "offsets": offsets, "per_sample_weights": factors}
    call_in_place("embedding_bag_backward_fused_", {**ctx.state, **given, **layout, **options})
    return _grads(ctx, token=grad_token, per_sample_weights=grad_factors)


def overflow_of(grad: Tensor) -> Tensor:
    """0-dim float32: inf if an element of ``grad``, float32, is infinite or NaN, else 0. Waits for no GPU.

    Update ops take it as ``found_inf``; as the gradient of a parameter, ``torch.amp.GradScaler`` finds it.
    """
    if not grad.numel():
        return grad.new_zeros(())
    low, high = grad.aminmax()  # reads it once, and makes nothing of its size
    return torch.where(torch.maximum(-low, high) <= _LARGEST, 0.0, torch.inf)  # a NaN is not


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
    ("embedding_bag", _backward, _setup),
    ("embedding_bag_fused", _backward_fused, _setup_fused),
    ("embedding_bag_tables", _backward_tables, _setup_tables),
):
    register_autograd(_op, differentiable_once(_op, _backward_of), setup_context=_keep_for)


def _register_autocast(op: str) -> None:
    """Under autocast, per-sample weights in half precision are widened.

    torch's own registration would widen every argument, also state that is kept in bfloat16, and update the copy.
    """
    place = list(signature_of(op)).index("per_sample_weights")

    def prepare(inputs: tuple, _device: str) -> tuple:
        factors = inputs[place] if len(inputs) > place else None
        if factors is None or factors.dtype not in NARROW:
            return inputs
        return *inputs[:place], factors.float(), *inputs[place + 1 :]

    autocast.register(op, prepare)


for _op in ("embedding_bag", "embedding_bag_tables", "embedding_bag_fused"):
    _register_autocast(_op)
