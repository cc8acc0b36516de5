"""BatchFacts: what follows from the keys, batch sizes and offsets of a batch, by TorchRec's names."""

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
    """Base of ``rk.KeyedJaggedTensor``: where its features' ids start, which is read once, and what follows from it."""

    _keys: list[str]

    @abstractmethod
    def stride_per_key(self) -> list[int]:
        """F batch sizes."""

    @abstractmethod
    def variable_stride_per_key(self) -> bool:
        """True if features have batch sizes of their own."""

    def offset_per_key(self) -> list[int]:
        """[F + 1]: where each feature's ids start. Read from the device, and kept until the offsets change.

        Raises:
            ValueError: on a GPU, or after somebody has written to them, these do not rise in [0, N].
        """
        found = self.known_offset_per_key()
        if found is None:
            bounds = list(itertools.accumulate(self.stride_per_key(), initial=0))
            found = read_at(self._offsets, bounds) if self._keys else [0]
            self._check_starts(bounds, found)
            self.keep_offset_per_key(found)
        return list(found)

    def known_offset_per_key(self) -> list[int] | None:
        """``offset_per_key()``, if the host knows it; None: it would have to be read from the device."""
        known = self._offset_per_key
        if known is None or torch.compiler.is_compiling():  # compiled code cannot see whether the offsets have changed
            return None
        return known[1] if known[0] == self._offsets._version else None

    def keep_offset_per_key(self, offset_per_key: list[int]) -> None:
        """Keeps what was learned of the offsets as they are now."""
        # Nobody counts changes of an inference tensor, and compiled code has no object that it could be kept in.
        if not torch.compiler.is_compiling() and not self._offsets.is_inference():
            self._offset_per_key = self._offsets._version, offset_per_key

    def _check_starts(self, bags: list[int], starts: list[int]) -> None:
        if torch.compiler.is_compiling():
            return
        count = self._values.shape[0]
        if isinstance(self._offsets, FakeTensor):  # numbers that nobody knows yet
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

    def _believe(self, starts: list[int] | None) -> None:
        """Keeps where features start, as a caller says. Numbers that can be read without waiting are compared."""
        if starts is None or torch.compiler.is_compiling():
            return
        if len(starts) != len(self._keys) + 1:
            raise ValueError(f"offset_per_key must be {len(self._keys) + 1} numbers, for the keys and an end: {starts}")
        if checks.has_data(self._offsets) and starts != (found := self.offset_per_key()):
            raise ValueError(f"offset_per_key must be {found}, as lengths or offsets say, got {starts}")
        self._check_starts(self.lengths_offset_per_key(), starts)
        self.keep_offset_per_key(starts)

    def _place_of_bag(self, bag: int) -> str:
        return checks.place_of_bag(bag, self._keys, self.stride_per_key())

    def index_per_key(self) -> dict[str, int]:
        """The number of each feature."""
        return {key: f for f, key in enumerate(self._keys)}

    def length_per_key(self) -> list[int]:
        """F numbers of ids. Read from the device, as ``offset_per_key()``.

        Raises:
            ValueError: as ``offset_per_key()``.
        """
        return [stop - start for start, stop in itertools.pairwise(self.offset_per_key())]

    def length_per_key_or_none(self) -> list[int] | None:
        """``length_per_key()``, if the host knows it; None: it would have to be read from the device."""
        known = self.known_offset_per_key()
        return None if known is None else [stop - start for start, stop in itertools.pairwise(known)]

    def offset_per_key_or_none(self) -> list[int] | None:
        """``offset_per_key()``, if the host knows it; None: it would have to be read from the device."""
        known = self.known_offset_per_key()
        return None if known is None else list(known)

    def lengths_offset_per_key(self) -> list[int]:
        """[F + 1]: where each feature's bags start."""
        return list(itertools.accumulate(self.stride_per_key(), initial=0))

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """F lists of one batch size, where features have their own; else none. TorchRec's have one for each rank."""
        return [[size] for size in self.stride_per_key()] if self.variable_stride_per_key() else []

    def flatten_lengths(self: _Batch) -> _Batch:
        """A batch of the same tensors, by TorchRec's name: lengths have one dimension here always."""
        return copy.copy(self)

    def sync(self: _Batch) -> _Batch:
        """Reads ``offset_per_key()``, so that later calls do not wait for a GPU, and returns the batch.

        It reads nothing in compiled code, and of tensors without numbers.
        """
        values = self._values
        if not (torch.compiler.is_compiling() or values.is_meta or type(values) is not Tensor):
            self.offset_per_key()
        return self

    def unsync(self: _Batch) -> _Batch:
        """Forgets what was read of the offsets, and returns the batch."""
        self._offset_per_key = None
        return self
