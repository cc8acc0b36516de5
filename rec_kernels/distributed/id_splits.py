"""Ids on their way to the shards: what ranks tell one another of a batch before they are sent, in one message each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.types import Awaitable

from rec_kernels.distributed.agreement import FACTS, Agreed, facts_of, raise_together
from rec_kernels.distributed.batches import CheckedBatch
from rec_kernels.distributed.collectives import all_to_all

if TYPE_CHECKING:
    from rec_kernels.distributed.row_exchange import RowContext
    from rec_kernels.distributed.sharded_collection import ShardedCollection


class IdSplits(Awaitable[KJTAllToAllTensorsAwaitable]):
    """Tells each rank of this rank's batch, and of how many bags and ids of it the rank gets.

    The first wait is for what all ranks tell, and sends the ids; the next for these.

    Args:
        module: of this rank. ctx: of the batch. given: this rank's batch. error: what refused it, or None.
    """

    def __init__(
        self, module: ShardedCollection, ctx: RowContext, given: CheckedBatch, error: Exception | None
    ) -> None:
        super().__init__()
        self._module, self._ctx, self._given, self._error = module, ctx, given, error
        entries = module.routes.entries
        facts = facts_of(given, error, training=module.training, bounds_check=module.bounds_check)
        with torch.no_grad():
            self._sorted = None if error else module._sorted(ctx, given)
        told, at = [], 0
        for own in entries:
            sizes = [0] * (1 + len(own))
            if self._sorted is not None:
                ids, lengths = (part[at : at + len(own)] for part in (self._sorted.ids, self._sorted.lengths))
                sizes = [sum(map(len, ids)), *map(len, lengths)]
            told.append([*facts, *sizes])
            at += len(own)
        self._sizes = [numbers[FACTS:] for numbers in told]
        flat = torch.tensor([n for numbers in told for n in numbers], dtype=torch.int64, device=module.shards.device)
        due = [FACTS + 1 + len(module.routes.own)] * len(entries)
        self._agreed: Agreed | None = None
        self._told = all_to_all(flat, [len(numbers) for numbers in told], due, module.group)

    def agree(self) -> Agreed:
        """Waits for what all ranks tell, of which the batch's context takes note.

        Raises:
            The error that refused the batch; RuntimeError: another rank's was refused, with its message. ValueError:
            ranks have other rules for ids out of range.
        """
        if self._agreed is None:
            module, ctx = self._module, self._ctx
            self._numbers = self._told.wait().view(len(self._sizes), -1).tolist()
            self._agreed = Agreed.of([numbers[:FACTS] for numbers in self._numbers])
            if self._agreed is None:
                raise_together(self._error, module.group, "refused its batch, and no rank has looked anything up")
            ctx.batch_sizes, ctx.wants, ctx.trains = self._agreed.batch_sizes, self._agreed.wants, self._agreed.trains
            ctx.fed = self._given.bags if ctx.wants[module.routes.rank] else None
            with torch.no_grad():
                self._own_sizes = module._take_agreed(ctx, self._given, self._sorted, self._agreed)
            self._ctx = None  # which has this
        return self._agreed

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        """Begins to send the ids; raises what ``agree`` does."""
        module, weighted = self._module, self.agree().weighted
        splits, count, own_sizes = [len(own) for own in module.routes.entries], len(module.routes.own), self._own_sizes
        due = [numbers[FACTS:] for numbers in self._numbers]
        with torch.no_grad():
            kjt = self._sorted.to_kjt(weighted=weighted, own_sizes=own_sizes)
            return KJTAllToAllTensorsAwaitable(
                pg=module.group,
                input=kjt,
                splits=splits,
                input_splits=_splits(self._sizes, splits, weighted=weighted, own_sizes=own_sizes),
                output_splits=_splits(due, [count] * len(due), weighted=weighted, own_sizes=own_sizes),
                input_tensors=kjt.dist_tensors(),
                labels=kjt.dist_labels(),
                keys=[str(i) for i in range(count)],
                device=module.shards.device,
                stagger=1,
                stride_per_rank=None if own_sizes else [bags[0] if bags else 0 for _, *bags in due],
            )


def _splits(sizes: list[list[int]], keys: list[int], *, weighted: bool, own_sizes: bool) -> list[list[int]]:
    """Numbers of elements to or from each rank, of lengths, ids, and where there are such, of strides and weights.

    Args:
        sizes: for each rank, ids, then bags of each key. keys: for each rank, how many.
    """
    ids = [numbers[0] for numbers in sizes]
    return [[sum(bags) for _, *bags in sizes], ids, *[keys] * own_sizes, *[ids] * weighted]
