"""Gradients of per-sample weights: computed by the ranks that have the rows, and sent to the samples' ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rec_kernels.distributed.collectives import all_to_all
from rec_kernels.distributed.routes import Entry, Routes
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.jagged.select_features import SelectedKeys, bags_of_feature, ids_per_feature

if TYPE_CHECKING:
    from rec_kernels.distributed.lookup_context import LookupContext
    from rec_kernels.distributed.sharded_collection import ShardedCollection

_ops = torch.ops.rec_kernels


def weight_gradients(grad: Tensor, module: ShardedCollection, ctx: LookupContext) -> Tensor | None:
    """[N] float32: the gradients of this rank's weights, or None if they require none; a collective.

    Partial sums of column shards are added in the order of columns before means are divided.

    Args:
        grad: unscaled, of each rank's own loss: [samples of all ranks, columns of this rank's entries], or, if rows are
            sent, a row for each.
    """
    routes, world = module.routes, module.routes.world_size
    products = module._on_all_ranks(lambda: _products(module.shards, grad, ctx.local_bags, ctx.row_starts))
    counts = ctx.batch_sizes * len(routes.own) if ctx.row_counts is None else ctx.row_counts.flatten().tolist()
    bounds = ctx.local_bags.offsets[list(itertools.accumulate(counts, initial=0))]
    blocks, sent = products.split(bounds.diff().tolist()), []  # by entry, then by rank
    for rank, needed in enumerate(ctx.needs_weight_grad):
        entries = [i for i, e in enumerate(routes.own) if needed and _is_computed_by(routes, routes.rank, e, rank)]
        sent.append(torch.cat([products[:0], *(blocks[i * world + rank] for i in entries)]))
    indices = [_received_ids(ctx.weight_grad_bags, own, rank, routes) for rank, own in enumerate(routes.entries)]
    received = [sum(len(ids) for _, ids in own) for own in indices]
    flat = all_to_all(torch.cat(sent), [len(block) for block in sent], received, module.group).wait()
    if ctx.weight_grad_bags is None:
        return None
    found = torch.zeros(ctx.weight_grad_bags.values.shape, dtype=torch.float32, device=grad.device)
    flattened = [pair for own in indices for pair in own]
    partial_sums = zip(flattened, flat.split([len(ids) for _, ids in flattened]), strict=True)
    for (entry, ids), block in sorted(partial_sums, key=lambda p: p[0][0].shard.first_column):
        found[ids] = block if entry.shard.first_column == 0 else found[ids] + block
    found = module.lookup_map.sum_over_lookups(found, ctx.weight_grad_bags, ctx.feature_bags)
    by_feature = found.split(ids_per_feature(ctx.feature_bags, len(module.lookup_map.features)))
    for f, feature in enumerate(module.lookup_map.features):
        if f in ctx.combined_weight_grads:
            by_feature[f].copy_(ctx.combined_weight_grads[f])
        elif feature.lookups[0] in routes.mean_features:
            bags = bags_of_feature(ctx.feature_bags, f, len(by_feature))
            by_feature[f].mul_((1 / feature.count_valid(bags)).repeat_interleave(bags.offsets.diff()))
    return found


def _is_computed_by(routes: Routes, rank: int, entry: Entry, other: int) -> bool:
    """True if ``rank`` computes the weight gradients of its entry for the samples of ``other``.

    Replicas are computed by each rank, and rows that are combined by id by the sample's rank.
    """
    return entry.feature not in routes.combined_features and (rank == other or not entry.shard.replica)


def _received_ids(
    bags: SelectedKeys | None, entries: list[Entry], rank: int, routes: Routes
) -> list[tuple[Entry, Tensor]]:
    """The entries of which a rank sends weight gradients to this one, and the indices of their ids in ``bags``."""
    if bags is None:
        return []
    found = []
    bounds = bags.offsets[bags.bag_starts(routes.num_features)].tolist()
    for entry in entries:
        if _is_computed_by(routes, rank, entry, routes.rank):
            first, last = bounds[entry.feature], bounds[entry.feature + 1]
            indices = torch.arange(first, last, device=bags.values.device)
            if entry.filters_ids:
                rows = bags.values[first:last] - entry.shard.first_row
                indices = indices[(rows >= 0) & (rows < entry.shard.rows)]
            found.append((entry, indices))
    return found


def _products(shards: TableCollection, grad: Tensor, bags: SelectedKeys, starts: Tensor | None) -> Tensor:
    """[N]: this rank's partial sums of the weight gradients of the ids that it looks up."""
    if not shards.feature_names:
        return grad.new_zeros(0)
    layout = shards._layout.arguments(starts)
    given = {name: value for name, value in layout.items() if name != "bounds_check"}
    if shards.row_cache is not None:
        cached = shards._store.lookup_arguments(shards._call(bags, starts), inserts=False)
        given |= {name: cached[name] for name in ("cache_rows", "cache_slots")}
    weights = shards._weights
    return _ops.embedding_bag_backward_per_sample_weights.layout(grad, weights, bags.values, bags.offsets, **given)
