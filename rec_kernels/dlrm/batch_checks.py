"""Checks of a data set's members and batches; errors name the argument, the value and its place."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rec_kernels.dlrm.data import Batch, DataError, DataSet, Feature
from rec_kernels.nn.tables.config import EmbeddingBagConfig
from rec_kernels.ops.layout_records import ID_DTYPES


class WrongBatchError(Exception):
    """A batch is invalid."""


def whole_number(data: DataSet, value: Any, what: str, least: int = 0) -> int:
    """Converts a data set's number to int; DataError if it is no integer or below ``least``."""
    if not isinstance(value, Integral) or value < least:
        raise DataError(f"data set {data.name!r}: {what} is {value!r}, must be a whole number of {least} or more")
    return int(value)  # checkpoints cannot hold NumPy's integers


def checked_features(data: DataSet) -> list[Feature]:
    """The features of a data set; DataError if they are invalid."""
    features = []
    for feature in data.features:
        where = f"data set {data.name!r}: a feature is {feature!r}, "
        if not isinstance(feature, Feature):
            raise DataError(f"{where}must be Feature(name, num_embeddings)")
        rows = whole_number(data, feature.num_embeddings, f"num_embeddings of feature {feature.name!r}", 1)
        try:
            name, pooling = feature.name, feature.pooling
            table = EmbeddingBagConfig(rows, 1, name=name, feature_names=[name], pooling=pooling)
        except ValueError as error:
            raise DataError(f"{where}which cannot have a table: {error}") from error
        features.append(feature._replace(num_embeddings=rows, pooling=table.pooling, shared=bool(feature.shared)))
    if not features:
        raise DataError(f"data set {data.name!r} has no features: a model needs one or more")
    names = [feature.name for feature in features]
    if len(set(names)) < len(names):
        raise DataError(f"data set {data.name!r} has features {names}, whose names must be unique")
    return features


def checked_batch(batch: Any, features: Sequence[Feature], num_dense: int, rows: int) -> Batch:
    """Checks a data set's batch of ``rows`` rows; ``dense`` and ``label`` become float32, labels [B, 1] become [B].

    Raises:
        WrongBatchError: the batch is not as ``Batch`` describes.
    """
    if not isinstance(batch, Batch):
        raise WrongBatchError(f"it is {type(batch).__name__}, must be rec_kernels.dlrm.Batch")
    label = _to_float32(batch.label, "label")
    label = label.squeeze(1) if label.ndim == 2 and label.shape[1] == 1 else label
    if label.ndim != 1:
        raise WrongBatchError(f"label has shape {list(label.shape)}, must be [B] or [B, 1]")
    if len(label) != rows:
        raise WrongBatchError(f"it has {len(label)} rows, must be {rows}")
    wrong = (label != 0) & (label != 1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise WrongBatchError(f"label[{row}] is {label[row].item()}, must be 0 or 1")
    dense, expected = _to_float32(batch.dense, "dense"), [rows, num_dense]
    if list(dense.shape) != expected:
        raise WrongBatchError(f"dense has shape {list(dense.shape)}, must be {expected}: [rows of label, num_dense]")
    if place := _first_not_finite(dense):
        value = batch.dense[tuple(place)].item()
        raise WrongBatchError(f"dense{place} is {value}, must be a finite number of float32 (row, column)")
    _check_bags(batch, features, rows)
    return batch._replace(dense=dense, label=label)


def _check_bags(batch: Batch, features: Sequence[Feature], rows: int) -> None:
    given: dict[str, Any] = {"features": batch.features}
    given |= {} if batch.shared is None else {"shared": batch.shared}
    for name, jagged in given.items():
        if not hasattr(jagged, "keys") or not hasattr(jagged, "stride"):
            raise WrongBatchError(f"{name} is {type(jagged).__name__}, must be a KeyedJaggedTensor")
        has_inverse = getattr(jagged, "inverse_indices_or_none", lambda: None)() is not None
        own = getattr(jagged, "variable_stride_per_key", bool)() and not has_inverse and jagged.stride_per_key()
        if own and set(own) != {rows}:
            raise WrongBatchError(
                f"{name} has {own} bags for its keys {jagged.keys()}, but label has {rows} rows: the numbers "
                "must be equal"
            )
        if (jagged.keys() or name == "shared") and jagged.stride() != rows:
            raise WrongBatchError(
                f"{name} has {jagged.stride()} bags for each key, but label has {rows} rows: the numbers must be equal"
            )
        ids = _stored(jagged).values()
        if ids.dtype not in ID_DTYPES:
            raise WrongBatchError(f"ids of {name} are {ids.dtype}, must be torch.int32 or torch.int64")
        weights = weights_of(jagged)
        if weights is not None and weights.dtype != torch.float32:
            raise WrongBatchError(f"weights of {name} are {weights.dtype}, must be torch.float32")
        if weights is not None and (place := _first_not_finite(weights)):
            raise WrongBatchError(f"weights{place} of {name} is {weights[tuple(place)].item()}, must be finite")
    have = list(itertools.chain(*(jagged.keys() for jagged in given.values())))
    if len(set(have)) < len(have):
        twice = sorted({name for name in have if have.count(name) > 1})
        raise WrongBatchError(f"features and shared have keys {twice} more than once")
    for feature in features:
        if feature.name not in have:
            part = "features or shared" if feature.shared else "features"
            raise WrongBatchError(f"{part} has keys {have}, which must include feature {feature.name!r}")
    names = {feature.name for feature in features}
    if unused := [name for name in have if name not in names]:
        raise WrongBatchError(f"features and shared have keys {unused} without a Feature: add one for each")


def _to_float32(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise WrongBatchError(f"{name} is {type(value).__name__}, must be a tensor")
    if value.is_complex():
        raise WrongBatchError(f"{name} is {value.dtype}, must be float32 or a dtype that converts to it")
    if value.layout != torch.strided:
        raise WrongBatchError(f"{name} has layout {value.layout}, must be {torch.strided}, that of a dense tensor")
    return value.detach().float()


def _first_not_finite(values: Tensor) -> list[int] | None:
    if values.sum().isfinite():  # implies finite values, and is five times as fast as checking each
        return None
    return next(iter((~values.isfinite()).nonzero().tolist()), None)


def _stored(jagged: Any) -> Any:
    """The container that stores each distinct bag once, if ``jagged`` has one, else ``jagged``."""
    return jagged.stored() if hasattr(jagged, "stored") else jagged


def weights_of(jagged: Any) -> Tensor | None:
    """The weights of a jagged container's stored ids; None without weights."""
    stored = _stored(jagged)
    return stored.weights_or_none() if hasattr(stored, "weights_or_none") else None


def user_code_line(error: Exception) -> str:
    """The innermost line of a traceback outside this package, as in "my_clicks.py, line 31"."""
    package, frames = Path(__file__).parents[1], traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if package not in Path(frame.filename).parents]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else "this package"
