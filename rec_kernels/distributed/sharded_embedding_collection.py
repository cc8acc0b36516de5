"""ShardedEmbeddingCollection: replaces an rk.EmbeddingCollection on every rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList

from rec_kernels.distributed.batch_checks import CheckedBatch
from rec_kernels.distributed.input_dist import BucketizedBatch, GlobalBatchInfo, bucketize_batch
from rec_kernels.distributed.lookup_context import LookupContext
from rec_kernels.distributed.output_dist import LazyJaggedTensor, lazy, prioritize_backward
from rec_kernels.distributed.row_packing import RowPacker
from rec_kernels.distributed.sequence_output_dist import SequenceOutputDist
from rec_kernels.distributed.sharded_collection import ShardedCollection
from rec_kernels.distributed.table_parameters import TableViews
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.jagged.jagged_tensor import JaggedTensor
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.load_state import rename


class ShardedEmbeddingCollection(ShardedCollection):
    """An ``rk.EmbeddingCollection`` whose tables are sharded over ranks; created by the sharder.

    Every rank calls it with its own samples, and runs the backward: both are collectives. Batch sizes may differ, also
    between features, and be 0. Outputs and updates have the bits of one process with all samples: a row comes from the
    one shard that has it, or from one per block of columns.

    With a fused optimizer its only parameter is ``all_tables``, without elements, whose ``requires_grad`` is that of
    all tables: an optimizer of torch, and DistributedDataParallel, train the rest of the model only. With
    ``optimizer=None`` its parameters are this rank's shards, with the gradients of all samples.

    Args:
        module: the unsharded collection; unless it is on the meta device, its rows and optimizer state are copied.
        shards: of its tables, from the plan.
        group: the ranks. device: of this rank's shards. Replicas start as the first rank's.
        gradient, wire: ``EmbeddingCollectionSharder``'s. row_wise: not used, as rows of ids are not summed.
        name: the collection's in the model; with its ``seed``, it seeds the rows of one on the meta device.

    Raises:
        ValueError: a rank's tables, plan, optimizer or options differ from the first rank's.
    """

    _holder = "embeddings"

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection]:
        """The type of the module that it replaces."""
        return EmbeddingCollection

    @property
    def embeddings(self) -> TableViews:
        """``embedding_bags`` by its name in ``rk.EmbeddingCollection``."""
        return self.embedding_bags

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, as ``rk.EmbeddingCollection.embedding_configs``."""
        return list(self.tables)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **named: Any) -> None:
        rename(state_dict, f"{prefix}embedding_bags.", f"{prefix}embeddings.")
        super()._load_from_state_dict(state_dict, prefix, *args, **named)

    def _bucketize(self, ctx: LookupContext, batch: CheckedBatch) -> BucketizedBatch:
        ctx.lookup_bags = bags = batch.bags
        starts = bags.offsets[bags.bag_starts(self.routes.num_features)]
        # One bag per feature: other ranks do not need the samples' offsets.
        return bucketize_batch(SelectedKeys(bags.values, starts, bags.weights, None), self.routes)

    def _prepare_output_dist(
        self, ctx: LookupContext, batch: CheckedBatch, sent: BucketizedBatch, info: GlobalBatchInfo
    ) -> bool:
        counts = iter(map(len, sent.ids))
        ctx.receive_packer = RowPacker(
            self.routes.rank,
            torch.cat([ctx.lookup_bags.offsets.new_empty(0), *sent.indices]),
            [[next(counts) for _ in entries] for entries in self.routes.entries],
            self._runs,
            compact=False,
        )
        return False

    def compute(self, ctx: LookupContext, dist_input: KJTList) -> Tensor:
        """Looks up the rows of all ids that this rank has received: [ids, columns of this rank's shards]."""
        kjt, routes = dist_input[0], self.routes
        counts = kjt.lengths().long().view(len(routes.own), routes.world_size)
        each = torch.arange(len(kjt.values()) + 1, device=counts.device)
        ctx.local_bags = SelectedKeys(kjt.values(), each, kjt.weights_or_none(), None)
        return self._lookup_rows(ctx, counts)

    def output_dist(self, ctx: LookupContext, output: Tensor) -> dict[str, JaggedTensor]:
        """Returns the rows of this rank's ids, as ``rk.EmbeddingCollection.forward``."""
        wait = self._start_output_dist(SequenceOutputDist(self, ctx), output)
        features = ctx.feature_bags
        bags = features.bag_starts(len(self.feature_names))
        bounds = features.offsets[bags].tolist()
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        blocks = lazy(lambda: wait().split(sizes))
        found: dict[str, JaggedTensor] = {}
        for f, (key, dim) in enumerate(zip(self._features.output_keys, self.output_dims, strict=True)):
            own = features.offsets[bags[f] : bags[f + 1] + 1]
            found[key] = LazyJaggedTensor(lazy(functools.partial(_rows_of, blocks, f, dim)), own - own[:1])
        return found


def _rows_of(blocks: Callable[[], Sequence[Tensor]], feature: int, dim: int) -> Tensor:
    return prioritize_backward(blocks()[feature][:, :dim])
