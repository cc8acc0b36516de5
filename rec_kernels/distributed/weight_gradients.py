"""Gradients of per-sample weights: computed where the rows are, and sent back to the rank that fed the samples."""

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
    from rec_kernels.distributed.row_exchange import RowContext
    from rec_kernels.distributed.sharded_collection import ShardedCollection

_ops = torch.ops.rec_kernels


def weight_gradients(grad: Tensor, module: ShardedCollection, batch: RowContext) -> Tensor | None:
    """[N] float32: the gradients of this rank's weights, or None if it wants none; a collective of all ranks.

    Columns of a row that several shards have are added up in their order, and means are divided behind them.

    Args:
        grad: as the ranks' losses have them, [samples of all ranks, columns of this rank's entries], or where rows are
            sent, a row for each.
    """
    routes, world = module.routes, module.routes.world_size
    products = module._agreed(lambda: _products(module.shards, grad, batch.bags, batch.starts))
    counts = batch.batch_sizes * len(routes.own) if batch.row_counts is None else batch.row_counts.flatten().tolist()
    bounds = batch.bags.offsets[list(itertools.accumulate(counts, initial=0))]
    parts, answers = products.split(bounds.diff().tolist()), []  # parts by entry, and there by rank
    for rank, wants in enumerate(batch.wants):
        asked = [i for i, e in enumerate(routes.own) if wants and _answers(routes, routes.rank, e, rank)]
        answers.append(torch.cat([products[:0], *(parts[i * world + rank] for i in asked)]))
    places = [_places(batch.fed, own, rank, routes) for rank, own in enumerate(routes.entries)]
    received = [sum(len(place) for _, place in own) for own in places]
    flat = all_to_all(torch.cat(answers), [len(answer) for answer in answers], received, module.group).wait()
    if batch.fed is None:
        return None
    found = torch.zeros(batch.fed.values.shape, dtype=torch.float32, device=grad.device)
    flattened = [pair for own in places for pair in own]
    blocks = zip(flattened, flat.split([len(place) for _, place in flattened]), strict=True)
    for (entry, place), block in sorted(blocks, key=lambda b: b[0][0].shard.first_column):
        found[place] = block if entry.shard.first_column == 0 else found[place] + block
    found = module.parts.of_features(found, batch.fed, batch.features)
    blocks = found.split(ids_per_feature(batch.features, len(module.parts.features)))
    for f, feature in enumerate(module.parts.features):
        if f in batch.answers:
            blocks[f].copy_(batch.answers[f])
        elif feature.lookups[0] in routes.means:
            bags = bags_of_feature(batch.features, f, len(blocks))
            blocks[f].mul_((1 / feature.counts(bags)).repeat_interleave(bags.offsets.diff()))
    return found


def _answers(routes: Routes, rank: int, entry: Entry, other: int) -> bool:
    """True if ``rank`` computes for ``other`` what an entry has.

    Every rank has replicas of its own, and the rank of a sample has what rows of parts make there, id by id.
    """
    return entry.feature not in routes.composed and (rank == other or not entry.shard.replica)


def _places(fed: SelectedKeys | None, entries: list[Entry], rank: int, routes: Routes) -> list[tuple[Entry, Tensor]]:
    """The entries of a rank that answer this rank, and where the ids that it was sent are among this rank's."""
    if fed is None:
        return []
    found = []
    bounds = fed.offsets[fed.bag_starts(routes.num_features)].tolist()
    for entry in entries:
        if _answers(routes, rank, entry, routes.rank):
            first, last = bounds[entry.feature], bounds[entry.feature + 1]
            place = torch.arange(first, last, device=fed.values.device)
            if entry.takes_some:
                ids = fed.values[first:last] - entry.shard.first_row
                place = place[(ids >= 0) & (ids < entry.shard.rows)]
            found.append((entry, place))
    return found


def _products(shards: TableCollection, grad: Tensor, bags: SelectedKeys, starts: Tensor | None) -> Tensor:
    """[N]: the gradient of the weight of each id that a rank looks up, before other ranks' parts of it."""
    if not shards.feature_names:
        return grad.new_zeros(0)
    layout = shards._layout.arguments(starts)
    given = {name: value for name, value in layout.items() if name != "bounds_check"}
    if shards.row_cache is not None:
        cached = shards._store.lookup_arguments(shards._call(bags.values, bags.offsets, starts), inserts=False)
        given |= {name: cached[name] for name in ("cache_rows", "cache_slots")}
    weights = shards._weights
    return _ops.embedding_bag_backward_per_sample_weights.layout(grad, weights, bags.values, bags.offsets, **given)
