"""Gradient accumulation for fused tables: lookups whose backwards have run and whose joint update has not."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.nn.jagged.shared_bags import join as join_shared
from rec_kernels.ops.autograd import differentiable_once
from rec_kernels.ops.jagged_permute import jagged_permute


class Lookup(NamedTuple):
    """A micro-batch, with everything an update needs.

    Args:
        grad: [B, C] float32, gradient of the pooled output.
        values: [N] ids; offsets: [F * B + 1], key-major; weights: [N] float32 or None. Ids and offsets are int32 or
            int64, independently.
        status: [2] int64 status of the lookup: the first element is below the largest int64 if an id was out of range.
            The update is then skipped, on devices where the lookup itself cannot raise in time.
        bag_starts: [F + 1] if batch sizes differ and every bag has its own row of the output and of grad; or None.
            shared: the bags that rows share instead, or None.
        found_inf: 0-dim float32, inf if the gradient of a larger output that ``grad`` is part of has overflowed, else
            0; None: ``grad`` alone decides.
    """

    grad: Tensor
    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    status: Tensor
    bag_starts: Tensor | None = None
    shared: SharedBags | None = None
    found_inf: Tensor | None = None


class LookupQueue:
    """Lookups of one joint update, in the order of their backwards."""

    def __init__(self) -> None:
        self.lookups: list[Lookup] = []
        self._streams: list[torch.cuda.Stream] = []  # CUDA streams of the backwards

    def add(self, lookup: Lookup) -> None:
        """Adds a lookup, in its backward."""
        self.lookups.append(lookup)
        if lookup.grad.is_cuda:
            self._streams.append(torch.cuda.current_stream(lookup.grad.device))

    def take(self) -> list[Lookup]:
        """Removes and returns the lookups, for use on the current stream.

        Autograd makes it wait for only one of their streams, on which the collection's token was first used.
        """
        lookups, self.lookups = self.lookups, []
        streams, self._streams = self._streams, []
        for lookup, stream in zip(lookups, streams, strict=False):
            here = torch.cuda.current_stream(stream.device)
            if stream != here:
                here.wait_stream(stream)
                for t in tree_leaves(lookup):
                    if isinstance(t, Tensor) and t.is_cuda:
                        t.record_stream(here)
        return lookups


class Pending:
    """The lookups of one ``accumulate()`` block.

    Args:
        token: the collection's token. It gets a gradient if a compiled lookup from before the block runs its backward;
            other earlier lookups raise before they update.
    """

    def __init__(self, token: Tensor) -> None:
        self.queue = LookupQueue()
        self._is_open = True
        # A separate token: the collection's belongs to lookups that update at once.
        self._token = torch.empty_like(token, requires_grad=True)
        self._hook = token.register_hook(_refuse_earlier_lookup)

    def close(self) -> None:
        """Rejects further backwards."""
        self._is_open = False
        self.queue = LookupQueue()
        self._hook.remove()

    def add(self, lookup: Lookup) -> None:
        """Adds a copy of a lookup: callers may reuse the memory of ids and gradients for the next micro-batch.

        Raises:
            RuntimeError: the block has ended.
        """
        if not self._is_open:
            raise RuntimeError(
                "this lookup was made in an accumulate() block that has ended, so its backward can no longer "
                "contribute to the update: call backward() inside the block"
            )
        shared = lookup.shared
        if shared is not None:
            shared = shared._replace(inverse=shared.inverse.clone())
        tensors: Any = (t.detach().clone() if isinstance(t, Tensor) else None for t in lookup)
        self.queue.add(Lookup._make(tensors)._replace(shared=shared))

    def record(self, pooled: Tensor, shared: SharedBags | None, *bags: Tensor | None) -> Tensor:
        """Returns ``pooled``, [B, C], such that its backward contributes to the update.

        Args:
            pooled: output of the lookup. shared: as in ``Lookup``.
            bags: values, offsets, weights, status and bag_starts, as in ``Lookup``.
        """
        from rec_kernels.ops.graph_breaks import record_lookup

        return record_lookup(self._record, pooled, shared, *bags)

    def _record(self, pooled: Tensor, shared: SharedBags | None, *bags: Tensor | None) -> Tensor:
        inverse = None if shared is None else shared.inverse
        return _Recorded.apply(pooled, self._token, self, shared, *bags, inverse)


def _record_gradient(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # accessed once, as activation checkpointing requires
    if grad is None:
        return None, None, None, None, *[None] * len(saved)
    shared = None if ctx.shared is None else ctx.shared._replace(inverse=saved[-1])
    ctx.pending.add(Lookup._make((grad.float(), *saved[:-1], shared, None)))
    return grad, None, None, None, *[None] * len(saved)


class _Recorded(torch.autograd.Function):
    """Identity; the backward records the gradient and passes it on for per-sample weights."""

    @staticmethod
    def forward(
        ctx, pooled: Tensor, token: Tensor, pending: Pending, shared: SharedBags | None, *bags: Tensor | None
    ) -> Tensor:
        ctx.mark_dirty(pooled)  # marked dirty, because a view could not be modified in place
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        ctx.shared = None if shared is None else shared._replace(inverse=None)  # saved with the bags
        ctx.save_for_backward(*bags)
        return pooled

    backward = staticmethod(differentiable_once("embedding_bag_fused.layout", _record_gradient))


def _refuse_earlier_lookup(_) -> None:
    raise RuntimeError(
        "a compiled lookup made before this accumulate() block ran its backward inside it and has already "
        "updated the tables: call the collection inside the block as well"
    )


def join(lookups: list[Lookup], num_features: int) -> Lookup:
    """Joins micro-batches into one batch: per feature, micro-batch by micro-batch.

    Args:
        lookups: at least one, with F = ``num_features`` features; batch sizes may differ. They ``have_same_layout``.

    Returns:
        Lookup with the sum of the batch sizes. If only some have per-sample weights, the others' are 1, which changes
        no bit of an update (docs/numerics.md, "Row gradients"). ``status`` names a bad id if any does, and
        ``found_inf`` is inf if any is.
    """
    status = torch.stack([lookup.status for lookup in lookups]).amin(0)
    found = [lookup.found_inf for lookup in lookups if lookup.found_inf is not None]
    found_inf = torch.stack(found).amax() if found else None
    lookups = [lookup for lookup in lookups if len(lookup.grad)] or lookups[:1]
    if len(lookups) == 1:
        return lookups[0]._replace(status=status, found_inf=found_inf)
    sizes = [_batch_sizes(lookup, num_features) for lookup in lookups]
    values, offsets, weights = _group_by_feature(lookups, sizes)
    starts, own_rows = None, lookups[0].bag_starts is not None and lookups[0].shared is None
    if own_rows:
        blocks = [lookup.grad.split(own) for lookup, own in zip(lookups, sizes, strict=True)]
        grad = torch.cat([own[f] for f in range(num_features) for own in blocks])
    else:
        grad = torch.cat([lookup.grad for lookup in lookups])
    if lookups[0].bag_starts is not None:
        starts = torch.stack([lookup.bag_starts for lookup in lookups]).sum(0)
    shared = None
    if lookups[0].shared is not None:
        shared = join_shared([lookup.shared._replace(sizes=own) for lookup, own in zip(lookups, sizes, strict=True)])
    return Lookup(grad, values, offsets, weights, status, starts, shared, found_inf)


def have_same_layout(lookups: list[Lookup]) -> bool:
    """True if all or none have ``bag_starts``, and all or none ``shared``, with the same groups."""
    kinds = {
        (lookup.bag_starts is None, None if lookup.shared is None else tuple(lookup.shared.groups))
        for lookup in lookups
        if len(lookup.grad)
    }
    return len(kinds) <= 1


def _group_by_feature(lookups: list[Lookup], sizes: list[list[int]]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, offsets and weights, with the bags of each feature adjacent. Never waits for a GPU.

    Args:
        sizes: [lookups][F] batch sizes.
    """
    # Values in no bag, after a lookup's last bag or before its first, become an extra bag between two lookups.
    strides = [size for own in sizes for size in (*own, 1)][:-1]
    firsts = itertools.accumulate((len(lookup.values) for lookup in lookups), initial=0)
    offsets = [lookup.offsets.long() + first for lookup, first in zip(lookups, firsts, strict=False)]
    features, weights = len(sizes[0]), None
    if any(lookup.weights is not None for lookup in lookups):
        ones = [torch.ones_like(x.values, dtype=torch.float32) if x.weights is None else x.weights for x in lookups]
        weights = torch.cat(ones)
    values = torch.cat([lookup.values for lookup in lookups])
    order = [own * (features + 1) + f for f in range(features) for own in range(len(lookups))]
    total = len(values)  # on a GPU, values in no bag may follow the others
    if not values.is_cuda:
        total = sum(int(own[-1] - own[0]) for own in offsets)
    return jagged_permute(values, torch.cat(offsets), order, strides, weights, total=total)


def _batch_sizes(lookup: Lookup, num_features: int) -> list[int]:
    """[F] batch sizes of the features. Waits for a GPU if they differ."""
    if lookup.bag_starts is not None:
        return lookup.bag_starts.diff().tolist()
    return [len(lookup.grad)] * num_features
