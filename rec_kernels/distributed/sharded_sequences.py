"""ShardedEmbeddingCollection: the module that takes the place of an rk.EmbeddingCollection on every rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList

from rec_kernels.distributed import batches
from rec_kernels.distributed.agreement import Agreed
from rec_kernels.distributed.batches import CheckedBatch, SortedIds
from rec_kernels.distributed.row_exchange import Parcels, RowContext, RowTrip
from rec_kernels.distributed.sharded_collection import ShardedCollection
from rec_kernels.distributed.torch_tables import ShownTables
from rec_kernels.distributed.trips import ArrivingRows, later, run_early
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.jagged.tensors import JaggedTensor
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.load_state import rename


class ShardedEmbeddingCollection(ShardedCollection):
    """An ``rk.EmbeddingCollection`` whose tables are shared out among ranks; made by the sharder.

    Every rank calls it with its own samples, and runs the backward: both are collectives. Batch sizes may differ, also
    between features, and be 0. Outputs and updates are those of one process with all samples, bit by bit: a row comes
    from the one shard that has it, or column by column.

    With a fused optimizer it has no parameter but ``all_tables``, of no elements, whose ``requires_grad`` is that of
    all tables: an optimizer of torch, and DistributedDataParallel, train the rest of the model only. With
    ``optimizer=None`` its parameters are this rank's shards, with the gradients of all samples.

    Args:
        module: the whole collection; rows that are not on the meta device are taken over, with the optimizer's state.
        shards: of its tables, as the plan has them.
        group: the ranks. device: of this rank's shards. Replicas begin as the first rank's.
        gradient, wire: ``EmbeddingCollectionSharder``'s. row_wise: not used: rows of ids are not summed.
        name: the collection's in the model, from which, and from its ``seed``, rows of one on the meta device begin.

    Raises:
        ValueError: ranks have other tables, plans, optimizers or options than the first.
    """

    _holder = "embeddings"

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection]:
        """The type of the module that it takes the place of."""
        return EmbeddingCollection

    @property
    def embeddings(self) -> ShownTables:
        """``embedding_bags``, by the name that it has in ``rk.EmbeddingCollection``."""
        return self.embedding_bags

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, as ``rk.EmbeddingCollection.embedding_configs``."""
        return list(self.tables)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **named: Any) -> None:
        rename(state_dict, f"{prefix}embedding_bags.", f"{prefix}embeddings.")
        super()._load_from_state_dict(state_dict, prefix, *args, **named)

    def _sorted(self, ctx: RowContext, given: CheckedBatch) -> SortedIds:
        ctx.given = bags = given.bags
        starts = bags.offsets[bags.bag_starts(self.routes.num_features)]
        # One bag for each feature: where samples begin is nobody else's business.
        return batches.sort_ids(SelectedKeys(bags.values, starts, bags.weights, None), self.routes)

    def _take_agreed(self, ctx: RowContext, given: CheckedBatch, sent: SortedIds, agreed: Agreed) -> bool:
        counts = iter(map(len, sent.ids))
        ctx.asked = Parcels(
            self.routes.rank,
            torch.cat([ctx.given.offsets.new_empty(0), *sent.places]),
            [[next(counts) for _ in entries] for entries in self.routes.entries],
            self._runs,
            at_front=False,
        )
        return False

    def compute(self, ctx: RowContext, dist_input: KJTList) -> Tensor:
        """[ids of all ranks, columns of this rank's shards]: rows of all ids that this rank was sent."""
        kjt, routes = dist_input[0], self.routes
        counts = kjt.lengths().long().view(len(routes.own), routes.world_size)
        each = torch.arange(len(kjt.values()) + 1, device=counts.device)
        ctx.bags = SelectedKeys(kjt.values(), each, kjt.weights_or_none(), None)
        return self._rows_looked_up(ctx, counts)

    def output_dist(self, ctx: RowContext, output: Tensor) -> dict[str, JaggedTensor]:
        """Returns the rows of this rank's ids, as ``rk.EmbeddingCollection.forward``."""
        arrived = self._leave(RowTrip(self, ctx), output)
        given = ctx.features
        bags = given.bag_starts(len(self.feature_names))
        bounds = given.offsets[bags].tolist()
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        blocks = later(lambda: arrived().split(sizes))
        found: dict[str, JaggedTensor] = {}
        for f, (key, dim) in enumerate(zip(self._features.output_keys, self.output_dims, strict=True)):
            own = given.offsets[bags[f] : bags[f + 1] + 1]
            found[key] = ArrivingRows(later(functools.partial(_rows_of, blocks, f, dim)), own - own[:1])
        return found


def _rows_of(blocks: Callable[[], Sequence[Tensor]], feature: int, dim: int) -> Tensor:
    return run_early(blocks()[feature][:, :dim])
