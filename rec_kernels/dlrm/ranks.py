"""Ranks of a run: processes started by torchrun, each with its rows of every batch, or a single process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rec_kernels.dlrm.runs import TrainingError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process's rank among ``world_size``; rank 0 writes the run's files and prints.

    Every method but ``local_slice`` is a collective.
    """

    rank: int = 0
    world_size: int = 1

    def local_slice(self, rows: int) -> slice:
        """This rank's part of ``rows``: parts are contiguous in rank order, differ by at most a row, may be empty."""
        return slice(rows * self.rank // self.world_size, rows * (self.rank + 1) // self.world_size)

    def all_gather(self, value: Result) -> list[Result]:
        """The values of all ranks, in rank order."""
        found: list = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, value)
        return found

    def any_true(self, flag: bool) -> bool:
        """True if ``flag`` is true on any rank."""
        if self.world_size > 1:
            count = torch.tensor(int(flag))
            dist.all_reduce(count)
            flag = bool(count)
        return flag

    def gather_rows(self, pieces: Sequence[Tensor]) -> Tensor:
        """Rows of all ranks, on the CPU: the first piece of every rank, then the second piece of every rank, etc."""
        gathered = self.all_gather([piece.cpu() for piece in pieces])
        return torch.cat([piece for same in zip(*gathered, strict=True) for piece in same])

    def require_equal(self, facts: Mapping[str, str]) -> None:
        """Raises TrainingError on all ranks unless every rank passes the same texts."""
        gathered = self.all_gather(facts)
        for rank, found in enumerate(gathered):
            for name, text in gathered[0].items():
                if found[name] != text:
                    raise TrainingError(f"{name} of process {rank} is {found[name]}, but {text} of process 0")

    def on_rank_0(self, function: Callable[[], Result]) -> Result:
        """Calls ``function`` on rank 0 and returns its result on all ranks; errors as in ``on_all_ranks``."""
        return self.all_gather(self.on_all_ranks(lambda: function() if self.rank == 0 else None))[0]

    def on_all_ranks(self, function: Callable[[], Result]) -> Result:
        """Calls ``function`` and returns its result after all ranks have called it.

        An exception is raised on its own rank, and as TrainingError with the same message on the others.
        """
        result: Any = None
        error = None
        try:
            result = function()
        except Exception as raised:  # any type: the other ranks wait for this one
            error = raised
        texts = self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise TrainingError(f"process {rank} has failed: {text}")
        return result

    def local_rank_0_first(self, function: Callable[[], Result]) -> Result:
        """``on_all_ranks``, on local rank 0 of each host first, so that the others find the files it writes."""
        first = self.world_size == 1 or os.environ.get("LOCAL_RANK", str(self.rank)) == "0"
        result: Any = self.on_all_ranks(lambda: function() if first else None)
        return self.on_all_ranks(lambda: result if first else function())


SINGLE_PROCESS = Ranks()


def torchrun_rank() -> int:
    """This process's rank as set by torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """The ranks of the caller's process group, else of a new one under torchrun, else a single process.

    With device "cuda", each rank uses the GPU of its LOCAL_RANK. A collective that fails in the block, because another
    process has ended, raises TrainingError.
    """
    initialized = dist.is_available() and dist.is_initialized()
    if not initialized and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE_PROCESS
        return
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not initialized:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    try:
        yield ranks
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise TrainingError(
            f"process {ranks.rank} of {ranks.world_size} cannot reach another process, which has probably ended "
            f"({str(error).splitlines()[0]}): start all of them again, with --resume if the run has a checkpoint"
        ) from error
    if not initialized:
        dist.destroy_process_group()
