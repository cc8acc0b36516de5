"""What a data set gives is looked at before it is used: errors name the batch, the argument, the value, its place."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rec_kernels.dlrm.data import Batch, DataError, DataSet, Feature

POOLINGS = ("sum", "mean")


class CheckedData:
    """A data set (``rec_kernels.dlrm.data.DataSet``) whose batches are what ``Batch`` says.

    ``dense`` and ``label`` of other dtypes become float32, labels [B, 1] become [B].

    Args:
        data: the data set.

    Raises:
        DataError: ``num_dense`` or a feature is not what it should be; of all members, what they give is not.
    """

    def __init__(self, data: DataSet):
        self.data, self.name = data, data.name
        self.num_dense = self._count(data.num_dense, "num_dense")
        self.features = [self._feature(feature) for feature in data.features]
        names = [feature.name for feature in self.features]
        if len(set(names)) < len(names):
            raise DataError(f"data set {self.name!r} has features {names}, whose names must differ")
        self.fingerprint: str | None = getattr(data, "fingerprint", None)

    def _count(self, value: Any, what: str, least: int = 0) -> int:
        if not isinstance(value, Integral) or value < least:
            raise DataError(f"data set {self.name!r}: {what} is {value!r}, must be a whole number of {least} or more")
        return int(value)  # of NumPy's, which no checkpoint has

    def _feature(self, feature: Any) -> Feature:
        where = f"data set {self.name!r}: a feature is {feature!r}, "
        if not isinstance(feature, Feature) or not isinstance(feature.name, str):
            raise DataError(f"{where}must be Feature(name, num_embeddings)")
        if feature.pooling not in POOLINGS:
            raise DataError(f"{where}whose pooling must be one of {', '.join(POOLINGS)}")
        rows = self._count(feature.num_embeddings, f"num_embeddings of feature {feature.name!r}", 1)
        return feature._replace(num_embeddings=rows, shared=bool(feature.shared))

    def num_rows(self, split: str) -> int:
        """Rows of "train" or "test"."""
        return self._count(self.data.num_rows(split), f"num_rows({split!r})")

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """As ``DataSet.batches``."""
        batches, end = self._given(split, batch_size, start), object()
        for number in itertools.count(start):
            where = f"data set {self.name!r}, batch {number} of split {split!r}"
            try:
                batch: Any = next(batches, end)
                if batch is end:
                    return
                batch = self._checked(batch)
            except _WrongError as error:
                raise DataError(f"{where}: {error}") from error
            except (ValueError, TypeError) as error:  # as those of the jagged containers
                raise DataError(f"{where}, made in {_place(error)}: {error}") from error
            yield batch

    def _given(self, split: str, batch_size: int, start: int) -> Iterator[Any]:
        """The batches as they are given; asking for them is part of the first ``next``, and so are its errors."""
        batches = self.data.batches(split, batch_size, start)
        if not hasattr(batches, "__iter__"):
            raise _WrongError(f"batches() gave {type(batches).__name__}, must be an iterator of Batch")
        yield from batches

    def _checked(self, batch: Any) -> Batch:
        if not isinstance(batch, Batch):
            raise _WrongError(f"it is {type(batch).__name__}, must be rec_kernels.dlrm.Batch")
        label = _floats(batch.label, "label")
        label = label.squeeze(1) if label.ndim == 2 and label.shape[1] == 1 else label
        if label.ndim != 1:
            raise _WrongError(f"label has shape {list(label.shape)}, must be [B] or [B, 1]")
        wrong = (label != 0) & (label != 1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise _WrongError(f"label[{row}] is {label[row].item()}, must be 0 or 1")
        dense, expected = _floats(batch.dense, "dense"), [len(label), self.num_dense]
        if list(dense.shape) != expected:
            raise _WrongError(f"dense has shape {list(dense.shape)}, must be {expected}: [rows of label, num_dense]")
        if not _all_finite(dense):
            row, column = (~dense.isfinite()).nonzero()[0].tolist()
            value = batch.dense[row, column].item()
            raise _WrongError(f"dense[{row}, {column}] is {value}, must be a finite number of float32 (row, column)")
        self._check_features(batch, len(label))
        return batch._replace(dense=dense, label=label)

    def _check_features(self, batch: Batch, rows: int) -> None:
        given: dict[str, Any] = {"features": batch.features}
        given |= {} if batch.shared is None else {"shared": batch.shared}
        for name, jagged in given.items():
            if not hasattr(jagged, "keys") or not hasattr(jagged, "stride"):
                raise _WrongError(f"{name} is {type(jagged).__name__}, must be a KeyedJaggedTensor")
            if (jagged.keys() or name == "shared") and jagged.stride() != rows:
                raise _WrongError(f"{name} has {jagged.stride()} bags for each key, label {rows} rows: must be as many")
            _check_weights(name, jagged)
        have = list(itertools.chain(*(jagged.keys() for jagged in given.values())))
        for feature in self.features:
            if feature.name not in have:
                place = "features or shared" if feature.shared else "features"
                raise _WrongError(f"{place} has keys {have}, which lack that of feature {feature.name!r}")


class _WrongError(Exception):
    """What is wrong with a batch."""


def _floats(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise _WrongError(f"{name} is {type(value).__name__}, must be a tensor")
    if value.is_complex():
        raise _WrongError(f"{name} is {value.dtype}, must be float32 or what becomes it")
    if value.layout != torch.strided:
        raise _WrongError(f"{name} has layout {value.layout}, must be {torch.strided}, that of a dense tensor")
    return value.float()


def _all_finite(values: Tensor) -> bool:
    # The sum is finite only if all are; it is five times as fast to make.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _check_weights(name: str, jagged: Any) -> None:
    stored = jagged.stored() if hasattr(jagged, "stored") else jagged
    weights = stored.weights_or_none() if hasattr(stored, "weights_or_none") else None
    if weights is None:
        return
    if weights.dtype != torch.float32:
        raise _WrongError(f"weights of {name} are {weights.dtype}, must be torch.float32")
    if not _all_finite(weights):
        place = int((~weights.isfinite()).nonzero()[0])
        raise _WrongError(f"weights[{place}] of {name} is {weights[place].item()}, must be finite")


def _place(error: Exception) -> str:
    """The last line of code that is not of this package, as in "my_clicks.py, line 31"."""
    package, frames = Path(__file__).parents[1], traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if package not in Path(frame.filename).parents]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else "this package"
