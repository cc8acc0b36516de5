"""Output dist of pooled features that receive a row per bag, or per id, instead of a row per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.distributed.lookup_context import LookupContext
from rec_kernels.distributed.sequence_output_dist import SequenceOutputDist
from rec_kernels.nn.jagged.select_features import SelectedKeys, bags_of_feature
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.ops.embedding_bag import embedding_bag

_ops = torch.ops.rec_kernels


class VariableBatchOutputDist(SequenceOutputDist):
    """Pooled outputs of features with batch sizes of their own, or whose rows are pooled on this rank.

    Some ranks may have features with batch sizes of their own, and others not. As TorchRec's
    VariableBatchPooledEmbeddingsAllToAll, but it also serves ``row_wise="exact"`` and parts combined by id, whose rows
    are sent one by one. Gradients of bags are float32 sums over samples, for any output dtype.
    """

    _is_pooled = True

    def wait_forward(self) -> Tensor:
        """[B, dim]; with ``by_feature``, [bags, D] of each feature, flattened and concatenated."""
        module, ctx, lookup_map = self.module, self.ctx, self.module.lookup_map
        out = self._receive_rows(sum(ctx.rows_per_lookup))
        lookups = [own[:, :dim] for own, dim in zip(out.split(ctx.rows_per_lookup), lookup_map.dims, strict=True)]
        blocks = []
        for f, feature in enumerate(lookup_map.features):
            if feature.by_id:
                blocks.append(self._combine_by_id(f, lookups))
                continue
            for u in feature.lookups:
                lookups[u] = self._pool(lookups[u], u)
            blocks.append(self.combiner.combine(f, lookups))
        for members, inverse in _groups(ctx.shared_bags):
            wide = _ops.expand(torch.cat([blocks[f] for f in members], dim=1), inverse)[0]
            for f, block in zip(members, wide.split([module.output_dims[f] for f in members], dim=1), strict=True):
                blocks[f] = block
        return torch.cat([b.reshape(-1) for b in blocks]) if ctx.by_feature else torch.cat(blocks, dim=1)

    def start_backward(self, grad: Tensor) -> None:
        """Starts to send each rank the gradients of its bags, summed over the samples that share them."""
        module, ctx = self.module, self.ctx
        sizes, dims = ctx.feature_bags.strides, module.output_dims
        blocks = split_by_feature(grad, ctx, dims) if ctx.by_feature else list(grad.split(dims, dim=1))
        for members, inverse in _groups(ctx.shared_bags):
            wide = torch.cat([blocks[f] for f in members], dim=1)
            summed = _ops.expand_backward(wide, inverse, sizes[members[0]])
            for f, block in zip(members, summed.split([module.output_dims[f] for f in members], dim=1), strict=True):
                blocks[f] = block
        # The last column is 1 / ids of the bag: see Routes.mean_entries.
        sizes = ctx.lookup_bags.strides
        own = grad.new_zeros(sum(sizes), max(module.output_dims, default=0) + 1)
        gradients = self.combiner.lookup_gradients(blocks)
        for u, (block, rows) in enumerate(zip(gradients, own.split(sizes), strict=True)):
            if u not in ctx.unique_inverse:
                rows[:, : block.shape[1]] = block
        if ctx.bag_counts is not None:
            own[:, -1] = 1 / ctx.bag_counts.clamp(min=1).to(own.dtype)
        if ctx.bag_of_row is not None:
            own = own.index_select(0, ctx.bag_of_row)
            self._split_by_id(own, blocks)
        self._send_gradients(own)

    def _pool(self, rows: Tensor, lookup: int) -> Tensor:
        """[bags, D]: pools a lookup's rows of ids in the order of one process; rows of bags are sums already."""
        module, bags, counts = self.module, self.ctx.lookup_bags, self.ctx.bag_counts
        if lookup in module.routes.unpooled_features:
            rows = _sum_bags(rows, bags_of_feature(bags, lookup, len(module.lookup_map.lookups)))
        if lookup in module.routes.mean_features and counts is not None:
            rows = rows / counts.split(bags.strides)[lookup].clamp(min=1).to(rows.dtype)[:, None]
        return rows

    def _combine_by_id(self, feature: int, lookups: list[Tensor]) -> Tensor:
        """[bags, D]: combines the rows of each id of a feature and pools them; ``lookups``: rows of all lookups."""
        rows = list(lookups)
        for u in self.module.lookup_map.features[feature].lookups:
            if u in self.ctx.unique_inverse:  # index len(rows) is that of invalid ids: zeros
                rows[u] = torch.nn.functional.pad(rows[u], (0, 0, 0, 1)).index_select(0, self.ctx.unique_inverse[u])
        bags = self._bags(feature)
        pooled, counts = _sum_bags(self.combiner.combine(feature, rows), bags), self._mean_counts(feature, bags)
        return pooled if counts is None else pooled / counts[:, None]

    def _bags(self, feature: int) -> SelectedKeys:
        return bags_of_feature(self.ctx.feature_bags, feature, len(self.module.lookup_map.features))

    def _mean_counts(self, feature: int, bags: SelectedKeys) -> Tensor | None:
        """[bags] float32 divisors of a mean, or None if the feature is summed."""
        found = self.module.lookup_map.features[feature]
        return found.count_valid(bags) if found.mean else None

    def _split_by_id(self, rows: Tensor, grads: list[Tensor]) -> None:
        """Overwrites gradients of rows that were combined by id with those of the parts' rows.

        Args:
            rows: float32, of all lookups. grads: of each feature's bags.
        """
        ctx, lookup_map, blocks = self.ctx, self.module.lookup_map, rows.split(self.ctx.rows_per_lookup)
        for f, feature in enumerate(lookup_map.features):
            if not feature.by_id:
                continue
            bags = self._bags(f)
            counts, lengths = self._mean_counts(f, bags), bags.offsets.diff()
            each = grads[f].repeat_interleave(lengths, dim=0)
            factors = None if counts is None else (1 / counts).repeat_interleave(lengths)
            if ctx.weight_grad_bags is not None:
                found = self.combiner.weight_gradients(f, grads[f], bags.offsets)
                ctx.combined_weight_grads[f] = found if factors is None else found * factors
            if feature.unique and bags.weights is not None:
                factors = bags.weights if factors is None else bags.weights * factors
            if feature.unique and factors is not None:
                each = each * factors[:, None]
            for u in feature.lookups:
                own = self.combiner.row_gradients(u, each)
                if u in ctx.unique_inverse:
                    inverse = ctx.unique_inverse[u]
                    own = _ops.expand_backward(own.contiguous(), inverse, len(blocks[u]) + 1)[:-1]
                blocks[u][:, : lookup_map.dims[u]] = own


def _sum_bags(rows: Tensor, bags: SelectedKeys) -> Tensor:
    """[bags, D]: sums of rows [N, D] of ids, in the order of one process."""
    each, rows = torch.arange(len(rows), device=rows.device), rows.contiguous()
    weights = bags.weights
    return embedding_bag(each, rows, bags.offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


def split_by_feature(flat: Tensor, ctx: LookupContext, dims: list[int]) -> list[Tensor]:
    """Splits a flat tensor into [bags, D] of each feature."""
    shapes = list(zip(ctx.feature_bags.strides, dims, strict=True))
    return [own.view(shape) for own, shape in zip(flat.split([n * d for n, d in shapes]), shapes, strict=True)]


def _groups(shared: SharedBags | None) -> list[tuple[list[int], Tensor]]:
    """Features that share bags together, and the bag of each of their samples."""
    if shared is None:
        return []
    return [(members, shared.inverse[group]) for group, members in shared.features_by_group().items()]
