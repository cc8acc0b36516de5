"""Tables in a file, of which as much is in memory as a budget allows: what a collection with backing="disk" reads."""

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

    Rows are named by their linear numbers. Only those that the last load named may be looked up or updated: of
    several threads, each loads and reads within ``held()``.

    Args:
        path: of the file. One that is there is opened and must have the same tables; else it is made, of zeros.
        storage: where the tables lie. stored: the tables.
        memory_budget: bytes of rows that are in memory at a time, at most.
        generation: of the file's states that a crash has left, the one to open; None: the last.

    Raises:
        ValueError: the file is of other tables, or has no such generation. OSError: it cannot be made or read, or is
        locked by another process. ImportError: the package was built without row files.
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
        #: True if this object has made the file.
        self.is_made = not exists
        unit = storage.dtype.itemsize
        self._starts = np.array([start * unit for start in storage.starts[:-1]], dtype=np.int64)
        self._sizes = np.array([t.row_bytes for t in stored], dtype=np.int64)
        self._dims = [t.embedding_dim for t in stored]
        self._first_rows = np.cumsum([0] + [t.num_embeddings for t in stored])[:-1]
        layout = self._layout(storage, stored)
        row_file = host().RowFile
        if not exists and generation:
            raise ValueError(f"{self.path} does not exist, and was to be opened at generation {generation}")
        if not exists:
            num_bytes = max(storage.starts[-1] * unit, 1)
            self.file = row_file.create(self.path, num_bytes, layout=layout, memory_budget=memory_budget)
        else:
            options = {"layout": layout, "memory_budget": memory_budget, "generation": generation}
            self.file = row_file.open(self.path, **options)
        #: The file's own number, as an int64.
        self.identity = int(np.uint64(self.file.identity).astype(np.int64))
        #: True while the file's tables have no rows: whoever made it may have been stopped before they were written.
        self.is_new = self.file.generation == 0
        #: Counts loads and flushes: who has seen another number has rows that may be gone, or count as unchanged.
        self.loads = 0
        #: True if rows were written, or were about to be, since the file had its generation.
        self.has_changed = False
        #: True if slots of the cache may have changed since the last flush; their owner says so.
        self.is_behind = False
        self._turn = threading.RLock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within the block, what this thread has loaded stays in memory: the blocks of other threads wait."""
        _ = self.file.closed  # RuntimeError in a forked process, where nobody may be there to end another block
        with self._turn:
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
        """The flat tensor: addresses for all rows, memory for those that were loaded."""
        size = storage.starts[-1]
        return torch.from_numpy(self.file.window)[: size * storage.dtype.itemsize].view(storage.dtype)

    def mapped(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """The tables as the last flush has left them, mapped from the file, which is read as they are.

        The mapping is private: numbers that are written to it take memory, and are neither in the file nor looked up.

        Args:
            tables: views of ``weights``, all of them.

        Raises:
            OSError: the last flush could not be applied, or the file not be mapped.
        """
        self.file.apply()
        block, size = self.file.block_bytes, self.file.num_bytes
        start = os.path.getsize(self.path) - -(-size // block) * block  # the blocks are the end of the file
        mapped = np.memmap(self.path, np.uint8, "c", start, (size,))
        own = zip(self._starts, tables, strict=True)
        each = [(torch.from_numpy(mapped[first : first + table.nbytes]), table) for first, table in own]
        return [rows.view(table.dtype).view(table.shape) for rows, table in each]

    def load(self, rows: Tensor, written: Tensor) -> None:
        """Has the linear rows in memory until the next load; ``written``: those of them that may change.

        Raises:
            MemoryError: they do not fit in the budget. OSError: they cannot be read, or make room for others.
        """
        self._load(*self._places(rows))
        self.file.mark_dirty(*self._places(written))
        self.has_changed |= len(written) > 0

    def _load(self, starts: np.ndarray, sizes: np.ndarray) -> None:
        self.loads += 1  # also if it fails: what was loaded before may be gone
        try:
            self.file.load(starts, sizes)
        except MemoryError:  # what was prefetched may be in the way
            self.file.cancel_prefetch()
            try:
                self.file.load(starts, sizes)
            except MemoryError as error:
                advice = "give it more memory_budget, or look up fewer rows at a time"
                raise MemoryError(f"{error} beside the cache's slots: {advice}") from None

    def load_table(self, i: int, first: int, count: int) -> None:
        """Loads rows of table i, all of which may change."""
        start = self._starts[i] + first * self._sizes[i]
        self.loads += 1
        self.has_changed = True
        self.file.load(np.array([start]), int(count * self._sizes[i]), write=True)

    def prefetch(self, rows: Tensor) -> None:
        """Begins to read rows that a later ``load`` names, if they fit beside those that are held."""
        with contextlib.suppress(MemoryError):
            self.file.prefetch(*self._places(rows))

    def forget_prefetched(self) -> None:
        """Lets go of rows that were prefetched and not loaded since: nobody may ever ask for them."""
        self.file.cancel_prefetch()

    def rows_at_once(self, i: int) -> int:
        """Number of table i's neighbouring rows that fit in half of the budget, and as float32 in a quarter of it and
        in 1 MiB."""
        fit = (self.file.memory_budget // 2 - 2 * self.file.block_bytes) // int(self._sizes[i])
        floats = min(self.file.memory_budget // 4, 1 << 20) // (4 * self._dims[i])
        return max(1, min(fit, floats))

    def scattered_rows_at_once(self) -> int:
        """Number of rows, wherever they are, that fit in half of the budget: a row may lie in several blocks."""
        blocks = 1 + -(-int(self._sizes.max(initial=1)) // self.file.block_bytes)
        return max(1, self.file.memory_budget // 2 // (blocks * self.file.block_bytes))

    def _places(self, rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
        linear = rows.numpy()
        table = np.searchsorted(self._first_rows, linear, side="right") - 1
        sizes = self._sizes[table]
        return self._starts[table] + (linear - self._first_rows[table]) * sizes, sizes

    def flush(self, *, apply: bool = False) -> None:
        """Makes the next generation durable; the one before can be opened until more is written, unless ``apply``."""
        self.loads += 1  # also if it fails: blocks may count as unchanged all the same
        self.file.flush(apply=apply)
        self.has_changed = self.is_behind = False

    def discard(self) -> None:
        """Closes the file, and deletes it if this object has made it."""
        self.file.close()
        if self.is_made:
            for path in (self.path, Path(f"{self.path}.log")):
                path.unlink(missing_ok=True)

    def refuse_copies(self) -> NoReturn:
        """Raises TypeError: two collections may not have the same file."""
        raise TypeError(
            f"tables in a file ({self.path}) cannot be copied or pickled: state_dict() and the file are their state"
        )

    def __reduce__(self) -> str:
        self.refuse_copies()
