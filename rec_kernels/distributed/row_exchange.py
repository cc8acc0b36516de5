"""Rows from the ranks that look them up to the ids that name them, and gradients back: one autograd function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.distributed.backwards import FACTS
from rec_kernels.distributed.batches import BatchContext
from rec_kernels.distributed.collectives import all_to_all
from rec_kernels.distributed.routes import Entry
from rec_kernels.nn.jagged.select_features import NOTHING_BAD, SelectedKeys
from rec_kernels.nn.training.accumulate import Lookup

if TYPE_CHECKING:
    from rec_kernels.distributed.sharded_sequences import ShardedEmbeddingCollection


@dataclass(frozen=True)
class Run:
    """Entries of a rank, one after the other, whose rows are the same columns of their tables.

    Args:
        entries: their numbers. columns: of the tables. replica: whether every rank has these rows.
    """

    entries: slice
    columns: slice
    replica: bool

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns.stop - self.columns.start


def runs_of(entries: Sequence[Entry]) -> list[Run]:
    """The entries of a rank in as few runs as their order allows."""

    def kind(entry: Entry) -> tuple[int, int, bool]:
        return entry.shard.first_column, entry.shard.columns, entry.shard.replica

    runs, first = [], 0
    for (column, width, replica), members in itertools.groupby(entries, kind):
        last = first + len(list(members))
        runs.append(Run(slice(first, last), slice(column, column + width), replica))
        first = last
    return runs


class Parcels:
    """Rows that this rank sends to each rank, or gets from each, and the tensor where they are.

    Every rank has the rows of replicas: each takes its own, and their gradients go to all ranks.

    Args:
        rank: this process's.
        places: numbers of rows of that tensor, rank by rank and entry by entry.
        counts: for each rank, how many rows each entry has. runs: for each rank, of its entries.
        at_front: whether the columns of a shard are the first ones of the tensor, and not those of its table.
    """

    def __init__(
        self,
        rank: int,
        places: Tensor,
        counts: Sequence[Sequence[int]],
        runs: Sequence[Sequence[Run]],
        *,
        at_front: bool,
    ) -> None:
        sizes = [sum(own[run.entries]) for own, mine in zip(counts, runs, strict=True) for run in mine]
        parts = iter(places.split(sizes))
        self._parts = [[(next(parts), run) for run in mine] for mine in runs]
        self._rank, self._places, self._at_front = rank, places, at_front

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` uses the tensors."""
        self._places.record_stream(stream)

    def _blocks(self, *, back: bool) -> list[list[tuple[Tensor, slice]]]:
        """For each rank, places and columns of what travels: rows or, on the way back, gradients."""
        return [
            [
                (places, slice(0, run.width) if self._at_front else run.columns)
                for places, run in part
                if back or not run.replica or rank == self._rank
            ]
            for rank, part in enumerate(self._parts)
        ]

    def sizes(self, *, back: bool) -> list[int]:
        """How many numbers go to, or come from, each rank."""
        return [sum(len(at) * (c.stop - c.start) for at, c in blocks) for blocks in self._blocks(back=back)]

    def packed(self, rows: Tensor, *, back: bool) -> list[Tensor]:
        """For each rank the numbers that go to it, in one row."""
        empty = rows.new_empty(0)
        return [
            torch.cat([empty, *(rows[:, columns].index_select(0, at).view(-1) for at, columns in blocks)])
            for blocks in self._blocks(back=back)
        ]

    def unpack(self, arrived: Sequence[Tensor], rows: Tensor, *, back: bool) -> None:
        """Writes the numbers that have come from each rank to their places in ``rows``."""
        for flat, blocks in zip(arrived, self._blocks(back=back), strict=True):
            widths = [c.stop - c.start for _, c in blocks]
            parts = flat.split([len(at) * width for (at, _), width in zip(blocks, widths, strict=True)])
            for (places, columns), width, part in zip(blocks, widths, parts, strict=True):
                rows[:, columns].index_copy_(0, places, part.view(-1, width))


class RowContext(BatchContext):
    """One batch of all ranks.

    Attributes:
        given: this rank's batch. asked: where its rows arrive, and their gradients are.
        starts: where the ids of this rank's entries begin. held: where all ranks' rows are among those.
    """

    given: SelectedKeys
    asked: Parcels
    starts: Tensor
    held: Parcels

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` uses the tensors."""
        super().record_stream(stream)
        if self.given.values.device.type != "cpu":
            self.given.offsets.record_stream(stream)
            self.asked.record_stream(stream)


def by_rank(counts: Tensor) -> Tensor:
    """[N]: the numbers of rows that lie entry by entry, and there rank by rank, listed by rank and then by entry.

    Args:
        counts: [entries, ranks] int64 rows of each block.
    """
    flat = counts.reshape(-1)
    firsts, sizes = (flat.cumsum(0) - flat).view_as(counts).T.reshape(-1), counts.T.reshape(-1)
    moved = firsts - (sizes.cumsum(0) - sizes)
    return torch.arange(int(flat.sum()), device=counts.device) + moved.repeat_interleave(sizes)


class RowExchange(torch.autograd.Function):
    """A row for each id of this rank, from what all ranks have looked up; its backward is the update.

    Every rank runs the backward, also one without tables or ids.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, rows: Tensor, module: ShardedEmbeddingCollection, batch: RowContext) -> Tensor:
        """[N, largest D] of the output dtype; columns behind a D are zeros.

        Args:
            token: what autograd calls the backward for.
            rows: [ids of all ranks, columns of this rank's entries], float32.
        """
        received = batch.asked.sizes(back=False)
        arrived = exchanged(batch.held.packed(rows, back=False), received, module.group)
        # Ids that are out of range of a table that is split by rows were sent to nobody: their rows are zeros.
        out = rows.new_zeros(len(batch.given.values), max(module.output_dims, default=0))
        batch.asked.unpack(arrived, out, back=False)
        ctx.module, ctx.batch = module, batch
        return out.to(module.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sends each rank the gradients of its rows, which updates its tables with those of all ids."""
        module, batch = ctx.module, ctx.batch
        rank, grad = module.routes.rank, grad.float()
        facts = module.backwards.facts(batch.begun, grad)
        scale = module.gradient_scales(batch.batch_sizes)[rank]
        blocks = batch.asked.packed(grad * scale if scale != 1 else grad, back=True)
        received = [FACTS + size for size in batch.held.sizes(back=True)]
        arrived = exchanged([torch.cat([facts, block]) for block in blocks], received, module.group)
        bags, width = batch.bags, max((e.shard.columns for e in module.routes.own), default=0)
        own = grad.new_zeros(len(bags.values), width)
        batch.held.unpack([block[FACTS:] for block in arrived], own, back=True)
        status = torch.full((2,), NOTHING_BAD, dtype=torch.int64, device=grad.device)
        lookup = Lookup(own, bags.values, bags.offsets, bags.weights, status, batch.starts)
        told = torch.stack([block[:FACTS] for block in arrived])
        module.backwards.check(told)
        module.backwards.take(batch.begun, lookup, told)
        return None, None, None, None


def exchanged(blocks: Sequence[Tensor], received: list[int], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Sends a flat block to each rank; the blocks from all ranks, of ``received`` elements."""
    return all_to_all(torch.cat([*blocks]), [len(block) for block in blocks], received, group).split(received)
