"""Packing of rows, and of their gradients, into the messages between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.distributed.messages import Message, MessageShape, ReceivedMessage
from rec_kernels.distributed.qcomm_codec import BlockShape
from rec_kernels.distributed.routes import Entry


@dataclass(frozen=True)
class EntryRun:
    """Consecutive entries of a rank whose rows are the same columns of their tables.

    Args:
        entries: their indices. columns: of the tables. replica: whether every rank has these rows.
        row_shard: index of the row shard if rows are partial sums of bags, else 0.
        divides_by_count: whether the gradient of a row comes with the factor 1 / ids of its bag.
    """

    entries: slice
    columns: slice
    replica: bool
    row_shard: int
    divides_by_count: bool

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns.stop - self.columns.start


def group_entries(entries: Sequence[Entry], by_id: Collection[int] | None) -> list[EntryRun]:
    """Groups the entries of a rank into as few runs as their order allows.

    Args:
        by_id: features that send a row per id; None: all. Row shards of the others send partial sums of bags.
    """

    def kind(entry: Entry) -> tuple[int, int, bool, int, bool]:
        shard = entry.shard
        row_shard = 0 if by_id is None or entry.feature in by_id else entry.bounds.index(shard.first_row)
        return shard.first_column, shard.columns, shard.replica, row_shard, entry.divides_by_count

    runs, first = [], 0
    for (column, width, replica, row_shard, divides), members in itertools.groupby(entries, kind):
        last = first + len(list(members))
        runs.append(EntryRun(slice(first, last), slice(column, column + width), replica, row_shard, divides))
        first = last
    return runs


class RowPacker:
    """Packs rows of a tensor into a message per rank, and unpacks messages into it.

    The forward sends rows, the backward their gradients. Every rank has the rows of replicas: the forward does not send
    them, not even to the rank itself, which would round them, and gradients go to all ranks in the backward.

    Args:
        rank: this process's.
        rows: indices into the tensor, rank by rank and entry by entry.
        counts: for each rank, the rows of each entry. runs: for each rank, of its entries.
        compact: whether a shard's columns are the first ones of the tensor instead of those of its table.

    Attributes:
        rows: as given.
    """

    def __init__(
        self,
        rank: int,
        rows: Tensor,
        counts: Sequence[Sequence[int]],
        runs: Sequence[Sequence[EntryRun]],
        *,
        compact: bool,
    ) -> None:
        sizes = [sum(own[run.entries]) for own, mine in zip(counts, runs, strict=True) for run in mine]
        blocks = iter(rows.split(sizes))
        self._runs = [[(next(blocks), run) for run in mine] for mine in runs]
        self._rank, self._compact = rank, compact
        self.rows = rows

    def _packed_runs(self, *, backward: bool) -> list[list[_PackedRun]]:
        """For each rank, the runs in its message."""
        return [
            [self._packed(rows, run, backward=backward) for rows, run in runs if backward or not run.replica]
            for runs in self._runs
        ]

    def _packed(self, rows: Tensor, run: EntryRun, *, backward: bool) -> _PackedRun:
        columns = slice(0, run.width) if self._compact else run.columns
        return _PackedRun(rows, columns, backward and run.divides_by_count, 0 if backward else run.row_shard)

    def replicas(self) -> list[_PackedRun]:
        """This rank's runs of replicas, which no forward message has."""
        return [self._packed(rows, run, backward=False) for rows, run in self._runs[self._rank] if run.replica]

    def shapes(self, *, backward: bool, header: int = 0) -> list[MessageShape]:
        """Shapes of the messages to or from each rank, which begin with ``header`` floats."""
        return [
            MessageShape(
                header + sum(len(run.rows) for run in runs if run.divides_by_count),
                [BlockShape(len(run.rows), run.width, run.width) for run in runs],
            )
            for runs in self._packed_runs(backward=backward)
        ]

    def pack(self, x: Tensor, *, backward: bool, header: Sequence[Tensor] = ()) -> list[Message]:
        """Returns a message to each rank with rows of ``x``, whose last column has the factors."""
        return [
            Message(
                [*header, *(x[:, -1].index_select(0, run.rows) for run in runs if run.divides_by_count)],
                [([x[:, run.columns].index_select(0, run.rows)], run.width) for run in runs],
            )
            for runs in self._packed_runs(backward=backward)
        ]

    def unpack(self, received: Sequence[ReceivedMessage], x: Tensor, *, backward: bool, header: int = 0) -> None:
        """Writes the messages of all ranks to rows of ``x``; partial sums are added in the order of row shards."""
        found: list[tuple[_PackedRun, Tensor]] = []
        for message, runs in zip(received, self._packed_runs(backward=backward), strict=True):
            found += zip(runs, message.blocks, strict=True)
            floats = message.floats[header:]
            for run in runs:
                if run.divides_by_count:
                    own, floats = floats[: len(run.rows)], floats[len(run.rows) :]
                    x[:, -1].index_copy_(0, run.rows, own)
        for run, block in sorted(found, key=lambda pair: pair[0].row_shard):
            columns = x[:, run.columns]
            if run.row_shard:
                columns.index_add_(0, run.rows, block)  # rows are distinct, so the order is that of row shards
            else:
                columns.index_copy_(0, run.rows, block)


class _PackedRun(NamedTuple):
    """Rows of a run in the message between two ranks.

    Args:
        rows: indices into the tensor of rows. columns: of that tensor.
        divides_by_count: whether the tensor's last column is sent with them.
        row_shard: 0, or the rows are added to those of lower row shards.
    """

    rows: Tensor
    columns: slice
    divides_by_count: bool
    row_shard: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns.stop - self.columns.start


def order_by_rank(counts: Tensor) -> Tensor:
    """[N]: permutes rows that are stored entry by entry, each rank by rank, into the order rank by rank.

    Args:
        counts: [entries, ranks] int64 rows of each block.
    """
    flat = counts.reshape(-1)
    firsts, sizes = (flat.cumsum(0) - flat).view_as(counts).T.reshape(-1), counts.T.reshape(-1)
    moved = firsts - (sizes.cumsum(0) - sizes)
    return torch.arange(int(flat.sum()), device=counts.device) + moved.repeat_interleave(sizes)
