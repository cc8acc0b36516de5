"""Reports of a sharded collection's tables: of all ranks' shards together, by the names of the whole tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rec_kernels.distributed.collectives import gathered
from rec_kernels.distributed.local_shards import Piece
from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.row_cache import COUNTERS

_BYTES = ("weight_bytes", "state_bytes")
_SLOTS = ("cached_rows", "dirty_rows", "cache_bytes")


def memory_report(
    features: FeatureMap, pieces: Sequence[Piece], report: Sequence[Mapping[str, Any]], group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """The sums of all ranks' ``memory_report()``, for each stored table of the whole collection; a collective.

    Args:
        features: of the whole collection. pieces: those of this rank. report: of its own collection.
    """
    numbers, own = {piece.name: piece.stored for piece in pieces}, dict[int, Counter[str]]()
    for table in report:
        found = own.setdefault(numbers[table["name"]], Counter())
        found.update({key: table[key] for key in (*_BYTES, *_SLOTS) if key in table})
        for key in COUNTERS:  # shards of one table have its sums
            if key in table:
                found[key] = table[key]
    ranks = gathered({number: dict(found) for number, found in own.items()}, group)
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


def tier_report(report: Mapping[str, int], group: dist.ProcessGroup) -> dict[str, int]:
    """The sums of all ranks' ``tier_report()``; a collective. ``report``: of this rank's own collection."""
    ranks = gathered(dict(report), group)
    return {key: sum(found[key] for found in ranks) for key in report}
