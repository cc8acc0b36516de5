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
from rec_kernels.dlrm.model import DLRM, CrossInteraction, DotInteraction, WukongInteraction
from rec_kernels.dlrm.runs import CONFIG
from rec_kernels.dlrm.shapes import TEXT, mismatch, shown

FILE = "embeddings.rows"  # of tables on disk, in the folder of a run


def build_model(
    config: TrainConfig, data: DataSet, directory: Path | None = None, generation: int | None = None
) -> DLRM:
    """The model of a run on its device, with its initial weights, which are the same on every device.

    Args:
        config: of the run. data: the data set.
        directory: of the run, which has the tables' file if they are on disk; ``generation``: of this file.

    Raises:
        DeviceError: the device cannot be used. DataError: the file of tables cannot be used.
    """
    try:
        return _build(config, data, row_cache(config, directory, generation))
    except (ValueError, MemoryError) as error:
        if config.backing != "disk":
            raise
        raise DataError(f"tables on disk: {error} (memory_budget is {config.memory_budget!r})") from error
    except (OSError, ImportError) as error:
        raise DataError(f"tables on disk: {error}") from error


def identity(data: DataSet) -> dict:
    """What a checkpoint remembers of its data: a run goes on with no other."""
    rows = {split: data.num_rows(split) for split in ("train", "test")}
    about = {"name": data.name, "rows": rows, "features": [list(feature) for feature in data.features]}
    return about | {"fingerprint": getattr(data, "fingerprint", None)}


def read_checkpoint(directory: Path, config: TrainConfig, data: DataSet) -> dict:
    """The checkpoint of a run with this config and data.

    Raises:
        DataError: it is missing, damaged, of other data, of another format or of another model.
    """
    state = checkpoint.load(directory)
    path, found, expected = directory / checkpoint.NAME, state.get("data"), identity(data)
    if isinstance(found, dict) and None in (found.setdefault("fingerprint"), expected["fingerprint"]):
        found["fingerprint"] = expected["fingerprint"]  # older checkpoints, and data sets of others, have none
    if not _same(found, expected):
        raise DataError(f"{path} was made with other data: {shown(found, 1000)}, here are {expected}")
    if wrong := mismatch(state, {"network?": TEXT, "row_format?": TEXT, "model": {}}, ""):
        raise DataError(f"{path} does not fit the run: {wrong}")
    kind = state.get("network", "dlrm")  # as below
    if kind != config.model:
        raise DataError(
            f"{path} is of model {kind}, and the run's {CONFIG} says {config.model}: put {kind} there, or train a new "
            f"run with --model {config.model}"
        )
    format = state.get("row_format", "fp32")  # there were no others before this was written
    if format != config.format:
        raise DataError(
            f"{path} has tables of format {format}, and the run's {CONFIG} says {config.format}: put {format} there, "
            f"or train a new run with --format {config.format}; convert_formats() of a collection loads such tables"
        )
    return state


def _same(found: object, expected: dict) -> bool:
    try:
        return bool(found == expected)
    except (RuntimeError, ValueError):  # tensors, or lists nested too deeply, in a file that is not ours
        return False


def restored_model(config: TrainConfig, data: DataSet, directory: Path, state: dict) -> DLRM:
    """The model of a run as it was at its checkpoint ``state``; DataError if the two do not fit."""
    try:
        generation = generation_of(state["model"])
    except ValueError as error:
        raise DataError(f"{directory / checkpoint.NAME} does not fit the run: {error}") from error
    model = build_model(config, data, directory, generation)
    try:
        model.load_state_dict(state["model"])
        if (step := int(getattr(model.embeddings, "step", 0))) < 0:
            raise ValueError(f"embeddings.step is {step}, allowed is 0 or more")
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        model.close()
        reason = " ".join(str(error).split())
        raise DataError(f"{directory / checkpoint.NAME} does not fit the run: {reason}") from error
    return model


def _build(config: TrainConfig, data: DataSet, cache: rk.RowCache | None) -> DLRM:
    model = DLRM(
        data.features,
        data.num_dense,
        config.embedding_dim,
        bottom=config.bottom,
        top=config.top,
        interaction=interaction_of(config),
        format=config.format,
        rounding=config.rounding,
        compressions=config.compressions(data.features),
        optimizer=config.table_optimizer(),
        seed=config.seed,
        cache=cache,
        precision=config.precision,
        activations=config.activations,
    )
    if config.compile != "no":
        model.compile_dense_side(config.compile)
    return model.to(devices.find(config.device))


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
    """What makes the interaction of the model that ``config.model`` names, from the number of features and D."""
    c = config
    return {
        "dlrm": DotInteraction,
        "dcnv2": lambda features, dim: CrossInteraction(features, dim, c.cross_layers, c.cross_rank),
        "wukong": lambda features, dim: WukongInteraction(
            features, dim, c.wukong_layers, c.wukong_features, c.wukong_factors, c.wukong_hidden
        ),
    }[config.model]
