"""The model of a run, made from its config, or from a checkpoint that fits it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rec_kernels as rk
from rec_kernels.dlrm import checkpoint, devices, files
from rec_kernels.dlrm.config import TrainConfig, parse_size
from rec_kernels.dlrm.data import DataError, DataSet
from rec_kernels.dlrm.files import shown
from rec_kernels.dlrm.model import DLRM, CrossInteraction, DotInteraction, WukongInteraction
from rec_kernels.dlrm.ranks import ALONE
from rec_kernels.dlrm.runs import TrainingError

#: Options of a config that are arguments of the model.
OPTIONS = ("bottom", "top", "format", "rounding", "seed", "precision", "activations")
FILE = "embeddings.rows"  # of tables on disk, in the folder of a run


def build_model(
    config: TrainConfig, data: DataSet, directory: Path | None = None, generation: int | None = None
) -> DLRM:
    """The model of a run on its device, with its initial weights, which are the same on every device.

    With several processes, which ``data.ranks`` tells, each has its shards of the tables. These begin with other
    numbers than one process's, from the seed alone, the same whatever the number of processes.

    Args:
        config: of the run. data: the data set, or a run's reader.
        directory: of the run, which has the tables' file if they are on disk; ``generation``: of this file.

    Raises:
        DeviceError: the device cannot be used. DataError: the file of tables cannot be used. TrainingError: no model
            has these options.
    """
    ranks, device = getattr(data, "ranks", ALONE), devices.find(config.device)
    try:
        model = DLRM(
            data.features,
            data.num_dense,
            config.embedding_dim,
            **{name: getattr(config, name) for name in OPTIONS},
            interaction=interaction_of(config),
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
            raise TrainingError(f"no model has these options: {error}") from error
        raise DataError(f"tables on disk: {error} (memory_budget is {config.memory_budget!r})") from error
    except (OSError, ImportError) as error:
        raise DataError(f"tables on disk: {error}") from error


def restored_model(config: TrainConfig, data: DataSet, directory: Path, state: dict) -> DLRM:
    """The model of a run as it was at its checkpoint ``state``.

    Raises:
        DataError: the two do not fit. Others: as ``build_model``.
    """
    with checkpoint.fitting(directory):
        generation = generation_of(state["model"])
    if (in_file := generation is not None) != (config.backing == "disk"):  # before a file of tables is made
        there, wanted = ("a file", "disk") if in_file else ("memory", "device or --backing host")
        raise DataError(
            f"{directory / checkpoint.NAME} has its tables in {there}, and backing is {config.backing!r}: go on with "
            f"--backing {wanted}"
        )
    model = build_model(config, data, directory, generation)
    try:
        with checkpoint.fitting(directory):
            shards = {}
            if "shards" in state:
                own = model.state_dict().items()
                shards = {n: t for n, t in own if n not in state["model"] and not n.startswith("embeddings.row_cache.")}
                checkpoint.load_shards(directory / state["shards"], shards)
            model.load_state_dict(state["model"] | shards)
    except DataError:
        model.own_tables.close()
        raise
    return model


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


def interaction_of(config: TrainConfig) -> Callable[[int, int], nn.Module]:
    """Interaction of the model that ``config.model`` names, from the number of features and D."""
    c = config
    return {
        "dlrm": DotInteraction,
        "dcnv2": lambda features, dim: CrossInteraction(features, dim, c.cross_layers, c.cross_rank),
        "wukong": lambda features, dim: WukongInteraction(
            features, dim, c.wukong_layers, c.wukong_features, c.wukong_factors, c.wukong_hidden
        ),
    }[config.model]
