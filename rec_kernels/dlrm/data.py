"""The trainer's data set protocol and its batches; docs/data.md has an example of a user's data set."""

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
    """The data is missing, invalid or of another version; the message names the place and the remedy."""


class Feature(NamedTuple):
    """A categorical feature with its own embedding table.

    Args:
        name: key in the batches.
        num_embeddings: rows E of the table; ids are below E.
        pooling: "sum" or "mean".
        shared: the feature is in ``Batch.shared``, because neighbouring rows often have equal bags.
    """

    name: str
    num_embeddings: int
    pooling: str = "sum"
    shared: bool = False


class Batch(NamedTuple):
    """A batch of B rows.

    Args:
        dense: float32 [B, num_dense].
        features: a KeyedJaggedTensor of the features that are not shared, B bags each; after ``joined()``, all
            features, possibly as an InverseKeyedJaggedTensor.
        label: float32 [B], 0 or 1.
        shared: the shared features: a KeyedJaggedTensor of B bags each, or an InverseKeyedJaggedTensor of B rows if the
            data set knows which rows have equal bags; None without shared features.
    """

    dense: Tensor
    features: rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor
    label: Tensor
    shared: rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Copies the batch to another device."""
        return Batch._make(None if p is None else p.to(device, non_blocking=non_blocking) for p in self)

    def pin_memory(self) -> Batch:
        """Copies the batch to page-locked host memory."""
        return Batch._make(None if p is None else p.pin_memory() for p in self)

    def record_stream(self, stream: torch.Stream) -> None:
        """Records the use of the tensors on ``stream``, as TorchRec's pipeline requires."""
        for part in filter(lambda part: part is not None, self):
            part.record_stream(stream)

    def joined(self) -> Batch:
        """Moves the shared features into ``features``, before the others, so that one lookup serves all.

        If any feature has weights, ids of features without weights get weight 1.
        """
        shared, features = self.shared, self.features
        if shared is None or isinstance(features, rk.InverseKeyedJaggedTensor):  # already joined
            return self
        if isinstance(shared, rk.InverseKeyedJaggedTensor):
            bags, features = _with_equal_weights(shared.bags(), features)
            if bags is not shared.bags():
                groups, inverse = shared.groups(), shared.inverse_of_groups()
                shared = rk.InverseKeyedJaggedTensor(bags, groups, inverse, shared.keys())
            return self._replace(features=shared.with_rest(features), shared=None)
        both = _with_equal_weights(shared, features)
        return self._replace(features=rk.KeyedJaggedTensor.concat(list(both)), shared=None)

    def expanded(self) -> Batch:
        """Expands deduplicated bags to one bag per row."""
        return self._replace(features=_expand(self.features), shared=_expand(self.shared))

    def part(self, rows: slice) -> Batch:
        """A contiguous range of rows of a batch that is ``expanded()``."""
        return Batch(self.dense[rows], _slice(self.features, rows), self.label[rows], _slice(self.shared, rows))


def _expand(jagged: Any) -> Any:
    return jagged.to_kjt() if isinstance(jagged, rk.InverseKeyedJaggedTensor) else jagged


def _slice(jagged: Any, rows: slice) -> rk.KeyedJaggedTensor | None:
    if jagged is None or not jagged.keys():
        return jagged
    own = torch.arange(rows.start, rows.stop).unsqueeze(0)
    return rk.InverseKeyedJaggedTensor(jagged, [list(jagged.keys())], own).to_kjt()


def _with_equal_weights(*features: rk.KeyedJaggedTensor) -> Iterator[rk.KeyedJaggedTensor]:
    """Adds weights of 1 to features without weights if any feature has weights."""
    weighted = any(f.weights_or_none() is not None for f in features)
    for f in features:
        if weighted and f.keys() and f.weights_or_none() is None:
            ones = torch.ones(f.values().shape, dtype=torch.float32, device=f.values().device)
            sizes = f.stride_per_key() if f.variable_stride_per_key() else None
            f = rk.KeyedJaggedTensor._from_parts(f.keys(), f.values(), f.offsets(), ones, sizes)
        yield f


class DataSet(Protocol):
    """Training rows, and test rows that are later in time, at least per user.

    With an optional ``fingerprint``, a text that identifies the rows, a resumed run refuses other data of equal size.
    """

    name: str  # letters, digits, "-", "_", "."
    num_dense: int

    @property
    def features(self) -> Sequence[Feature]:
        """The features, in the order of a batch."""
        ...

    def num_rows(self, split: str) -> int:
        """The number of rows of "train" or "test"."""
        ...

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yields the batches of a split from index ``start`` on; the last one may be shorter.

        Must be deterministic, so that a resumed run continues where it stopped. The trainer iterates on its own thread.
        """
        ...


class Rows:
    """Base of data sets with random access to rows.

    Attributes:
        rows: number of rows. train_rows: number of training rows, which come first; the others are test rows.
        label: float32 [rows]. dense: float32 [rows, num_dense].
        ids: int32 [F, rows], of the first F features, which have one id per row. A subclass that overrides
            ``batch_of`` needs none of the three.
    """

    rows: int
    train_rows: int
    features: Sequence[Feature]
    label: np.ndarray
    dense: np.ndarray
    ids: np.ndarray

    def batch_of(self, rows: slice) -> Batch:
        """Makes the batch of these rows, without shared features."""
        ids = torch.from_numpy(self.ids[:, rows].flatten())
        keys = [feature.name for feature in self.features[: len(self.ids)]]
        return Batch(
            dense=torch.from_numpy(self.dense[rows].copy()),
            features=rk.KeyedJaggedTensor(keys, ids, offsets=torch.arange(len(ids) + 1)),
            label=torch.from_numpy(self.label[rows].copy()),
        )

    def num_rows(self, split: str) -> int:
        """The number of rows of "train" or "test"."""
        return len(self._range(split))

    def batches(self, split: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yields the batches of a split from index ``start`` on."""
        rows = self._range(split)
        for row in rows[start * batch_size :: batch_size]:
            yield self.batch_of(slice(row, min(row + batch_size, rows.stop)))

    def _range(self, split: str) -> range:
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}, allowed are 'train' and 'test'")
        return range(self.train_rows) if split == "train" else range(self.train_rows, self.rows)


def prefetch(items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items, each computed on another thread while its predecessor is in use.

    That thread runs without OpenMP workers, which would compete with the training's for cores. Thread counts of other
    threads do not change, even with nested prefetching.
    """
    end: Any = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="data") as pool:
        pool.submit(compute_with, 1).result()
        pending = pool.submit(next, items, end)
        while (item := pending.result()) is not end:
            pending = pool.submit(next, items, end)
            yield item
