"""Agreement of all ranks: equal options and states, errors that all ranks raise, equal numbers of batches."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rec_kernels.distributed.collectives import gather_objects

Batch = TypeVar("Batch")
Made = TypeVar("Made")


class OtherRankError(RuntimeError):
    """An error of another rank.

    Args:
        message: the rank and its error's message. cause: name of the type of the first such error.
    """

    def __init__(self, message: str, cause: str = "RuntimeError") -> None:  # unpickling passes only the message
        super().__init__(message)
        self.cause = cause


def check_same_on_all_ranks(texts: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Compares the text of each name with the first rank's; a collective.

    Raises:
        ValueError: on all ranks, if a rank has another text.
    """
    found = gather_objects({name: _short(text) for name, text in texts.items()}, group)
    for rank, theirs in enumerate(found):
        for name in texts:
            if theirs[name] != found[0][name]:
                advice = "; a planner's collective_plan() gives all ranks the same plan" if name == "the plan" else ""
                raise ValueError(
                    f"{name} must be the same on all ranks: rank 0 has {found[0][name]}, but rank {rank} has "
                    f"{theirs[name]}{advice}"
                )


def _short(text: str) -> str:
    """Replaces a long text, as a plan of thousands of shards, by its beginning and hash."""
    return text if len(text) < 2000 else f"{text[:200]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def raise_on_all_ranks(error: Exception | None, group: dist.ProcessGroup, what: str) -> None:
    """Raises any rank's error on all ranks; a collective.

    Args:
        error: this rank's, or None. what: what a rank with an error did, as "refused its batch", for the message.

    Raises:
        ``error``; OtherRankError: only other ranks have errors, with their messages.
    """
    texts = gather_objects(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    message = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
    if message:
        cause = next(text for text in texts if text is not None).partition(":")[0]
        raise OtherRankError(f"another rank {what}: {message}", cause)


def run_on_all_ranks(call: Callable[[], Made], group: dist.ProcessGroup, what: str) -> Made:
    """Returns the result of a function, or raises as ``raise_on_all_ranks``; a collective."""
    made, error = None, None
    try:
        made = call()
    except Exception as raised:  # of any type: other ranks wait in the collective
        error = raised
    raise_on_all_ranks(error, group, what)
    return made


def check_equal_tensors(names: Sequence[str], state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Compares the tensors of a state that must be equal on all ranks, by checksums; a collective.

    Raises:
        RuntimeError: on all ranks, if a rank has other values or names.
    """
    own = {name: _checksum(state[name]) for name in names}
    found = gather_objects(own, group)
    for rank, theirs in enumerate(found):
        for name in sorted(theirs.keys() | found[0].keys()):
            if theirs.get(name) != found[0].get(name):
                raise RuntimeError(
                    f"{name} in the state of rank {rank} differs from that of rank 0: load the same state on "
                    "all of them; no rank has loaded any of its tables"
                )


def _checksum(t: Tensor) -> int:
    data: Any = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites tensors with the first rank's; a collective."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)  # gloo lacks some dtypes
        dist.broadcast(flat, source, group=group)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def until_all_end(
    batches: Iterable[Batch], empty: Batch, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Yields this rank's batches, then ``empty`` until every rank's batches have ended: all ranks get the same number.

    Each step is a collective, so every rank must consume all of them. It also serves ``TrainPipelineSparseDist``.

    Args:
        batches: of this rank. empty: a batch of no samples, with the features of the others.
        group: the ranks; None: all. device: of the group's collectives.

    Raises:
        Any exception of ``batches``, on this rank. RuntimeError: another rank's batches raised one, with its message.
    """
    source: Iterator[Batch] | None = None
    ended = False
    while True:
        batch, error = empty, None
        if not ended:
            try:
                source = iter(batches) if source is None else source
                batch = next(source)
            except StopIteration:
                ended = True
            except Exception as raised:
                error = raised
        left = torch.tensor([not ended, error is not None], dtype=torch.int64, device=device)
        dist.all_reduce(left, group=group)
        more, failed = left.tolist()
        if failed:
            raise_on_all_ranks(error, dist.group.WORLD if group is None else group, "could not read its batches")
        if not more:
            return
        yield batch
