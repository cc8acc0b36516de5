"""The data sets that a config can name."""

from __future__ import annotations

import importlib

from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import DataError, DataSet


def open_data(config: TrainConfig) -> DataSet:
    """The data set that the config names.

    Raises:
        DataError: it is missing, damaged, or ``data`` names nothing.
    """
    if config.data == "completejourney":
        from rec_kernels.dlrm.batches import CompleteJourney
        from rec_kernels.dlrm.prepared import load_completejourney

        return CompleteJourney(load_completejourney(config.weeks, config.data_dir, progress=True))
    module, _, function = config.data.partition(":")
    if not function:
        raise DataError(f"data is {config.data!r}, allowed are completejourney, criteo, synthetic and module:function")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise DataError(f"data is {config.data!r}: {error}") from error
    return make()
