"""The store of ``backing="disk"``, and ``make_store``, which selects a collection's store."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.prefetch import TableCall
from rec_kernels.nn.tables.row_cache import CacheState, RowCache
from rec_kernels.nn.tables.rows import initialize, takes_chunks, write
from rec_kernels.nn.tables.store import HostStore, TableStore, device_of
from rec_kernels.nn.tables.table_file import TableFile
from rec_kernels.ops.tracing import is_exporting


class FileStore(TableStore):
    """Tables in a file (``backing="disk"``), loaded into memory on demand within a budget.

    Args:
        features, cache: see ``TableStore``. file: the open file.
    """

    def __init__(self, features: FeatureMap, cache: CacheState, file: TableFile) -> None:
        super().__init__(features, cache)
        self.file = file
        self._marked = False  # True if the last lookup marked the rows that its backward writes

    def shared(self) -> TableStore:
        raise NotImplementedError(
            f"tables in {self.file.path} cannot be served by a module without the file: use the collection in "
            "eval() mode, or load the rows into a collection in memory"
        )

    def new_weights(self, device: torch.device | str | None) -> Tensor:
        return self.file.weights(self._features.storage)

    @torch.no_grad()
    def initialize(self, weights: Sequence[Tensor]) -> None:
        if not self.file.is_new:
            return
        for i, (weight, table) in enumerate(zip(weights, self._features.stored, strict=True)):
            initialize(weight, table, self.file.rows_at_once(i), functools.partial(self.file.load_table, i))
        self.file.flush(apply=True)  # the empty generation is never reopened

    def wrap_apply(self, weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if fn(torch.empty(0, dtype=torch.uint8, device="cpu")).device.type != "cpu":
            raise NotImplementedError(
                f"tables on disk ({self.file.path}) cannot be moved to another device: their file backs host memory"
            )
        return lambda t: t if t is weights else fn(t)  # a cast, even if undone, would read the whole file

    def refuse_copies(self) -> None:
        self.file.refuse_copies()

    def close(self, *, apply: bool) -> None:
        if apply:
            self.file.row_file.apply()
        self.file.row_file.close()

    def pin_rows(self) -> AbstractContextManager[None]:
        if is_exporting():
            raise NotImplementedError(
                f"tables in {self.file.path} cannot be exported: an exported program cannot read the file; load "
                "the rows into a collection in memory, and export its for_serving()"
            )
        if torch.compiler.is_compiling():
            from rec_kernels.ops.graph_breaks import pin_file_rows

            return pin_file_rows(self.file.pin_rows)
        return self.file.pin_rows()

    def _slots(self, call: TableCall, *, inserts: bool) -> Tensor:
        self.file.has_unflushed_slots |= inserts
        rows, written = self.cache.plan(call, inserts=inserts)
        # A backward marks the rows that it writes itself; most lookups outside training have no backward.
        self.file.load(rows, written if inserts else written[:0])
        self._marked = inserts
        self.file.forget_prefetched()
        return super()._slots(call, inserts=inserts)

    def row(self, weight: Tensor, number: int) -> Tensor:
        with self.pin_rows():
            rows = torch.tensor([number], device="cpu")
            self.file.load(rows, rows[:0])
            return super().row(weight, number).clone()  # the next load may evict it

    def _update_arguments(self, call: Callable[[], TableCall]) -> dict[str, Tensor]:
        self._load_for_update(call())
        return super()._update_arguments(call)

    def _load_for_update(self, call: TableCall) -> None:
        """Loads the uncached rows of an update."""
        self.file.has_unflushed_slots = True
        self.file.load(*self.cache.plan(call, inserts=False))

    def keep_until_backward(self, output: Tensor, call: TableCall) -> None:
        if output.requires_grad:
            loads = self.file.loads if self._marked else None
            output.register_hook(functools.partial(self._load_again, loads, call))

    def _load_again(self, loads: int | None, call: TableCall, _: Tensor) -> None:
        """Backward hook: reload the rows if others were loaded since the lookup, or if the lookup did not mark them."""
        self.file.has_unflushed_slots = True
        if self.file.loads != loads:
            self._load_for_update(call)

    def prefetch(self, call: Callable[[], TableCall], *, training: bool) -> None:
        self.file.prefetch(self.cache.plan(call(), inserts=training)[0])

    def numbers(self) -> dict[str, int]:
        return {"file_identity": self.file.identity, "file_generation": self.file.row_file.generation}

    def fit_state(self, state_dict: dict, prefix: str, weights: list[str]) -> bool:
        """As ``TableStore.fit_state``. The file has all rows of the state's generation; the caches may differ.

        The current cached rows are newer than the state, so they are never flushed here.
        """
        self._check_generation(state_dict, prefix, weights)
        cache = f"{prefix}row_cache."
        if f"{prefix}file_generation" not in state_dict and not any(name.startswith(cache) for name in state_dict):
            state_dict.update(self.cache.own_state(cache))  # the state has nothing of these tables
        return False

    def _check_generation(self, state_dict: dict, prefix: str, weights: list[str]) -> None:
        tables = [name for name in weights if name in state_dict]
        if tables:
            raise RuntimeError(f"{tables[0]} cannot be loaded: the rows of this table are in {self.file.path}")
        name, own = f"{prefix}file_identity", self.file.identity
        if int(state_dict.setdefault(name, torch.tensor(own, device="cpu"))) != own:  # older states have none
            raise RuntimeError(
                f"{name} is {int(state_dict[name])}, but that of {self.file.path} is {own}: the state belongs "
                "to another file; nothing was changed"
            )
        given, own = state_dict.get(f"{prefix}file_generation"), self.file.row_file.generation
        has_cache = any(name.startswith(f"{prefix}row_cache.") for name in state_dict)
        if given is None and has_cache and (self.file.has_unflushed_slots or self.file.has_changed):
            raise RuntimeError(
                f"{prefix}file_generation is missing, so the generation of {self.file.path} that "
                f"{prefix}row_cache belongs to is unknown, and there were updates since the last one; nothing "
                "was changed"
            )
        if given is not None and (int(given) != own or self.file.has_changed):
            changed = ", whose rows have changed since" if self.file.has_changed else ""
            raise RuntimeError(
                f"{prefix}file_generation is {int(given)}, but {self.file.path} has generation {own}{changed}: "
                f"reopen the file with rk.RowCache(generation={int(given)}), if it still has that generation; "
                "nothing was changed"
            )
        self.file.has_unflushed_slots = True  # loading will change slots

    def write_tables(self, tables: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Overwrite tables, and empty the cache, whose rows are stale then.

        Args:
            tables: (index, view of the weight, rows that ``check_tensors`` accepts) of each table.
        """
        with self.file.pin_rows(), torch.no_grad():
            for i, weight, rows in tables:
                write(weight.detach(), rows, 0, self.file.rows_at_once(i), functools.partial(self.file.load_table, i))
            self.cache.clear()

    def _flush(self, weights: Tensor, layout: dict[str, object], rounding: dict[str, object]) -> None:
        if not self.file.has_unflushed_slots and not self.file.has_changed:
            return  # a new generation would invalidate states that name the current one
        with self.file.pin_rows():
            for first, count, rows in self.cache.dirty_slots(self.file.scattered_rows_at_once()):
                self.file.load(rows, rows)
                self.cache.flush(weights, layout, rounding, first, count)
            self.file.flush()

    def tier_report(self, weights: Tensor) -> dict[str, int]:
        stats = self.file.row_file.stats()
        return super().tier_report(weights) | {
            "row_bytes": stats["resident_bytes"],
            "file_bytes": weights.nbytes,
            "index_bytes": stats["bookkeeping_bytes"],
            "read_bytes": stats["bytes_read"],
            "written_bytes": stats["bytes_written"],
        }


