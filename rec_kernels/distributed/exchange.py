"""Pooled columns from the ranks that look them up to the samples, and gradients back: one autograd function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.distributed.backwards import FACTS
from rec_kernels.distributed.batches import BatchContext
from rec_kernels.distributed.collectives import all_to_all, reduce_scatter
from rec_kernels.distributed.routes import Routes
from rec_kernels.distributed.row_exchange import lookup_of
from rec_kernels.distributed.weight_gradients import weight_gradients

if TYPE_CHECKING:
    from rec_kernels.distributed.sharded_pooled import ShardedEmbeddingBagCollection


class Exchange(torch.autograd.Function):
    """The collection's output from what this rank has pooled of all ranks' samples; its backward is the update.

    Every rank runs the backward, also one without tables or samples.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        pooled: Tensor,
        weights: Tensor | None,
        module: ShardedEmbeddingBagCollection,
        batch: BatchContext,
    ) -> Tensor:
        """[B, dim] of the output dtype.

        Args:
            token: what autograd calls the backward for.
            pooled: [samples of all ranks, columns of this rank's entries], float32.
            weights: this rank's per-sample weights, if they want a gradient.
        """
        routes, rank = module.routes, module.routes.rank
        sizes, own = batch.batch_sizes, batch.batch_sizes[rank]
        start, blocks = sum(sizes[:rank]), []
        if any(routes.sent):
            sent, lengths = pooled[:, : routes.sent[rank]], [own * n for n in routes.sent]
            flat = all_to_all(sent, [size * routes.sent[rank] for size in sizes], lengths, module.group)
            blocks = [b.view(own, n) for b, n in zip(flat.split(lengths), routes.sent, strict=True)]
        blocks.append(pooled[start : start + own, pooled.shape[1] - routes.replicated :])
        if routes.reduced:
            blocks.append(reduce_scatter(routes.parts(pooled), sizes, module.group))
        ctx.module, ctx.batch = module, batch
        return routes.assemble(torch.cat(blocks, dim=1), batch.counts).to(module.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sends each rank the gradients of its columns, which updates its tables with those of all samples."""
        module, batch = ctx.module, ctx.batch
        routes, sizes = module.routes, batch.batch_sizes
        grad = grad.float()
        facts, arrived = _to_shards(module.backwards.facts(batch.begun, grad), grad, module, batch)
        module.backwards.check(facts)
        whole, wide = torch.cat(arrived), routes.widths[routes.rank]
        columns, factors = whole[:, :wide].contiguous(), _by_id(whole[:, wide:], routes, batch)
        grad_weights = None
        if any(batch.wants):
            grad_weights = weight_gradients(batch.looked_up(columns), factors, module, batch)
        for block, scale in zip(columns.split(sizes), module.gradient_scales(sizes), strict=True):
            if scale != 1:
                block *= scale
        columns = batch.looked_up(columns, trains=True)
        module.backwards.take(batch.begun, lookup_of(columns if routes.own else columns[:0], factors, batch), facts)
        return None, None, grad_weights, None, None


def _to_shards(
    facts: Tensor, grad: Tensor, module: ShardedEmbeddingBagCollection, batch: BatchContext
) -> tuple[Tensor, list[Tensor]]:
    """Sends each rank the gradients of its columns, behind this rank's ``facts``.

    Returns:
        The facts of all ranks, [ranks, FACTS], and for each rank the gradients of its samples, [samples, columns of
        this rank's entries and their coefficients].
    """
    routes, sizes = module.routes, batch.batch_sizes
    blocks = routes.disperse(grad, batch.counts)
    flat = torch.cat([t for block in blocks for t in (facts, block.reshape(-1))])
    width = blocks[routes.rank].shape[1]
    received = [FACTS + size * width for size in sizes]
    arrived = all_to_all(flat, [FACTS + block.numel() for block in blocks], received, module.group).split(received)
    told = torch.stack([block[:FACTS] for block in arrived])
    return told, [block[FACTS:].view(size, width) for block, size in zip(arrived, sizes, strict=True)]


def _by_id(coefficients: Tensor, routes: Routes, batch: BatchContext) -> Tensor | None:
    """[N]: the coefficient of each id that this rank looks up, or None if no entry has any.

    Args:
        coefficients: [samples of all ranks, entries that have them].
    """
    numbers = routes.coefficients[routes.rank]
    if not numbers:
        return None
    factors = torch.ones(len(routes.own), len(coefficients), dtype=torch.float32, device=coefficients.device)
    factors[numbers] = coefficients.T
    return factors.reshape(-1).repeat_interleave(batch.bags.offsets.diff())
