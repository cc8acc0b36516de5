"""ShardedEmbeddingBagCollection: the module that takes the place of an rk.EmbeddingBagCollection on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList

from rec_kernels.distributed import batches
from rec_kernels.distributed.agreement import Agreed
from rec_kernels.distributed.batches import CheckedBatch, SortedIds
from rec_kernels.distributed.distinct_exchange import DistinctTrip, by_feature
from rec_kernels.distributed.exchange import PooledTrip
from rec_kernels.distributed.row_exchange import Parcels, RowContext
from rec_kernels.distributed.sharded_collection import ShardedCollection
from rec_kernels.distributed.trips import ArrivingColumns, run_early
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.tables.config import EmbeddingConfig


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An ``rk.EmbeddingBagCollection`` whose tables are shared out among ranks; made by the sharder.

    Every rank calls it with its own samples, and runs the backward: both are collectives. Batch sizes may differ, and
    be 0. Outputs are those of one process with all samples, and each backward updates all tables once, with the
    gradients of all ranks and of all lookups that it has. docs/distributed.md says what has the bits of one process.

    With a fused optimizer it has no parameter but ``all_tables``, of no elements, whose ``requires_grad`` is that of
    all tables: an optimizer of torch, and DistributedDataParallel, train the rest of the model only. With
    ``optimizer=None`` its parameters are this rank's shards, with the gradients of all samples.

    Args:
        module: the whole collection; rows that are not on the meta device are taken over, with the optimizer's state.
        shards: of its tables, as the plan has them.
        group: the ranks. device: of this rank's shards. Replicas begin as the first rank's.
        gradient, row_wise, wire: ``EmbeddingBagCollectionSharder``'s.
        name: the collection's in the model, from which, and from its ``seed``, rows of one on the meta device begin.

    Attributes:
        routes: which rank looks up what. group: the ranks. output_dtype: of the outputs.
        backwards: when its lookups are updates.

    Raises:
        ValueError: ranks have other tables, plans, optimizers or options than the first.
    """

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """The type of the module that it takes the place of."""
        return EmbeddingBagCollection

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, as ``rk.EmbeddingBagCollection.embedding_bag_configs``."""
        return list(self.tables)

    def _sorted(self, ctx: RowContext, given: CheckedBatch) -> SortedIds:
        ctx.counts = batches.counts_of(given.bags, self.routes)
        return batches.sort_ids(given.bags, self.routes)

    def _take_agreed(self, ctx: RowContext, given: CheckedBatch, sent: SortedIds, agreed: Agreed) -> bool:
        routes = self.routes
        if not agreed.own_sizes and not routes.by_id:
            return False
        ctx.given, ctx.shared = given.bags, given.shared
        if ctx.features.strides is None:
            ctx.features = ctx.features._replace(strides=[given.samples] * len(self.feature_names))
        if ctx.given.strides is None:
            ctx.given = ctx.given._replace(strides=[given.samples] * routes.num_features)
            ctx.counts = None if ctx.counts is None else ctx.counts.view(-1)
        self._ask(ctx, sent.places)
        return True

    def _ask(self, ctx: RowContext, places: list[Tensor]) -> None:
        """Takes note of the rows that this rank gets: of each bag, or of each id of ``routes.by_id``.

        Args:
            places: for each entry of each rank, which ids it was sent.
        """
        bags, routes, device = ctx.given, self.routes, ctx.given.offsets.device
        starts = bags.bag_starts(routes.num_features)
        ids = bags.offsets[starts].tolist()
        ctx.sizes = [ids[f + 1] - ids[f] if f in routes.by_id else count for f, count in enumerate(bags.strides)]
        rows = torch.arange(sum(ctx.sizes), device=device).split(ctx.sizes)
        wanted, sent = [], iter(places)
        for entry in itertools.chain(*routes.entries):
            own, f = next(sent), entry.feature
            wanted.append(rows[f][own - ids[f]] if f in routes.by_id else rows[f])
        numbers = iter(len(own) for own in wanted)
        counts = [[next(numbers) for _ in own] for own in routes.entries]
        ctx.asked = Parcels(routes.rank, torch.cat(wanted), counts, self._runs, at_front=False)
        if routes.by_id:
            bag = torch.arange(starts[-1], device=device)
            lengths = [own.diff() for own in (bags.offsets[a : b + 1] for a, b in itertools.pairwise(starts))]
            ctx.bag_of_row = torch.cat(
                [
                    own.repeat_interleave(lengths[f]) if f in routes.by_id else own
                    for f, own in enumerate(bag.split(bags.strides))
                ]
            )

    def compute(self, ctx: RowContext, dist_input: KJTList) -> Tensor:
        """Looks up bags of all ranks' samples in this rank's shards, pooled.

        Returns:
            [samples of all ranks, columns of this rank's shards]; a row for each bag where features of some rank have
            batch sizes of their own.
        """
        kjt, own = dist_input[0], self.routes.own
        ctx.bags = batches.looked_up(kjt, len(own))
        if ctx.asked is None:
            return self._composed(ctx, self._looked_up(ctx, ctx.bags, sum(ctx.batch_sizes)))
        numbers = kjt.stride_per_key_per_rank() if own else []
        counts = torch.tensor(numbers, dtype=torch.int64, device=self.shards.device)
        return self._rows_looked_up(ctx, counts.view(len(own), self.routes.world_size))

    def output_dist(self, ctx: RowContext, output: Tensor) -> KeyedTensor | dict[str, Tensor]:
        """Returns this rank's samples, as ``rk.EmbeddingBagCollection.forward``, or its bags as ``by_feature``."""
        keys, dims = self._features.output_keys, self._features.output_dims
        arrived = self._leave(PooledTrip(self, ctx) if ctx.asked is None else DistinctTrip(self, ctx), output)
        if not ctx.by_feature:
            return ArrivingColumns(keys, dims, arrived)
        blocks = arrived().split(dims, dim=1) if ctx.asked is None else by_feature(arrived(), ctx, dims)
        return dict(zip(keys, map(run_early, blocks), strict=True))

    def by_feature(self, features: Any) -> dict[str, Tensor]:
        """Looks up as ``rk.EmbeddingBagCollection.by_feature``: a [B_f, D_f] tensor for each feature; a collective.

        Other ranks may call the collection meanwhile. TorchRec's pipelines know no lookups but calls of the collection.

        Args:
            features: as of ``rk.EmbeddingBagCollection.by_feature``, of this rank's samples.

        Raises:
            As ``input_dist``.
        """
        if isinstance(features, InverseKeyedJaggedTensor):
            return self(features).to_dict()
        ctx = self.create_context()
        ctx.by_feature = True
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features).wait().wait())
