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

    Each rank has different shards and projections among its parameters, so torch's function computes a different norm
    on every rank, and replicas that DistributedDataParallel keeps equal would diverge. This function computes the norm
    of one process with the whole model: blocks of all ranks, and replicas once. Tables with a fused optimizer have no
    gradients to include; the optimizer's ``clip_grad_norm`` and ``clip_grad_value`` clip each row.

    Args:
        model: with gradients; outside of sharded collections, these are equal on all ranks, as with
            DistributedDataParallel, or sharded by FSDP2.
        max_norm: the largest norm after clipping. norm_type: p of the p-norm, above 0; infinity: largest element.
        error_if_nonfinite: whether a norm that is NaN or Inf raises.

    Returns:
        The norm before clipping, float32, 0-dim.

    Raises:
        TypeError: ``model`` is not a module; a list of parameters would not show which are sharded. ValueError:
        ``norm_type`` is not above 0, or ``max_norm`` is below 0. RuntimeError: the norm is not finite and
        ``error_if_nonfinite`` is True; on all ranks.
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
    """The gradients that only this rank has: of its blocks of tables and of their projections."""
    own = {id(p) for p in collection.parameters()}
    for block in collection._stored_blocks:
        for parameter in [] if block.shard.replica else collection.shards._tables[block.name]._parameters.values():
            if parameter is not None and id(parameter) in own and parameter.grad is not None:
                yield parameter.grad


def _whole(norm: Tensor) -> Tensor:
    """The norm of the whole gradient; a collective if FSDP2 has sharded it."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _power(gradients: Iterator[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of the elements' p-th powers, or the largest element, float32, 0-dim."""
    norms = [_whole(torch.linalg.vector_norm(g.float(), norm_type)).to(device) for g in gradients]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    found = torch.stack(norms)
    return found.amax() if math.isinf(norm_type) else (found**norm_type).sum()
