"""``table_layout``: where the tables of an embedding_bag call lie, and what becomes of their rows, as one value.

csrc/embedding_bag/table_layout.h is the contract: a record for each part of a feature, and a short list of what the
host must know. Nobody else writes records; the kernels check of them only what their safety needs.
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
from rec_kernels.ops.status import cannot_read

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
    """A layout of tables, which ops take as ``layout`` and ``layout_sizes``.

    Attributes:
        layout: [parts, columns] int64, a record for each part of a feature, on the device of the ids.
        layout_sizes: what the host must know of all records.
    """

    layout: Tensor
    layout_sizes: list[int]

    def column(self, column: Column) -> Tensor:
        """[parts]: a column of the layout, a view."""
        return self.layout[:, column]


def _between_graphs(make: Callable[P, TableLayout]) -> Callable[P, TableLayout]:
    """Has torch.compile call the function between two graphs: it cannot trace it."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> TableLayout:
        if torch.compiler.is_compiling():
            from rec_kernels.ops.graph_breaks import make_layout

            return make_layout(make, *args, **kwargs)
        return make(*args, **kwargs)

    return made


@_between_graphs
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
    """The layout of F features, each of which reads one table or, with ``partitions``, several parts; P parts in all.

    ``rk.table_layout([1000, 50], [16, 8])`` is two tables of a feature each, one after the other in flat weights.

    Args:
        num_embeddings, embedding_dims: [P] E and D of each part's table.
        weight_offsets: [P] where each table starts in the flat ``weights``, in elements: floats, or with ``formats``
            bytes. Default: the tables lie one after the other, without gaps.
        row_offsets: [P] the linear row of each table's row 0. Default: rows are numbered through. Parts that read one
            table have its offsets.
        formats: [P] one of ``BAG_FORMATS`` each; ``weights`` is uint8 then. Default: float32.
        mean: [F] whether bags are averaged. Default: summed.
        frozen: [F] whether ids give no gradient; ``set_frozen`` changes it later. Default: none.
        padding_idx: [F] the id that sums, averages and gradients leave out, or None. Default: none.
        table_ids: [P] the numbers of the tables in stochastic rounding's noise, in [0, 65536). Default: 0.
        state_offsets: [P] where each table starts in optimizer state for every element. Default: tables without gaps.
        partitions: how ids find rows. Default: every feature reads one table, and ids, in [0, E), are its rows.
        shards: where the tables are in whole ones. Default: they are whole.
        cache: where rows may lie in a row cache.
        widest_feature: columns of the output of calls with ``bag_starts``. Default: of the widest feature.
        num_rows: above every linear row. Default: the least.
        device: of the layout.

    Raises:
        ValueError: a list of another length than said above, or a number out of its range; tables, their state or
            their places in a cache that overlap in part. The message names the argument, the element, and what is
            allowed.
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
    """Changes, in place, which features of a layout give no gradient.

    Args:
        layout: a ``TableLayout``, or its ``layout``, [parts, columns] int64. Of the latter, the number of features is
            read from the records: a GPU is waited for, except in compiled code and while it captures.
        frozen: [F] booleans, or 1 and 0.

    Raises:
        ValueError: what is no layout; another number of elements than features; an element that is neither true nor
            false. RuntimeError: a layout that was made in inference mode, outside of it.
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


# torch.load(weights_only=True) makes no object of a class that it was not told of.
torch.serialization.add_safe_globals([TableLayout])
