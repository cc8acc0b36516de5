"""LookupContext: the state of one batch from its input dist to the update."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.streamable import Multistreamable

from rec_kernels.distributed.backward_sync import PendingBackward
from rec_kernels.distributed.row_packing import EntryRun, RowPacker, order_by_rank
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.jagged.shared_bags import SharedBags

if TYPE_CHECKING:
    from rec_kernels.distributed.compositions import Composition
    from rec_kernels.distributed.input_dist import SplitsAwaitable


class LookupContext(Multistreamable):
    """The state that output dist and backward of a lookup share, as TorchRec's ``ShardedModuleContext``.

    Attributes:
        splits_awaitable: the exchange of splits, until the lookup is computed.
        batch_sizes: of each rank.
        feature_bags: this rank's batch. lookup_bags, unique_inverse: as ``LookupMap.expand_features`` returns them.
        shared_bags: the bags that samples share, or None.
        bag_counts: [F, B] valid ids of each of this rank's bags, or None if no feature needs them.
        local_bags: the ids of all ranks that this rank looks up, key-major.
        training: True if any rank trains.
        needs_weight_grad: for each rank, True if its per-sample weights require a gradient.
        weight_grad_bags: this rank's batch, if its per-sample weights require a gradient, else None.
        receive_packer: the rows that this rank receives; None: it receives pooled columns of its samples.
        rows_per_lookup: rows that this rank receives for each lookup; ``lookup_bags.strides`` has the bags.
        bag_of_row: if some lookups receive a row per id, the bag of each row; else None.
        row_starts, row_counts, send_packer: if rows are sent, the first row of each of this rank's entries, the rows
            per entry and rank, [entries, ranks], and their packing. Else None.
        by_feature: True if this rank's output is bags per feature instead of samples.
        is_prefetch: True if rows are only read from files.
        composition: computes columns from what this rank has looked up, or None.
        pending_backward: set by the output dist.
        combined_weight_grads: feature -> [N] weight gradients that were computed on this rank.
    """

    splits_awaitable: SplitsAwaitable
    feature_bags: SelectedKeys
    lookup_bags: SelectedKeys
    unique_inverse: dict[int, Tensor]
    shared_bags: SharedBags | None = None
    bag_counts: Tensor | None = None
    local_bags: SelectedKeys | None = None
    training = False
    weight_grad_bags: SelectedKeys | None = None
    receive_packer: RowPacker | None = None
    rows_per_lookup: list[int]
    bag_of_row: Tensor | None = None
    row_starts: Tensor | None = None
    row_counts: Tensor | None = None
    send_packer: RowPacker
    by_feature = False
    is_prefetch = False
    composition: Composition | None = None
    pending_backward: PendingBackward

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.needs_weight_grad: list[bool] = []
        self.combined_weight_grads: dict[int, Tensor] = {}

    def set_rows_to_send(self, rank: int, counts: Tensor, runs: Sequence[EntryRun]) -> None:
        """Sets the layout of the rows that this rank looks up for all ranks.

        Args:
            counts: [entries of this rank, ranks] int64, rows for each rank. runs: of this rank's entries.
        """
        self.row_counts, self.row_starts = counts, torch.nn.functional.pad(counts.sum(1).cumsum(0), (1, 0))
        rows = order_by_rank(counts)
        self.send_packer = RowPacker(rank, rows, counts.T.tolist(), [runs] * counts.shape[1], compact=True)

    def lookup_gradients(self, grad: Tensor, *, trains: bool = False) -> Tensor:
        """Gradients of what this rank has looked up, from those of its columns; ``trains``: as ``Composition``."""
        return grad if self.composition is None else self.composition.backward(grad, trains=trains)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` uses the tensors."""
        batches = [bags[:3] for bags in (self.local_bags, self.weight_grad_bags) if bags is not None]
        if self.receive_packer is not None:
            batches.append((self.lookup_bags.offsets, self.feature_bags.offsets, self.receive_packer.rows))
        for t in (self.bag_counts, *itertools.chain(*batches)):
            if isinstance(t, Tensor) and t.device.type != "cpu":
                t.record_stream(stream)
