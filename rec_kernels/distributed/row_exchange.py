"""Rows from the ranks that look them up to the ids that name them, and gradients back: one autograd function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.distributed.batches import BatchContext
from rec_kernels.distributed.exchange import all_to_all
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

    def packed(self, rows: Tensor, *, back: bool) -> Tensor:
        """What goes to all ranks, in one flat tensor."""
        blocks = [rows[:, c].index_select(0, at).view(-1) for own in self._blocks(back=back) for at, c in own]
        return torch.cat([rows.new_empty(0), *blocks])

    def unpack(self, flat: Tensor, rows: Tensor, *, back: bool) -> None:
        """Writes what has come from all ranks to its places in ``rows``."""
        start = 0
        for places, columns in itertools.chain(*self._blocks(back=back)):
            width = columns.stop - columns.start
            block = flat[start : start + len(places) * width].view(-1, width)
            rows[:, columns].index_copy_(0, places, block)
            start += block.numel()


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
        sent, received = batch.held.sizes(back=False), batch.asked.sizes(back=False)
        flat = all_to_all(batch.held.packed(rows, back=False), sent, received, module.group)
        # Ids that are out of range of a table that is split by rows were sent to nobody: their rows are zeros.
        out = rows.new_zeros(len(batch.given.values), max(module.output_dims, default=0))
        batch.asked.unpack(flat, out, back=False)
        ctx.module, ctx.batch, ctx.pending = module, batch, module.pending
        return out.to(module.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sends each rank the gradients of its rows, which updates its tables with those of all ids."""
        module, batch = ctx.module, ctx.batch
        module.check_pending(ctx.pending)
        scale = module.gradient_scale(batch.batch_sizes)
        grad = grad.float() * scale if scale != 1 else grad.float()
        sent, received = batch.asked.sizes(back=True), batch.held.sizes(back=True)
        flat = all_to_all(batch.asked.packed(grad, back=True), sent, received, module.group)
        own = grad.new_zeros(len(batch.bags.values), max((e.shard.columns for e in module.routes.own), default=0))
        batch.held.unpack(flat, own, back=True)
        status = torch.full((2,), NOTHING_BAD, dtype=torch.int64, device=grad.device)
        lookup = Lookup(own, batch.bags.values, batch.bags.offsets, batch.bags.weights, status, batch.starts)
        if ctx.pending is None:
            module.update(lookup)
        else:
            ctx.pending.add(lookup)
        return None, None, None, None
