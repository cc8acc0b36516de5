"""ShardedEmbeddingBagCollection: replaces an rk.EmbeddingBagCollection on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList

from rec_kernels.distributed.batch_checks import CheckedBatch, count_valid_ids
from rec_kernels.distributed.input_dist import BucketizedBatch, GlobalBatchInfo, bucketize_batch, received_bags
from rec_kernels.distributed.lookup_context import LookupContext
from rec_kernels.distributed.output_dist import LazyKeyedTensor, prioritize_backward
from rec_kernels.distributed.pooled_output_dist import PooledOutputDist
from rec_kernels.distributed.row_packing import RowPacker
from rec_kernels.distributed.sharded_collection import ShardedCollection
from rec_kernels.distributed.variable_batch_output_dist import VariableBatchOutputDist, split_by_feature
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.tables.config import EmbeddingConfig


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An ``rk.EmbeddingBagCollection`` whose tables are sharded over ranks; created by the sharder.

    Every rank calls it with its own samples, and runs the backward: both are collectives. Batch sizes may differ, and
    be 0. Outputs are those of one process with all samples, and each backward updates all tables once, with the
    gradients of all ranks and of all its lookups. docs/distributed.md lists what has the bits of one process.

    With a fused optimizer its only parameter is ``all_tables``, without elements, whose ``requires_grad`` is that of
    all tables: an optimizer of torch, and DistributedDataParallel, train the rest of the model only. With
    ``optimizer=None`` its parameters are this rank's shards, with the gradients of all samples.

    Args:
        module: the unsharded collection; unless it is on the meta device, its rows and optimizer state are copied.
        shards: of its tables, from the plan.
        group: the ranks. device: of this rank's shards. Replicas start as the first rank's.
        gradient, row_wise, wire: ``EmbeddingBagCollectionSharder``'s.
        name: the collection's in the model; with its ``seed``, it seeds the rows of one on the meta device.

    Attributes:
        routes: what each rank looks up. group: the ranks. output_dtype: of the outputs.
        backward_sync: decides when lookups update the tables.

    Raises:
        ValueError: a rank's tables, plan, optimizer or options differ from the first rank's.
    """

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """The type of the module that it replaces."""
        return EmbeddingBagCollection

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, as ``rk.EmbeddingBagCollection.embedding_bag_configs``."""
        return list(self.tables)

    def _bucketize(self, ctx: LookupContext, batch: CheckedBatch) -> BucketizedBatch:
        ctx.bag_counts = count_valid_ids(batch.bags, self.routes)
        return bucketize_batch(batch.bags, self.routes)

    def _prepare_output_dist(
        self, ctx: LookupContext, batch: CheckedBatch, sent: BucketizedBatch, info: GlobalBatchInfo
    ) -> bool:
        routes = self.routes
        if not info.variable_stride and not routes.unpooled_features:
            return False
        ctx.lookup_bags, ctx.shared_bags = batch.bags, batch.shared
        if ctx.feature_bags.strides is None:
            ctx.feature_bags = ctx.feature_bags._replace(strides=[batch.samples] * len(self.feature_names))
        if ctx.lookup_bags.strides is None:
            ctx.lookup_bags = ctx.lookup_bags._replace(strides=[batch.samples] * routes.num_features)
            ctx.bag_counts = None if ctx.bag_counts is None else ctx.bag_counts.view(-1)
        self._set_received_rows(ctx, sent.indices)
        return True

    def _set_received_rows(self, ctx: LookupContext, indices: list[Tensor]) -> None:
        """Sets the rows that this rank receives: of each bag, or of each id of ``routes.unpooled_features``.

        Args:
            indices: for each entry of each rank, the ids that it was sent.
        """
        bags, routes, device = ctx.lookup_bags, self.routes, ctx.lookup_bags.offsets.device
        by_id = routes.unpooled_features
        starts = bags.bag_starts(routes.num_features)
        ids = bags.offsets[starts].tolist()
        ctx.rows_per_lookup = [ids[f + 1] - ids[f] if f in by_id else count for f, count in enumerate(bags.strides)]
        rows = torch.arange(sum(ctx.rows_per_lookup), device=device).split(ctx.rows_per_lookup)
        received, sent = [], iter(indices)
        for entry in itertools.chain(*routes.entries):
            own, f = next(sent), entry.feature
            received.append(rows[f][own - ids[f]] if f in by_id else rows[f])
        sizes = iter(len(own) for own in received)
        counts = [[next(sizes) for _ in own] for own in routes.entries]
        ctx.receive_packer = RowPacker(routes.rank, torch.cat(received), counts, self._runs, compact=False)
        if by_id:
            bag = torch.arange(starts[-1], device=device)
            lengths = [own.diff() for own in (bags.offsets[a : b + 1] for a, b in itertools.pairwise(starts))]
            ctx.bag_of_row = torch.cat(
                [
                    own.repeat_interleave(lengths[f]) if f in by_id else own
                    for f, own in enumerate(bag.split(bags.strides))
                ]
            )

    def compute(self, ctx: LookupContext, dist_input: KJTList) -> Tensor:
        """Looks up the bags of all ranks' samples in this rank's shards.

        Returns:
            [samples of all ranks, columns of this rank's shards]; a row per bag if features of some rank have batch
            sizes of their own.
        """
        kjt, own = dist_input[0], self.routes.own
        ctx.local_bags = received_bags(kjt, len(own))
        if ctx.receive_packer is None:
            return self._compose(ctx, self._lookup_local(ctx, ctx.local_bags, sum(ctx.batch_sizes)))
        strides = kjt.stride_per_key_per_rank() if own else []
        counts = torch.tensor(strides, dtype=torch.int64, device=self.shards.device)
        return self._lookup_rows(ctx, counts.view(len(own), self.routes.world_size))

    def output_dist(self, ctx: LookupContext, output: Tensor) -> KeyedTensor | dict[str, Tensor]:
        """Returns this rank's samples, as ``rk.EmbeddingBagCollection.forward``, or its bags as ``by_feature``."""
        keys, dims, is_plain = self._features.output_keys, self._features.output_dims, ctx.receive_packer is None
        output_dist = PooledOutputDist(self, ctx) if is_plain else VariableBatchOutputDist(self, ctx)
        wait = self._start_output_dist(output_dist, output)
        if not ctx.by_feature:
            return LazyKeyedTensor(keys, dims, wait)
        blocks = wait().split(dims, dim=1) if is_plain else split_by_feature(wait(), ctx, dims)
        return dict(zip(keys, map(prioritize_backward, blocks), strict=True))

    def by_feature(self, features: Any) -> dict[str, Tensor]:
        """Looks up as ``rk.EmbeddingBagCollection.by_feature``: a [B_f, D_f] tensor for each feature; a collective.

        Other ranks may call the collection instead. TorchRec's pipelines support only calls of the collection.

        Args:
            features: this rank's samples, as for ``rk.EmbeddingBagCollection.by_feature``.

        Raises:
            As ``input_dist``.
        """
        if isinstance(features, InverseKeyedJaggedTensor):
            return self(features).to_dict()
        ctx = self.create_context()
        ctx.by_feature = True
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features).wait().wait())
