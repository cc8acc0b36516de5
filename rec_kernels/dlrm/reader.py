"""The batches of a run: a data set by its name, checked, split, and with the bags that rows have in common once.

Deduplication moves, looks up and updates such bags once; with windows, ids that different bags have in common are moved
once, too. All is done on the reader's thread: a step does not wait for it while it takes less time than the step.

Source: Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model Training Infrastructure",
MLSys 2023, arXiv:2211.05239.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map_only

import rec_kernels as rk
from rec_kernels.dlrm import batch_checks as checks
from rec_kernels.dlrm import files
from rec_kernels.dlrm.batch_checks import WrongBatchError
from rec_kernels.dlrm.completejourney import load_completejourney
from rec_kernels.dlrm.config import DATA, FUNCTION, TrainConfig, options_of, refuse_options_without_effect
from rec_kernels.dlrm.criteo import Criteo
from rec_kernels.dlrm.data import Batch, DataError, DataSet, Rows
from rec_kernels.dlrm.ranks import ALONE, Ranks
from rec_kernels.dlrm.runs import CONFIG, RUN_NAMES, is_run_name
from rec_kernels.dlrm.synthetic import Synthetic

MEMBERS = ("name", "num_dense", "features", "num_rows", "batches")
#: Ids before over ids stored from which "auto" deduplicates. Below it, writing pooled rows out to all samples takes as
#: long as the lookups and updates that are saved: with histories of 50 ids, they break even at 1.1 (docs/results.md,
#: "Deduplicated batches"); the rest is for finding the bags, and for what varies from batch to batch.
THRESHOLD = 4 / 3
#: Batches that "auto" looks at: so many with ids in shared features, among so many from the beginning of the training.
#: The first rows of a log may have no past.
MEASURED, LOOKED_AT = 8, 64


def open_data(config: TrainConfig) -> DataSet:
    """The data set that the config names.

    Raises:
        DataError: it is missing, damaged, no data set, ``data`` names nothing, or an option belongs to another one.
    """
    if config.data not in DATA and ":" not in config.data:
        raise DataError(f"data is {config.data!r}, allowed are {', '.join(DATA)} and {FUNCTION}")
    given = {o.name: getattr(config, o.name) for o in dataclasses.fields(config) if o.default is None}
    given = {name: value for name, value in given.items() if value is not None}
    own = {name: given[name] for name in options_of(config.data) if name in given}
    try:
        refuse_options_without_effect(given, [config])
        if config.data == "completejourney":
            return load_completejourney(**own, data_dir=config.data_dir, progress=True)
    except ValueError as error:
        raise DataError(str(error)) from error
    if config.data == "criteo":
        if config.path is None:
            raise DataError("data is 'criteo', which needs path: a file in Criteo's format or a folder of such files")
        return Criteo(**own, data_dir=config.data_dir, progress=True)
    return Synthetic(**own) if config.data == "synthetic" else _call(config)


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


class Decision(NamedTuple):
    """A run's decision to deduplicate or not.

    Args:
        on: yes or no.
        factor: what "auto" has measured; None without "auto", and of data without shared features.
    """

    on: bool
    factor: float | None = None


def dedup_batch(batch: Batch, windows: bool = False) -> Batch:
    """The batch with its shared features as one group of distinct bags; those of a data set that knows them stay.

    With ``windows``, the bags are windows of one buffer.
    """
    shared = batch.shared
    if shared is None:
        return batch
    if not isinstance(shared, rk.InverseKeyedJaggedTensor):
        shared = rk.InverseKeyedJaggedTensor.from_kjt(shared, [list(shared.keys())])
    return batch._replace(shared=shared.with_windows() if windows else shared)


class Reader:
    """The batches of a run.

    Args:
        config: of the run. Of its options, ``valid_fraction`` is the share of the training rows, the last ones, that
            are the split "valid", in whole batches of ``batch_size``; ``dedup`` decides whether equal shared bags of a
            batch are given once.
        data: the data set; by default the one that ``config.data`` names.
        run: folder of a run that is gone on with: what dedup "auto" has decided there holds.
        ranks: the run's processes. Of several, each has its rows of every batch, and a bag for every row.

    Attributes:
        dedup: whether equal bags are given once.

    Raises:
        DataError: the data is missing or not what it should be, or ``valid_fraction`` leaves nothing to train or to
            validate on; of all members, what the data set gives is not what it should be.
    """

    def __init__(self, config: TrainConfig, data: DataSet | None = None, run: Path | None = None, ranks: Ranks = ALONE):
        self.data = data = open_data(config) if data is None else data
        self.name, self.batch_size, self.mode = data.name, config.batch_size, config.dedup
        self.num_dense = checks.whole_number(data, data.num_dense, "num_dense")
        self.features = checks.checked_features(data)
        self.fingerprint: str | None = getattr(data, "fingerprint", None)
        self._rows = {s: checks.whole_number(data, data.num_rows(s), f"num_rows({s!r})") for s in ("train", "test")}
        if empty := [split for split, rows in self._rows.items() if rows < 1]:
            raise DataError(f"data set {self.name!r} has no rows in split {empty[0]!r}")
        rows, fraction = self._rows["train"], config.valid_fraction
        total = -(-rows // self.batch_size)
        self._trained = total - round(total * fraction)  # batches; those after them are "valid"
        if fraction and not 0 < self._trained < total:
            raise DataError(f"valid_fraction is {fraction}, which leaves {self._trained} of {total} batches")
        self._rows["train"] = min(self._trained * self.batch_size, rows)
        self._rows["valid"] = rows - self._rows["train"]
        self.ranks = ranks
        self.dedup = self._decision(run) if ranks.world_size == 1 else Decision(False)

    def num_rows(self, split: str) -> int:
        """Rows of "train", "valid" or "test"."""
        return self._rows[split]

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yields ``DataSet.batches``, joined unless of windows; "train" and "valid" have the training's batch size."""
        if split != "test" and batch_size != self.batch_size:
            raise ValueError(f"batch_size is {batch_size}, for {split!r} it must be {self.batch_size}")
        windows = self.mode == "windows"  # smaller to move than the bags they become
        for batch in self._checked(split, batch_size, start):
            batch = dedup_batch(batch, windows) if self.dedup.on else batch.expanded()
            if self.ranks.world_size > 1:
                batch = batch.part(self.ranks.own(len(batch.label)))
            yield batch if windows else batch.joined()

    def _checked(self, split: str, batch_size: int, start: int) -> Iterator[Batch]:
        """The batches of the data set from number ``start`` of the split on."""
        source, before = ("train", self._trained) if split == "valid" else (split, 0)
        given, rows = self._given(source, batch_size, before + start), self._rows[split]
        for number in range(start, -(-rows // batch_size)):
            where = f"data set {self.name!r}, batch {before + number} of split {source!r}"
            try:
                size = min(batch_size, rows - number * batch_size)
                batch = checks.checked_batch(next(given), self.features, self.num_dense, size)
                if self.mode == "windows" and batch.shared is not None and checks.weights_of(batch.shared) is not None:
                    raise WrongBatchError(
                        "shared has weights, and dedup is 'windows', which have none: allowed is auto, on or off"
                    )
            except StopIteration:
                raise DataError(f"{where} is not there, and num_rows says {self.data.num_rows(source)}") from None
            except WrongBatchError as error:
                raise DataError(f"{where}: {error}") from error
            except (ValueError, TypeError, IndexError) as error:  # as those of the jagged containers
                raise DataError(f"{where}, made in {checks.place_of(error)}: {error}") from error
            # The data set makes the next batch while this one is in use, and may do so in the same tensors.
            yield batch if isinstance(self.data, Rows) else tree_map_only(Tensor, Tensor.clone, batch)

    def _given(self, split: str, batch_size: int, start: int) -> Iterator[Any]:
        """The batches as they are given; asking for them is part of the first ``next``, and so are its errors."""
        batches = self.data.batches(split, batch_size, start)
        if not hasattr(batches, "__iter__"):
            raise WrongBatchError(f"batches() gave {type(batches).__name__}, must be an iterator of Batch")
        yield from batches

    def _decision(self, run: Path | None) -> Decision:
        """Decides by the option ``dedup``, by what "auto" has decided in ``run``, or by the first batches."""
        if self.mode != "auto":
            return Decision(self.mode != "off")
        if run is not None:
            found = files.read_json(run / CONFIG).get("dedup")
            shape = {"on": files.FLAG, "factor": files.Maybe(files.number())}
            if wrong := files.mismatch(found, shape, "dedup"):
                raise DataError(f"{run / CONFIG}: {wrong}")
            return Decision(found["on"], found["factor"])
        if not any(feature.shared for feature in self.features):
            return Decision(False)
        factors: list[float] = []
        for batch in islice(self._checked("train", self.batch_size, 0), LOOKED_AT):
            shared: Any = dedup_batch(batch).shared
            if shared is not None and len(shared.stored().values()):
                factors.append(shared.dedup_factor())
            if len(factors) == MEASURED:
                break
        factor = sum(factors) / len(factors) if factors else 1.0
        return Decision(factor >= THRESHOLD, factor)
