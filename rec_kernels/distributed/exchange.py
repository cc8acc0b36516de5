"""Pooled columns from the ranks that look them up to the samples, and gradients back: one autograd function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.distributed.batches import BatchContext
from rec_kernels.distributed.routes import Routes
from rec_kernels.nn.jagged.select_features import NOTHING_BAD
from rec_kernels.nn.training.accumulate import Lookup

if TYPE_CHECKING:
    from rec_kernels.distributed.sharded_pooled import ShardedEmbeddingBagCollection


class Exchange(torch.autograd.Function):
    """The collection's output from what this rank has pooled of all ranks' samples; its backward is the update.

    Every rank runs the backward, also one without tables or samples.
    """

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, pooled: Tensor, module: ShardedEmbeddingBagCollection, batch: BatchContext
    ) -> Tensor:
        """[B, dim] of the output dtype.

        Args:
            token: what autograd calls the backward for.
            pooled: [samples of all ranks, columns of this rank's entries], float32.
        """
        routes, rank = module.routes, module.routes.rank
        sizes, own = batch.batch_sizes, batch.batch_sizes[rank]
        sent = pooled[:, : routes.sent[rank]]
        lengths = [own * n for n in routes.sent]
        flat = all_to_all(sent, [size * routes.sent[rank] for size in sizes], lengths, module.group)
        blocks = [b.view(own, n) for b, n in zip(flat.split(lengths), routes.sent, strict=True)]
        start = sum(sizes[:rank])
        replicas = pooled[start : start + own, routes.sent[rank] :]
        ctx.module, ctx.batch, ctx.pending = module, batch, module.pending
        return routes.assemble(torch.cat([*blocks, replicas], dim=1), batch.counts).to(module.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sends each rank the gradients of its columns, which updates its tables with those of all samples."""
        module, batch = ctx.module, ctx.batch
        module.check_pending(ctx.pending)
        routes, sizes = module.routes, batch.batch_sizes
        grad = grad.float() * scale if (scale := module.gradient_scale(sizes)) != 1 else grad.float()
        flat, widths = routes.disperse(grad, batch.counts)
        own, mine = sizes[routes.rank], widths[routes.rank]
        arrived = all_to_all(flat, [own * n for n in widths], [size * mine for size in sizes], module.group)
        arrived = arrived.view(sum(sizes), mine)
        lookup = _lookup(arrived, routes, batch)
        if ctx.pending is None:
            module.update(lookup)
        else:
            ctx.pending.add(lookup)
        return None, None, None, None


def _lookup(arrived: Tensor, routes: Routes, batch: BatchContext) -> Lookup:
    """The update of this rank: gradients of its columns, and ids with their weights."""
    bags, wide = batch.bags, routes.widths[routes.rank]
    if not routes.own:
        arrived = arrived[:0]
    grad, weights = arrived[:, :wide].contiguous(), bags.weights
    if numbers := routes.coefficients[routes.rank]:
        factors = torch.ones(len(routes.own), len(arrived), dtype=torch.float32, device=grad.device)
        factors[numbers] = arrived[:, wide:].T
        each = factors.reshape(-1).repeat_interleave(bags.offsets.diff())
        weights = each if weights is None else weights * each
    status = torch.full((2,), NOTHING_BAD, dtype=torch.int64, device=grad.device)
    return Lookup(grad, bags.values, bags.offsets, weights, status)


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Flat blocks from all ranks, in their order; ``sent`` and ``received`` are elements to and from each."""
    flat = x.reshape(-1)
    if dist.get_world_size(group) == 1:
        return flat
    out = flat.new_empty(sum(received))
    dist.all_to_all_single(out, flat, received, sent, group=group)
    return out
