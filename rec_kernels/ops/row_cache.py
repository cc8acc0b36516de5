"""row_cache: an FP32 cache for rows of encoded tables; the embedding_bag ops read and update its slots.

The ops (schemas and contract in csrc/row_cache/row_cache.cpp and .h, arguments in docs/ops.md, replacement policy and
bits in docs/numerics.md):

- ``row_cache_lookup``: finds the slot of each id's row, or -1.
- ``row_cache_insert_``: inserts the rows of a batch, evicts others, and returns the slot of each id's row.
- ``row_cache_plan``: lists the table rows that a batch will read, and those that it may write.
- ``row_cache_flush_``: writes dirty rows back to their tables.
- ``row_cache_stats``: counts the cached rows and the dirty rows of each table.

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
