"""ShardedEmbeddingBagCollection: the module that takes the place of an rk.EmbeddingBagCollection on every rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_kernels.distributed import batches
from rec_kernels.distributed.batches import BatchContext
from rec_kernels.distributed.exchange import Exchange
from rec_kernels.distributed.sharded_collection import ShardedCollection
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.jagged.select_features import SelectedKeys


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An ``rk.EmbeddingBagCollection`` whose tables are shared out among ranks; made by the sharder.

    Every rank calls it with its own samples, and runs the backward: both are collectives. Batch sizes may differ, and
    be 0. Outputs are those of one process with all samples, and each backward updates all tables once, with the
    gradients of all ranks and of all lookups that it has. docs/distributed.md says what has the bits of one process.

    It has no parameters: an optimizer of torch, and DistributedDataParallel, see the rest of the model only.

    Args:
        module: the whole collection; rows that are not on the meta device are taken over, with the optimizer's state.
        shards: of its tables, as the plan has them.
        group: the ranks. device: of this rank's shards. Replicas begin as the first rank's.
        gradient: ``EmbeddingBagCollectionSharder``'s.
        name: the collection's in the model, from which, and from its ``seed``, rows of one on the meta device begin.

    Attributes:
        routes: which rank looks up what. group: the ranks. output_dtype: of the outputs.
        backwards: when its lookups are updates.

    Raises:
        ValueError: ranks have other tables, plans, optimizers or options than the first.
    """

    _returns_weight_gradients = True

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """The type of the module that it takes the place of."""
        return EmbeddingBagCollection

    def create_context(self) -> BatchContext:
        """The context of one batch."""
        return BatchContext()

    def _sent(self, ctx: BatchContext, given: SelectedKeys, *, weighted: bool) -> KeyedJaggedTensor:
        ctx.counts = batches.counts_of(given, self.routes)
        return batches.sent_batch(given, self.routes, weighted=weighted)

    @torch.no_grad()
    def compute(self, ctx: BatchContext, dist_input: KJTList) -> Tensor:
        """[samples of all ranks, columns of this rank's shards]: what this rank has of all samples, pooled."""
        total = sum(ctx.batch_sizes)
        ctx.bags = batches.looked_up(dist_input[0], len(self.routes.own), total)
        if not self.routes.own:
            return torch.zeros(total, 0, device=self.shards._device)
        return self.shards._lookup(ctx.bags)

    def output_dist(self, ctx: BatchContext, output: Tensor) -> KeyedTensor:
        """Returns this rank's samples, as ``rk.EmbeddingBagCollection.forward``."""
        token = torch.zeros(0, device=output.device, requires_grad=True)
        ctx.begun = self.backwards.begin(needs_rows=any(ctx.wants))
        weights = None if ctx.fed is None else ctx.fed.weights
        values = Exchange.apply(token, output, weights, self, ctx)
        self.backwards.watch(ctx.begun, values)
        return KeyedTensor._of(self._features.output_keys, self._features.output_dims, values)
