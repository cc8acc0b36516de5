"""Data sets of the trainer: the interface and its batches.

Any object with the members of ``DataSet`` will do: ``python -m rec_kernels.dlrm train --data my_module:my_function``
calls ``my_function()`` for one, and ``train(config, data)`` takes one. docs/data.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

import rec_kernels as rk
from rec_kernels.threads import compute_with

Item = TypeVar("Item")


class DataError(RuntimeError):
    """The data is missing, of another version, or not what it should be; the message says where and what to do."""


class Feature(NamedTuple):
    """A categorical feature, which has an embedding table of its own.

    Args:
        name: its key in the batches.
        num_embeddings: rows E of its table; ids are below it.
        pooling: of its bags, "sum" or "mean".
        shared: its bags are in ``Batch.shared``, because neighbouring rows often have the same one.
    """

    name: str
    num_embeddings: int
    pooling: str = "sum"
    shared: bool = False


class Batch(NamedTuple):
    """B rows.

    Args:
        dense: float32 [B, num_dense].
        features: KeyedJaggedTensor of the features that are not shared, B bags each; of a batch that is ``joined()``,
            of all features, which may be an InverseKeyedJaggedTensor.
        label: float32 [B], 0 or 1.
        shared: the shared features, a bag for every row: a KeyedJaggedTensor of B bags each, or an
            InverseKeyedJaggedTensor of B rows, if the data set knows which have the same bags; None without any.
    """

    dense: Tensor
    features: rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor
    label: Tensor
    shared: rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Copies the batch to another device."""
        parts: list[Any] = [None if p is None else p.to(device, non_blocking=non_blocking) for p in self]
        return Batch(*parts)

    def pin_memory(self) -> Batch:
        """Copies the batch to page-locked host memory."""
        parts: list[Any] = [None if p is None else p.pin_memory() for p in self]
        return Batch(*parts)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` uses the tensors, which TorchRec's pipeline asks for."""
        for part in filter(lambda part: part is not None, self):
            part.record_stream(stream)

    def joined(self) -> Batch:
        """Returns the batch with all features in ``features``, the shared ones first: one lookup has them all.

        Where some have weights, ids of the others weigh 1.
        """
        shared, features = self.shared, self.features
        if shared is None or isinstance(features, rk.InverseKeyedJaggedTensor):  # joined already
            return self
        if isinstance(shared, rk.InverseKeyedJaggedTensor):
            kept = shared.bags()
            bags, features = _alike(kept, features)
            if bags is not kept:
                groups, inverse = shared.groups(), shared.inverse_of_groups()
                shared = rk.InverseKeyedJaggedTensor(bags, groups, inverse, shared.keys())
            return self._replace(features=shared.with_rest(features), shared=None)
        return self._replace(features=rk.KeyedJaggedTensor.concat(list(_alike(shared, features))), shared=None)

    def expanded(self) -> Batch:
        """Returns the batch with a bag for every row."""
        return self._replace(features=_bags_of_rows(self.features), shared=_bags_of_rows(self.shared))

    def part(self, rows: slice) -> Batch:
        """Some neighbouring rows of a batch that is ``expanded()``."""
        return Batch(self.dense[rows], _part_of(self.features, rows), self.label[rows], _part_of(self.shared, rows))


def _bags_of_rows(jagged: Any) -> Any:
    return jagged.to_kjt() if isinstance(jagged, rk.InverseKeyedJaggedTensor) else jagged


def _part_of(jagged: Any, rows: slice) -> rk.KeyedJaggedTensor | None:
    """The bags of some neighbouring rows, of each key."""
    if jagged is None or not jagged.keys():
        return jagged
    own = torch.arange(rows.start, rows.stop).unsqueeze(0)
    return rk.InverseKeyedJaggedTensor(jagged, [list(jagged.keys())], own).to_kjt()


def _alike(*features: rk.KeyedJaggedTensor) -> Iterator[rk.KeyedJaggedTensor]:
    """Gives all of them weights if any has weights; missing ones are ones."""
    if all(f.weights_or_none() is None for f in features):
        yield from features
        return
    for f in features:
        if f.weights_or_none() is not None or not f.keys():
            yield f
            continue
        ones = torch.ones(f.values().shape, dtype=torch.float32, device=f.values().device)
        sizes = f.stride_per_key() if f.variable_stride_per_key() else None
        yield rk.KeyedJaggedTensor._from_parts(f.keys(), f.values(), f.offsets(), ones, sizes)


class DataSet(Protocol):
    """Rows for training and rows for the test, which are later in time, if only than those of the same user.

    One that also has a ``fingerprint``, a text of its rows, is told from another one of the same sizes when a run is
    resumed.
    """

    name: str  # letters, digits, "-", "_", "."
    num_dense: int

    @property
    def features(self) -> Sequence[Feature]:
        """Names of the bags' features, in the order of a batch."""
        ...

    def num_rows(self, split: str) -> int:
        """Rows of "train" or "test"."""
        ...

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """The batches of a split from number ``start`` on, the last one possibly shorter.

        Always the same ones in the same order: a run that is resumed goes on where it stopped. The trainer asks for
        them on a thread of its own.
        """
        ...


class Rows:
    """The base of data sets that can make a batch of any rows.

    Attributes:
        rows: all of them. train_rows: how many of them, the first ones, are for training; the others are for the test.
        label: float32 [rows]. dense: float32 [rows, num_dense].
        ids: int32 [F, rows], of the first F features, whose bags have one id. Data sets that make their batches
            themselves need none of the three.
    """

    rows: int
    train_rows: int
    features: Sequence[Feature]
    label: np.ndarray
    dense: np.ndarray
    ids: np.ndarray

    def batch_of(self, rows: slice) -> Batch:
        """The batch of these rows, without shared features."""
        ids = torch.from_numpy(self.ids[:, rows].flatten())
        keys = [feature.name for feature in self.features[: len(self.ids)]]
        return Batch(
            dense=torch.from_numpy(self.dense[rows].copy()),
            features=rk.KeyedJaggedTensor(keys, ids, offsets=torch.arange(len(ids) + 1)),
            label=torch.from_numpy(self.label[rows].copy()),
        )

    def num_rows(self, split: str) -> int:
        """Rows of "train" or "test"."""
        return len(self._range(split))

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """The batches of a split from number ``start`` on, in the order of the rows."""
        rows = self._range(split)
        for row in rows[start * batch_size :: batch_size]:
            yield self.batch_of(slice(row, min(row + batch_size, rows.stop)))

    def _range(self, split: str) -> range:
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}, allowed are 'train' and 'test'")
        return range(self.train_rows) if split == "train" else range(self.train_rows, self.rows)


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items; another thread always makes the next one.

    That thread computes alone: helpers of its own would take the cores of the training's, which wait for each other.
    No other thread's number of helpers changes, also where ``items`` are themselves made ahead.
    """
    end: Any = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="data") as pool:
        pool.submit(compute_with, 1).result()
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item
