"""A collection's flat tensor in a row file, loaded on demand within a memory budget (backing="disk")."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from rec_kernels._library import host
from rec_kernels.nn.tables.config import StoredTable
from rec_kernels.nn.tables.storage import Storage


class TableFile:
    """The flat tensor of a collection's tables, in a row file (docs/row_file.md).

    Rows are addressed by linear index over all tables. Only rows of the last load may be looked up or updated, so each
    thread loads and reads within ``pin_rows()``.

    Args:
        path: an existing file, which must have the same tables, or a new file, which is created with zeros.
        storage: the layout of the tables. stored: the tables.
        memory_budget: maximum bytes of rows in memory.
        generation: the generation of an existing file to open, if a crash left two; None: the last.

    Raises:
        ValueError: the file has other tables, or no such generation. OSError: it cannot be created or read, or another
        process has locked it. ImportError: the package was built without row files.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        storage: Storage,
        stored: list[StoredTable],
        *,
        memory_budget: int,
        generation: int | None = None,
    ) -> None:
        self.path = Path(path)
        exists = self.path.exists()
        #: True if this object created the file.
        self.is_created = not exists
        unit = storage.dtype.itemsize
        self._starts = np.array([start * unit for start in storage.starts[:-1]], dtype=np.int64)
        self._sizes = np.array([t.row_bytes for t in stored], dtype=np.int64)
        self._dims = [t.embedding_dim for t in stored]
        self._first_rows = np.cumsum([0] + [t.num_embeddings for t in stored])[:-1]
        layout = self._layout(storage, stored)
        row_file = host().RowFile
        if not exists and generation:
            raise ValueError(f"{self.path} does not exist, so it cannot be opened at generation {generation}")
        if not exists:
            num_bytes = max(storage.starts[-1] * unit, 1)
            self.row_file = row_file.create(self.path, num_bytes, layout=layout, memory_budget=memory_budget)
        else:
            options = {"layout": layout, "memory_budget": memory_budget, "generation": generation}
            self.row_file = row_file.open(self.path, **options)
        #: The identity in the file's header, as an int64.
        self.identity = int(np.uint64(self.row_file.identity).astype(np.int64))
        #: True until the initial rows are flushed; the process that created the file may have died before that.
        self.is_new = self.row_file.generation == 0
        #: Number of loads and flushes. If it changes after a load, the rows may be evicted or marked clean.
        self.loads = 0
        #: True if rows may have been written since the current generation.
        self.has_changed = False
        #: True if cache slots may have changed since the last flush; set by the store.
        self.has_unflushed_slots = False
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def pin_rows(self) -> Iterator[None]:
        """Holds the lock: within the block, rows that this thread loads stay in memory."""
        _ = self.row_file.closed  # RuntimeError in a forked process, where the lock's owner may not exist
        with self._lock:
            yield

    @staticmethod
    def _layout(storage: Storage, stored: list[StoredTable]) -> str:
        names = ("name", "num_embeddings", "embedding_dim", "format")
        starts = zip(stored, storage.starts[:-1], strict=True)
        tables = [{name: getattr(table, name) for name in names} | {"start": start} for table, start in starts]
        for told, table in zip(tables, stored, strict=True):
            if table.place is not None:  # a shard: another block of the table may have as many rows
                told |= {"first_row": table.place.first_row, "first_column": table.place.first_column}
        return json.dumps({"dtype": str(storage.dtype), "tables": tables})

    def weights(self, storage: Storage) -> Tensor:
        """The flat tensor: address space for all rows, memory for loaded rows only."""
        size = storage.starts[-1]
        return torch.from_numpy(self.row_file.window)[: size * storage.dtype.itemsize].view(storage.dtype)

    def mapped(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Maps the tables of the last flush from the file; rows are read on access.

        The mapping is private (copy-on-write): writes to it take memory and change neither the file nor lookups.

        Args:
            tables: the views of ``weights`` for all tables.

        Raises:
            OSError: the last flush could not be applied, or the file could not be mapped.
        """
        self.row_file.apply()
        block, size = self.row_file.block_bytes, self.row_file.num_bytes
        start = os.path.getsize(self.path) - -(-size // block) * block  # the blocks are at the end of the file
        mapped = np.memmap(self.path, np.uint8, "c", start, (size,))
        own = zip(self._starts, tables, strict=True)
        each = [(torch.from_numpy(mapped[first : first + table.nbytes]), table) for first, table in own]
        return [rows.view(table.dtype).view(table.shape) for rows, table in each]

    def load(self, rows: Tensor, written: Tensor) -> None:
        """Loads linear rows, which stay in memory until the next load; ``written``: the subset that may change.

        Raises:
            MemoryError: they do not fit in the budget. OSError: a read failed, or a write-back of evicted rows.
        """
        self._load(*self._places(rows))
        self.row_file.mark_dirty(*self._places(written))
        self.has_changed |= len(written) > 0

    def _load(self, starts: np.ndarray, sizes: np.ndarray) -> None:
        self.loads += 1  # even on failure, which may evict rows of the previous load
        try:
            self.row_file.load(starts, sizes)
        except MemoryError:  # prefetched rows may occupy the budget
            self.row_file.cancel_prefetch()
            try:
                self.row_file.load(starts, sizes)
            except MemoryError as error:
                advice = "increase memory_budget, or look up fewer rows at a time"
                raise MemoryError(f"{error}, without the cache's slots: {advice}") from None

    def load_table(self, i: int, first: int, count: int) -> None:
        """Loads consecutive rows of table i for writing."""
        start = self._starts[i] + first * self._sizes[i]
        self.loads += 1
        self.has_changed = True
        self.row_file.load(np.array([start]), int(count * self._sizes[i]), write=True)

    def prefetch(self, rows: Tensor) -> None:
        """Starts to read rows for a later ``load``, if they fit beside the loaded rows."""
        with contextlib.suppress(MemoryError):
            self.row_file.prefetch(*self._places(rows))

    def forget_prefetched(self) -> None:
        """Drops prefetched rows that were not loaded, since they may never be used."""
        self.row_file.cancel_prefetch()

    def rows_at_once(self, i: int) -> int:
        """Number of consecutive rows of table i that fit in half of the budget, and as float32 in a quarter of it and
        in 1 MiB."""
        fit = (self.row_file.memory_budget // 2 - 2 * self.row_file.block_bytes) // int(self._sizes[i])
        floats = min(self.row_file.memory_budget // 4, 1 << 20) // (4 * self._dims[i])
        return max(1, min(fit, floats))

    def scattered_rows_at_once(self) -> int:
        """Number of arbitrary rows that fit in half of the budget; a row may span several blocks."""
        blocks = 1 + -(-int(self._sizes.max(initial=1)) // self.row_file.block_bytes)
        return max(1, self.row_file.memory_budget // 2 // (blocks * self.row_file.block_bytes))

    def _places(self, rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
        linear = rows.numpy()
        table = np.searchsorted(self._first_rows, linear, side="right") - 1
        sizes = self._sizes[table]
        return self._starts[table] + (linear - self._first_rows[table]) * sizes, sizes

    def flush(self, *, apply: bool = False) -> None:
        """Makes a new generation durable; the previous one can be opened until the next write, unless ``apply``."""
        self.loads += 1  # even on failure, which may already have marked blocks as clean
        self.row_file.flush(apply=apply)
        self.has_changed = self.has_unflushed_slots = False

    def discard(self) -> None:
        """Closes the file, and deletes it if this object created it."""
        self.row_file.close()
        if self.is_created:
            for path in (self.path, Path(f"{self.path}.log")):
                path.unlink(missing_ok=True)

    def refuse_copies(self) -> NoReturn:
        """Raises TypeError: two collections cannot share a file."""
        raise TypeError(
            f"tables in a file ({self.path}) cannot be copied or pickled: their state is state_dict() and the file"
        )

    def __reduce__(self) -> str:
        self.refuse_copies()
