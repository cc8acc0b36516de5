"""Row caches of a run: which rows are kept in FP32, where the others are, and how often a row was cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rec_kernels as rk
from rec_kernels.dlrm.config import TrainConfig, parse_size
from rec_kernels.dlrm.data import DataError, Feature

#: The collections of a model, by their attributes' names.
COLLECTIONS = ("embeddings", "shared")


def row_caches(
    config: TrainConfig, features: Sequence[Feature], directory: Path | None, generations: dict[str, int]
) -> dict[str, rk.RowCache]:
    """The cache of each collection of a run's model; none where the config asks for none.

    Args:
        config: of the run. features: of its data.
        directory: of the run, where files of tables are.
        generations: of the files' states that a checkpoint goes with, by collection.

    Raises:
        DataError: tables are to be in files, and there is no folder for them.
    """
    if not config.cache and config.backing == "device":
        return {}
    options = {"fraction": config.cache, "policy": config.policy, "decay_every": config.decay_every}
    if config.backing != "disk":
        return dict.fromkeys(COLLECTIONS, rk.RowCache(**options, backing=config.backing))
    if directory is None:
        raise DataError("backing 'disk' is for runs, whose folder has the tables' files")
    of = {name: [f for f in features if f.shared == (name == "shared")] for name in COLLECTIONS}
    rows = {name: sum(f.num_embeddings for f in chosen) for name, chosen in of.items()}
    budget, total = parse_size(config.memory_budget), sum(rows.values())
    return {
        name: rk.RowCache(
            **options,
            backing="disk",
            path=directory / f"{name}.rows",
            memory_budget=max(budget * count // total, 1),
            generation=generations.get(name),
        )
        for name, count in rows.items()
        if count
    }


def generations_of(state: dict) -> dict[str, int]:
    """The states of the files that a model's ``state_dict`` goes with, by collection."""
    found = {name: state.get(f"{name}.file_generation") for name in COLLECTIONS}
    return {name: int(generation) for name, generation in found.items() if generation is not None}


class HitRates:
    """Of the ids that were looked up since the last call, how many had their row in the cache.

    Args:
        collections: of the model.
    """

    def __init__(self, collections: Sequence[rk.EmbeddingBagCollection]) -> None:
        self._cached = [c for c in collections if c.row_cache is not None]
        self._before: dict[str, tuple[int, int]] = {}

    def take(self) -> dict[str, float]:
        """Table -> rate, of the tables that were looked up."""
        counted = [item for c in self._cached for item in c.row_cache.counters().items()]
        now = {name: (numbers["lookups"], numbers["hits"]) for name, numbers in counted}
        rates = {}
        for name, (lookups, hits) in now.items():
            lookups_before, hits_before = self._before.get(name, (0, 0))
            if lookups > lookups_before:
                rates[name] = (hits - hits_before) / (lookups - lookups_before)
        self._before = now
        return rates
