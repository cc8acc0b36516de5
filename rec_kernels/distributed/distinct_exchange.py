"""Pooled columns of bags that samples share, from the ranks that look them up, and gradients back."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.distributed.row_exchange import RowContext, RowTrip
from rec_kernels.nn.jagged.select_features import SelectedKeys, bags_of_feature
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.ops.embedding_bag import embedding_bag

_ops = torch.ops.rec_kernels


class DistinctTrip(RowTrip):
    """The collection's output from rows of distinct bags, which all ranks have pooled, or of ids, pooled here.

    Features may have batch sizes of their own on some ranks only. Gradients of bags are float32 sums over samples,
    whatever the output dtype.
    """

    _is_pooled = True

    def receive(self) -> Tensor:
        """[B, dim]; by feature, the numbers of each feature's [bags, D], one after the other."""
        module, batch, parts = self.module, self.batch, self.module.parts
        out = self._fetched(sum(batch.sizes))
        lookups = [own[:, :dim] for own, dim in zip(out.split(batch.sizes), parts.dims, strict=True)]
        blocks = []
        for f, feature in enumerate(parts.features):
            if feature.by_id:
                blocks.append(self._composed(f, lookups))
                continue
            for u in feature.lookups:
                lookups[u] = self._pooled(lookups[u], u)
            blocks.append(self.joined.compose(f, lookups))
        for members, inverse in _groups(batch.shared):
            wide = _ops.expand(torch.cat([blocks[f] for f in members], dim=1), inverse)[0]
            for f, block in zip(members, wide.split([module.output_dims[f] for f in members], dim=1), strict=True):
                blocks[f] = block
        return torch.cat([b.reshape(-1) for b in blocks]) if batch.by_feature else torch.cat(blocks, dim=1)

    def send_gradients(self, grad: Tensor) -> None:
        """Begins to send each rank the gradients of its bags, each summed over the samples that have it."""
        module, batch = self.module, self.batch
        sizes, dims = batch.features.strides, module.output_dims
        blocks = by_feature(grad, batch, dims) if batch.by_feature else list(grad.split(dims, dim=1))
        for members, inverse in _groups(batch.shared):
            wide = torch.cat([blocks[f] for f in members], dim=1)
            summed = _ops.expand_backward(wide, inverse, sizes[members[0]])
            for f, block in zip(members, summed.split([module.output_dims[f] for f in members], dim=1), strict=True):
                blocks[f] = block
        # The last column has what gradients of a bag's ids are divided by: see Routes.coefficients.
        sizes = batch.given.strides
        own = grad.new_zeros(sum(sizes), max(module.output_dims, default=0) + 1)
        for u, (block, rows) in enumerate(zip(self.joined.divide(blocks), own.split(sizes), strict=True)):
            if u not in batch.inverse:
                rows[:, : block.shape[1]] = block
        if batch.counts is not None:
            own[:, -1] = 1 / batch.counts.clamp(min=1).to(own.dtype)
        if batch.bag_of_row is not None:
            own = own.index_select(0, batch.bag_of_row)
            self._of_rows(own, blocks)
        self._return(own)

    def _pooled(self, rows: Tensor, lookup: int) -> Tensor:
        """[bags, D]: of a lookup's rows, which are those of bags, or of ids, to be summed as one process does."""
        module, given, counts = self.module, self.batch.given, self.batch.counts
        if lookup in module.routes.by_id:
            rows = _sums(rows, bags_of_feature(given, lookup, len(module.parts.lookups)))
        if lookup in module.routes.means and counts is not None:
            rows = rows / counts.split(given.strides)[lookup].clamp(min=1).to(rows.dtype)[:, None]
        return rows

    def _composed(self, feature: int, lookups: list[Tensor]) -> Tensor:
        """[bags, D]: of a feature whose rows are combined id by id; ``lookups``: the rows of all."""
        rows = list(lookups)
        for u in self.module.parts.features[feature].lookups:
            if u in self.batch.inverse:  # a row of zeros is behind those that were asked for
                rows[u] = torch.nn.functional.pad(rows[u], (0, 0, 0, 1)).index_select(0, self.batch.inverse[u])
        bags = self._bags(feature)
        pooled, counts = _sums(self.joined.compose(feature, rows), bags), self._counts(feature, bags)
        return pooled if counts is None else pooled / counts[:, None]

    def _bags(self, feature: int) -> SelectedKeys:
        return bags_of_feature(self.batch.features, feature, len(self.module.parts.features))

    def _counts(self, feature: int, bags: SelectedKeys) -> Tensor | None:
        """[bags] float32: what sums of a feature's rows are divided by; None: nothing."""
        found = self.module.parts.features[feature]
        return found.counts(bags) if found.mean else None

    def _of_rows(self, rows: Tensor, grads: list[Tensor]) -> None:
        """Makes gradients of rows that were combined id by id those of the parts, in place.

        Args:
            rows: float32, of all lookups. grads: of each feature's bags.
        """
        batch, parts, blocks = self.batch, self.module.parts, rows.split(self.batch.sizes)
        for f, feature in enumerate(parts.features):
            if not feature.by_id:
                continue
            bags = self._bags(f)
            counts, lengths = self._counts(f, bags), bags.offsets.diff()
            each = grads[f].repeat_interleave(lengths, dim=0)
            factors = None if counts is None else (1 / counts).repeat_interleave(lengths)
            if batch.fed is not None:
                found = self.joined.weight_gradients(f, grads[f], bags.offsets)
                batch.answers[f] = found if factors is None else found * factors
            if feature.distinct and bags.weights is not None:
                factors = bags.weights if factors is None else bags.weights * factors
            if feature.distinct and factors is not None:
                each = each * factors[:, None]
            for u in feature.lookups:
                own = self.joined.multiply(u, each)
                if u in batch.inverse:
                    own = _ops.expand_backward(own.contiguous(), batch.inverse[u], len(blocks[u]) + 1)[:-1]
                blocks[u][:, : parts.dims[u]] = own


def _sums(rows: Tensor, bags: SelectedKeys) -> Tensor:
    """[bags, D]: sums of rows [N, D] of ids, in the order of one process."""
    each, rows = torch.arange(len(rows), device=rows.device), rows.contiguous()
    weights = bags.weights
    return embedding_bag(each, rows, bags.offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


def by_feature(flat: Tensor, batch: RowContext, dims: list[int]) -> list[Tensor]:
    """[bags, D] of each feature, whose numbers lie one after the other."""
    shapes = list(zip(batch.features.strides, dims, strict=True))
    return [own.view(shape) for own, shape in zip(flat.split([n * d for n, d in shapes]), shapes, strict=True)]


def _groups(shared: SharedBags | None) -> list[tuple[list[int], Tensor]]:
    """Features that share bags together, and which of them each sample has."""
    if shared is None:
        return []
    return [(members, shared.inverse[group]) for group, members in shared.features_by_group().items()]
