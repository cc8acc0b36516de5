"""row_cache: some rows of encoded tables in FP32, in slots that the embedding_bag ops read and update.

The ops (schemas and contract in csrc/row_cache/row_cache.cpp and .h, arguments in docs/ops.md; what is cached when, and
every bit of it, in docs/numerics.md):

- ``row_cache_lookup``: in which slot the row of each id is, or -1.
- ``row_cache_insert_``: the same after the rows of a batch have been taken in, and others evicted for them.
- ``row_cache_plan``: which rows of the tables a batch will read, and which of them it may write.
- ``row_cache_flush_``: encodes changed rows into their tables.
- ``row_cache_stats``: how many rows of each table are cached, and how many of these have changed.

``rk.RowCache`` gives a collection such a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.ops.fakes import check_devices, check_one_device, dynamic_size, register_fake


def _insert(a: dict) -> Tensor:
    check_devices(a)
    return a["values"].new_empty(a["values"].shape, dtype=torch.int64)


def _lookup(a: dict) -> Tensor:
    check_one_device(a.values())
    return a["values"].new_empty(a["values"].shape, dtype=torch.int64)


def _plan(a: dict) -> tuple[Tensor, ...]:
    check_one_device(a.values())
    return tuple(a["values"].new_empty((dynamic_size(),), dtype=torch.int64) for _ in range(2))


def _stats(a: dict) -> Tensor:
    check_one_device(a.values())
    return a["cache_tags"].new_empty((a["layout"].shape[0], 2))


register_fake("row_cache_lookup.layout", _lookup)
register_fake("row_cache_insert_.layout", _insert)
register_fake("row_cache_plan.layout", _plan)
register_fake("row_cache_flush_.layout", check_devices)
register_fake("row_cache_stats.layout", _stats)
