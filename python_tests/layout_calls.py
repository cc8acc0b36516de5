"""Calls ops with layouts described by lists that have an element for each feature or part.

Test cases, and calls recorded before layouts existed, describe tables by lists or tensors under the names of
``rk.table_layout`` and a few older ones. ``as_call`` converts them to the current op and arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import rec_kernels as rk

#: Old name -> argument of ``rk.table_layout``; values are lists or tensors with an element for each feature or part.
_LISTS = {
    "weight_offsets": "weight_offsets",
    "row_offsets": "row_offsets",
    "num_embeddings": "num_embeddings",
    "embedding_dims": "embedding_dims",
    "mean": "mean",
    "frozen": "frozen",
    "partition_starts": "partition_starts",
    "divisors": "divisors",
    "moduli": "moduli",
    "id_limits": "id_limits",
    "combine": "combine",
    "table_ids": "table_ids",
    "moment_offsets": "state_offsets",
    "state_offsets": "state_offsets",
}
_PARTITIONS = ("partition_starts", "divisors", "moduli", "id_limits", "combine")
_CACHE = ("cache_sets", "cache_set_starts", "cache_offsets")
# Removed options, and options with less information than today's.
_REMOVED = ("output_offsets", "max_embedding_dim", "max_parts", "multiplies")
_NUMBERS = ("output_dim", "num_rows", "cache_ways", "embedding_dim")
_OTHERS = ("formats", "format_of", "pooling", "include_last_offset", "padding_idx")
LAYOUT_NAMES = (*_LISTS, *_CACHE, *_REMOVED, *_NUMBERS, *_OTHERS)

#: Ops that also accept one table without a layout.
ONE_TABLE_OPS = (
    "embedding_bag",
    "embedding_bag_backward_dense",
    "embedding_bag_backward_sparse",
    "embedding_bag_backward_per_sample_weights",
)
#: Ops with a layout, by their names before layouts.
LAYOUT_OPS = (
    *ONE_TABLE_OPS,
    *("embedding_bag_tables", "embedding_bag_fused", "embedding_bag_backward_fused_"),
    *("row_cache_lookup", "row_cache_insert_", "row_cache_plan", "row_cache_flush_", "row_cache_stats"),
)


def _numbers(values: Tensor | Sequence) -> list:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def make_layout(given: dict[str, object], features: int | None = None, device=None) -> rk.TableLayout:
    """The layout that ``given`` describes, under the names of ``LAYOUT_NAMES``; ignores other names.

    Args:
        given: embedding_dims, num_embeddings and optional arguments.
        features: number of features of calls with ``pooling`` or without features; otherwise inferred.
        device: of the layout.
    """
    lists = {new: _numbers(given[old]) for old, new in _LISTS.items() if given.get(old) is not None}
    parts = len(lists["embedding_dims"])
    starts = lists.get("partition_starts")
    count = features if features is not None else parts if starts is None else len(starts) - 1
    if given.get("formats") is not None:
        names = list(given["formats"])
        of = _numbers(given["format_of"]) if given.get("format_of") is not None else [0] * parts
        lists["formats"] = [names[i] for i in of]
    if "mean" not in lists and given.get("pooling", "sum") == "mean":
        lists["mean"] = [True] * count
    partitions = None
    if starts is not None:
        missing = next((n for n in _PARTITIONS[1:] if n not in lists), None)
        if missing:
            raise ValueError(f"{missing} is missing: partition_starts is given")
        partitions = rk.IdPartitions(*(lists[n] for n in _PARTITIONS))
    lists = {n: t for n, t in lists.items() if n not in _PARTITIONS}
    cache = _cache_places(given, lists["embedding_dims"])
    own_rows = given.get("bag_starts") is not None and given.get("groups") is None
    wide = given.get("output_dim") if own_rows else None
    limits = lists["num_embeddings"] if partitions is None else partitions.id_limits
    lists["padding_idx"] = padding_of(given.get("padding_idx", -1), limits[:count])
    dims, rows = lists.pop("embedding_dims"), lists.pop("num_embeddings")
    return rk.table_layout(
        rows,
        dims,
        **lists,
        partitions=partitions,
        cache=cache,
        widest_feature=wide,
        num_rows=given.get("num_rows") or None,
        device=device,
    )


def padding_of(given: int | Sequence[int | None], limits: Sequence[int | None]) -> list[int | None]:
    """Padding ids per feature (-1: none), from one number or a list; None for numbers that are no id of the feature."""
    ids = [None if given == -1 else given] * len(limits) if isinstance(given, int) else given
    return [
        x if x is not None and (limit is None or 0 <= x < limit) else None for x, limit in zip(ids, limits, strict=True)
    ]


def forged(given: dict[str, object], column: str, place: int, value: int) -> dict[str, object]:
    """Makes a layout by ``make_layout``, then changes one number to one that ``rk.table_layout`` would not write."""
    made = make_layout(given)
    made.layout[place, rk.ops.table_layout.Column[column]] = value
    return made._asdict()


def _cache_places(given: dict[str, object], dims: list[int]) -> rk.CachePlaces | None:
    names = ("cache_sets", "cache_set_starts", "cache_offsets")
    sets, starts, offsets = (None if given.get(n) is None else _numbers(given[n]) for n in names)
    if sets is None and offsets is None:
        return None
    nothing = [0] * len(dims)
    if sets is None:  # only its rows are read
        return rk.CachePlaces(1, nothing, nothing, offsets)
    ways, starts = given.get("cache_ways", 0), starts or nothing
    if offsets is None:  # only its tags are read: the slots' rows are consecutive
        places, end = {}, 0
        for key in sorted({(first, n, dim) for first, n, dim in zip(starts, sets, dims, strict=True) if n > 0}):
            places[key], end = end - key[0] * ways * key[2], end + key[1] * ways * key[2]
        offsets = [places.get(key, 0) for key in zip(starts, sets, dims, strict=True)]
    return rk.CachePlaces(ways, sets, starts, offsets)


def as_call(op: str, given: dict[str, object]) -> tuple[str, dict[str, object]]:
    """Converts a call to the current overload, such as "embedding_bag.layout", and its arguments by name.

    ``given`` has lists, the current ``layout`` and ``layout_sizes``, or neither: one table.
    """
    if op not in LAYOUT_OPS:
        return op, given
    if op == "row_cache_stats" and given.get("layout") is None:
        rows = _numbers(given["num_embeddings"])
        records = _stats_layout(_numbers(given["row_offsets"]), rows, given["cache_tags"].device)
        return f"{op}.layout", {n: t for n, t in given.items() if n.startswith("cache_")} | records
    values = given.get("values", given.get("cache_tags"))
    layout = {}
    if given.get("layout") is None:
        if given.get("embedding_dims") is None and op in ONE_TABLE_OPS:
            return _one_table(op, given)
        if given.get("embedding_dims") is None:
            given = _with_one_table(given)
        layout = make_layout(given, device=values.device)._asdict()
    call = {n: t for n, t in given.items() if n not in LAYOUT_NAMES}
    if op.startswith("embedding_bag_backward_") and "weights_shape" in call:
        shape = call.pop("weights_shape")
        if call.get("weights") is None:
            call["weights"] = torch.zeros(shape, device=values.device)
    if op.endswith("per_sample_weights"):
        call.pop("bounds_check", None)
    if op == "row_cache_flush_":
        call = {n: t for n, t in call.items() if n not in ("bag_starts", "inverse", "groups", "bounds_check")}
    if op.startswith("row_cache"):
        call = {n: t for n, t in call.items() if n not in ("inverse", "groups")}
    return f"{op}.layout", call | layout


def _one_table(op: str, given: dict[str, object]) -> tuple[str, dict[str, object]]:
    call = {
        n: t
        for n, t in given.items()
        if n not in LAYOUT_NAMES or n in ("pooling", "include_last_offset", "padding_idx")
    }
    call = {
        n: t for n, t in call.items() if not n.startswith("cache_") and n not in ("bag_starts", "inverse", "groups")
    }
    if op in ("embedding_bag", "embedding_bag_backward_per_sample_weights") and given.get("formats") is not None:
        (call["format"],), call["embedding_dim"] = given["formats"], given["embedding_dim"]
    if "weights_shape" in given:
        call.pop("weights", None)
    if op.endswith("per_sample_weights"):
        call.pop("bounds_check", None)
    return f"{op}.table", call


def _with_one_table(given: dict[str, object]) -> dict[str, object]:
    """The layout of the one table ``weights`` [E, D], or rows of bytes."""
    weights = given["weights"]
    columns = given.get("embedding_dim") or weights.shape[1]
    places = {"num_embeddings": [weights.shape[0]], "embedding_dims": [columns]}
    return {n: t for n, t in given.items() if n != "embedding_dim"} | places | {"weights": weights.view(-1)}


def _stats_layout(row_offsets: list[int], rows: list[int], device) -> dict[str, object]:
    """A layout with only ranges of rows."""
    layout = rk.table_layout([max(n, 0) for n in rows], [1] * len(rows), device=device)
    for name, numbers in (("row_offset", row_offsets), ("num_embeddings", rows)):
        layout.layout[:, rk.ops.table_layout.Column[name]] = torch.tensor(numbers, device=device)
    return layout._asdict()


_BAGS = ("values", "offsets")
_PLACES = ("cache_sets", "cache_set_starts", "cache_ways")
#: Positional arguments of calls in lists.
_POSITIONAL = {
    "embedding_bag": ("weights", *_BAGS, "per_sample_weights"),
    "embedding_bag_tables": ("weights", "tables", *_BAGS, "per_sample_weights"),
    "embedding_bag_fused": ("weights", "sum", "step", "lr", "token", *_BAGS, "per_sample_weights"),
    "embedding_bag_backward_fused_": ("weights", "sum", "step", "lr", "grad", *_BAGS, "per_sample_weights"),
    "embedding_bag_backward_dense": ("grad", "weights_shape", *_BAGS, "per_sample_weights"),
    "embedding_bag_backward_sparse": ("grad", "weights_shape", *_BAGS, "per_sample_weights"),
    "embedding_bag_backward_per_sample_weights": ("grad", "weights", *_BAGS),
    "row_cache_lookup": ("cache_tags", "cache_marks", *_PLACES, *_BAGS),
    "row_cache_insert_": (
        *("weights", "cache_rows", "cache_offsets", "cache_tags", "cache_marks", "cache_dirty"),
        *(*_PLACES, "cache_stamps", "cache_clock", *_BAGS),
    ),
    "row_cache_plan": (
        *("cache_tags", "cache_marks", "cache_dirty", *_PLACES, "cache_stamps", "cache_clock"),
        *_BAGS,
    ),
    "row_cache_flush_": (
        *("weights", "cache_rows", "cache_offsets", "cache_tags", "cache_dirty", *_PLACES, "cache_clock"),
    ),
    "row_cache_stats": ("cache_tags", "cache_dirty", "row_offsets", "num_embeddings"),
}


class ListOps:
    """The ops of a namespace, called with lists: ``ListOps(ops).embedding_bag(weights, values, offsets, **lists)``."""

    def __init__(self, ops: object = torch.ops.rec_kernels) -> None:
        self.ops = ops

    def __getattr__(self, op: str):
        if op not in LAYOUT_OPS:
            return getattr(self.ops, op)

        def call(*args: object, **given: object) -> object:
            given |= dict(zip(_POSITIONAL[op], args, strict=False))
            assert len(args) <= len(_POSITIONAL[op])
            name, arguments = as_call(op, given)
            overload = name.partition(".")[2]
            return getattr(getattr(self.ops, op), overload)(**arguments)

        call.__name__ = op
        return call


OPS = ListOps()
