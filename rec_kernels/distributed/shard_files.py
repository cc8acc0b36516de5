"""Files of shards of collections with backing "disk": one per rank, which together are one state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rec_kernels.distributed.collectives import gather_objects
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.tables.file_store import FileStore
from rec_kernels.nn.tables.load_state import check_tensors


def check_files(shards: TableCollection, group: dist.ProcessGroup) -> None:
    """Checks that the files that ranks have opened or created belong together; a collective.

    Raises:
        ValueError: on all ranks, if only some files are new, or generations differ. This rank's file is then closed,
        and deleted if it is new.
    """
    store, own = shards._store, None
    if isinstance(store, FileStore):
        own = str(store.file.path), store.file.is_new, store.file.row_file.generation
    found = [file for file in gather_objects(own, group) if file is not None]
    for path, is_new, generation in found:
        first, was_new, expected = found[0]
        if (is_new, generation) != (was_new, expected):
            states = [
                f"{name} {'is new' if new else f'has rows of generation {number}'}"
                for name, new, number in ((first, was_new, expected), (path, is_new, generation))
            ]
            discard(shards)
            raise ValueError(
                f"the files of all ranks must match, but {' and '.join(states)}: choose a generation that all "
                "have with RowCache(generation=...), or remove the files of all ranks and load a checkpoint"
            )


def discard(shards: TableCollection | None) -> None:
    """Closes this rank's file, if any, and deletes it if it is new."""
    if shards is not None and isinstance(shards._store, FileStore):
        shards._store.file.discard()


def flush(shards: TableCollection, group: dist.ProcessGroup, on_all_ranks: Callable[[Callable[[], Any]], Any]) -> None:
    """Makes all ranks' files durable as one generation; a collective.

    Args:
        on_all_ranks: calls a function, and raises any rank's error on all.
    """
    on_all_ranks(shards.flush)
    file = shards._store.file if isinstance(shards._store, FileStore) else None
    latest = max(gather_objects(0 if file is None else file.row_file.generation, group))

    def catch_up() -> None:  # an earlier flush succeeded on other ranks and failed on this one
        while file is not None and file.row_file.generation < latest:
            file.flush()

    on_all_ranks(catch_up)


def rows_of_state(shards: TableCollection) -> dict[str, Tensor]:
    """Maps the tables in a rank's file, which its ``state_dict()`` lacks, by name in the state."""
    if not isinstance(shards._store, FileStore):
        return {}
    tables = _tables(shards)
    return dict(zip(tables, shards._store.file.mapped([*tables.values()]), strict=True))


def _tables(shards: TableCollection) -> dict[str, Tensor]:
    """A rank's tables in its file, by name in the state."""
    return {f"{shards._holder}.{name}.weight": shards._tables[name].weight.detach() for name in shards._tables}


def check_rows(shards: TableCollection, state: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError if a state has a table that cannot be written to this rank's file."""
    if isinstance(shards._store, FileStore):
        check_tensors(dict(state), "", _tables(shards))


def write_rows(shards: TableCollection, state: dict[str, Tensor]) -> None:
    """Writes the tables of a checked state to this rank's file, and removes them from the state.

    Raises:
        OSError, MemoryError: not all were written; the file's last generation is unchanged.
    """
    if not isinstance(shards._store, FileStore):
        return
    own = _tables(shards)
    given = [(i, t, state.pop(name)) for i, (name, t) in enumerate(own.items()) if name in state]
    if given:
        if len(given) < len(own):
            shards.flush()  # before the cache is emptied: it has newer rows of tables that the state lacks
        shards._store.write_tables(given)
        shards._tied.note_written()
