"""``table_layout``: the memory layout of an embedding_bag call's tables, and how their rows are combined.

csrc/embedding_bag/table_layout.h is the contract: one record per part of a feature, and a short summary for the host.
Only this module writes records; the kernels check only what memory safety needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec

import torch
from torch import Tensor

from rec_kernels.ops.layout_builder import Builder
from rec_kernels.ops.layout_records import (
    CachePlaces,
    Column,
    Flag,
    IdPartitions,
    Shards,
    Size,
    flags,
    integers,
    listed,
)
from rec_kernels.ops.tracing import cannot_read

P = ParamSpec("P")

__all__ = [
    "CachePlaces",
    "Column",
    "Flag",
    "IdPartitions",
    "Shards",
    "Size",
    "TableLayout",
    "set_frozen",
    "table_layout",
]


class TableLayout(NamedTuple):
    """Layout of the tables of a call, which ops take as ``layout`` and ``layout_sizes``.

    Attributes:
        layout: [parts, columns] int64, one record per part of a feature, on the device of the ids.
        layout_sizes: summary of the records that the host needs, a list of 9 integers.
    """

    layout: Tensor
    layout_sizes: list[int]

    def column(self, column: Column) -> Tensor:
        """Returns one column of the layout as a view, [parts]."""
        return self.layout[:, column]


def _break_graph(make: Callable[P, TableLayout]) -> Callable[P, TableLayout]:
    """Decorates a function that torch.compile cannot trace: compiled code breaks the graph to call it."""

    @functools.wraps(make)
    def call_outside_graph(*args: P.args, **kwargs: P.kwargs) -> TableLayout:
        if torch.compiler.is_compiling():
            from rec_kernels.ops.graph_breaks import make_layout

            return make_layout(make, *args, **kwargs)
        return make(*args, **kwargs)

    return call_outside_graph


@_break_graph
def table_layout(
    num_embeddings: Sequence[int],
    embedding_dims: Sequence[int],
    *,
    weight_offsets: Sequence[int] | None = None,
    row_offsets: Sequence[int] | None = None,
    formats: Sequence[str] | None = None,
    mean: Sequence[bool] | None = None,
    frozen: Sequence[bool] | None = None,
    padding_idx: Sequence[int | None] | None = None,
    table_ids: Sequence[int] | None = None,
    state_offsets: Sequence[int] | None = None,
    partitions: IdPartitions | None = None,
    shards: Shards | None = None,
    cache: CachePlaces | None = None,
    widest_feature: int | None = None,
    num_rows: int | None = None,
    device: torch.device | str | None = None,
) -> TableLayout:
    """Builds the layout of F features, each of which reads one table or, with ``partitions``, several parts.

    P is the number of parts of all features. ``rk.table_layout([1000, 50], [16, 8])`` describes two tables with one
    feature each, stored consecutively in flat weights.

    Args:
        num_embeddings, embedding_dims: [P] E and D of each part's table.
        weight_offsets: [P] start of each table in the flat ``weights``, in elements: floats, or bytes with ``formats``.
            Default: tables are consecutive, without gaps.
        row_offsets: [P] linear row of each table's row 0. Default: rows are numbered consecutively over the tables.
            Parts that read the same table have the same offsets.
        formats: [P] row formats, from ``BAG_FORMATS``; ``weights`` is then uint8. Default: float32.
        mean: [F] whether bags are averaged. Default: summed.
        frozen: [F] whether the feature produces no gradient; ``set_frozen`` changes it later. Default: none is frozen.
        padding_idx: [F] the id excluded from sums, averages and gradients, or None. Default: None.
        table_ids: [P] table numbers, in [0, 65536), that select the random numbers of stochastic rounding. Default: 0.
        state_offsets: [P] start of each table in per-element optimizer state. Default: consecutive, without gaps.
        partitions: mapping of ids to rows. Default: every feature reads one table, and ids in [0, E) are its rows.
        shards: position of each part within its unsharded table. Default: tables are unsharded.
        cache: sets of a row cache for the rows of each part. Default: nothing is cached.
        widest_feature: number of output columns of calls with ``bag_starts``. Default: that of the widest feature.
        num_rows: upper bound of the linear rows, exclusive. Default: the smallest such bound.
        device: device of the layout.

    Raises:
        ValueError: a list of the wrong length, or a value out of range; tables, their state or their cache slots that
            overlap partially. The message names the argument, the element, and what is allowed.
    """
    rows, dims = integers(num_embeddings, "num_embeddings"), integers(embedding_dims, "embedding_dims")
    build = Builder(rows, dims, partitions, formats)
    build.place_features(partitions)
    build.place_tables(weight_offsets, row_offsets, state_offsets, table_ids)
    build.place_shards(shards)
    build.place_columns()
    build.set_flags(mean=mean, frozen=frozen)
    build.set_padding(padding_idx)
    build.place_cache(cache)
    build.check_tables()
    build.order_by_row()
    records = torch.tensor(build.records, dtype=torch.int64, device=device).reshape(-1, len(Column))
    return TableLayout(records, build.sizes(widest_feature, num_rows))


def set_frozen(layout: TableLayout | Tensor, frozen: Sequence[bool]) -> None:
    """Changes in place which features of a layout produce no gradient.

    Args:
        layout: a ``TableLayout``, or its ``layout``, [parts, columns] int64. With the latter, the number of features is
            read from the records, which synchronizes with a GPU, except in compiled code and during graph capture.
        frozen: [F] booleans, or 1 and 0.

    Raises:
        ValueError: ``layout`` is not a layout, or ``frozen`` does not have one boolean per feature.
        RuntimeError: a layout created in inference mode is changed outside of it.
    """
    records = layout.layout if isinstance(layout, TableLayout) else layout
    is_layout = isinstance(records, Tensor) and records.dtype == torch.int64 and records.shape[1:] == (len(Column),)
    if not is_layout:
        what = f"{records.dtype} {list(records.shape)}" if isinstance(records, Tensor) else repr(layout)
        raise ValueError(f"layout must be an rk.TableLayout, or its int64 [parts, {len(Column)}], got {what}")
    if not torch.compiler.is_compiling() and records.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed: set_frozen changes layout; "
            "call it inside torch.inference_mode(), or give it a clone of the tensor"
        )
    if records.is_meta or cannot_read(records):
        features = len(listed(frozen, "frozen"))
    elif isinstance(layout, TableLayout):
        features = layout.layout_sizes[Size.num_features]
    else:
        features = int(records[:, Column.feature].amax()) + 1 if len(records) else 0
    numbers = torch.tensor(flags(frozen, features, "frozen"), dtype=torch.int64, device=records.device)
    records[:, Column.frozen] = numbers[records[:, Column.feature]]


# torch.load(weights_only=True) rejects classes that are not on its list.
torch.serialization.add_safe_globals([TableLayout])
