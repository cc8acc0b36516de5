"""Stores of a collection's rows: device memory or host memory (file_store.py: a file), with an optional row cache.

Each backing is a class with the interface of ``TableStore``; collections do not depend on the backing.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.host_memory import host_zeros, pin, pin_instead_of_moving
from rec_kernels.nn.tables.prefetch import PrefetchedBatch, TableCall
from rec_kernels.nn.tables.row_cache import CacheState
from rec_kernels.nn.tables.rows import initialize
from rec_kernels.nn.tables.storage import zeros

_NOTHING_TO_PIN = contextlib.nullcontext()


class TableStore:
    """Tables in the memory of the collection's device (``backing="device"``, and without a cache).

    Args:
        features: the tables and their places.
        cache: the slots of rows that are cached, or None.
    """

    def __init__(self, features: FeatureMap, cache: CacheState | None) -> None:
        self.cache = cache
        self._features = features
        self._flushed_step: Tensor | None = None  # at the last flush()
        #: Calls a function and raises an error of any rank on all ranks; set for ranks with tables in files.
        self.agree: Callable[[Callable[[], Any]], Any] | None = None

    def shared(self) -> TableStore:
        """Shares the rows with a read-only module that can be moved independently."""
        other = copy.copy(self)
        other.cache = None if self.cache is None else self.cache.shared()
        return other

    # Memory.

    def new_weights(self, device: torch.device | str | None) -> Tensor:
        """Allocates the flat tensor of the tables.

        Raises:
            RuntimeError: out of memory; the message names the largest table.
        """
        storage = self._features.storage
        try:
            return zeros(storage.starts[-1], storage.dtype, device)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            sizes = [(stop - start) * storage.dtype.itemsize for start, stop in itertools.pairwise(storage.starts)]
            name, largest = max(zip((t.name for t in self._features.stored), sizes, strict=True), key=lambda x: x[1])
            raise type(error)(
                f"no memory for {len(sizes)} tables of {sum(sizes):,} bytes, of which {name!r} has {largest:,}; "
                "on device='meta', memory_report() lists the bytes of each. Smaller row formats "
                "(format='int8') take less memory, and rk.RowCache keeps tables in host memory or on disk: "
                f"{error}"
            ) from error

    @torch.no_grad()
    def initialize(self, weights: Sequence[Tensor]) -> None:
        """Initializes the rows of all tables, given as views of the flat tensor."""
        for weight, table in zip(weights, self._features.stored, strict=True):
            initialize(weight, table)

    def make_accessible(self, weights: Tensor, device: torch.device) -> Tensor:
        """Returns the weights, in memory that kernels on ``device`` can access."""
        return weights

    def wrap_apply(self, weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Wraps ``fn`` of ``torch.nn.Module._apply`` so that ``weights`` stay in this store's memory."""
        return fn

    def wait(self, device: torch.device) -> None:
        """Synchronizes with the device; required before the CPU reads weights that kernels write."""

    def refuse_copies(self) -> None:
        """Raises TypeError if the tables cannot be copied or pickled."""

    def close(self, *, apply: bool) -> None:
        """Closes the file, if any."""

    # Lookups and updates.

    def pin_rows(self) -> AbstractContextManager[None]:
        """Returns a context in which rows that this thread loads stay in memory."""
        return _NOTHING_TO_PIN

    def lookup_arguments(self, call: TableCall, *, inserts: bool) -> dict[str, Tensor]:
        """The cache arguments of a lookup of a collection with a cache.

        Args:
            inserts: True to insert the batch's rows into the cache first, as in training.
        """
        return self.cache.arguments(self._slots(call, inserts=inserts))

    def served_arguments(self, call: TableCall) -> dict[str, Tensor]:
        """``lookup_arguments`` for a serving module with a cache."""
        return self.cache.arguments(self.cache.lookup(call))

    def _slots(self, call: TableCall, *, inserts: bool) -> Tensor:
        return self.cache.insert(call) if inserts else self.cache.lookup(call)

    def update_arguments(self, call: Callable[[], TableCall]) -> dict[str, Tensor]:
        """The cache arguments of the update ``call()``, made only if rows must be loaded for it.

        All ranks raise the error of a rank that could not load its rows.
        """
        if self.agree is not None:
            return self.agree(lambda: self._update_arguments(call))
        return self._update_arguments(call)

    def _update_arguments(self, call: Callable[[], TableCall]) -> dict[str, Tensor]:
        return {} if self.cache is None else self.cache.update_arguments()

    def watch(self, output: Tensor, is_deferred: Callable[[], bool]) -> None:
        """Tracks a lookup whose backward updates rows, at once or deferred.

        Args:
            is_deferred: called after the lookup's backward; returns True if its update is deferred.
        """

    def updated(self) -> None:
        """Called after a deferred update has run."""

    def row(self, weight: Tensor, number: int) -> Tensor:
        """Encoded row ``number`` of the first table, [1, ...], from its view ``weight``; it must not be cached."""
        return weight.detach()[number : number + 1]

    def keep_until_backward(self, output: Tensor, call: TableCall) -> None:
        """Ensures that the rows of a lookup are in memory when its backward runs."""

    def prefetch(self, call: Callable[[], TableCall], *, training: bool) -> None:
        """Starts to load rows of the next batch, whose lookup is ``call()``, which is called only if needed."""

    def refuse_prefetched(self, what: str) -> None:
        """Raises RuntimeError if rows of a prefetched batch are cached: ``what`` must wait for that batch's lookup."""

    def forget_prefetched(self) -> None:
        """Discards the prefetched batch."""

    def defer_prefetched_rows(self) -> AbstractContextManager[None]:
        """Returns a context that delays inserting prefetched rows: ``accumulate()`` defers the update to its end."""
        return contextlib.nullcontext()

    # State.

    def numbers(self) -> dict[str, int]:
        """Name -> additional scalar of a ``state_dict()``."""
        return {}

    def fit_state(self, state_dict: dict, prefix: str, weights: list[str]) -> bool:
        """Removes the cache from a state that is about to be loaded, unless this store's cache can load it.

        Args:
            prefix: prefix of the collection's names. weights: the names of its tables' weights.

        Returns:
            True if the cache must be flushed before loading: the state lacks some tables, which keep their rows.
        """
        cache, own = self.cache, f"{prefix}row_cache."
        missing = [name for name in weights if name not in state_dict]
        if cache is not None and not missing:
            return False
        # The state was flushed when it was saved: its tables have all rows.
        for name in [n for n in state_dict if n.startswith(own)]:
            del state_dict[name]
        if cache is not None and missing == weights:
            state_dict.update(cache.own_state(own))
            return False
        return cache is not None

    @torch.no_grad()
    def flush(self, weights: Tensor, layout: dict[str, object], rounding: dict[str, object], step: Tensor) -> None:
        """Writes dirty cached rows back to their tables; ``step`` is the number of updates."""
        self.refuse_prefetched("flush() or state_dict()")
        self._flush(weights, layout, rounding)
        self._flushed_step = step.clone()

    def _flush(self, weights: Tensor, layout: dict[str, object], rounding: dict[str, object]) -> None:
        self.cache.flush(weights, layout, rounding)

    @torch.no_grad()
    def reset(self, step: Tensor) -> None:
        """Empties the cache.

        Raises:
            RuntimeError: rows were updated since the last ``flush()``; nothing is changed.
        """
        cache = self.cache
        if cache.tags.is_meta:
            return
        self.refuse_prefetched("reset_cache_states()")
        flushed = -1 if self._flushed_step is None else int(self._flushed_step)
        if int(step) != flushed and any(table["dirty_rows"] for table in cache.report()):
            when = "there was no flush()" if flushed < 0 else f"the last flush() was at {flushed}"
            raise RuntimeError(
                f"step is {int(step)}, and {when}: cached rows have updates that were not written back; call "
                "flush() before writing to a table, and reset_cache_states() afterwards; nothing was changed"
            )
        clock = cache.clock.clone()  # kept, because stochastic rounding depends on it
        cache.clear()
        cache.clock.copy_(clock)
        # As in an update, autograd then rejects backwards of lookups that need the old rows.
        torch.autograd.graph.increment_version(step)

    # Reports.

    def memory_report(self) -> list[dict[str, object]]:
        """The entries of a collection's ``memory_report()``."""
        stored = self._features.stored
        cached: list[dict[str, object]] = [{} for _ in stored] if self.cache is None else self.cache.report()
        return [
            table.report() | {"state_bytes": self._features.state_bytes(i)} | cached[i]
            for i, table in enumerate(stored)
        ]

    def tier_report(self, weights: Tensor) -> dict[str, int]:
        """A collection's ``tier_report()``."""
        cache, stored = self.cache, self._features.stored
        counters = cache.counters() if cache else {}
        moved = sum((n["inserted"] + n["written"]) * t.row_bytes for t in stored if (n := counters.get(t.name)))
        return {
            "cache_bytes": cache.num_bytes() if cache else 0,
            "row_bytes": weights.nbytes,
            "host_bytes": 0,
            "file_bytes": 0,
            "index_bytes": 0,
            "moved_bytes": moved,
            "read_bytes": 0,
            "written_bytes": 0,
        }


