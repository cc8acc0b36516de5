"""The store that a collection's cache asks for."""

from __future__ import annotations

import torch

from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.file_store import FileStore, UnopenedStore, open_file
from rec_kernels.nn.tables.row_cache import CacheState, RowCache
from rec_kernels.nn.tables.store import HostStore, TableStore, device_of


def make_store(features: FeatureMap, cache: RowCache | None, device: torch.device | str | None) -> TableStore:
    """The store that a cache's ``backing`` asks for, with its slots on ``device``.

    Raises:
        ValueError: a file for a collection on a GPU, or a budget that is too small. OSError: the file cannot be opened.
    """
    if cache is None:
        return TableStore(features, None)
    if cache.backing == "disk" and device_of(device).type == "meta":
        return UnopenedStore(features, CacheState(cache, features, device=device))
    if cache.backing == "disk":
        file = open_file(features, cache, device)
        try:
            return FileStore(features, CacheState(cache, features, device=device), file)
        except BaseException:
            file.file.close()
            raise
    return (HostStore if cache.backing == "host" else TableStore)(features, CacheState(cache, features, device=device))
