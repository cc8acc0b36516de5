"""Builds the model of a run from its config, or restores it from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rec_kernels as rk
from rec_kernels.dlrm import checkpoint, devices, files
from rec_kernels.dlrm.config import TrainConfig, parse_size
from rec_kernels.dlrm.data import DataError, DataSet
from rec_kernels.dlrm.files import short_repr
from rec_kernels.dlrm.model import DLRM, CrossInteraction, DotInteraction, WukongInteraction
from rec_kernels.dlrm.ranks import SINGLE_PROCESS
from rec_kernels.dlrm.runs import TrainingError

#: Options of a config that are arguments of DLRM.
OPTIONS = ("bottom", "top", "format", "rounding", "seed", "precision", "activations")
FILE = "embeddings.rows"  # tables on disk, in the run's folder


def build_model(
    config: TrainConfig, data: DataSet, directory: Path | None = None, generation: int | None = None
) -> DLRM:
    """Builds the model of a run on its device; initial weights are equal on all devices.

    If ``data.ranks`` has several ranks, tables are sharded; their initial weights depend on the seed but not on the
    world size, and differ from those of a single process.

    Args:
        data: the data set, or a run's reader.
        directory: folder of the run, required for tables on disk; ``generation``: of the tables' file.

    Raises:
        DeviceError: the device cannot be used. DataError: the tables' file cannot be used. TrainingError: the options
            define no valid model.
    """
    ranks, device = getattr(data, "ranks", SINGLE_PROCESS), devices.find(config.device)
    try:
        model = DLRM(
            data.features,
            data.num_dense,
            config.embedding_dim,
            **{name: getattr(config, name) for name in OPTIONS},
            interaction=_interaction(config),
            compressions=config.compressions(data.features),
            optimizer=config.table_optimizer(),
            cache=row_cache(config, directory, generation),
            sharded=ranks.world_size > 1,
        )
        if ranks.world_size > 1:
            from rec_kernels.dlrm.sharded import shard_tables  # imports TorchRec

            shard_tables(model, config, ranks, device)
        if config.compile != "no":
            model.compile_dense_side(config.compile)
        return model.to(device)
    except (ValueError, MemoryError) as error:
        if config.backing != "disk":
            if isinstance(error, MemoryError):
                raise
            raise TrainingError(f"no model can have these options: {error}") from error
        raise DataError(f"tables on disk: {error} (memory_budget is {config.memory_budget!r})") from error
    except (OSError, ImportError) as error:
        raise DataError(f"tables on disk: {error}") from error


def restored_model(config: TrainConfig, data: DataSet, directory: Path, state: dict) -> DLRM:
    """Restores the model of a run from its checkpoint ``state``.

    Raises:
        DataError: the checkpoint does not fit. Others: as in ``build_model``.
    """
    with checkpoint.as_data_error(directory):
        generation = _file_generation(state["model"])
    if (in_file := generation is not None) != (config.backing == "disk"):  # before build_model creates a file
        place, allowed = ("a file", "disk") if in_file else ("memory", "device or --backing host")
        raise DataError(
            f"{directory / checkpoint.NAME} has its tables in {place}, but backing is {config.backing!r}: use "
            f"--backing {allowed}"
        )
    model = build_model(config, data, directory, generation)
    try:
        with checkpoint.as_data_error(directory):
            shards = {}
            if "shards" in state:
                items, cache = model.state_dict().items(), "embeddings.row_cache."
                shards = {n: t for n, t in items if n not in state["model"] and not n.startswith(cache)}
                checkpoint.load_shards(directory / state["shards"], shards)
            model.load_state_dict(state["model"] | shards)
    except DataError:
        model.local_tables.close()
        raise
    return model


def _file_generation(state: dict) -> int | None:
    """The generation of the tables' file in a model's state; None without a file, ValueError if it is invalid."""
    found = state.get("embeddings.file_generation")
    if found is None:
        return None
    if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.ndim or found.is_meta or found < 0:
        raise ValueError(f"file_generation is {short_repr(found)}, allowed is an int64 of 0 or more")
    return int(found)


def row_cache(config: TrainConfig, directory: Path | None, generation: int | None = None) -> rk.RowCache | None:
    """The row cache of a run's model; None if the config needs none.

    Raises:
        DataError: tables are on disk, and ``directory`` is None, or their file or its log is a link.
    """
    if not config.cache and config.backing == "device":
        return None
    options: dict[str, Any] = {"fraction": config.cache, "policy": config.policy, "decay_every": config.decay_every}
    if config.backing != "disk":
        return rk.RowCache(**options, backing=config.backing)
    if directory is None:
        raise DataError("backing 'disk' needs the folder of a run, for the tables' file")
    for name in (FILE, f"{FILE}.log"):
        files.refuse_foreign(directory / name)
    budget = parse_size(config.memory_budget)
    file: dict[str, Any] = {"path": directory / FILE, "memory_budget": budget, "generation": generation}
    return rk.RowCache(**options, backing="disk", **file)


def _interaction(config: TrainConfig) -> Callable[[int, int], nn.Module]:
    c = config
    if c.model == "dcnv2":
        return partial(CrossInteraction, num_layers=c.cross_layers, low_rank=c.cross_rank)
    options = {"num_layers": c.wukong_layers, "features": c.wukong_features, "factors": c.wukong_factors}
    return DotInteraction if c.model == "dlrm" else partial(WukongInteraction, **options, hidden=c.wukong_hidden)
