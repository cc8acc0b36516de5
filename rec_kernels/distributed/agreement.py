"""Facts that all ranks must agree upon before anything is sent: options, first rows, batch sizes, refused batches."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rec_kernels.distributed.batches import CheckedBatch
from rec_kernels.distributed.collectives import gathered

Batch = TypeVar("Batch")
Made = TypeVar("Made")


class OtherRankError(RuntimeError):
    """Another rank has an error, and this one stops with it.

    Args:
        message: which rank, and its error's. cause: the type of the first such error.
    """

    def __init__(self, message: str, cause: str = "RuntimeError") -> None:  # pickle makes it of its message
        super().__init__(message)
        self.cause = cause


def check_same(facts: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """A collective that compares a text for each of several names with the first rank's.

    Raises:
        ValueError: on all ranks, if a rank has another text.
    """
    found = gathered({name: _short(text) for name, text in facts.items()}, group)
    for rank, theirs in enumerate(found):
        for name in facts:
            if theirs[name] != found[0][name]:
                raise ValueError(
                    f"{name} must be the same on all ranks: rank 0 has {found[0][name]}, and rank {rank} has "
                    f"{theirs[name]}; a planner's collective_plan() gives all ranks one plan"
                )


def _short(text: str) -> str:
    """The text, or what identifies a long one: a plan of thousands of shards is not sent."""
    return text if len(text) < 2000 else f"{text[:200]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def raise_together(error: Exception | None, group: dist.ProcessGroup, what: str) -> None:
    """A collective that raises any rank's error on all of them.

    Args:
        error: this rank's, or None. what: "refused its batch", which another rank did that has one.

    Raises:
        ``error``; OtherRankError: other ranks have one, with their messages.
    """
    texts = gathered(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
    if told:
        cause = next(text for text in texts if text is not None).partition(":")[0]
        raise OtherRankError(f"another rank {what}: {told}", cause)


def together(call: Callable[[], Made], group: dist.ProcessGroup, what: str) -> Made:
    """Returns what a call has returned; a collective that raises any rank's error on all, as ``raise_together``."""
    made, error = None, None
    try:
        made = call()
    except Exception as raised:  # whatever it is: other ranks wait for what this one tells
        error = raised
    raise_together(error, group, what)
    return made


def check_equal(names: Sequence[str], state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """A collective that compares tensors of a state, which every rank is to have alike, by their checksums.

    Raises:
        RuntimeError: on all ranks, if a rank has other numbers, or other names.
    """
    own = {name: _checksum(state[name]) for name in names}
    found = gathered(own, group)
    for rank, theirs in enumerate(found):
        for name in sorted(theirs.keys() | found[0].keys()):
            if theirs.get(name) != found[0].get(name):
                raise RuntimeError(
                    f"{name} has other numbers in the state of rank {rank} than in that of rank 0, and ranks keep it "
                    "alike: load one state on all of them; no rank has loaded any of its tables"
                )


def _checksum(t: Tensor) -> int:
    numbers: Any = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(numbers)


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites tensors with the first rank's; a collective."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)  # gloo does not know every dtype
        dist.broadcast(flat, source, group=group)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


#: Numbers that a rank tells of its batch: see ``facts_of``.
FACTS = 5
_WANTS, _TRAINS = 1, 2
_RULES = ("error", "ignore", "none")  # of bounds_check, whose number is in the bits above those two


class Agreed(NamedTuple):
    """A batch of all ranks.

    Args:
        batch_sizes: of all ranks. weighted: whether any has weights.
        wants: for each rank, whether its weights want a gradient.
        own_sizes: whether features of any have batch sizes of their own.
        trains: whether any trains, which lets rows into caches: replicas keep theirs alike.
    """

    batch_sizes: list[int]
    weighted: bool
    wants: list[bool]
    own_sizes: bool
    trains: bool

    @classmethod
    def of(cls, told: list[list[int]]) -> Agreed | None:
        """The batch by the ``facts_of`` all ranks; None: a rank's was refused.

        Raises:
            ValueError: on all ranks, if a rank has another ``bounds_check`` than the first.
        """
        sizes, weighted, modes, own_sizes, failed = zip(*told, strict=True)
        if any(failed):
            return None
        rules = [_RULES[mode // (2 * _TRAINS)] for mode in modes]
        if other := next((rank for rank, rule in enumerate(rules) if rule != rules[0]), 0):
            raise ValueError(
                f"bounds_check must be the same on all ranks: rank 0 has {rules[0]!r}, and rank {other} has "
                f"{rules[other]!r}; nothing was looked up"
            )
        wants, trains = [bool(mode & _WANTS) for mode in modes], any(mode & _TRAINS for mode in modes)
        return cls(list(sizes), any(weighted), wants, any(own_sizes), trains)


def facts_of(given: CheckedBatch, error: Exception | None, *, training: bool, bounds_check: str) -> list[int]:
    """[FACTS] numbers that a rank tells all others of its batch.

    Args:
        given: the batch. error: what refused it, or None. training: whether the collection is in training mode.
        bounds_check: the rank's, as ids that one rank lets pass are looked up by others.
    """
    bags = given.bags
    wants = bags.weights is not None and bags.weights.requires_grad and torch.is_grad_enabled()
    mode = _WANTS * wants + _TRAINS * (training and torch.is_grad_enabled())
    mode += 2 * _TRAINS * _RULES.index(bounds_check)
    told = given.samples, bags.weights is not None, mode, bags.strides is not None, error is not None
    return list(map(int, told))


def until_all_end(
    batches: Iterable[Batch], empty: Batch, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Yields this rank's batches, then ``empty`` until every rank's have ended: all ranks get as many.

    Each step is a collective, so every rank has to take all of them. For ``TrainPipelineSparseDist``, too.

    Args:
        batches: of this rank. empty: a batch of no samples, with the features of the others.
        group: the ranks; None: all. device: of the group's collectives.

    Raises:
        Any exception of ``batches``, on this rank. RuntimeError: another rank's batches have raised one, with its
        message.
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
            raise_together(error, dist.group.WORLD if group is None else group, "could not read its batches")
        if not more:
            return
        yield batch
