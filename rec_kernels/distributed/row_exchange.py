"""Rows of ids, or of bags, from the ranks that look them up to those that asked, and gradients back."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torchrec.streamable import Multistreamable

from rec_kernels.distributed.backwards import FACTS, Begun
from rec_kernels.distributed.messages import Arrived, Due, Mail, Message
from rec_kernels.distributed.routes import Entry
from rec_kernels.distributed.trips import Trip
from rec_kernels.distributed.weight_gradients import weight_gradients
from rec_kernels.distributed.wire import Block
from rec_kernels.nn.jagged.select_features import NOTHING_BAD, SelectedKeys, bags_of_feature, ids_per_feature
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.nn.training.accumulate import Lookup

if TYPE_CHECKING:
    from rec_kernels.distributed.compositions import Composition
    from rec_kernels.distributed.id_splits import IdSplits


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


def runs_of(entries: Sequence[Entry], by_id: Collection[int] | None) -> list[Run]:
    """The entries of a rank in as few runs as their order allows.

    Args:
        by_id: the features of which rows of ids are sent; None: of all. Shards have parts of the bags of the others.
    """

    def kind(entry: Entry) -> tuple[int, int, bool, int, bool]:
        shard = entry.shard
        part = 0 if by_id is None or entry.feature in by_id else entry.bounds.index(shard.first_row)
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

    Attributes:
        places: as given.
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
        self._rank, self._at_front = rank, at_front
        self.places = places

    def _parts_of(self, *, back: bool) -> list[list[_Part]]:
        """For each rank, what travels: rows or, on the way back, gradients."""
        return [
            [
                _Part(
                    places,
                    slice(0, run.width) if self._at_front else run.columns,
                    back and run.coefficient,
                    0 if back else run.part,
                )
                for places, run in parts
                if back or not run.replica or rank == self._rank
            ]
            for rank, parts in enumerate(self._parts)
        ]

    def due(self, *, back: bool, facts: int = 0) -> list[Due]:
        """The messages to or from each rank, with ``facts`` numbers in front."""
        return [
            Due(
                facts + sum(len(part.places) for part in parts if part.coefficient),
                [Block(len(part.places), part.width, part.width) for part in parts],
            )
            for parts in self._parts_of(back=back)
        ]

    def messages(self, rows: Tensor, *, back: bool, facts: Sequence[Tensor] = ()) -> list[Message]:
        """A message to each rank."""
        return [
            Message(
                [*facts, *(rows[:, -1].index_select(0, part.places) for part in parts if part.coefficient)],
                [([rows[:, part.columns].index_select(0, part.places)], part.width) for part in parts],
            )
            for parts in self._parts_of(back=back)
        ]

    def unpack(self, arrived: Sequence[Arrived], rows: Tensor, *, back: bool, facts: int = 0) -> None:
        """Writes what has come from each rank to its places in ``rows``, parts added in their order."""
        found: list[tuple[_Part, Tensor]] = []
        for message, parts in zip(arrived, self._parts_of(back=back), strict=True):
            found += zip(parts, message.blocks, strict=True)
            numbers = message.numbers[facts:]
            for part in parts:
                if part.coefficient:
                    own, numbers = numbers[: len(part.places)], numbers[len(part.places) :]
                    rows[:, -1].index_copy_(0, part.places, own)
        for part, block in sorted(found, key=lambda pair: pair[0].number):
            columns = rows[:, part.columns]
            if part.number:
                columns.index_add_(0, part.places, block)  # each place once: the order is that of the parts
            else:
                columns.index_copy_(0, part.places, block)


class _Part(NamedTuple):
    """Rows of a run, as they travel between two ranks.

    Args:
        places: their numbers in a tensor of rows. columns: of that tensor.
        coefficient: whether its last column goes with them. number: 0, or they are added to what is there.
    """

    places: Tensor
    columns: slice
    coefficient: bool
    number: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns.stop - self.columns.start


class RowContext(Multistreamable):
    """One batch of all ranks, from its ids to the update, of which this rank gets samples, or rows of ids or of bags.

    Attributes:
        splits: what ranks tell one another of it, until it is looked up. batch_sizes: of all ranks.
        features: this rank's batch. given, inverse: the bags of its lookups, as of ``PartMap.lookups_of``.
        shared: which bags of features samples have, or None.
        counts: [F, B] ids of this rank's bags that count, or None where nothing needs them.
        bags: the ids that this rank looks up, of all ranks' samples, key-major.
        trains: whether any rank trains. wants: for each, whether its per-sample weights want a gradient. fed: this
            rank's batch, if they do.
        asked: where its rows arrive, and their gradients are; None: bags are not sent as rows.
        sizes: how many rows each feature gets, in place of ``given.strides``, the numbers of its bags.
        bag_of_row: where some features' rows are those of ids, the bag of each row; else None.
        starts, row_counts, held: where rows are sent, and not the columns of samples, where those of this rank's
            entries begin, [entries, ranks] how many each rank gets, and where they are among those.
        by_feature: whether this rank wants the bags of each feature, and not samples.
        is_ahead: whether it is not looked up, only read from files.
        composition: how columns are made of what this rank looks up, or None where they are that.
        begun: the lookup, from its output on.
        answers: gradients of weights that this rank has of its own samples: feature -> [N].
    """

    splits: IdSplits
    features: SelectedKeys
    given: SelectedKeys
    inverse: dict[int, Tensor]
    shared: SharedBags | None = None
    counts: Tensor | None = None
    bags: SelectedKeys | None = None
    trains = False
    fed: SelectedKeys | None = None
    asked: Parcels | None = None
    sizes: list[int]
    bag_of_row: Tensor | None = None
    starts: Tensor | None = None
    row_counts: Tensor | None = None
    held: Parcels
    by_feature = False
    is_ahead = False
    composition: Composition | None = None
    begun: Begun

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.wants: list[bool] = []
        self.answers: dict[int, Tensor] = {}

    def hold(self, rank: int, counts: Tensor, runs: Sequence[Run]) -> None:
        """Takes note of the rows that this rank looks up.

        Args:
            counts: [entries of this rank, ranks] int64, how many rows each rank gets. runs: of this rank's entries.
        """
        self.row_counts, self.starts = counts, torch.nn.functional.pad(counts.sum(1).cumsum(0), (1, 0))
        self.held = Parcels(rank, by_rank(counts), counts.T.tolist(), [runs] * counts.shape[1], at_front=True)

    def looked_up(self, grad: Tensor, *, trains: bool = False) -> Tensor:
        """The gradients of what this rank has looked up, of those of its columns; ``trains`` is ``Composition``'s."""
        return grad if self.composition is None else self.composition.backward(grad, trains=trains)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` uses the tensors."""
        batches = [batch[:3] for batch in (self.bags, self.fed) if batch is not None]
        if self.asked is not None:
            batches.append((self.given.offsets, self.features.offsets, self.asked.places))
        for t in (self.counts, *itertools.chain(*batches)):
            if isinstance(t, Tensor) and t.device.type != "cpu":
                t.record_stream(stream)


def _widened(rows: Tensor, width: int) -> Tensor:
    """[N, width]: zeros behind the columns."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


def by_rank(counts: Tensor) -> Tensor:
    """[N]: the numbers of rows that lie entry by entry, and there rank by rank, listed by rank and then by entry.

    Args:
        counts: [entries, ranks] int64 rows of each block.
    """
    flat = counts.reshape(-1)
    firsts, sizes = (flat.cumsum(0) - flat).view_as(counts).T.reshape(-1), counts.T.reshape(-1)
    moved = firsts - (sizes.cumsum(0) - sizes)
    return torch.arange(int(flat.sum()), device=counts.device) + moved.repeat_interleave(sizes)


class RowTrip(Trip):
    """A row for each id of this rank, from what all ranks have looked up."""

    _rows: Mail
    _is_pooled = False

    def send(self, rows: Tensor) -> None:
        """Begins to send each rank the rows that it has asked for.

        Args:
            rows: [rows of all ranks, columns of this rank's entries], float32.
        """
        batch = self.batch
        messages, due = batch.held.messages(rows, back=False), batch.asked.due(back=False)
        self._rows = self.module.forward_post.send(messages, due, batch.begun.draw)

    def receive(self) -> Tensor:
        """[N, largest D]: zeros behind a D, and where no rank has a row: an id is out of range of its shards."""
        batch, parts = self.batch, self.module.parts
        out = self._fetched(len(batch.given.values))
        if not parts.joins:
            return out
        rows = zip(out.split(ids_per_feature(batch.given, len(parts.lookups))), parts.dims, strict=True)
        lookups, blocks = [own[:, :dim] for own, dim in rows], []
        for f, feature in enumerate(parts.features):
            block = self.joined.compose(f, lookups)
            if feature.by_id:
                weights = bags_of_feature(batch.features, f, len(parts.features)).weights
                block = (block if weights is None else weights[:, None] * block) + 0.0  # and no -0
            blocks.append(_widened(block, out.shape[1]))
        return torch.cat(blocks)

    def _fetched(self, count: int) -> Tensor:
        """The rows that this rank has asked for, in their places: [count, largest D]."""
        module = self.module
        shape = count, max(module.output_dims, default=0)
        out = torch.zeros(shape, dtype=torch.float32, device=module.shards.device)
        self.batch.asked.unpack(self._rows.wait(), out, back=False)
        del self._rows
        return out

    def send_gradients(self, grad: Tensor) -> None:
        """Begins to send each rank the gradients of the rows that it has looked up."""
        batch, parts = self.batch, self.module.parts
        if parts.joins:
            rows = zip(
                grad.split(ids_per_feature(batch.features, len(parts.features))), self.module.output_dims, strict=True
            )
            features = [own[:, :dim] for own, dim in rows]
            lookups = [self.joined.multiply(u, own) for u, own in enumerate(self.joined.divide(features))]
            for f, feature in enumerate(parts.features):
                if batch.fed is not None and feature.by_id:
                    each = torch.arange(len(features[f]) + 1, device=grad.device)
                    batch.answers[f] = self.joined.weight_gradients(f, features[f], each)
            grad = torch.cat([_widened(own, grad.shape[1]) for own in lookups])
        self._return(grad)

    def _return(self, grad: Tensor) -> None:
        """Sends gradients behind what ranks tell one another.

        Args:
            grad: float32, of the rows that this rank has asked for; where they are pooled, its last column has the
                coefficients of bags.
        """
        facts = self.module.backwards.facts(self.batch.begun, grad)
        messages = self.batch.asked.messages(grad, back=True, facts=[facts])
        due = self.batch.held.due(back=True, facts=FACTS)
        self._gradients = self.module.backward_post.send(messages, due, self.batch.begun.draw)

    def receive_gradients(self) -> Tensor | None:
        """Updates this rank's tables with the gradients of all samples; see ``Trip``."""
        module, batch, pooled = self.module, self.batch, self._is_pooled
        arrived, told = self._arrived()
        bags, width = batch.bags, max((e.shard.columns for e in module.routes.own), default=0)
        own = told.new_zeros(len(bags.offsets) - 1, width + pooled)
        own[:, width:] = 1
        batch.held.unpack(arrived, own, back=True, facts=FACTS)
        factors, columns = None, own[:, :width].contiguous()
        if pooled and module.routes.coefficients[module.routes.rank]:
            factors = own[:, -1].repeat_interleave(bags.offsets.diff())
        grad_weights = weight_gradients(batch.looked_up(columns), module, batch) if any(batch.wants) else None
        scales = module.gradient_scales(batch.batch_sizes)
        if set(scales) != {1.0}:
            each = columns.new_tensor(scales).repeat(len(batch.row_counts))
            columns *= each.repeat_interleave(batch.row_counts.flatten())[:, None]
        module.backwards.take(batch.begun, lookup_of(batch.looked_up(columns, trains=True), factors, batch), told)
        return grad_weights


def lookup_of(grad: Tensor, factors: Tensor | None, batch: RowContext) -> Lookup:
    """The update of this rank: gradients of its columns or rows, and ids with their weights.

    Args:
        factors: for each id that this rank looks up, what its bag's gradient is divided by, inverted; None: nothing.
    """
    bags, weights = batch.bags, batch.bags.weights
    if factors is not None:
        weights = factors if weights is None else weights * factors
    status = torch.full((2,), NOTHING_BAD, dtype=torch.int64, device=grad.device)
    return Lookup(grad, bags.values, bags.offsets, weights, status, batch.starts)
