"""The model of a run, made from its config."""

from __future__ import annotations

from pathlib import Path

import rec_kernels as rk
from rec_kernels.dlrm import checkpoint, devices
from rec_kernels.dlrm.caches import generations_of, row_caches
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import DataError, DataSet
from rec_kernels.dlrm.model import DLRM


def generations(directory: Path) -> dict[str, int]:
    """Which states of the tables' files a run's checkpoint goes with."""
    state = checkpoint.load(directory).get("model")
    return generations_of(state) if isinstance(state, dict) else {}


def build_model(
    config: TrainConfig, data: DataSet, directory: Path | None = None, generations: dict[str, int] | None = None
) -> DLRM:
    """The model of a run on its device, with its initial weights, which are the same on every device.

    Args:
        config: of the run. data: the data set.
        directory: of the run, which has the tables' files if they are on disk; ``generations``: of these files.

    Raises:
        DeviceError: the device cannot be used. DataError: files of tables cannot be used.
    """
    try:
        caches = row_caches(config, data.features, directory, generations or {})
        return _build(config, data, caches)
    except (ValueError, MemoryError) as error:
        if config.backing != "disk":
            raise
        share = f"each collection has its share of memory_budget {config.memory_budget!r}, by rows"
        raise DataError(f"tables on disk: {error} ({share})") from error
    except (OSError, ImportError) as error:
        raise DataError(f"tables on disk: {error}") from error


def _build(config: TrainConfig, data: DataSet, caches: dict[str, rk.RowCache]) -> DLRM:
    model = DLRM(
        data.features,
        data.num_dense,
        config.embedding_dim,
        bottom=config.bottom,
        top=config.top,
        format=config.format,
        rounding=config.rounding,
        compressions=config.compressions(data.features),
        optimizer=config.table_optimizer(),
        seed=config.seed,
        caches=caches,
    )
    return model.to(devices.find(config.device))
