"""The processes of a run: those that torchrun has started, each with its rows of every batch, or one with all rows."""

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

Made = TypeVar("Made")


@dataclass(frozen=True)
class Ranks:
    """This process among ``world_size``; each method but ``own`` is a collective of all of them.

    Args:
        rank: its number; the first process, 0, writes the run's files and prints.
    """

    rank: int = 0
    world_size: int = 1

    def own(self, rows: int) -> slice:
        """This process's part of ``rows``: parts follow one another, differ by a row at most, and may be empty."""
        return slice(rows * self.rank // self.world_size, rows * (self.rank + 1) // self.world_size)

    def all(self, value: Made) -> list[Made]:
        """The values of all processes, by rank."""
        found: list = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, value)
        return found

    def any(self, flag: bool) -> bool:
        """True if a process says so."""
        if self.world_size > 1:
            count = torch.tensor(int(flag))
            dist.all_reduce(count)
            flag = bool(count)
        return flag

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """Rows of all processes, on the CPU: the first piece of each rank, the second piece of each, and so on."""
        return torch.cat([piece for same in zip(*self.all([p.cpu() for p in pieces]), strict=True) for piece in same])

    def same(self, facts: Mapping[str, str]) -> None:
        """Raises TrainingError, on all processes, unless each has these texts, by their names."""
        given = self.all(facts)
        for rank, found in enumerate(given):
            for name, text in given[0].items():
                if found[name] != text:
                    raise TrainingError(f"{name} of process {rank} is {found[name]}, and {text} of process 0")

    def once(self, make: Callable[[], Made]) -> Made:
        """Returns what ``make`` returned on the first process, on every process; errors as of ``each``."""
        return self.all(self.each(lambda: make() if self.rank == 0 else None))[0]

    def each(self, make: Callable[[], Made]) -> Made:
        """Returns what ``make`` returned on this process, once all have called it.

        An exception of it is raised on its process, and TrainingError with its message on the others.
        """
        made: Any = None
        error = None
        try:
            made = make()
        except Exception as raised:  # whatever it is: the others wait for this process
            error = raised
        texts = self.all(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise TrainingError(f"process {rank} has failed: {text}")
        return made

    def in_turn(self, make: Callable[[], Made]) -> Made:
        """As ``each``, on the first process of each host before the others, which find the files that it wrote."""
        first = self.world_size == 1 or os.environ.get("LOCAL_RANK", str(self.rank)) == "0"
        made: Any = self.each(lambda: make() if first else None)
        return self.each(lambda: made if first else make())


ALONE = Ranks()


def launched_rank() -> int:
    """This process's number as torchrun has given it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def joined_ranks(device: str) -> Iterator[Ranks]:
    """The processes that torchrun, or the caller's ``init_process_group``, has joined; this one, where there are none.

    With device "cuda", each has the GPU of torchrun's LOCAL_RANK. TrainingError: within it, a collective failed, as it
    does where another process has ended.
    """
    begun = dist.is_available() and dist.is_initialized()
    if not begun and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not begun:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    try:
        yield ranks
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise TrainingError(
            f"process {ranks.rank} of {ranks.world_size} cannot reach another one, which has probably ended "
            f"({str(error).splitlines()[0]}): start all of them again, with --resume if the run has a checkpoint"
        ) from error
    if not begun:
        dist.destroy_process_group()
