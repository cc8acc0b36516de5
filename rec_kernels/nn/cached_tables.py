"""Tables behind a row cache, in memory or in a file: what a lookup needs before it, and an update."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.nn.jagged import select_keys
from rec_kernels.nn.layout import Layout
from rec_kernels.nn.row_cache import CacheState, RowCache
from rec_kernels.nn.table_file import TableFile


class CachedTables(Layout):
    """A module with tables, a ``row_cache`` or None, and the file that the tables are in or None.

    ``file_generation`` is that of the file's state which ``state_dict()`` goes with.
    """

    row_cache: CacheState | None
    _file: TableFile | None

    def _rounding(self) -> dict[str, object]:
        """How rows are encoded: arguments of the ops."""
        raise NotImplementedError

    def _open_file(self, cache: RowCache | None, device: torch.device | str | None) -> TableFile | None:
        if cache is None or cache.backing != "disk":
            return None
        where = torch.get_default_device() if device is None else torch.device(device)
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

    def _slots(self, bags: tuple[Tensor, Tensor], layout: dict[str, object]) -> Tensor:
        """Where the rows of a batch are in the cache: in training, after they have come in."""
        inserts = self.training and torch.is_grad_enabled()
        if self._file is not None:
            rows, written = self.row_cache.plan(bags, layout, self._seed, inserts=inserts)
            self._file.load(rows, written if torch.is_grad_enabled() else written[:0])
            self._file.forget_prefetched()
        if not inserts:
            return self.row_cache.lookup(bags, layout)
        with torch.no_grad():
            return self.row_cache.insert(self._weights, bags, layout, self._rounding())

    def _load_for_update(self, bags: tuple[Tensor, Tensor], bag_starts: Tensor | None) -> None:
        """Has an update's rows that are not cached in memory."""
        self._file.load(*self.row_cache.plan(bags, self._layout(bag_starts), self._seed, inserts=False))

    def _load_again(self, loads: int, bags: tuple[Tensor, Tensor], bag_starts: Tensor | None, _: Tensor) -> None:
        """The same before a backward, if others were loaded since its lookup; a hook of the lookup's output."""
        if self._file.loads != loads:
            self._load_for_update(bags, bag_starts)

    def prefetch(self, features) -> None:
        """Begins to read what the next batch needs of tables in a file, while this one is computed.

        To be called between a lookup and the next, with the features of the next. What is learned is the same without
        it, and with those of another batch. Where the rows of both batches do not fit in the memory budget together,
        nothing is read. Tables in memory need none: nothing happens.

        Args:
            features: as of ``forward``.

        Raises:
            As ``forward``, but for MemoryError.
        """
        if self._file is None:
            return
        given = select_keys(features, self.feature_names)
        starts = None if given.strides is None else torch.tensor(given.bag_starts(len(self.feature_names)))
        bags, layout = (given.values, given.offsets), self._layout(starts)
        self._file.prefetch(self.row_cache.plan(bags, layout, self._seed, inserts=self.training)[0])

    def close(self) -> None:
        """Closes the file of tables on disk, which cannot be used then. What was not flushed is lost."""
        if self._file is not None:
            self._file.file.close()

    @torch.no_grad()
    def flush(self) -> None:
        """Encodes rows that have changed in the row cache into their tables; without a cache it does nothing.

        They stay cached, and training goes on as if it had not happened. ``state_dict()`` does it first. What is read
        of ``embedding_bags[name].weight`` is up to date after it. Tables on disk are then durable: what a crash leaves
        is the state of the last ``flush()``, or the next one.
        """
        if self.row_cache is None:
            return
        arguments = (self._weights, self._layout(), self._rounding())
        if self._file is None:
            self.row_cache.flush(*arguments)
            return
        for first, count, rows in self.row_cache.dirty_slots(self._file.scattered_rows_at_once()):
            self._file.load(rows, rows)
            self.row_cache.flush(*arguments, first, count)
        self._file.flush()

    def _check_generation(self, state_dict: dict, prefix: str) -> None:
        tables = [name for t in self._stored if (name := f"{prefix}embedding_bags.{t.name}.weight") in state_dict]
        if tables:
            raise RuntimeError(f"{tables[0]} cannot be loaded: the tables are those of {self._file.path}")
        given, own = state_dict.get(f"{prefix}file_generation"), self._file.file.generation
        if given is not None and (int(given) != own or self._file.has_changed):
            changed = ", whose rows have changed since" if self._file.has_changed else ""
            raise RuntimeError(
                f"{prefix}file_generation is {int(given)} and {self._file.path} has generation {own}{changed}: open "
                f"the file anew with rk.RowCache(generation={int(given)}), if it still has it; nothing was changed"
            )

    def tier_report(self) -> dict[str, int]:
        """Bytes of the tables where they are, and bytes that were moved.

        cache_bytes: slots with their tags, stamps, flags and counts, and the rows' counts; row_bytes: encoded rows in
        memory; file_bytes: rows in the file, 0 without one; index_bytes: what is kept in memory of the file's blocks;
        moved_bytes: encoded rows that went into slots or came back; read_bytes and written_bytes: of the file.
        """
        cache, file = self.row_cache, self._file
        stats = {} if file is None else file.file.stats()
        counters = cache.counters() if cache else {}
        moved = sum((n["inserted"] + n["written"]) * t.row_bytes for t in self._stored if (n := counters.get(t.name)))
        whole = self._weights.numel() * self._weights.element_size()
        return {
            "cache_bytes": cache.num_bytes() if cache else 0,
            "row_bytes": stats.get("resident_bytes", whole),
            "file_bytes": whole if file else 0,
            "index_bytes": stats.get("bookkeeping_bytes", 0),
            "moved_bytes": moved,
            "read_bytes": stats.get("bytes_read", 0),
            "written_bytes": stats.get("bytes_written", 0),
        }
