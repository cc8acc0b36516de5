"""The memory report of a sharded collection: sums over all ranks' shards, by table of the whole collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rec_kernels.distributed.collectives import gather_objects
from rec_kernels.distributed.local_shards import StoredBlock
from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.row_cache import COUNTERS

_BYTES = ("weight_bytes", "state_bytes")
_SLOTS = ("cached_rows", "dirty_rows", "cache_bytes")


def memory_report(
    features: FeatureMap, blocks: Sequence[StoredBlock], report: Sequence[Mapping[str, Any]], group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Sums ``memory_report()`` over ranks, for each stored table of the whole collection; a collective.

    Args:
        features: of the whole collection. blocks: those of this rank. report: of its own collection.
    """
    numbers, own = {block.name: block.stored for block in blocks}, dict[int, Counter[str]]()
    for table in report:
        found = own.setdefault(numbers[table["name"]], Counter())
        found.update({key: table[key] for key in (*_BYTES, *_SLOTS) if key in table})
        for key in COUNTERS:  # a table's shards on a rank share its counters
            if key in table:
                found[key] = table[key]
    ranks = gather_objects({number: dict(found) for number, found in own.items()}, group)
    tables = []
    for number, stored in enumerate(features.stored):
        sums: Counter[str] = Counter()
        for theirs in ranks:
            sums.update(theirs.get(number, {}))
        names = ("name", "num_embeddings", "embedding_dim", "format")
        whole = {name: getattr(stored, name) for name in names} | dict(sums)
        if "lookups" in sums:
            whole["hit_rate"] = sums["hits"] / sums["lookups"] if sums["lookups"] else None
        tables.append(whole)
    return tables
