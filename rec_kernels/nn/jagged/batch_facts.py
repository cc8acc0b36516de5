"""BatchFacts: values derived from the keys, batch sizes and offsets of a batch, under TorchRec's names."""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rec_kernels.nn.jagged import checks
from rec_kernels.nn.jagged.bounds import read_at
from rec_kernels.nn.jagged.container import BagContainer, OffsetsContainer

_Batch = TypeVar("_Batch", bound="BatchFacts")


class BatchFacts(BagContainer, OffsetsContainer):
    """Base class of ``rk.KeyedJaggedTensor``: cached starts of each feature's ids, and values derived from them."""

    _keys: list[str]

    @abstractmethod
    def stride_per_key(self) -> list[int]:
        """F batch sizes."""

    @abstractmethod
    def variable_stride_per_key(self) -> bool:
        """True if features have batch sizes of their own."""

    def offset_per_key(self) -> list[int]:
        """[F + 1]: start of each feature's ids. Read from the device, and cached until the offsets change.

        Raises:
            ValueError: on a GPU, or after an in-place change, offsets are not non-decreasing in [0, N].
        """
        found = self.known_offset_per_key()
        if found is None:
            bounds = list(itertools.accumulate(self.stride_per_key(), initial=0))
            found = read_at(self._offsets, bounds) if self._keys else [0]
            self._check_starts(bounds, found)
            self.keep_offset_per_key(found)
        return list(found)

    def known_offset_per_key(self) -> list[int] | None:
        """``offset_per_key()`` if the host knows it; None if it must be read from the device."""
        known = self._offset_per_key
        if known is None or torch.compiler.is_compiling():  # compiled code cannot compare version counters
            return None
        return known[1] if known[0] == self._offsets._version else None

    def keep_offset_per_key(self, offset_per_key: list[int]) -> None:
        """Caches starts that were read from the offsets in their current version."""
        # Inference tensors have no version counter, and compiled code has no object to cache the starts in.
        if not torch.compiler.is_compiling() and not self._offsets.is_inference():
            self._offset_per_key = self._offsets._version, offset_per_key

    def _check_starts(self, bags: list[int], starts: list[int]) -> None:
        if torch.compiler.is_compiling():
            return
        count = self._values.shape[0]
        if isinstance(self._offsets, FakeTensor):  # symbolic sizes
            for before, start in itertools.pairwise([0, *starts, count]):
                torch._check(before <= start)
            return
        for f, (before, start) in enumerate(itertools.pairwise([0, *starts])):
            if not before <= start <= count:
                where = f"feature {self._keys[f]!r} begins" if f < len(self._keys) else "the last feature ends"
                raise ValueError(
                    f"offsets[{bags[f]}] = {start}, where {where}, must be in [{before}, {count}], from where the one "
                    "before begins to the number of values"
                )

    def _set_given_starts(self, starts: list[int] | None) -> None:
        """Caches the feature starts given by a caller. On the CPU they are compared with the offsets."""
        if starts is None or torch.compiler.is_compiling():
            return
        if len(starts) != len(self._keys) + 1:
            raise ValueError(f"offset_per_key must be {len(self._keys) + 1} numbers, for the keys and an end: {starts}")
        if checks.has_data(self._offsets) and starts != (found := self.offset_per_key()):
            raise ValueError(f"offset_per_key must be {found}, as lengths or offsets say, got {starts}")
        self._check_starts(self.lengths_offset_per_key(), starts)
        self.keep_offset_per_key(starts)

    def _describe_bag(self, bag: int) -> str:
        return checks.describe_bag(bag, self._keys, self.stride_per_key())

    def index_per_key(self) -> dict[str, int]:
        """Index of each feature."""
        return {key: f for f, key in enumerate(self._keys)}

    def length_per_key(self) -> list[int]:
        """F id counts. Read from the device, as ``offset_per_key()``.

        Raises:
            ValueError: as ``offset_per_key()``.
        """
        return [stop - start for start, stop in itertools.pairwise(self.offset_per_key())]

    def length_per_key_or_none(self) -> list[int] | None:
        """``length_per_key()`` if the host knows it; None if it must be read from the device."""
        known = self.known_offset_per_key()
        return None if known is None else [stop - start for start, stop in itertools.pairwise(known)]

    def offset_per_key_or_none(self) -> list[int] | None:
        """``offset_per_key()`` if the host knows it; None if it must be read from the device."""
        known = self.known_offset_per_key()
        return None if known is None else list(known)

    def lengths_offset_per_key(self) -> list[int]:
        """[F + 1]: index of each feature's first bag."""
        return list(itertools.accumulate(self.stride_per_key(), initial=0))

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """F lists of one batch size each, if features have batch sizes of their own; else an empty list.

        TorchRec's lists have one batch size per rank.
        """
        return [[size] for size in self.stride_per_key()] if self.variable_stride_per_key() else []

    def flatten_lengths(self: _Batch) -> _Batch:
        """Returns a shallow copy, for TorchRec's callers: lengths are one-dimensional already."""
        return copy.copy(self)

    def sync(self: _Batch) -> _Batch:
        """Reads ``offset_per_key()``, so that later calls do not wait for a GPU, and returns the batch.

        Does nothing in compiled code, and for tensors without data.
        """
        values = self._values
        if not (torch.compiler.is_compiling() or values.is_meta or type(values) is not Tensor):
            self.offset_per_key()
        return self

    def unsync(self: _Batch) -> _Batch:
        """Drops the cached ``offset_per_key()`` and returns the batch."""
        self._offset_per_key = None
        return self
