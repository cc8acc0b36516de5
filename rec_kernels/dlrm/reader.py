"""Reader of a run's batches: opens the data set, checks and splits its batches, and deduplicates equal bags.

Source of the deduplication: Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model
Training Infrastructure", MLSys 2023, arXiv:2211.05239. It runs on the reader's thread, beside the training step.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
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
from rec_kernels.dlrm.ranks import SINGLE_PROCESS, Ranks
from rec_kernels.dlrm.runs import CONFIG, RUN_NAMES, is_run_name
from rec_kernels.dlrm.synthetic import Synthetic

MEMBERS = ("name", "num_dense", "features", "num_rows", "batches")
#: Dedup factor (ids before / ids stored) from which "auto" deduplicates. With histories of 50 ids, lookups and updates
#: saved equal the cost of expanding pooled rows at 1.1 (docs/results.md, "Deduplicated batches"); the margin is for
#: finding equal bags, and for variation between batches.
THRESHOLD = 4 / 3
#: "auto" measures 8 batches that have ids in shared features, among the first 64: histories may be empty at first.
MEASURED, LOOKED_AT = 8, 64


def open_data(config: TrainConfig) -> DataSet:
    """Opens the data set that the config names; DataError if it is missing or invalid, or an option does not fit it."""
    if config.data not in DATA and ":" not in config.data:
        raise DataError(f"data is {config.data!r}, allowed are {', '.join(DATA)} and {FUNCTION}")
    optional = (o.name for o in dataclasses.fields(config) if o.default is None)
    given = {name: value for name in optional if (value := getattr(config, name)) is not None}
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
    return Synthetic(**own) if config.data == "synthetic" else _call_function(config)


def _call_function(config: TrainConfig) -> DataSet:
    """Imports and calls ``module:function``, with those of ``path`` and ``data_dir`` that are given and it takes."""
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
    try:
        parameters = tuple(inspect.signature(make).parameters)
    except ValueError:  # some functions written in C
        parameters = ()
    if config.path is not None and "path" not in parameters:
        raise DataError(f"path is {config.path!r}, but data is {config.data!r}, which takes no path: leave it out")
    given = {name: getattr(config, name) for name in ("path", "data_dir") if name in parameters}
    made = make(**{name: value for name, value in given.items() if value is not None})
    if missing := [member for member in MEMBERS if not hasattr(made, member)]:
        raise DataError(
            f"data is {data!r}, which returned {type(made).__name__} without {', '.join(missing)}: "
            f"a data set has {', '.join(MEMBERS)} (rec_kernels.dlrm.DataSet)"
        )
    if not isinstance(made.name, str) or not is_run_name(made.name):
        raise DataError(f"data is {data!r}, which returned a data set of name {made.name!r}, allowed are {RUN_NAMES}")
    return made


class DedupDecision(NamedTuple):
    """Outcome of the option ``dedup``; ``factor`` is measured by "auto", for data with shared features."""

    on: bool
    factor: float | None = None


def dedup_batch(batch: Batch, windows: bool = False) -> Batch:
    """Stores equal rows of the shared features once, as windows of one buffer with ``windows``.

    An InverseKeyedJaggedTensor of the data set keeps its groups.
    """
    shared = batch.shared
    if shared is None:
        return batch
    if not isinstance(shared, rk.InverseKeyedJaggedTensor):
        shared = rk.InverseKeyedJaggedTensor.from_kjt(shared, [list(shared.keys())])
    return batch._replace(shared=shared.with_windows() if windows else shared)


class Reader:
    """The batches of a run.

    The split "valid" is the last training batches, ``config.valid_fraction`` of them, rounded.

    Args:
        data: the data set; by default the one that ``config.data`` names.
        run: folder of a run to resume or evaluate: the decision of dedup "auto" is read from it.
        ranks: with several, each has its rows of every batch, without deduplication.

    Raises:
        DataError: the data is missing, or ``valid_fraction`` leaves no rows in a split; from all methods, the data set
            returns something invalid.
    """

    def __init__(
        self, config: TrainConfig, data: DataSet | None = None, run: Path | None = None, ranks: Ranks = SINGLE_PROCESS
    ):
        self.ranks, self.data = ranks, (data := open_data(config) if data is None else data)
        self.name, self.batch_size, self.mode = data.name, config.batch_size, config.dedup
        self.num_dense = checks.whole_number(data, data.num_dense, "num_dense")
        self.features = checks.checked_features(data)
        self.fingerprint: str | None = getattr(data, "fingerprint", None)
        self._rows = {s: checks.whole_number(data, data.num_rows(s), f"num_rows({s!r})") for s in ("train", "test")}
        if empty := [split for split, rows in self._rows.items() if rows < 1]:
            raise DataError(f"data set {self.name!r} has no rows in split {empty[0]!r}")
        rows, fraction = self._rows["train"], config.valid_fraction
        total = -(-rows // self.batch_size)
        self._train_batches = total - round(total * fraction)
        if fraction and not 0 < self._train_batches < total:
            raise DataError(f"valid_fraction is {fraction}, which leaves {self._train_batches} of {total} batches")
        self._rows["train"] = min(self._train_batches * self.batch_size, rows)
        self._rows["valid"] = rows - self._rows["train"]
        self.dedup = self._decide_dedup(run) if ranks.world_size == 1 else DedupDecision(False)

    def num_rows(self, split: str) -> int:
        """The number of rows of "train", "valid" or "test"."""
        return self._rows[split]

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yields the checked batches of a split from index ``start`` on, joined except with windows.

        "train" and "valid" have the training's batch size.
        """
        if split != "test" and batch_size != self.batch_size:
            raise ValueError(f"batch_size is {batch_size}, for {split!r} it must be {self.batch_size}")
        windows = self.mode == "windows"  # joined after the copy to the device: windows are smaller than bags
        for batch in self._checked_batches(split, batch_size, start):
            batch = dedup_batch(batch, windows) if self.dedup.on else batch.expanded()
            if self.ranks.world_size > 1:
                batch = batch.part(self.ranks.local_slice(len(batch.label)))
            yield batch if windows else batch.joined()

    def _checked_batches(self, split: str, batch_size: int, start: int) -> Iterator[Batch]:
        source, before = ("train", self._train_batches) if split == "valid" else (split, 0)
        given, rows = self._source_batches(source, batch_size, before + start), self._rows[split]
        for number in range(start, -(-rows // batch_size)):
            where = f"data set {self.name!r}, batch {before + number} of split {source!r}"
            try:
                size = min(batch_size, rows - number * batch_size)
                batch = checks.checked_batch(next(given), self.features, self.num_dense, size)
                if self.mode == "windows" and batch.shared is not None and checks.weights_of(batch.shared) is not None:
                    raise WrongBatchError(
                        "shared has weights, which dedup='windows' does not support: allowed is auto, on or off"
                    )
            except StopIteration:
                raise DataError(f"{where} is missing, although num_rows is {self.data.num_rows(source)}") from None
            except WrongBatchError as error:
                raise DataError(f"{where}: {error}") from error
            except (ValueError, TypeError, IndexError) as error:  # e.g. from the jagged containers
                raise DataError(f"{where}, made in {checks.user_code_line(error)}: {error}") from error
            # The data set makes the next batch while this one is in use, possibly in the same tensors.
            yield batch if isinstance(self.data, Rows) else tree_map_only(Tensor, Tensor.clone, batch)

    def _source_batches(self, split: str, batch_size: int, start: int) -> Iterator[Any]:
        """Yields the data set's batches; a generator, so that errors of ``batches()`` come with the first ``next``."""
        batches = self.data.batches(split, batch_size, start)
        if not hasattr(batches, "__iter__"):
            raise WrongBatchError(f"batches() returned {type(batches).__name__}, must be an iterator of Batch")
        yield from batches

    def _decide_dedup(self, run: Path | None) -> DedupDecision:
        """Decides by the option ``dedup``; for "auto", by the resumed run's config or the first batches."""
        if self.mode != "auto":
            return DedupDecision(self.mode != "off")
        if run is not None:
            found = files.read_json(run / CONFIG).get("dedup")
            shape = {"on": files.FLAG, "factor": files.Maybe(files.number())}
            if wrong := files.mismatch(found, shape, "dedup"):
                raise DataError(f"{run / CONFIG}: {wrong}")
            return DedupDecision(found["on"], found["factor"])
        if not any(feature.shared for feature in self.features):
            return DedupDecision(False)
        factors: list[float] = []
        for batch in islice(self._checked_batches("train", self.batch_size, 0), LOOKED_AT):
            shared: Any = dedup_batch(batch).shared
            if shared is not None and len(shared.stored().values()):
                factors.append(shared.dedup_factor())
            if len(factors) == MEASURED:
                break
        factor = sum(factors) / len(factors) if factors else 1.0
        return DedupDecision(factor >= THRESHOLD, factor)
