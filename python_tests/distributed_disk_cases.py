"""Functions that test_distributed_disk.py runs on each rank: sharded collections with row files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_cache_cases import train_cached
from distributed_cases import KEYS, Case, Model, batch, blocks, coefficients, collection, restore, sharded, train
from torch import Tensor, nn

import rec_kernels as rk
from rec_kernels.nn.tables.table_file import TableFile

#: Memory for some of a rank's rows. Each of these tables takes 4 to 70 KiB in fp32.
BUDGET = 200_000


def on_disk(case: Case, folder: str, **options: Any) -> Case:
    """The case with its tables in files of a folder."""
    cache = rk.RowCache(0.1, ways=4, backing="disk", path=f"{folder}/rows", memory_budget=BUDGET)
    return replace(case, cache=replace(cache, **options))


def made(case: Case) -> tuple[nn.Module, Any]:
    """A sharded model, and its tables."""
    model = sharded(case, collection(case, device="meta"))
    return model, model.module.ebc


def save(model: nn.Module, folder: str) -> None:
    """Saves a checkpoint of torch.distributed.checkpoint."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def train_and_open(case: Case, other: Case, state: dict[str, Tensor], folder: str) -> dict[str, Any]:
    """Trains from one process's state, saves, reopens the files, and loads the checkpoint into another plan.

    Returns:
        "outputs" and "state" of the training, the state "read" from the reopened files, the state "loaded" by the other
        plan, and "later", a step after that; this rank's files; reports.
    """
    model, tables = made(on_disk(case, folder))
    model.load_state_dict({f"ebc.{name}": t for name, t in state.items()}, strict=False)
    found: dict[str, Any] = {"outputs": train_cached(case, model, tables, [dist.get_rank()])}
    found["state"] = blocks(tables.state_dict())
    save(model, f"{folder}/checkpoint")
    found["report"], found["tiers"], own = tables.memory_report(), tables.tier_report(), tables.shards
    found["own"] = own.memory_report(), own.tier_report()
    tables.flush()
    tables.close(apply=True)
    found["files"] = sorted(path.name for path in Path(folder).glob("rows*"))
    dist.barrier()
    model, tables = made(on_disk(case, folder))
    found["read"] = blocks(tables.state_dict())
    tables.close()
    model, tables = made(on_disk(other, f"{folder}/other"))
    train(replace(other, steps=2), model, [dist.get_rank()])
    restore(model, f"{folder}/checkpoint")
    found["loaded"] = blocks(tables.state_dict())
    train(replace(other, steps=1), model, [dist.get_rank()])
    found["later"] = blocks(tables.state_dict())
    tables.close()
    return found


def read_ahead(case: Case, state: dict[str, Tensor], folder: str) -> tuple[list[Tensor], dict[str, Any], list[int]]:
    """Trains with every batch prefetched; returns outputs, blocks, and the number of rows of each prefetch."""
    rank, counts, outputs = dist.get_rank(), [], []
    model, tables = made(on_disk(case, folder))
    model.load_state_dict({f"ebc.{name}": t for name, t in state.items()}, strict=False)
    prefetch = TableFile.prefetch

    def recorded(file: TableFile, rows: Tensor) -> None:
        counts.append(len(rows))
        prefetch(file, rows)

    TableFile.prefetch = recorded
    try:
        for step in range(case.steps):
            out = model(batch(case, step, [rank]))
            tables.prefetch(batch(case, step + 1, [rank]))
            outputs.append(out.detach().clone())
            (out * coefficients(case, step, [rank])).sum().backward()
        found = blocks(tables.state_dict())
    finally:
        TableFile.prefetch = prefetch
        tables.close()
    return outputs, found, counts


def error_of(call: Callable[[], object]) -> str:
    """Returns the error of a call, type and text."""
    try:
        call()
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def full_disk(*_: object, **__: object) -> None:
    """Raises ENOSPC."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk:
    """Context in which a method of rank 1's files raises ENOSPC."""

    def __init__(self, method: str) -> None:
        self._method, self._before = method, getattr(TableFile, method)

    def __enter__(self) -> None:
        if dist.get_rank() == 1:
            setattr(TableFile, self._method, full_disk)

    def __exit__(self, *_: object) -> None:
        setattr(TableFile, self._method, self._before)


def disk_errors(case: Case, folder: str) -> tuple[list[str], list[str], list[bool]]:
    """Returns errors of all ranks if rank 1's disk is full, files that remain after a failed creation, and comparisons.

    The comparisons: the state before and after errors in a step, and before and after a later step.
    """
    rank, case = dist.get_rank(), on_disk(case, folder)
    errors, files = [], Path(folder)
    with FullDisk("flush"):  # while writing the initial rows
        errors.append(error_of(lambda: made(case)))
    dist.barrier()
    left = sorted(path.name for path in files.glob("rows*"))
    dist.barrier()
    model, tables = made(case)
    train(replace(case, steps=1), model, [rank])
    before = blocks(tables.state_dict())
    output = model(rk.KeyedJaggedTensor.from_lists({key: [[1], [40]] for key in KEYS})).sum()
    with FullDisk("load"):
        errors.append(error_of(output.backward))
        errors.append(error_of(lambda: train(replace(case, steps=1), model, [rank])))
    after = blocks(tables.state_dict())
    train(replace(case, steps=1), model, [rank])
    with FullDisk("flush"):
        errors.append(error_of(tables.state_dict))
        errors.append(error_of(tables.flush))
    train(replace(case, steps=1), model, [rank])  # rank 0's file is one generation ahead
    changed = blocks(tables.state_dict())
    tables.close()
    dist.barrier()
    _, tables = made(case)
    tables.close()
    kept = [
        all(torch.equal(x[1], y[1]) for n in b for x, y in zip(b[n], a[n], strict=True))
        for b, a in ((before, after), (after, changed))
    ]
    return errors, left, kept


def file_errors(case: Case, folder: str) -> list[str]:
    """Returns errors of files that do not belong together, and of unusable paths."""
    rank, errors, on = dist.get_rank(), [], on_disk(case, folder)
    _, tables = made(on)
    tables.close(apply=True)
    dist.barrier()
    if rank == 1:
        Path(folder, "rows.1-of-2").rename(Path(folder, "elsewhere"))
    dist.barrier()
    errors.append(error_of(lambda: made(on)))
    if rank == 1:
        assert not Path(folder, "rows.1-of-2").exists()
        Path(folder, "elsewhere").rename(Path(folder, "rows.1-of-2"))
    dist.barrier()
    errors.append(error_of(lambda: made(replace(on, plan="table_wise"))))  # files of the previous plan
    model, tables = made(on)
    train(replace(case, steps=1), model, [rank])
    if rank == 0:
        tables.shards.flush()
    tables.close()
    errors.append(error_of(lambda: made(on)))
    _, tables = made(on_disk(case, folder, generation=1))
    tables.close()
    errors.append(error_of(lambda: made(on_disk(case, f"{folder}/nowhere"))))
    Path(folder, "other", "rows.1-of-2").mkdir(parents=True, exist_ok=True)
    errors.append(error_of(lambda: made(on_disk(case, f"{folder}/other"))))
    dist.barrier()
    assert not Path(folder, "other", "rows.0-of-2").exists()
    errors.append(error_of(lambda: made(on_disk(case, f"{folder}/other", memory_budget=1000))))
    return errors


def one_process(case: Case, state: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and state of ``train_cached`` in one process without a cache."""
    model = Model(collection(case))
    model.ebc.load_state_dict(state)
    outputs = train_cached(case, model, model.ebc, [0, 1])
    return outputs, dict(model.ebc.state_dict())
