"""Lookup-only modules over a collection's tables, for serving and ``torch.export``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.tables.config import EmbeddingConfig, shown
from rec_kernels.nn.tables.layout import LayoutBuffers, move_buffers
from rec_kernels.nn.tables.prefetch import TableCall
from rec_kernels.nn.tables.row_cache import CacheState
from rec_kernels.ops.autograd import call
from rec_kernels.ops.bad_ids import explain

_ops = torch.ops.rec_kernels
_Collection = TypeVar("_Collection", bound=TableCollection)


def in_format(
    kind: type[_Collection], source: TableCollection, format: str | Mapping[str, str] | None
) -> _Collection | TableCollection:
    """Returns the collection to serve: ``source``, or a copy in another row format, without optimizer and cache.

    Args:
        kind: class of the copy. format: format of all tables, or a dict from table name to format; None: no copy.
    """
    if format is None:
        return source
    source._store.shared()  # raises if the tables are in a file
    tables = source.tables
    formats = format if isinstance(format, Mapping) else {table.name: format for table in tables}
    if unknown := sorted(set(formats) - {table.name for table in tables}):
        raise KeyError(f"format: tables {unknown} are not among the collection's, {[t.name for t in tables]}")
    given = [
        dataclasses.replace(t, format=formats.get(t.name, t.format), init=None, lr=None, optimizer=None) for t in tables
    ]
    made = kind(
        given,
        device="meta",
        output_dtype=source.output_dtype,
        bounds_check=source.bounds_check,
        seed=source.seed,
        is_weighted=source.is_weighted(),
    )
    own = tuple(f"{source._holder}.{name}." for name in source._tables)  # a subclass may have others
    kinds = (".weight", ".format", ".projection")
    rows = {n: t for n, t in source.state_dict().items() if n.startswith(own) and n.endswith(kinds)}
    made.load_state_dict(rows, assign=True, convert=True)
    return made.to(source.device)


class ServedTables(nn.Module):
    """Lookup-only module: one buffer with all tables, no parameters, no optimizer, no state.

    Args:
        source: collection whose memory the module shares. trained: the collection that ``source`` was made from.
    """

    row_cache: CacheState | None
    _weights: Tensor
    _layout: LayoutBuffers

    def __init__(self, source: TableCollection, trained: TableCollection) -> None:
        super().__init__()
        self._trained, self._features, self.output_dtype = trained._features, source._features, source.output_dtype
        self._store = source._store.shared()
        self.row_cache = self._store.cache
        self._layout = source._layout.shared()
        self.register_buffer("_weights", source._weights)
        for table in self._features.projected:
            self.register_buffer(f"_projection_{table.name}", source._projection(table).detach())

    @property
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The table configs of the collection."""
        return self._features.tables

    @property
    def bounds_check(self) -> str:
        """How ids outside their table are handled: the collection's setting when ``for_serving()`` was called."""
        return self._layout.bounds_check

    @property
    def feature_names(self) -> list[str]:
        """The features that the module looks up, in table order."""
        return list(self._features.feature_names)

    def memory_report(self) -> list[dict[str, object]]:
        """One dict per stored table, with its size here and in training.

        name, num_embeddings, embedding_dim, format and weight_bytes describe this module; trained_format,
        trained_weight_bytes and trained_state_bytes (state of the fused optimizer) describe the collection.
        """
        return [
            now.report()
            | {
                "trained_format": before.format,
                "trained_weight_bytes": before.num_bytes,
                "trained_state_bytes": self._trained.state_bytes(i),
            }
            for i, (now, before) in enumerate(zip(self._features.stored, self._trained.stored, strict=True))
        ]

    def __repr__(self) -> str:
        """One line per table, and total bytes here and in training."""
        report: list[Any] = self.memory_report()
        names = "weight_bytes", "trained_weight_bytes", "trained_state_bytes"
        now, before, state = (sum(table[name] for table in report) for name in names)
        sizes = f"{now:,} bytes of rows; in training {before:,}, and {state:,} of optimizer state"
        return shown(self, self.tables, sizes)

    def _projection(self, table: EmbeddingConfig) -> Tensor:
        """The projection matrix [D, dim] of a table that has one."""
        return self._buffers[f"_projection_{table.name}"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ServedTables:
        fn = self._store.wrap_apply(self._weights, fn)
        self._layout._apply(fn)
        move_buffers(self, fn)
        if self.row_cache is not None:
            self.row_cache._apply(fn)
        return self

    def _lookup(self, given: SelectedKeys, starts: Tensor | None = None, shared=None, dtype=None) -> Tensor:
        """Looks up as ``TableCollection._lookup``."""
        given = given.weighted(self._features.is_weighted)
        bags, weights, layout = (given.values, given.offsets), self._weights, self._layout
        options = layout.arguments(starts, shared) | self._features.output(dtype or self.output_dtype)
        if self._store.cache is not None:
            options |= self._store.served_arguments(TableCall(weights, (*bags, starts), layout.arguments(starts), {}))
        try:
            return call(_ops.embedding_bag.layout, weights, *bags, per_sample_weights=given.weights, **options)[0]
        except (IndexError, ValueError) as error:
            explain(error, self.feature_names)
            raise

    def _note(self, status: Tensor, *what: Any) -> None:
        """Discards the status of a lookup on a GPU: serving reports no late errors."""


#: A module that looks up tables: a collection, or the module that serves it.
LookupModule = TableCollection | ServedTables