class UnopenedStore(TableStore):
    """Tables of backing "disk" on the meta device: no file is open, and ``rk.distributed`` can shard them."""

    def wrap_apply(self, weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if not fn(torch.empty(0, device="meta")).is_meta:
            raise NotImplementedError(
                f"tables on disk ({self.cache.cache.path}) of a collection on the meta device have no file, and "
                "cannot be given memory: create the collection on the CPU, or let rk.distributed shard it"
            )
        return fn


def _open(features: FeatureMap, cache: RowCache, device: torch.device | str | None) -> FileStore:
    where = device_of(device)
    if where.type != "cpu":
        raise ValueError(f"backing 'disk' requires a collection on the CPU, got device {str(where)!r}")
    slots = CacheState(cache, features, device="meta").num_bytes()
    left, least = cache.memory_budget - slots, 16 * 4096
    if left < least:
        raise ValueError(
            f"memory_budget = {cache.memory_budget} must be at least {slots + least}: the cache's slots take "
            f"{slots} bytes, and rows of the file need at least {least}"
        )
    for table in [] if Path(cache.path).exists() else features.stored:
        floats = 4 * table.num_embeddings * table.embedding_dim
        if floats > cache.memory_budget and not takes_chunks(table.init):
            warnings.warn(
                f"table {table.name!r}: its init receives all rows at once, {floats} bytes in float32 in "
                f"addition to the memory_budget of {cache.memory_budget}: if it can initialize chunks of rows, "
                "set its attribute in_chunks = True",
                stacklevel=4,
            )
    state = CacheState(cache, features, device=device)  # before the file is opened, because it may run out of memory
    options = {"memory_budget": left, "generation": cache.generation}
    return FileStore(features, state, TableFile(cache.path, features.storage, features.stored, **options))


def make_store(features: FeatureMap, cache: RowCache | None, device: torch.device | str | None) -> TableStore:
    """Makes the store for a cache's ``backing``, with its slots on ``device``.

    Raises:
        ValueError: backing "disk" on a GPU, or a budget that is too small. OSError: the file cannot be opened.
    """
    if cache is None:
        return TableStore(features, None)
    if cache.backing == "disk" and device_of(device).type != "meta":
        return _open(features, cache, device)
    kind = {"device": TableStore, "host": HostStore, "disk": UnopenedStore}[cache.backing]
    return kind(features, CacheState(cache, features, device=device))
