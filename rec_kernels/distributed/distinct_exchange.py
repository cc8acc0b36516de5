"""Pooled columns of bags that samples share, from the ranks that look them up, and gradients back."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.distributed.row_exchange import RowContext, RowTrip
from rec_kernels.nn.jagged.select_features import SelectedKeys
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
        module, batch = self.module, self.batch
        sizes, out = batch.given.strides, self._fetched(sum(batch.sizes))
        blocks = [own[:, :dim] for own, dim in zip(out.split(batch.sizes), module.output_dims, strict=True)]
        for f in module.routes.by_id:
            blocks[f] = _pooled(blocks[f], batch.given, f)
        if batch.counts is not None:
            counts = batch.counts.clamp(min=1).to(out.dtype)[:, None].split(sizes)
            for f in module.routes.means:
                blocks[f].div_(counts[f])
        for members, inverse in _groups(batch.shared):
            wide = _ops.expand(torch.cat([blocks[f] for f in members], dim=1), inverse)[0]
            for f, block in zip(members, wide.split([module.output_dims[f] for f in members], dim=1), strict=True):
                blocks[f] = block
        return torch.cat([b.reshape(-1) for b in blocks]) if batch.by_feature else torch.cat(blocks, dim=1)

    def send_gradients(self, grad: Tensor) -> None:
        """Begins to send each rank the gradients of its bags, each summed over the samples that have it."""
        module, batch = self.module, self.batch
        sizes, dims = batch.given.strides, module.output_dims
        blocks = by_feature(grad, batch, dims) if batch.by_feature else list(grad.split(dims, dim=1))
        for members, inverse in _groups(batch.shared):
            wide = torch.cat([blocks[f] for f in members], dim=1)
            summed = _ops.expand_backward(wide, inverse, sizes[members[0]])
            for f, block in zip(members, summed.split([module.output_dims[f] for f in members], dim=1), strict=True):
                blocks[f] = block
        # The last column has what gradients of a bag's ids are divided by: see Routes.coefficients.
        own = grad.new_zeros(sum(sizes), max(module.output_dims, default=0) + 1)
        for block, rows in zip(blocks, own.split(sizes), strict=True):
            rows[:, : block.shape[1]] = block
        if batch.counts is not None:
            own[:, -1] = 1 / batch.counts.clamp(min=1).to(own.dtype)
        self._return(own if batch.bag_of_row is None else own.index_select(0, batch.bag_of_row))


def _pooled(rows: Tensor, given: SelectedKeys, feature: int) -> Tensor:
    """[bags, D]: sums of the rows of a feature's ids, [N, D], by the order of sums of one process."""
    starts = given.bag_starts(len(given.strides))
    offsets = given.offsets[starts[feature] : starts[feature + 1] + 1]
    weights = None if given.weights is None else given.weights[int(offsets[0]) : int(offsets[-1])]
    each = torch.arange(len(rows), device=rows.device)
    offsets = offsets - offsets[0]
    rows = rows.contiguous()
    return embedding_bag(each, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


def by_feature(flat: Tensor, batch: RowContext, dims: list[int]) -> list[Tensor]:
    """[bags, D] of each feature, whose numbers lie one after the other."""
    shapes = list(zip(batch.given.strides, dims, strict=True))
    return [own.view(shape) for own, shape in zip(flat.split([n * d for n, d in shapes]), shapes, strict=True)]


def _groups(shared: SharedBags | None) -> list[tuple[list[int], Tensor]]:
    """Features that share bags together, and which of them each sample has."""
    if shared is None:
        return []
    return [(members, shared.inverse[group]) for group, members in shared.together().items()]
