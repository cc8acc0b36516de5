"""Input dist: bucketizes a batch by the ranks that look its ids up, exchanges splits, and sends the ids."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_kernels.distributed.agreement import raise_on_all_ranks
from rec_kernels.distributed.batch_checks import CheckedBatch
from rec_kernels.distributed.collectives import all_to_all
from rec_kernels.distributed.routes import Routes
from rec_kernels.nn.jagged.select_features import SelectedKeys

if TYPE_CHECKING:
    from rec_kernels.distributed.lookup_context import LookupContext
    from rec_kernels.distributed.sharded_collection import ShardedCollection

_Bags = tuple[Tensor, Tensor, Tensor | None, Tensor]  # ids, lengths, weights, indices of the ids in the feature


class BucketizedBatch(NamedTuple):
    """A batch as it is sent: a key for each entry of each rank, in order.

    Args:
        ids, lengths, weights: of each key. indices: of its ids in the batch. device: of all.
    """

    ids: list[Tensor]
    lengths: list[Tensor]
    weights: list[Tensor] | None
    indices: list[Tensor]
    device: torch.device

    def to_kjt(self, *, weighted: bool, variable_stride: bool) -> KeyedJaggedTensor:
        """The batch as TorchRec's container.

        Args:
            weighted: whether any rank's batch has weights. variable_stride: whether any rank's keys have batch sizes
                of their own.
        """
        empty, weights = torch.zeros(0, dtype=torch.int64, device=self.device), None
        if weighted:
            given = self.weights or [empty.new_ones(len(own), dtype=torch.float32) for own in self.ids]
            weights = torch.cat([empty.float(), *given])
        return KeyedJaggedTensor(
            keys=[str(i) for i in range(len(self.ids))],
            values=torch.cat([empty, *self.ids]),
            lengths=torch.cat([empty, *self.lengths]),
            weights=weights,
            stride=None if variable_stride else len(self.lengths[0]) if self.lengths else 0,
            stride_per_key_per_rank=[[len(own)] for own in self.lengths] if variable_stride else None,
        )


def bucketize_batch(bags: SelectedKeys, routes: Routes) -> BucketizedBatch:
    """Groups the ids of a batch by the entries that look them up.

    Ids of a table that is split by rows, or of a part, go to the shard that has their row, and become rows of it; ids
    without a row are dropped. Each id of ``routes.unpooled_features`` is a bag of its own.
    """
    starts = bags.bag_starts(routes.num_features)
    bounds = bags.offsets[starts].tolist()
    lengths = bags.offsets.diff().split([stop - start for start, stop in itertools.pairwise(starts)])
    weights = bags.weights
    every = torch.arange(len(bags.values), device=bags.values.device)
    found: list[_Bags] = []
    buckets: dict[tuple[int, tuple[int, ...]], dict[int, _Bags]] = {}
    for entry in itertools.chain(*routes.entries):
        f, shard = entry.feature, entry.shard
        feature = slice(bounds[f], bounds[f + 1])
        values, counts, indices = bags.values[feature], lengths[f], every[feature]
        own = None if weights is None else weights[feature]
        if entry.filters_ids:
            key = f, entry.bounds
            if key not in buckets:
                buckets[key] = _bucketize(values, counts, own, entry.bounds)
            values, counts, own, order = buckets[key][shard.first_row]
            indices = indices[order]
        if f in routes.unpooled_features:
            counts = torch.ones_like(values)
        found.append((values, counts, own, indices))
    ids, sizes, factors, places = ([part[k] for part in found] for k in range(4))
    return BucketizedBatch(ids, sizes, None if weights is None else factors, places, bags.values.device)


def _bucketize(values: Tensor, lengths: Tensor, weights: Tensor | None, bounds: tuple[int, ...]) -> dict[int, _Bags]:
    """Splits a feature's bags by row shards; returns those of each shard by its first row.

    Args:
        values: [N] ids. lengths: [B]. weights: [N] or None.
        bounds: first rows of the shards, and the end of the last.
    """
    batch, shards = len(lengths), len(bounds) - 1
    # Bucket 0 has ids below the first row, and the last bucket those from the end on.
    bucket = torch.searchsorted(torch.tensor(bounds, device=values.device), values, right=True)
    order = bucket.argsort(stable=True)
    bag = torch.arange(batch, device=values.device).repeat_interleave(lengths)
    counts = torch.bincount(bucket * batch + bag, minlength=(shards + 2) * batch).view(shards + 2, batch)
    sizes = counts.sum(1).tolist()
    ids, places, factors = values[order].split(sizes), order.split(sizes), [None] * (shards + 2)
    if weights is not None:
        factors = list(weights[order].split(sizes))
    return {first: (ids[i] - first, counts[i], factors[i], places[i]) for i, first in enumerate(bounds[:-1], 1)}


def received_bags(kjt: KeyedJaggedTensor, num_entries: int) -> SelectedKeys:
    """Returns the bags that a rank has received, for its own collection of ``num_entries`` features."""
    if not num_entries:
        empty = torch.zeros(0, dtype=torch.int64, device=kjt.values().device)
        return SelectedKeys(empty, torch.zeros(1, dtype=torch.int64, device=empty.device), None, None)
    offsets = torch.nn.functional.pad(kjt.lengths().long().cumsum(0), (1, 0))
    return SelectedKeys(kjt.values(), offsets, kjt.weights_or_none(), None)


#: Integers that a rank sends about its batch: see ``batch_info``.
BATCH_INFO_SIZE = 5
_NEEDS_WEIGHT_GRAD, _TRAINING = 1, 2  # flags
_RULES = ("error", "ignore", "none")  # of bounds_check; the index is stored above the two flags


class GlobalBatchInfo(NamedTuple):
    """Properties of a batch of all ranks.

    Args:
        batch_sizes: of each rank. weighted: whether any rank's batch has weights.
        needs_weight_grad: for each rank, whether its weights require a gradient.
        variable_stride: whether features of any rank have batch sizes of their own.
        training: whether any rank trains; then lookups insert rows into the caches of all ranks, as replicas must stay
            equal.
    """

    batch_sizes: list[int]
    weighted: bool
    needs_weight_grad: list[bool]
    variable_stride: bool
    training: bool

    @classmethod
    def of(cls, infos: list[list[int]]) -> GlobalBatchInfo | None:
        """Merges the ``batch_info`` of all ranks; None: a rank refused its batch.

        Raises:
            ValueError: on all ranks, if a rank's ``bounds_check`` is not the first rank's.
        """
        sizes, weighted, modes, variable_stride, failed = zip(*infos, strict=True)
        if any(failed):
            return None
        rules = [_RULES[mode // (2 * _TRAINING)] for mode in modes]
        if other := next((rank for rank, rule in enumerate(rules) if rule != rules[0]), 0):
            raise ValueError(
                f"bounds_check must be the same on all ranks: rank 0 has {rules[0]!r}, but rank {other} has "
                f"{rules[other]!r}; nothing was looked up"
            )
        needed, training = [bool(mode & _NEEDS_WEIGHT_GRAD) for mode in modes], any(mode & _TRAINING for mode in modes)
        return cls(list(sizes), any(weighted), needed, any(variable_stride), training)


def batch_info(batch: CheckedBatch, error: Exception | None, *, training: bool, bounds_check: str) -> list[int]:
    """[BATCH_INFO_SIZE] integers that a rank sends to all others about its batch.

    Args:
        batch: this rank's. error: why it was refused, or None. training: whether the collection is in training mode.
        bounds_check: the rank's; ids that one rank lets pass are looked up by others.
    """
    bags = batch.bags
    needs_grad = bags.weights is not None and bags.weights.requires_grad and torch.is_grad_enabled()
    mode = _NEEDS_WEIGHT_GRAD * needs_grad + _TRAINING * (training and torch.is_grad_enabled())
    mode += 2 * _TRAINING * _RULES.index(bounds_check)
    info = batch.samples, bags.weights is not None, mode, bags.strides is not None, error is not None
    return list(map(int, info))


class SplitsAwaitable(Awaitable[KJTAllToAllTensorsAwaitable]):
    """The all-to-all of splits, as TorchRec's KJTAllToAllSplitsAwaitable, with ``batch_info`` in the same message.

    ``wait()`` returns the awaitable of the ids, whose all-to-all it starts.

    Args:
        module: this rank's. ctx: of the lookup. batch: this rank's. error: why it was refused, or None.
    """

    def __init__(
        self, module: ShardedCollection, ctx: LookupContext, batch: CheckedBatch, error: Exception | None
    ) -> None:
        super().__init__()
        self._module, self._ctx, self._batch, self._error = module, ctx, batch, error
        entries = module.routes.entries
        info = batch_info(batch, error, training=module.training, bounds_check=module.bounds_check)
        with torch.no_grad():
            self._bucketized = None if error else module._bucketize(ctx, batch)
        messages, at = [], 0
        for own in entries:
            sizes = [0] * (1 + len(own))
            if self._bucketized is not None:
                ids, lengths = (part[at : at + len(own)] for part in (self._bucketized.ids, self._bucketized.lengths))
                sizes = [sum(map(len, ids)), *map(len, lengths)]
            messages.append([*info, *sizes])
            at += len(own)
        self._sizes = [message[BATCH_INFO_SIZE:] for message in messages]
        flat = torch.tensor(
            [n for message in messages for n in message], dtype=torch.int64, device=module.shards.device
        )
        expected = [BATCH_INFO_SIZE + 1 + len(module.routes.own)] * len(entries)
        self._info: GlobalBatchInfo | None = None
        self._exchange = all_to_all(flat, [len(message) for message in messages], expected, module.group)

    def wait_for_info(self) -> GlobalBatchInfo:
        """Waits for the splits and the info of all ranks, and writes them to the context.

        Raises:
            The error that refused the batch; RuntimeError: another rank's was refused, with its message. ValueError:
            ranks have different rules for ids out of range.
        """
        if self._info is None:
            module, ctx = self._module, self._ctx
            self._received = self._exchange.wait().view(len(self._sizes), -1).tolist()
            self._info = info = GlobalBatchInfo.of([message[:BATCH_INFO_SIZE] for message in self._received])
            if info is None:
                raise_on_all_ranks(self._error, module.group, "refused its batch, and no rank has looked anything up")
            ctx.batch_sizes, ctx.training = info.batch_sizes, info.training
            ctx.needs_weight_grad = info.needs_weight_grad
            ctx.weight_grad_bags = self._batch.bags if ctx.needs_weight_grad[module.routes.rank] else None
            with torch.no_grad():
                self._variable_stride = module._prepare_output_dist(ctx, self._batch, self._bucketized, info)
            self._ctx = None  # breaks the reference cycle
        return self._info

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        """Starts to send the ids; raises as ``wait_for_info``."""
        module, weighted = self._module, self.wait_for_info().weighted
        splits, count = [len(own) for own in module.routes.entries], len(module.routes.own)
        kinds = {"weighted": weighted, "variable_stride": self._variable_stride}
        received = [message[BATCH_INFO_SIZE:] for message in self._received]
        with torch.no_grad():
            kjt = self._bucketized.to_kjt(**kinds)
            return KJTAllToAllTensorsAwaitable(
                pg=module.group,
                input=kjt,
                splits=splits,
                input_splits=_splits(self._sizes, splits, **kinds),
                output_splits=_splits(received, [count] * len(received), **kinds),
                input_tensors=kjt.dist_tensors(),
                labels=kjt.dist_labels(),
                keys=[str(i) for i in range(count)],
                device=module.shards.device,
                stagger=1,
                stride_per_rank=None if self._variable_stride else [bags[0] if bags else 0 for _, *bags in received],
            )


def _splits(sizes: list[list[int]], keys: list[int], *, weighted: bool, variable_stride: bool) -> list[list[int]]:
    """Elements to or from each rank: of lengths, ids and, if there are any, strides and weights.

    Args:
        sizes: for each rank, ids, then bags of each key. keys: for each rank, their number.
    """
    ids = [numbers[0] for numbers in sizes]
    return [[sum(bags) for _, *bags in sizes], ids, *[keys] * variable_stride, *[ids] * weighted]
