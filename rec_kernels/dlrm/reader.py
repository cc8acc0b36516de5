"""The batches of a run: those of a data set, checked, split, and with the bags that rows have in common once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from rec_kernels.dlrm import batch_checks as checks
from rec_kernels.dlrm import dedup
from rec_kernels.dlrm.batch_checks import WrongBatchError
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import Batch, DataError, DataSet, Rows
from rec_kernels.dlrm.datasets import open_data
from rec_kernels.dlrm.ranks import ALONE, Ranks


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
        alone = ranks.world_size == 1
        self.dedup = (dedup.recorded(config.dedup, run) or self._decide()) if alone else dedup.Decision(False)

    def num_rows(self, split: str) -> int:
        """Rows of "train", "valid" or "test"."""
        return self._rows[split]

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yields ``DataSet.batches``, joined unless of windows; "train" and "valid" have the training's batch size."""
        if split != "test" and batch_size != self.batch_size:
            raise ValueError(f"batch_size is {batch_size}, for {split!r} it must be {self.batch_size}")
        windows = self.mode == "windows"  # smaller to move than the bags they become
        for batch in self._checked(split, batch_size, start):
            batch = dedup.dedup_batch(batch, windows) if self.dedup.on else batch.expanded()
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

    def _decide(self) -> dedup.Decision:
        """Decides dedup "auto" by the first batches of the training."""
        if not any(feature.shared for feature in self.features):
            return dedup.Decision(False)
        return dedup.measured(self._checked("train", self.batch_size, 0))
