"""The data sets that a config can name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from rec_kernels.dlrm.config import DATA, FUNCTION, TrainConfig, options_of, refuse_options_of_others
from rec_kernels.dlrm.data import DataError, DataSet
from rec_kernels.dlrm.runs import RUN_NAMES, is_run_name

MEMBERS = ("name", "num_dense", "features", "num_rows", "batches")


def open_data(config: TrainConfig) -> DataSet:
    """The data set that the config names.

    Raises:
        DataError: it is missing, damaged, no data set, ``data`` names nothing, or an option belongs to another one.
    """
    if config.data not in DATA and ":" not in config.data:
        raise DataError(f"data is {config.data!r}, allowed are {', '.join(DATA)} and {FUNCTION}")
    given = {name: value for name, value in vars(config).items() if value is not None}
    try:
        refuse_options_of_others(given, "data", [config.data])
    except ValueError as error:
        raise DataError(str(error)) from error
    own = {name: given[name] for name in options_of(config.data) if name in given}
    if config.data == "completejourney":
        from rec_kernels.dlrm.completejourney import load_completejourney

        return load_completejourney(**own, data_dir=config.data_dir, progress=True)
    if config.data == "criteo":
        from rec_kernels.dlrm.criteo import Criteo

        if config.path is None:
            raise DataError("data is 'criteo', which needs path: a file in Criteo's format or a folder of such files")
        return Criteo(**own, data_dir=config.data_dir, progress=True)
    if config.data == "synthetic":
        from rec_kernels.dlrm.synthetic import Synthetic

        return Synthetic(**own)
    return _call(config)


def _call(config: TrainConfig) -> DataSet:
    """Calls ``module:function``."""
    data = config.data
    module, _, function = data.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"data is {data!r}: {error}") from error
    if not callable(make):
        raise DataError(
            f"data is {data!r}, which is {type(make).__name__}, expected a function that returns a data set"
        )
    made = make(**_arguments(make, config))
    missing = [member for member in MEMBERS if not hasattr(made, member)]
    if missing:
        raise DataError(
            f"data is {data!r}, which returned {type(made).__name__} without {', '.join(missing)}: "
            f"a data set has {', '.join(MEMBERS)} (rec_kernels.dlrm.DataSet)"
        )
    if not isinstance(made.name, str) or not is_run_name(made.name):
        raise DataError(f"data is {data!r}, which returned a data set of name {made.name!r}, allowed are {RUN_NAMES}")
    return made


def _arguments(make: Callable, config: TrainConfig) -> dict[str, str]:
    """The options ``path`` and ``data_dir`` that are given, for the function's parameters of these names."""
    try:
        parameters = tuple(inspect.signature(make).parameters)
    except ValueError:  # of some that are written in C
        parameters = ()
    if config.path is not None and "path" not in parameters:
        raise DataError(f"path is {config.path!r}, but data is {config.data!r}, which takes no path: leave it out")
    given = {name: getattr(config, name) for name in ("path", "data_dir") if name in parameters}
    return {name: value for name, value in given.items() if value is not None}
