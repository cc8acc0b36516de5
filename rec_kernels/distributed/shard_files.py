"""Files of ranks' shards, of collections with backing "disk": one for each rank, of one state together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rec_kernels.distributed.collectives import gathered
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.tables.file_store import FileStore
from rec_kernels.nn.tables.load_state import check_tensors


def check_files(shards: TableCollection, group: dist.ProcessGroup) -> None:
    """A collective after all ranks have opened, or made, their files.

    Raises:
        ValueError: on all ranks, if some have made theirs and others have found one, or generations differ. This rank's
        file is closed then, and deleted if it was made.
    """
    store, own = shards._store, None
    if isinstance(store, FileStore):
        own = str(store.file.path), store.file.is_new, store.file.file.generation
    found = [fact for fact in gathered(own, group) if fact is not None]
    for path, is_new, generation in found:
        first, was_new, expected = found[0]
        if (is_new, generation) != (was_new, expected):
            told = [
                f"{name} {'is new' if new else f'has rows of generation {number}'}"
                for name, new, number in ((first, was_new, expected), (path, is_new, generation))
            ]
            discard(shards)
            raise ValueError(
                f"files of ranks belong together, and {' and '.join(told)}: RowCache(generation=...) names one that "
                "all have; or remove the files of all ranks, and load a checkpoint"
            )


def discard(shards: TableCollection | None) -> None:
    """Closes this rank's file, if it has one, and deletes it if it was made by this rank just now."""
    if shards is not None and isinstance(shards._store, FileStore):
        shards._store.file.discard()


def flush(shards: TableCollection, group: dist.ProcessGroup, agreed: Callable[[Callable[[], Any]], Any]) -> None:
    """Makes all ranks' files durable as one generation; a collective.

    Args:
        agreed: calls a function, and raises any rank's error on all.
    """
    agreed(shards.flush)
    file = shards._store.file if isinstance(shards._store, FileStore) else None
    latest = max(gathered(0 if file is None else file.file.generation, group))

    def catch_up() -> None:  # other ranks' flushes have been successful when this rank's was not
        while file is not None and file.file.generation < latest:
            file.flush()

    agreed(catch_up)


def rows_of_state(shards: TableCollection) -> dict[str, Tensor]:
    """The tables that a rank's ``state_dict()`` lacks as they are in a file, by their names there."""
    if not isinstance(shards._store, FileStore):
        return {}
    tables = _tables(shards)
    return dict(zip(tables, shards._store.file.mapped([*tables.values()]), strict=True))


def _tables(shards: TableCollection) -> dict[str, Tensor]:
    """The windows of a rank's tables in its file, by their names in a state."""
    return {f"{shards._holder}.{name}.weight": shards._held[name].weight.detach() for name in shards._held}


def check_rows(shards: TableCollection, state: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError if a rank's state has a table that cannot be written to its file."""
    if isinstance(shards._store, FileStore):
        check_tensors(dict(state), "", _tables(shards))


def write_rows(shards: TableCollection, state: dict[str, Tensor]) -> None:
    """Writes the tables of a checked state to a rank's file, and leaves the rest of the state.

    Raises:
        OSError, MemoryError: they could not all be written; the file's last generation stays as it is.
    """
    if not isinstance(shards._store, FileStore):
        return
    own = _tables(shards)
    given = [(i, t, state.pop(name)) for i, (name, t) in enumerate(own.items()) if name in state]
    if given:
        if len(given) < len(own):
            shards.flush()  # the cache is emptied: tables that the state lacks have their rows first
        shards._store.write_tables(given)
        shards._tied.note_written()
