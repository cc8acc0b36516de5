"""Row caches of a run: which rows are kept in FP32, where the others are, and how often a row was cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rec_kernels as rk
from rec_kernels.dlrm import files
from rec_kernels.dlrm.config import TrainConfig, parse_size
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.shapes import shown

FILE = "embeddings.rows"


def row_cache(config: TrainConfig, directory: Path | None, generation: int | None = None) -> rk.RowCache | None:
    """The cache of a run's model; None where the config asks for none.

    Args:
        config: of the run.
        directory: of the run, where the file of tables is.
        generation: of the file's state that a checkpoint goes with.

    Raises:
        DataError: tables are to be in a file, and there is no folder for it, or it or its log is a link.
    """
    if not config.cache and config.backing == "device":
        return None
    options: dict[str, Any] = {"fraction": config.cache, "policy": config.policy, "decay_every": config.decay_every}
    if config.backing != "disk":
        return rk.RowCache(**options, backing=config.backing)
    if directory is None:
        raise DataError("backing 'disk' is for runs, whose folder has the tables' file")
    for name in (FILE, f"{FILE}.log"):
        files.refuse_foreign(directory / name)
    budget = parse_size(config.memory_budget)
    file: dict[str, Any] = {"path": directory / FILE, "memory_budget": budget, "generation": generation}
    return rk.RowCache(**options, backing="disk", **file)


def generation_of(state: dict) -> int | None:
    """The state of the file that a model's ``state_dict`` goes with; None: there is no file.

    Raises:
        ValueError: it is no int64 [] of 0 or more.
    """
    found = state.get("embeddings.file_generation")
    if found is None:
        return None
    if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.ndim or found.is_meta or found < 0:
        raise ValueError(f"file_generation is {shown(found)}, allowed is an int64 of 0 or more")
    return int(found)


class HitRates:
    """Of the ids that were looked up since the last call, how many had their row in the cache.

    Args:
        collection: of the model.
    """

    def __init__(self, collection: rk.EmbeddingBagCollection) -> None:
        self._cache = collection.row_cache
        self._before: dict[str, tuple[int, int]] = {}

    def take(self) -> dict[str, float]:
        """Table -> rate, of the tables that were looked up."""
        counted = {} if self._cache is None else self._cache.counters()
        now = {name: (numbers["lookups"], numbers["hits"]) for name, numbers in counted.items()}
        rates = {}
        for name, (lookups, hits) in now.items():
            lookups_before, hits_before = self._before.get(name, (0, 0))
            if lookups > lookups_before:
                rates[name] = (hits - hits_before) / (lookups - lookups_before)
        self._before = now
        return rates
