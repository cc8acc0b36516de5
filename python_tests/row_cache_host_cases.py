"""Collections with backing="host", and training loops that prefetch."""

from __future__ import annotations

from dataclasses import replace

import torch
from row_cache_collections import batch
from torch import Tensor

import rec_kernels as rk


def in_host(cache: rk.RowCache) -> rk.RowCache:
    """The row cache for tables in host memory."""
    return replace(cache, backing="host")


def step(collection, given, prefetched=None, *, where: str = "after") -> Tensor:
    """One update with a nonlinear loss; returns the output.

    Args:
        given: the batch. prefetched: the next batch, prefetched ``where``: "before" or "after" the backward.
    """
    pooled = collection(given).values()
    if where == "before" and prefetched is not None:
        collection.prefetch(prefetched)
    pooled.square().sum().backward()
    if where == "after" and prefetched is not None:
        collection.prefetch(prefetched)
    return pooled.detach()


def train_ahead(collection, steps: int, *, where: str = "after", device: str = "cpu", **options) -> list[Tensor]:
    """Takes ``steps`` updates, prefetching every later batch (``where=""``: none); returns the outputs on the CPU."""
    batches = [batch(collection, s, **options).to(torch.device(device)) for s in range(steps)]
    return [step(collection, a, b, where=where).cpu() for a, b in zip(batches, [*batches[1:], None], strict=True)]
