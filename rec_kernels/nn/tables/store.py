"""Storage of a collection's rows: device memory or host memory (file_store.py: a file), some in a cache beside it.

Each of the three is a class; a collection asks its store without knowing which one it has.
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
from rec_kernels.nn.tables.host_memory import host_zeros, pinned, staying
from rec_kernels.nn.tables.prefetch import PrefetchedBatch, TableCall
from rec_kernels.nn.tables.row_cache import CacheState, choose_cache
from rec_kernels.nn.tables.rows import initialize
from rec_kernels.nn.tables.storage import zeros

_NOT_HELD = contextlib.nullcontext()


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
        #: Calls what may fail on one rank of several, and raises its error on all: of ranks with tables in files.
        self.agree: Callable[[Callable[[], Any]], Any] | None = None

    def shared(self) -> TableStore:
        """Shares the rows with a module that only reads them, and can be moved by itself."""
        other = copy.copy(self)
        other.cache = None if self.cache is None else self.cache.shared()
        return other

    # Memory.

    def new_weights(self, device: torch.device | str | None) -> Tensor:
        """The flat tensor of the tables.

        Raises:
            RuntimeError: there is not so much memory; the message has the largest table.
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
                f"no memory for {len(sizes)} tables of {sum(sizes):,} bytes, of which {name!r} has {largest:,}; on "
                "device='meta', memory_report() has the bytes of each. Rows of other formats (format='int8') take "
                f"fewer, and rk.RowCache keeps tables in host memory or on disk: {error}"
            ) from error

    @torch.no_grad()
    def initialize(self, weights: Sequence[Tensor]) -> None:
        """Fills the rows of all tables, views of the flat tensor, as their ``init`` says."""
        for weight, table in zip(weights, self._features.stored, strict=True):
            initialize(weight, table)

    def placed(self, weights: Tensor, device: torch.device) -> Tensor:
        """Weights as kernels on the collection's ``device`` read them."""
        return weights

    def mover(self, weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """``fn`` of ``torch.nn.Module._apply``, with weights going where this store has them."""
        return fn

    def wait(self, device: torch.device) -> None:
        """Waits for kernels; must be called before the CPU reads weights that the collection's device writes."""

    def refuse_copies(self) -> None:
        """Raises TypeError if the tables cannot be copied or pickled."""

    def close(self, *, apply: bool) -> None:
        """Closes what has to be closed."""

    # Lookups and updates.

    def held(self) -> AbstractContextManager[None]:
        """Within the block, rows that this thread has asked for stay where they are."""
        return _NOT_HELD

    def lookup_arguments(self, call: TableCall, *, inserts: bool) -> dict[str, Tensor]:
        """The arguments of a lookup that say which rows are cached.

        Args:
            inserts: whether the batch's rows come into the cache first, as in training.
        """
        return {} if self.cache is None else self.cache.arguments(self._slots(call, inserts=inserts))

    def served_arguments(self, call: TableCall) -> dict[str, Tensor]:
        """``lookup_arguments`` for a module that has a cache, and never trains."""
        return self.cache.arguments(self.cache.lookup(call.bags[:2], call.layout))

    def _slots(self, call: TableCall, *, inserts: bool) -> Tensor:
        return self._insert(call) if inserts else self.cache.lookup(call.bags[:2], call.layout)

    @torch.no_grad()
    def _insert(self, call: TableCall) -> Tensor:
        return self.cache.insert(call.weights, call.bags[:2], call.layout, call.rounding)

    def found_for(self, update: Callable[[], TableCall]) -> dict[str, Tensor]:
        """``update_arguments`` of a call, which is made if it is needed; what one rank cannot load, all ranks raise."""
        if self.agree is not None:
            return self.agree(lambda: self.update_arguments(update()))
        return {} if self.cache is None else self.update_arguments(update())

    def update_arguments(self, call: TableCall) -> dict[str, Tensor]:
        """The arguments of an update that say which rows are cached."""
        return {} if self.cache is None else self.cache.update_arguments()

    def watch(self, output: Tensor, is_put_off: Callable[[], bool]) -> None:
        """Takes note of a lookup whose backward is an update, or part of one that comes later.

        Args:
            is_put_off: returns, after the lookup's own part of a backward, whether the update is still to come.
        """

    def updated(self) -> None:
        """Takes note that an update that was put off has been made."""

    def row(self, weight: Tensor, number: int) -> Tensor:
        """[1, ...]: an encoded row of the first table, of which ``weight`` is the view; never one that is cached."""
        return weight.detach()[number : number + 1]

    def keep(self, output: Tensor, call: TableCall) -> None:
        """Makes sure that the rows of a lookup are in memory when its backward runs."""

    def prefetch(self, call: TableCall, *, training: bool) -> None:
        """Begins to bring rows of the next batch."""

    def takes_prefetches(self, *, training: bool) -> bool:
        """True if ``prefetch`` does anything."""
        return False

    def refuse_prefetched(self, what: str) -> None:
        """Raises RuntimeError if the next batch has its rows in the cache: ``what`` must wait for its lookup."""

    def forget_prefetched(self) -> None:
        """Forgets the batch that was announced."""

    def held_back(self) -> AbstractContextManager[None]:
        """Within the block, prefetched rows do not come in: an update is put off to its end, as in ``accumulate()``."""
        return contextlib.nullcontext()

    # State.

    def numbers(self) -> dict[str, int]:
        """Numbers that a state has beside the tables, by name."""
        return {}

    def fit_state(self, state_dict: dict, prefix: str, weights: list[str]) -> bool:
        """Leaves in a state what tables and cache can take of it.

        Args:
            prefix: of the collection's names. weights: the names of its tables' weights.

        Returns:
            Whether cached rows must be encoded into their tables first.
        """
        return choose_cache(self.cache, state_dict, prefix, weights)

    @torch.no_grad()
    def flush(self, weights: Tensor, layout: dict[str, object], rounding: dict[str, object], step: Tensor) -> None:
        """Encodes changed rows of the cache into their tables; ``step`` counts updates, the others are a call's."""
        self.refuse_prefetched("flush() or state_dict()")
        self._flush(weights, layout, rounding)
        self._flushed_step = step.clone()

    def _flush(self, weights: Tensor, layout: dict[str, object], rounding: dict[str, object]) -> None:
        self.cache.flush(weights, layout, rounding)

    @torch.no_grad()
    def reset(self, step: Tensor) -> None:
        """Empties the cache.

        Raises:
            RuntimeError: there were updates since the last ``flush()``; nothing was changed.
        """
        cache = self.cache
        if cache.tags.is_meta:
            return
        self.refuse_prefetched("reset_cache_states()")
        flushed = -1 if self._flushed_step is None else int(self._flushed_step)
        if int(step) != flushed and any(table["dirty_rows"] for table in cache.report()):
            when = "there was no flush()" if flushed < 0 else f"the last flush() was at {flushed}"
            raise RuntimeError(
                f"step is {int(step)}, and {when}: cached rows hold updates that their tables do not; call "
                "flush() before a table is written, and reset_cache_states() after it; nothing was changed"
            )
        clock = cache.clock.clone()  # noise of rounding depends on it
        cache.clear()
        cache.clock.copy_(clock)
        # An update does this, too, for lookups that need the rows as they were.
        torch.autograd.graph.increment_version(step)

    # Reports.

    def memory_report(self) -> list[dict[str, object]]:
        """Report of the tables for a collection's ``memory_report()``."""
        stored = self._features.stored
        cached: list[dict[str, object]] = [{} for _ in stored] if self.cache is None else self.cache.report()
        return [
            table.report() | {"state_bytes": self._features.state_bytes(i)} | cached[i]
            for i, table in enumerate(stored)
        ]

    def tier_report(self, weights: Tensor) -> dict[str, int]:
        """Report of the tiers for a collection's ``tier_report()``."""
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
        self._holds_back = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_holds_back": False}  # a copy is in no block

    def new_weights(self, device: torch.device | str | None) -> Tensor:
        where, storage = device_of(device), self._features.storage
        if where.type == "meta":
            return super().new_weights(device)
        return self.placed(host_zeros(storage.starts[-1], storage.dtype), where)

    def placed(self, weights: Tensor, device: torch.device) -> Tensor:
        return pinned(weights, device) if device.type == "cuda" else weights

    def mover(self, weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return staying(weights, fn)

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

    def watch(self, output: Tensor, is_put_off: Callable[[], bool]) -> None:
        if torch.compiler.is_compiling():
            self._prefetched.is_compiled = True
        else:
            self._prefetched.watch(output, lambda: None if is_put_off() else self.updated())

    def takes_prefetches(self, *, training: bool) -> bool:
        return training

    def prefetch(self, call: TableCall, *, training: bool) -> None:
        self._prefetched.announce(call)
        self._insert_prefetched()

    def _insert_prefetched(self) -> None:
        """Inserts the rows of the batch that was announced, unless an update is to come before it."""
        if not self._prefetched.is_empty and not self._holds_back:
            self._prefetched.insert(self._insert, self.cache.buffers())

    def updated(self) -> None:
        with contextlib.suppress(IndexError, ValueError):  # the lookup of the batch says what is wrong with it
            self._insert_prefetched()

    def refuse_prefetched(self, what: str) -> None:
        self._prefetched.refuse(what)

    def forget_prefetched(self) -> None:
        self._prefetched.forget()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        before, self._holds_back = self._holds_back, True
        try:
            yield
        finally:
            self._holds_back = before
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
