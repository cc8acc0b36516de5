"""Clipping of a sharded model's gradients by the norm of all ranks' parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rec_kernels.distributed.sharded_collection import ShardedCollection
from rec_kernels.nn.arguments import number_of


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for a model with sharded collections; a collective, after the backward.

    A rank has its own shards and matrices among its parameters, so torch's function finds another norm on every rank,
    and scales by it what DistributedDataParallel keeps alike. This one has the norm of one process with the whole
    model: blocks of all ranks, and replicas once. Tables that a fused optimizer trains have no gradients to count:
    their own ``clip_grad_norm`` and ``clip_grad_value`` are of each row.

    Args:
        model: with gradients; those of parameters outside of sharded collections are the same on all ranks, as
            DistributedDataParallel leaves them, or sharded by FSDP2.
        max_norm: of the norm, at most. norm_type: p of the p-norm, above 0; infinity: of the largest element.
        error_if_nonfinite: whether a norm that is NaN or Inf raises.

    Returns:
        The norm before, float32 with no dimension.

    Raises:
        TypeError: ``model`` is no module, as a list of parameters, which does not say who has the others. ValueError:
        ``norm_type`` is not above 0, or ``max_norm`` is below. RuntimeError: the norm is not finite, and that was to
        raise; on all ranks.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not number_of(norm_type) > 0:
        raise ValueError(f"norm_type = {norm_type!r} must be above 0")
    if not number_of(max_norm) >= 0:
        raise ValueError(f"max_norm = {max_norm!r} must be at least 0")
    shards = [m for m in model.modules() if isinstance(m, ShardedCollection)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    own = {id(grad) for collection in shards for grad in _blocks(collection)}
    device = gradients[0].device if gradients else torch.device("cpu")
    parts = [_power((g for g in gradients if id(g) not in own), norm_type, device)]
    for collection in shards:
        part = _power(_blocks(collection), norm_type, collection.shards.device)
        dist.all_reduce(part, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, collection.group)
        parts.append(part.to(device))
    norm = torch.stack(parts).amax() if math.isinf(norm_type) else torch.stack(parts).sum() ** (1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of all gradients is {norm.item()}; nothing was scaled")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm


def _blocks(collection: ShardedCollection) -> Iterator[Tensor]:
    """The gradients that this rank alone has: of its blocks of tables, and of matrices of tables that no other has."""
    shown = {id(p) for p in collection.parameters()}
    for piece in collection._pieces:
        for parameter in [] if piece.shard.replica else collection.shards._held[piece.name]._parameters.values():
            if parameter is not None and id(parameter) in shown and parameter.grad is not None:
                yield parameter.grad


def _whole(norm: Tensor) -> Tensor:
    """The norm of all ranks' parts of a gradient that FSDP2 has sharded: a collective then."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _power(gradients: Iterator[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of the elements' powers, or their largest, float32 without dimensions."""
    norms = [_whole(torch.linalg.vector_norm(g.float(), norm_type)).to(device) for g in gradients]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    found = torch.stack(norms)
    return found.amax() if math.isinf(norm_type) else (found**norm_type).sum()
