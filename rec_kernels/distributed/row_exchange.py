"""Rows of ids, or of bags, from the ranks that look them up to those that asked, and gradients back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.distributed.backwards import FACTS
from rec_kernels.distributed.batches import BatchContext
from rec_kernels.distributed.collectives import all_to_all
from rec_kernels.distributed.routes import Entry
from rec_kernels.distributed.weight_gradients import weight_gradients
from rec_kernels.nn.jagged.select_features import NOTHING_BAD, SelectedKeys
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.nn.training.accumulate import Lookup

if TYPE_CHECKING:
    from rec_kernels.distributed.sharded_collection import ShardedCollection


@dataclass(frozen=True)
class Run:
    """Entries of a rank, one after the other, whose rows are the same columns of their tables.

    Args:
        entries: their numbers. columns: of the tables. replica: whether every rank has these rows.
        part: number of the row shard among those of its columns, where rows of bags are sums of such parts; else 0.
        coefficient: whether a gradient goes with the coefficient of its bag.
    """

    entries: slice
    columns: slice
    replica: bool
    part: int
    coefficient: bool

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns.stop - self.columns.start


def runs_of(entries: Sequence[Entry], *, pooled: bool) -> list[Run]:
    """The entries of a rank in as few runs as their order allows; ``pooled``: whether they have rows of bags."""

    def kind(entry: Entry) -> tuple[int, int, bool, int, bool]:
        shard = entry.shard
        part = entry.bounds.index(shard.first_row) if pooled else 0
        return shard.first_column, shard.columns, shard.replica, part, entry.coefficient

    runs, first = [], 0
    for (column, width, replica, part, coefficient), members in itertools.groupby(entries, kind):
        last = first + len(list(members))
        runs.append(Run(slice(first, last), slice(column, column + width), replica, part, coefficient))
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

    def _blocks(self, *, back: bool) -> list[list[_Block]]:
        """For each rank, what travels: rows or, on the way back, gradients."""
        return [
            [
                _Block(
                    places,
                    slice(0, run.width) if self._at_front else run.columns,
                    back and run.coefficient,
                    0 if back else run.part,
                )
                for places, run in part
                if back or not run.replica or rank == self._rank
            ]
            for rank, part in enumerate(self._parts)
        ]

    def sizes(self, *, back: bool) -> list[int]:
        """How many numbers go to, or come from, each rank."""
        return [sum(block.size for block in blocks) for blocks in self._blocks(back=back)]

    def packed(self, rows: Tensor, *, back: bool) -> list[Tensor]:
        """For each rank the numbers that go to it, in one row."""
        empty = rows.new_empty(0)
        return [torch.cat([empty, *(block.packed(rows) for block in blocks)]) for blocks in self._blocks(back=back)]

    def unpack(self, arrived: Sequence[Tensor], rows: Tensor, *, back: bool) -> None:
        """Writes the numbers that have come from each rank to their places in ``rows``, parts added in their order."""
        found: list[tuple[_Block, Tensor]] = []
        for flat, blocks in zip(arrived, self._blocks(back=back), strict=True):
            found += zip(blocks, flat.split([block.size for block in blocks]), strict=True)
        for block, numbers in sorted(found, key=lambda pair: pair[0].part):
            block.unpack(numbers, rows)


class _Block(NamedTuple):
    """Rows of a run, as they travel between two ranks.

    Args:
        places: their numbers in a tensor of rows. columns: of that tensor.
        coefficient: whether its last column goes with them. part: 0, or they are added to what is there.
    """

    places: Tensor
    columns: slice
    coefficient: bool
    part: int

    @property
    def _width(self) -> int:
        return self.columns.stop - self.columns.start + self.coefficient

    @property
    def size(self) -> int:
        return len(self.places) * self._width

    def packed(self, rows: Tensor) -> Tensor:
        chosen = rows[:, self.columns].index_select(0, self.places)
        if self.coefficient:
            chosen = torch.cat([chosen, rows[:, -1:].index_select(0, self.places)], dim=1)
        return chosen.view(-1)

    def unpack(self, numbers: Tensor, rows: Tensor) -> None:
        block, columns = numbers.view(-1, self._width), rows[:, self.columns]
        own = block[:, : columns.shape[1]]
        if self.part:
            columns.index_add_(0, self.places, own)  # each place once: the order is that of the parts
        else:
            columns.index_copy_(0, self.places, own)
        if self.coefficient:
            rows[:, -1:].index_copy_(0, self.places, block[:, -1:])


class RowContext(BatchContext):
    """One batch of all ranks, of which this rank gets rows of ids or of bags.

    Attributes:
        given: this rank's batch. shared: which of its bags samples have, or None.
        asked: where its rows arrive, and their gradients are; None: bags are not sent as rows.
        held: where all ranks' rows are among those of this rank's entries.
        by_feature: whether this rank wants the bags of each feature, and not samples.
    """

    given: SelectedKeys
    shared: SharedBags | None = None
    asked: Parcels | None = None
    held: Parcels
    by_feature: bool = False

    def hold(self, rank: int, counts: Tensor, runs: Sequence[Run]) -> None:
        """Takes note of the rows that this rank looks up.

        Args:
            counts: [entries of this rank, ranks] int64, how many rows each rank gets. runs: of this rank's entries.
        """
        self.row_counts, self.starts = counts, torch.nn.functional.pad(counts.sum(1).cumsum(0), (1, 0))
        self.held = Parcels(rank, by_rank(counts), counts.T.tolist(), [runs] * counts.shape[1], at_front=True)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` uses the tensors."""
        super().record_stream(stream)
        if self.asked is not None and self.given.values.device.type != "cpu":
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


