"""Tables behind a row cache, in memory or in a file: what a lookup needs before it, and an update."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rec_kernels.nn.accumulate import Pending
from rec_kernels.nn.ahead import Ahead, Bags
from rec_kernels.nn.host_memory import host_zeros, pinned
from rec_kernels.nn.layout import Layout
from rec_kernels.nn.row_cache import CacheState, RowCache
from rec_kernels.nn.selected import SelectedKeys
from rec_kernels.nn.table_file import TableFile
from rec_kernels.nn.tables import zeros


def holds_rows(lookup: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method whose rows, where they are in a file, stay in memory to its end: other threads' calls wait."""

    @functools.wraps(lookup)
    def held(self: CachedTables, *args: object, **options: object) -> Tensor:
        if self._file is None:
            return lookup(self, *args, **options)
        with self._file.held():
            return lookup(self, *args, **options)

    return held


class CachedTables(Layout):
    """A module with tables, a ``row_cache`` or None, and the file that the tables are in or None.

    ``file_generation`` is that of the file's state which ``state_dict()`` goes with, ``file_identity`` the file's own.
    """

    row_cache: CacheState | None
    step: Tensor
    file_generation: Tensor
    file_identity: Tensor
    _file: TableFile | None
    _ahead: Ahead
    _pending: Pending | None
    _flushed_step: Tensor | None = None  # at the last flush()

    def _rounding(self) -> dict[str, object]:
        """How rows are encoded: arguments of the ops."""
        raise NotImplementedError

    def _select(self, features) -> SelectedKeys:
        """The bags of a batch, in the order of the features."""
        raise NotImplementedError

    def _bags_of(self, given: SelectedKeys) -> tuple[SelectedKeys, Tensor | None]:
        """The bags that are looked up, and [F + 1] where features begin among them if each has a row of the output."""
        raise NotImplementedError

    def _open_file(self, cache: RowCache | None, device: torch.device | str | None) -> TableFile | None:
        if cache is None or cache.backing != "disk":
            return None
        where = _device_of(device)
        if where.type != "cpu":
            raise ValueError(f"backing 'disk' is for collections on the CPU, got device {str(where)!r}")
        slots = CacheState(cache, self._stored, self._features, device="meta").num_bytes()
        left, least = cache.memory_budget - slots, 16 * 4096
        if left < least:
            raise ValueError(
                f"memory_budget = {cache.memory_budget} must be {slots + least} or more: slots of the cache take "
                f"{slots} bytes, and rows in the file need {least} at least"
            )
        options = {"memory_budget": left, "generation": cache.generation}
        return TableFile(cache.path, self._storage, self._stored, **options)

    def _new_weights(self, device: torch.device | str | None) -> Tensor:
        """The flat tensor of the tables: zeros, or what their file has."""
        storage = self._storage
        if self._file is not None:
            return self._file.weights(storage)
        where = _device_of(device)
        if not self._in_host or where.type == "meta":
            return zeros(storage.starts[-1], storage.dtype, device)
        return self._in_place(host_zeros(storage.starts[-1], storage.dtype), where)

    def _in_place(self, weights: Tensor, device: torch.device) -> Tensor:
        """Weights as kernels on a device read them."""
        return pinned(weights, device) if self._in_host and device.type == "cuda" else weights

    def _wait(self) -> None:
        """Before the CPU looks at weights that kernels of a GPU read and write, too."""
        if self._in_host and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _slots(self, bags: Bags, layout: dict[str, object]) -> Tensor:
        """Where the rows of a batch are in the cache: in training, after they have come in."""
        inserts = self.training and torch.is_grad_enabled()
        if not self._ahead.is_empty and (slots := self._ahead.take(bags, inserts=inserts)) is not None:
            return slots
        jagged = bags[:2]
        if self._file is not None:
            self._file.is_behind |= inserts
            rows, written = self.row_cache.plan(jagged, layout, self._seed, inserts=inserts)
            self._file.load(rows, written if torch.is_grad_enabled() else written[:0])
            self._file.forget_prefetched()
        return self._insert(jagged, layout) if inserts else self.row_cache.lookup(jagged, layout)

    @torch.no_grad()
    def _insert(self, bags: tuple[Tensor, Tensor], layout: dict[str, object]) -> Tensor:
        return self.row_cache.insert(self._weights, bags, layout, self._rounding())

    def _insert_ahead(self) -> None:
        """Has the batch that was announced come in, if no update is to come before it."""
        if not self._ahead.is_empty and self._pending is None:
            self._ahead.insert(
                lambda values, offsets, starts: self._insert((values, offsets), self._layout(starts)),
                self.row_cache.buffers(),
            )

    def _insert_after_update(self) -> None:
        """The same, as a hook: what is wrong with the batch is for its lookup to say."""
        with contextlib.suppress(IndexError, ValueError):
            self._insert_ahead()

    def _watch(self, output: Tensor) -> None:
        """Takes note of a lookup whose backward is an update."""
        if not self._in_host:
            return
        if torch.compiler.is_compiling():
            self._ahead.is_compiled = True
        else:
            self._ahead.watch(output, self._insert_after_update)

    def _load_for_update(self, bags: tuple[Tensor, Tensor], bag_starts: Tensor | None) -> None:
        """Has an update's rows that are not cached in memory."""
        self._file.is_behind = True
        self._file.load(*self.row_cache.plan(bags, self._layout(bag_starts), self._seed, inserts=False))

    def _load_again(self, loads: int, bags: tuple[Tensor, Tensor], bag_starts: Tensor | None, _: Tensor) -> None:
        """The same before a backward, if others were loaded since its lookup; a hook of the lookup's output."""
        self._file.is_behind = True
        if self._file.loads != loads:
            self._load_for_update(bags, bag_starts)

    def prefetch(self, features) -> None:
        """Begins to read what the next batch needs of tables in a file or in host memory, while this one is computed.

        To be called between a lookup and the next, with the features of the next. What is learned is the same without
        it. Tables of backing "device" need none: nothing happens.

        Backing "disk": blocks are read, and another batch may come instead. Where the rows of both batches do not fit
        in the memory budget together, nothing is read.

        Backing "host": in training, the batch's rows come into the cache, on a GPU on a stream beside the current one,
        as soon as the update of the lookup before has been made. From then on that batch is looked up next, with the
        same tensors unchanged: until then, other lookups, updates, ``flush()``, ``state_dict()``, copies and moves
        raise RuntimeError. Within ``accumulate()``, and once lookups are compiled, the rows come in no earlier than
        without it.

        Args:
            features: as of ``forward``.

        Raises:
            As ``forward``, but for MemoryError. RuntimeError: the rows of another prefetched batch are in the cache.
        """
        if self._file is None and not (self._in_host and self.training):
            return
        given, starts = self._bags_of(self._select(features))
        bags = (given.values, given.offsets)
        if self._file is not None:
            plan = self.row_cache.plan(bags, self._layout(starts), self._seed, inserts=self.training)
            self._file.prefetch(plan[0])
            return
        self._ahead.announce((*bags, starts))
        self._insert_ahead()

    def close(self, *, apply: bool = False) -> None:
        """Closes the file of tables on disk, which cannot be used then. What was not flushed is lost.

        Args:
            apply: first copies into the file what the last ``flush()`` has left in ``<path>.log``: the file is whole
                without it then, and has no generation but the last.

        Raises:
            OSError: the copying failed; nothing is closed or lost, and it may be tried again. ValueError: it is closed
            already, and was to be applied.
        """
        if self._file is None:
            return
        if apply:
            self._file.file.apply()
        self._file.file.close()

    @torch.no_grad()
    def flush(self) -> None:
        """Encodes rows that have changed in the row cache into their tables; without a cache it does nothing.

        They stay cached, and training goes on as if it had not happened. ``state_dict()`` does it first. What is read
        of ``embedding_bags[name].weight`` is up to date after it. Tables on disk are then durable: what a crash leaves
        is the state of the last ``flush()``, or the next one. Where nothing was trained or loaded since the last, the
        file keeps its generation.
        """
        if self.row_cache is None:
            return
        self._ahead.refuse("flush() or state_dict()")
        arguments = (self._weights, self._layout(), self._rounding())
        if self._file is None:
            self.row_cache.flush(*arguments)
            self._wait()
        elif self._file.is_behind or self._file.has_changed:  # else the states that name its generation stay good
            with self._file.held():
                for first, count, rows in self.row_cache.dirty_slots(self._file.scattered_rows_at_once()):
                    self._file.load(rows, rows)
                    self.row_cache.flush(*arguments, first, count)
                self._file.flush()
        self._flushed_step = self.step.clone()

    @torch.no_grad()
    def reset_cache_states(self) -> None:
        """Empties the row cache, so that rows are read in their tables until they come in anew; else it does nothing.

        For tables that are written in place, which the cache does not hear of: ``flush()``, write, then this. Uses and
        counters begin anew, too.

        Raises:
            RuntimeError: there were updates since the last ``flush()``; nothing was changed.
        """
        cache = self.row_cache
        if cache is None or cache.tags.is_meta:
            return
        self._ahead.refuse("reset_cache_states()")
        flushed = -1 if self._flushed_step is None else int(self._flushed_step)
        if int(self.step) != flushed and any(table["dirty_rows"] for table in self.memory_report()):
            when = "there was no flush()" if flushed < 0 else f"the last flush() was at {flushed}"
            raise RuntimeError(
                f"step is {int(self.step)}, and {when}: cached rows hold updates that their tables do not; call "
                "flush() before a table is written, and reset_cache_states() after it; nothing was changed"
            )
        clock = cache.clock.clone()  # noise of rounding depends on it
        cache.clear()
        cache.clock.copy_(clock)
        torch.autograd.graph.increment_version(
            self.step
        )  # as an update does, for lookups that need the rows as they were

    def _check_generation(self, state_dict: dict, prefix: str) -> None:
        tables = [name for t in self._stored if (name := f"{prefix}embedding_bags.{t.name}.weight") in state_dict]
        if tables:
            raise RuntimeError(f"{tables[0]} cannot be loaded: the tables are those of {self._file.path}")
        name, own = f"{prefix}file_identity", self._file.identity
        if int(state_dict.setdefault(name, torch.tensor(own, device="cpu"))) != own:  # states of before have none
            raise RuntimeError(
                f"{name} is {int(state_dict[name])} and that of {self._file.path} is {own}: the state is of tables in "
                "another file; nothing was changed"
            )
        given, own = state_dict.get(f"{prefix}file_generation"), self._file.file.generation
        if given is not None and (int(given) != own or self._file.has_changed):
            changed = ", whose rows have changed since" if self._file.has_changed else ""
            raise RuntimeError(
                f"{prefix}file_generation is {int(given)} and {self._file.path} has generation {own}{changed}: open "
                f"the file anew with rk.RowCache(generation={int(given)}), if it still has it; nothing was changed"
            )
        self._file.is_behind = True  # slots are to be loaded

    def memory_report(self) -> list[dict[str, object]]:
        """One dict per table that is kept: name, num_embeddings, embedding_dim, format, weight_bytes, state_bytes.

        With a row cache also: cached_rows and dirty_rows (now in slots, and changed there), cache_bytes (the table's
        share of the slots, tags, stamps and counts), lookups and hits (ids of training batches, and those of them whose
        row was cached), hit_rate (None before the first), inserted, evicted, written and left_out (rows taken in, rows
        evicted, those of them that had to be encoded, rows that found no slot).
        """
        self._ahead.wait()
        cached = None if self.row_cache is None else self.row_cache.report()
        return [
            {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": t.embedding_dim,
                "format": t.format,
                "weight_bytes": t.num_bytes,
                "state_bytes": self._places.bytes(i),
                **(cached[i] if cached else {}),
            }
            for i, t in enumerate(self._stored)
        ]

    def tier_report(self) -> dict[str, int]:
        """Bytes of the tables where they are, and bytes that were moved.

        cache_bytes: slots with their tags, stamps, flags and counts, and the rows' counts; row_bytes: encoded rows in
        memory; host_bytes: those of them that backing "host" keeps in host memory; file_bytes: rows in the file, 0
        without one; index_bytes: what is kept in memory of the file's blocks; moved_bytes: encoded rows that went into
        slots or came back; read_bytes and written_bytes: of the file.
        """
        self._ahead.wait()
        cache, file = self.row_cache, self._file
        stats = {} if file is None else file.file.stats()
        counters = cache.counters() if cache else {}
        moved = sum((n["inserted"] + n["written"]) * t.row_bytes for t in self._stored if (n := counters.get(t.name)))
        whole = self._weights.numel() * self._weights.element_size()
        return {
            "cache_bytes": cache.num_bytes() if cache else 0,
            "row_bytes": stats.get("resident_bytes", whole),
            "host_bytes": whole if self._in_host else 0,
            "file_bytes": whole if file else 0,
            "index_bytes": stats.get("bookkeeping_bytes", 0),
            "moved_bytes": moved,
            "read_bytes": stats.get("bytes_read", 0),
            "written_bytes": stats.get("bytes_written", 0),
        }


def _device_of(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)
