"""Collections with backing="host", and training loops that prefetch, for the tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from row_cache_collections import batch
from torch import Tensor

import rec_kernels as rk


def in_host(cache: rk.RowCache) -> rk.RowCache:
    """The row cache in front of tables in host memory."""
    return replace(cache, backing="host")


def step(collection, given, prefetched=None, *, where: str = "after") -> Tensor:
    """One update by a loss that is not linear; the output.

    Args:
        given: the batch; prefetched: the one after it, which is announced ``where``: "before" or "after" the backward.
    """
    pooled = collection(given).values()
    if where == "before" and prefetched is not None:
        collection.prefetch(prefetched)
    pooled.square().sum().backward()
    if where == "after" and prefetched is not None:
        collection.prefetch(prefetched)
    return pooled.detach()


def train_ahead(collection, steps: int, *, where: str = "after", device: str = "cpu", **options) -> list[Tensor]:
    """``steps`` updates, each batch but the first prefetched; ``where=""``: none. The outputs, on the CPU."""
    batches = [batch(collection, s, **options).to(torch.device(device)) for s in range(steps)]
    return [step(collection, a, b, where=where).cpu() for a, b in zip(batches, [*batches[1:], None], strict=True)]
