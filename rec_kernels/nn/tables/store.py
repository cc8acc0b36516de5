"""Storage of a collection's rows: device memory, host memory or a file, some rows in a cache beside it.

Each of the three is a class; a collection asks its store without knowing which one it has.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.host_memory import host_zeros, pinned, staying
from rec_kernels.nn.tables.prefetch import Bags, PrefetchedBatch
from rec_kernels.nn.tables.row_cache import CacheState, RowCache, choose_cache
from rec_kernels.nn.tables.rows import initialize, write
from rec_kernels.nn.tables.storage import zeros
from rec_kernels.nn.tables.table_file import TableFile

_NOT_HELD = contextlib.nullcontext()


class TableCall(NamedTuple):
    """Table arguments of a call of the ops.

    Args:
        weights: the flat tensor of the tables. bags: values, offsets, and where features begin, or None.
        layout: the ops' arguments for the layout of these bags. rounding: those that say how rows are encoded.
    """

    weights: Tensor
    bags: Bags
    layout: dict[str, object]
    rounding: dict[str, Any]


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
        """The flat tensor of the tables."""
        storage = self._features.storage
        return zeros(storage.starts[-1], storage.dtype, device)

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
        """``lookup_arguments`` for a module that never trains."""
        return {} if self.cache is None else self.cache.arguments(self.cache.lookup(call.bags[:2], call.layout))

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
        cached = None if self.cache is None else self.cache.report()
        return [
            {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": t.embedding_dim,
                "format": t.format,
                "weight_bytes": t.num_bytes,
                "state_bytes": self._features.state_bytes(i),
                **(cached[i] if cached else {}),
            }
            for i, t in enumerate(self._features.stored)
        ]

    def tier_report(self, weights: Tensor) -> dict[str, int]:
        """Report of the tiers for a collection's ``tier_report()``."""
        cache, stored = self.cache, self._features.stored
        counters = cache.counters() if cache else {}
        moved = sum((n["inserted"] + n["written"]) * t.row_bytes for t in stored if (n := counters.get(t.name)))
        return {
            "cache_bytes": cache.num_bytes() if cache else 0,
            "row_bytes": _num_bytes(weights),
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
        self._prefetched: PrefetchedBatch[TableCall] = PrefetchedBatch()
        self._holds_back = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_holds_back": False}  # a copy is in no block

    def new_weights(self, device: torch.device | str | None) -> Tensor:
        where, storage = _device_of(device), self._features.storage
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
        self._prefetched.announce(call, call.bags)
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
        return super().tier_report(weights) | {"host_bytes": _num_bytes(weights)}


class FileStore(TableStore):
    """Tables in a file (``backing="disk"``), of which as much is in memory as a budget allows.

    Args:
        features, cache: as ``TableStore``'s. file: the file.
    """

    def __init__(self, features: FeatureMap, cache: CacheState, file: TableFile) -> None:
        super().__init__(features, cache)
        self.file = file

    def shared(self) -> TableStore:
        raise NotImplementedError(
            f"tables in {self.file.path} cannot be served by a module without the file: look up in the collection in "
            "eval() mode, or load the rows into one in memory"
        )

    def new_weights(self, device: torch.device | str | None) -> Tensor:
        return self.file.weights(self._features.storage)

    @torch.no_grad()
    def initialize(self, weights: Sequence[Tensor]) -> None:
        if not self.file.is_new:
            return
        for i, (weight, table) in enumerate(zip(weights, self._features.stored, strict=True)):
            initialize(weight, table, self.file.rows_at_once(i), functools.partial(self.file.load_table, i))
        self.file.flush(apply=True)  # nobody asks for the file before it had rows

    def mover(self, weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if fn(torch.empty(0, dtype=torch.uint8, device="cpu")).device.type != "cpu":
            raise NotImplementedError(
                f"tables on disk ({self.file.path}) cannot be moved: their file backs host memory"
            )
        return lambda t: t if t is weights else fn(t)  # even a cast that is undone would read all of the file

    def refuse_copies(self) -> None:
        self.file.refuse_copies()

    def close(self, *, apply: bool) -> None:
        if apply:
            self.file.file.apply()
        self.file.file.close()

    def held(self) -> AbstractContextManager[None]:
        return self.file.held()

    def _plan(self, call: TableCall, *, inserts: bool) -> tuple[Tensor, Tensor]:
        return self.cache.plan(call.bags[:2], call.layout, call.rounding["seed"], inserts=inserts)

    def _slots(self, call: TableCall, *, inserts: bool) -> Tensor:
        self.file.is_behind |= inserts
        rows, written = self._plan(call, inserts=inserts)
        self.file.load(rows, written if inserts or torch.is_grad_enabled() else written[:0])
        self.file.forget_prefetched()
        return super()._slots(call, inserts=inserts)

    def update_arguments(self, call: TableCall) -> dict[str, Tensor]:
        self._load_for_update(call)
        return super().update_arguments(call)

    def _load_for_update(self, call: TableCall) -> None:
        """Loads the rows of an update that are not cached."""
        self.file.is_behind = True
        self.file.load(*self._plan(call, inserts=False))

    def keep(self, output: Tensor, call: TableCall) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(self._load_again, self.file.loads, call))

    def _load_again(self, loads: int, call: TableCall, _: Tensor) -> None:
        """Before a backward: loads its rows, if others were loaded since its lookup."""
        self.file.is_behind = True
        if self.file.loads != loads:
            self._load_for_update(call)

    def takes_prefetches(self, *, training: bool) -> bool:
        return True

    def prefetch(self, call: TableCall, *, training: bool) -> None:
        self.file.prefetch(self._plan(call, inserts=training)[0])

    def numbers(self) -> dict[str, int]:
        return {"file_identity": self.file.identity, "file_generation": self.file.file.generation}

    def fit_state(self, state_dict: dict, prefix: str, weights: list[str]) -> bool:
        self._check_generation(state_dict, prefix, weights)
        cache = f"{prefix}row_cache."
        if not any(name.startswith(cache) for name in state_dict):
            state_dict.update(self.cache.own_state(cache))
            return False
        return not self.cache.fits(state_dict, cache)  # the cache will be emptied then

    def _check_generation(self, state_dict: dict, prefix: str, weights: list[str]) -> None:
        tables = [name for name in weights if name in state_dict]
        if tables:
            raise RuntimeError(f"{tables[0]} cannot be loaded: the tables are those of {self.file.path}")
        name, own = f"{prefix}file_identity", self.file.identity
        if int(state_dict.setdefault(name, torch.tensor(own, device="cpu"))) != own:  # older states have none
            raise RuntimeError(
                f"{name} is {int(state_dict[name])} and that of {self.file.path} is {own}: the state is of tables in "
                "another file; nothing was changed"
            )
        given, own = state_dict.get(f"{prefix}file_generation"), self.file.file.generation
        if given is not None and (int(given) != own or self.file.has_changed):
            changed = ", whose rows have changed since" if self.file.has_changed else ""
            raise RuntimeError(
                f"{prefix}file_generation is {int(given)} and {self.file.path} has generation {own}{changed}: open "
                f"the file anew with rk.RowCache(generation={int(given)}), if it still has it; nothing was changed"
            )
        self.file.is_behind = True  # slots are to be loaded

    def write_tables(self, tables: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Overwrites tables, and empties the cache, whose rows they are no more.

        Args:
            tables: the number of each, the view of its weight, and rows as ``check_tensors`` takes them.
        """
        with self.file.held(), torch.no_grad():
            for i, weight, rows in tables:
                write(weight.detach(), rows, 0, self.file.rows_at_once(i), functools.partial(self.file.load_table, i))
            self.cache.clear()

    def _flush(self, weights: Tensor, layout: dict[str, object], rounding: dict[str, object]) -> None:
        if not self.file.is_behind and not self.file.has_changed:
            return  # states that name the file's generation stay good
        with self.file.held():
            for first, count, rows in self.cache.dirty_slots(self.file.scattered_rows_at_once()):
                self.file.load(rows, rows)
                self.cache.flush(weights, layout, rounding, first, count)
            self.file.flush()

    def tier_report(self, weights: Tensor) -> dict[str, int]:
        stats, whole = self.file.file.stats(), _num_bytes(weights)
        return super().tier_report(weights) | {
            "row_bytes": stats["resident_bytes"],
            "file_bytes": whole,
            "index_bytes": stats["bookkeeping_bytes"],
            "read_bytes": stats["bytes_read"],
            "written_bytes": stats["bytes_written"],
        }


class UnopenedStore(TableStore):
    """Tables of backing "disk" on the meta device, without a file: what ``rk.distributed`` makes shards of."""

    def mover(self, weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if not fn(torch.empty(0, device="meta")).is_meta:
            raise NotImplementedError(
                f"tables on disk ({self.cache.cache.path}) that are on the meta device have no file, and cannot be "
                "given memory: make the collection on the CPU, or have rk.distributed shard it"
            )
        return fn


def make_store(features: FeatureMap, cache: RowCache | None, device: torch.device | str | None) -> TableStore:
    """The store that a cache's ``backing`` asks for, with its slots on ``device``.

    Raises:
        ValueError: a file for a collection on a GPU, or a budget that is too small. OSError: the file cannot be opened.
    """
    if cache is None:
        return TableStore(features, None)
    if cache.backing == "disk" and _device_of(device).type == "meta":
        return UnopenedStore(features, CacheState(cache, features, device=device))
    if cache.backing == "disk":
        file = _open_file(features, cache, device)
        try:
            return FileStore(features, CacheState(cache, features, device=device), file)
        except BaseException:
            file.file.close()
            raise
    return (HostStore if cache.backing == "host" else TableStore)(features, CacheState(cache, features, device=device))


def _open_file(features: FeatureMap, cache: RowCache, device: torch.device | str | None) -> TableFile:
    where = _device_of(device)
    if where.type != "cpu":
        raise ValueError(f"backing 'disk' is for collections on the CPU, got device {str(where)!r}")
    slots = CacheState(cache, features, device="meta").num_bytes()
    left, least = cache.memory_budget - slots, 16 * 4096
    if left < least:
        raise ValueError(
            f"memory_budget = {cache.memory_budget} must be {slots + least} or more: slots of the cache take "
            f"{slots} bytes, and rows in the file need {least} at least"
        )
    options = {"memory_budget": left, "generation": cache.generation}
    return TableFile(cache.path, features.storage, features.stored, **options)


def _device_of(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


def _num_bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()