class HostStore(TableStore):
    """Tables in host memory (``backing="host"``), which is page-locked while the collection is on a GPU."""

    def __init__(self, features: FeatureMap, cache: CacheState) -> None:
        super().__init__(features, cache)
        self._prefetched = PrefetchedBatch()
        self._defers_prefetch = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_defers_prefetch": False}  # a copy is outside any block

    def new_weights(self, device: torch.device | str | None) -> Tensor:
        where, storage = device_of(device), self._features.storage
        if where.type == "meta":
            return super().new_weights(device)
        return self.make_accessible(host_zeros(storage.starts[-1], storage.dtype), where)

    def make_accessible(self, weights: Tensor, device: torch.device) -> Tensor:
        return pin(weights, device) if device.type == "cuda" else weights

    def wrap_apply(self, weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return pin_instead_of_moving(weights, fn)

    def wait(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def served_arguments(self, call: TableCall) -> dict[str, Tensor]:
        self._prefetched.wait()
        return super().served_arguments(call)

    def _slots(self, call: TableCall, *, inserts: bool) -> Tensor:
        if not self._prefetched.is_empty and (slots := self._prefetched.take(call.bags, inserts=inserts)) is not None:
            return slots
        return super()._slots(call, inserts=inserts)

    def watch(self, output: Tensor, is_deferred: Callable[[], bool]) -> None:
        if torch.compiler.is_compiling():
            self._prefetched.is_compiled = True
        else:
            self._prefetched.watch(output, lambda: None if is_deferred() else self.updated())

    def prefetch(self, call: Callable[[], TableCall], *, training: bool) -> None:
        if training:
            self._prefetched.announce(call())
            self._insert_prefetched()

    def _insert_prefetched(self) -> None:
        """Inserts the rows of the prefetched batch, unless an update must run before."""
        if not self._prefetched.is_empty and not self._defers_prefetch:
            self._prefetched.insert(self.cache.insert, self.cache.buffers())

    def updated(self) -> None:
        with contextlib.suppress(IndexError, ValueError):  # the batch's lookup raises the same error
            self._insert_prefetched()

    def refuse_prefetched(self, what: str) -> None:
        self._prefetched.refuse(what)

    def forget_prefetched(self) -> None:
        self._prefetched.forget()

    @contextlib.contextmanager
    def defer_prefetched_rows(self) -> Iterator[None]:
        before, self._defers_prefetch = self._defers_prefetch, True
        try:
            yield
        finally:
            self._defers_prefetch = before
        self.updated()

    def _flush(self, weights: Tensor, layout: dict[str, object], rounding: dict[str, object]) -> None:
        super()._flush(weights, layout, rounding)
        self.wait(self.cache.tags.device)

    def memory_report(self) -> list[dict[str, object]]:
        self._prefetched.wait()
        return super().memory_report()

    def tier_report(self, weights: Tensor) -> dict[str, int]:
        self._prefetched.wait()
        return super().tier_report(weights) | {"host_bytes": weights.nbytes}


def device_of(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)