def fetch_rows(rows: Tensor, batch: RowContext, out: Tensor, group: dist.ProcessGroup) -> None:
    """Writes to ``out`` the rows that this rank has asked for.

    Args:
        rows: [rows of all ranks, columns of this rank's entries], float32, which it has looked up.
        out: zeros, which rows stay that no rank has: of ids out of range of a table that is split by rows.
    """
    blocks, received = batch.held.packed(rows, back=False), batch.asked.sizes(back=False)
    batch.asked.unpack(exchanged(blocks, received, group), out, back=False)


def send_gradients(
    grad: Tensor, module: ShardedCollection, facts: Tensor, batch: RowContext, *, pooled: bool = False
) -> Tensor | None:
    """Sends each rank the gradients of the rows that it has looked up, which is the update of its tables.

    Args:
        grad: float32, of the rows that this rank has asked for; with ``pooled``, its last column has the coefficients
            of bags. facts: ``Backwards.facts``.

    Returns:
        The gradients of this rank's weights, or None if it wants none.
    """
    blocks, received = batch.asked.packed(grad, back=True), batch.held.sizes(back=True)
    arrived = exchanged([torch.cat([facts, b]) for b in blocks], [FACTS + size for size in received], module.group)
    told = torch.stack([block[:FACTS] for block in arrived])
    module.backwards.check(told)
    bags, width = batch.bags, max((e.shard.columns for e in module.routes.own), default=0)
    own = grad.new_zeros(len(bags.offsets) - 1, width + pooled)
    own[:, width:] = 1
    batch.held.unpack([block[FACTS:] for block in arrived], own, back=True)
    factors, columns = None, own[:, :width].contiguous()
    if pooled and module.routes.coefficients[module.routes.rank]:
        factors = own[:, -1].repeat_interleave(bags.offsets.diff())
    grad_weights = weight_gradients(batch.looked_up(columns), factors, module, batch) if any(batch.wants) else None
    scales = module.gradient_scales(batch.batch_sizes)
    if set(scales) != {1.0}:
        each = columns.new_tensor(scales).repeat(len(batch.row_counts))
        columns *= each.repeat_interleave(batch.row_counts.flatten())[:, None]
    module.backwards.take(batch.begun, lookup_of(batch.looked_up(columns, trains=True), factors, batch), told)
    return grad_weights


def lookup_of(grad: Tensor, factors: Tensor | None, batch: BatchContext) -> Lookup:
    """The update of this rank: gradients of its columns or rows, and ids with their weights.

    Args:
        factors: for each id that this rank looks up, what its bag's gradient is divided by, inverted; None: nothing.
    """
    bags, weights = batch.bags, batch.bags.weights
    if factors is not None:
        weights = factors if weights is None else weights * factors
    status = torch.full((2,), NOTHING_BAD, dtype=torch.int64, device=grad.device)
    return Lookup(grad, bags.values, bags.offsets, weights, status, batch.starts)


class RowExchange(torch.autograd.Function):
    """A row for each id of this rank, from what all ranks have looked up; its backward is the update.

    Every rank runs the backward, also one without tables or ids.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        rows: Tensor,
        weights: Tensor | None,
        module: ShardedCollection,
        batch: RowContext,
    ) -> Tensor:
        """[N, largest D] of the output dtype; columns behind a D are zeros.

        Args:
            token: what autograd calls the backward for.
            rows: [ids of all ranks, columns of this rank's entries], float32.
            weights: this rank's per-sample weights, if they want a gradient.
        """
        out = rows.new_zeros(len(batch.given.values), max(module.output_dims, default=0))
        fetch_rows(rows, batch, out, module.group)
        ctx.module, ctx.batch = module, batch
        return out.to(module.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sends each rank the gradients of its rows."""
        module, batch, grad = ctx.module, ctx.batch, grad.float()
        grad_weights = send_gradients(grad, module, module.backwards.facts(batch.begun, grad), batch)
        return None, None, grad_weights, None, None


def exchanged(blocks: Sequence[Tensor], received: list[int], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Sends a flat block to each rank; the blocks from all ranks, of ``received`` elements."""
    return all_to_all(torch.cat([*blocks]), [len(block) for block in blocks], received, group).split(received)
