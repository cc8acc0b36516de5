"""The model of a run, made from its config."""

from __future__ import annotations

from pathlib import Path

import rec_kernels as rk
from rec_kernels.dlrm import devices
from rec_kernels.dlrm.caches import row_cache
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import DataError, DataSet
from rec_kernels.dlrm.model import DLRM
from rec_kernels.dlrm.networks import interaction_of


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
