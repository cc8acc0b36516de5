"""The tables of a collection for lookups only: what ``for_serving()`` returns and programs are exported with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.nn.bad_ids import advise
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.layout import LayoutBuffers, move_buffers
from rec_kernels.nn.tables.row_cache import CacheState
from rec_kernels.nn.tables.store import TableCall
from rec_kernels.ops.autograd import call

_ops = torch.ops.rec_kernels


class ServedTables(nn.Module):
    """One buffer with all tables, no parameter, no optimizer, no state.

    Args:
        source: the collection, whose memory it shares.
    """

    row_cache: CacheState | None
    _weights: Tensor
    _layout: LayoutBuffers

    def __init__(self, source: TableCollection) -> None:
        super().__init__()
        self._features, self.output_dtype = source._features, source.output_dtype
        self._store = source._store.shared()
        self.row_cache = self._store.cache
        self._layout = source._layout.shared()
        self.register_buffer("_weights", source._weights)
        for table in self._features.projected:
            self.register_buffer(f"_projection_{table.name}", source._projection(table).detach())

    @property
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The configs of the collection."""
        return self._features.tables

    @property
    def bounds_check(self) -> str:
        """The rule for ids outside their table, which may be set in the collection."""
        return self._layout.bounds_check

    @property
    def feature_names(self) -> list[str]:
        """The features that it looks up, table by table."""
        return self._features.feature_names

    def _projection(self, table: EmbeddingConfig) -> Tensor:
        """The matrix [D, dim] of a table that has one."""
        return self._buffers[f"_projection_{table.name}"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ServedTables:
        fn = self._store.mover(self._weights, fn)
        self._layout._apply(fn)
        move_buffers(self, fn)
        if self.row_cache is not None:
            self.row_cache._apply(fn)
        return self

    def _lookup(self, given: SelectedKeys, starts: Tensor | None = None, shared: SharedBags | None = None) -> Tensor:
        """Looks up as ``TableCollection``."""
        given = given.in_float32()
        bags, cache = (given.values, given.offsets), {}
        if self._store.cache is not None:
            found = TableCall(self._weights, (*bags, starts), self._layout.arguments(starts), {})
            cache = self._store.served_arguments(found)
        options = self._layout.arguments(starts, shared) | self._features.output(self.output_dtype) | cache
        try:
            return call(_ops.embedding_bag.layout, self._weights, *bags, per_sample_weights=given.weights, **options)[0]
        except IndexError as error:
            advise(error)
            raise

    def _note(self, status: Tensor, *what: Any) -> None:
        """Drops what a lookup on a GPU says later of its input: nobody is told."""
