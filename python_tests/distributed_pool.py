"""A pool of gloo processes that stay alive, because importing TorchRec takes seconds, and a case a fraction of one."""

from __future__ import annotations

import atexit
import importlib
import os
import queue
import tempfile
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


class WorkerError(AssertionError):
    """A case failed on some rank; the message has each rank's traceback."""


def _work(rank: int, world: int, store: str, tasks: Any, results: Any) -> None:
    """Runs tasks until it receives None; a failing rank reports its traceback, and the pool ends."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)
    while (task := tasks.get()) is not None:
        module, function, arguments = task
        try:
            results.put((rank, True, getattr(importlib.import_module(module), function)(*arguments)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
    os._exit(0)  # do not wait for ranks that hang


class Pool:
    """``world`` processes."""

    def __init__(self, world: int) -> None:
        self.world = world
        context = mp.get_context("forkserver")  # the server imports once for all ranks
        context.set_forkserver_preload(
            ["torchrec.distributed", "rec_kernels.distributed", "distributed_torchrec_cases"]
        )
        self._folder = tempfile.TemporaryDirectory()
        self._results = context.Queue()
        self._tasks = [context.Queue() for _ in range(world)]
        store = os.path.join(self._folder.name, "store")
        arguments = [(r, world, store, self._tasks[r], self._results) for r in range(world)]
        self._processes = [context.Process(target=_work, args=a, daemon=True) for a in arguments]
        for process in self._processes:
            process.start()

    def run(self, module: str, function: str, *arguments: object, timeout: float = 120) -> list[Any]:
        """Runs ``function`` of a module of this folder on every rank; returns the results by rank.

        Raises:
            WorkerError: a rank failed or timed out; the pool is closed.
        """
        for tasks in self._tasks:
            tasks.put((module, function, arguments))
        found: dict[int, tuple[bool, Any]] = {}
        try:
            while len(found) < self.world:
                rank, *answer = self._results.get(timeout=timeout if not found or _all_good(found) else 5)
                found[rank] = (bool(answer[0]), answer[1])
        except queue.Empty:
            pass
        if len(found) < self.world or not _all_good(found):
            self.close()
            texts = [f"rank {rank}: {value}" for rank, (good, value) in sorted(found.items()) if not good]
            silent = [rank for rank in range(self.world) if rank not in found]
            raise WorkerError("\n".join([*texts, f"without an answer: {silent}"]))
        return [found[rank][1] for rank in range(self.world)]

    @property
    def is_open(self) -> bool:
        """True if all processes are alive."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _all_good(found: dict[int, tuple[bool, Any]]) -> bool:
    return all(good for good, _ in found.values())


_POOLS: dict[int, Pool] = {}


def pool(world: int) -> Pool:
    """Returns this process's pool of a size; a new one if the last was closed."""
    if world not in _POOLS or not _POOLS[world].is_open:
        _POOLS[world] = Pool(world)
        atexit.register(_POOLS[world].close)
    return _POOLS[world]
