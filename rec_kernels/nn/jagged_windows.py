"""KeyedJaggedWindows: bags that are windows of one buffer, so that what they have in common is kept once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rec_kernels.nn.jagged import KeyedJaggedTensor, check_bags, has_data, to_offsets
from rec_kernels.ops.jagged_overlaps import jagged_overlaps
from rec_kernels.ops.jagged_windows import jagged_windows


class KeyedJaggedWindows:
    """Ids of several features for a batch, in one buffer: bag i is ``values[starts[i] : starts[i] + lengths[i]]``.

    Bags are key-major, as those of ``rk.KeyedJaggedTensor``: with B samples, bag (f, b) is number f * B + b. The
    histories of one user's samples are such windows of all that the user has done. ``from_kjt`` finds windows in a
    batch; data that knows its sequences gives them here. What is moved to a device is the buffer; ``to_kjt()`` makes
    bags of it there. Nobody writes to the tensors afterwards.

    Args:
        keys: F feature names, all different.
        values: [N] ids, int32 or int64.
        starts: [F * B] int32 or int64, in [0, N].
        lengths: [F * B] int32 or int64, in [0, N - ``starts``].
        stride_per_key: F batch sizes, where they differ among the features; starts and lengths are of their sum then.

    Source: partial deduplication of Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model
    Training Infrastructure", MLSys 2023, arXiv:2211.05239.

    Raises:
        ValueError: sizes, dtypes or devices that do not fit together; the message names the argument. IndexError: a
            window is not within the values (on the CPU; on a GPU when its bags are made, or counted).
    """

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        starts: Tensor,
        lengths: Tensor,
        *,
        stride_per_key: list[int] | None = None,
    ) -> None:
        _check_tensors(values, starts, lengths)
        check_bags(keys, stride_per_key, len(starts), "starts")
        self._keys, self._values, self._starts, self._lengths = list(keys), values, starts, lengths
        self._strides = None if stride_per_key is None else list(stride_per_key)
        self._offset_per_key: list[int] | None = None
        self._bags: KeyedJaggedTensor | None = None
        if has_data(starts):
            self.offset_per_key()  # is known from now on, when they have been moved, too

    @classmethod
    def from_kjt(cls, kjt) -> KeyedJaggedWindows:
        """Finds windows in a batch: a bag that begins with the last ids of an earlier one is laid over it.

        By ``rk.jagged_overlaps``, on the CPU. Bags of one user come in the order of their time, others may lie between.

        Args:
            kjt: ``rk.KeyedJaggedTensor`` or TorchRec's, without weights, which stays as it is.

        Raises:
            ValueError: the batch has weights or inverse indices, is not on the CPU, or has bad offsets.
        """
        if kjt.weights_or_none() is not None:
            raise ValueError("kjt has weights, which windows do not: an id has one in each of its bags")
        if getattr(kjt, "inverse_indices_or_none", lambda: None)() is not None:
            raise ValueError("kjt has inverse_indices, which rk.InverseKeyedJaggedTensor has beside its bags")
        offsets = kjt.offsets()
        if offsets.device.type != "cpu":
            raise ValueError(f"kjt is on {offsets.device}: windows are found on the CPU, before a batch is moved")
        values, starts = jagged_overlaps(kjt.values(), offsets)
        strides = list(kjt.stride_per_key()) if getattr(kjt, "variable_stride_per_key", bool)() else None
        return cls(list(kjt.keys()), values, starts, offsets.diff(), stride_per_key=strides)

    def keys(self) -> list[str]:
        """F feature names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """[N] ids, of which bags are windows."""
        return self._values

    def starts(self) -> Tensor:
        """[F * B]: where bags begin."""
        return self._starts

    def lengths(self) -> Tensor:
        """[F * B]."""
        return self._lengths

    def stride_per_key(self) -> list[int]:
        """F batch sizes."""
        if self._strides is not None:
            return self._strides
        return [self._starts.shape[0] // max(len(self._keys), 1)] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """Whether features have batch sizes of their own."""
        return self._strides is not None

    def offset_per_key(self) -> list[int]:
        """[F + 1]: where each feature's ids start in ``to_kjt()``. On a GPU the host may wait, once.

        Raises:
            IndexError: on a GPU, a window is not within the values.
        """
        if self._offset_per_key is None:
            bounds = list(itertools.accumulate(self.stride_per_key(), initial=0))
            bad = self._outside()
            *found, any_bad = torch.cat([to_offsets(self._lengths.long())[bounds], bad.any()[None].long()]).tolist()
            if any_bad:
                raise IndexError(self._message(int(bad.nonzero()[0])))
            self._offset_per_key = found
        return self._offset_per_key

    def known_offset_per_key(self) -> list[int] | None:
        """``offset_per_key()``, if the host knows it; None: it would have to be read from the device."""
        return self._offset_per_key

    def to_kjt(self) -> KeyedJaggedTensor:
        """The bags, each with ids of its own: made when they are first asked for, and kept.

        Ids of a GPU are waited for only if the windows were given there.

        Raises:
            IndexError: on a GPU, a window is not within the values.
        """
        if self._bags is None:
            compiling = torch.compiler.is_compiling()
            known = self._offset_per_key if compiling or self._starts.is_meta else self.offset_per_key()
            total = None if known is None else known[-1]
            values, offsets = jagged_windows(self._values, self._starts, self._lengths, total=total)
            bags = KeyedJaggedTensor(self._keys, values, offsets=offsets, stride_per_key=self._strides)
            if compiling:  # which has no object that they could be kept in
                return bags
            if known is not None:
                bags.keep_offset_per_key(known)
            self._bags = bags
        return self._bags

    def num_stored(self, keys: Sequence[str]) -> int:
        """How many ids of the buffer are in bags of these features, each counted once. On a GPU the host waits."""
        bounds = list(itertools.accumulate(self.stride_per_key(), initial=0))
        bags = [slice(bounds[f], bounds[f + 1]) for f, key in enumerate(self._keys) if key in keys]
        starts, lengths = (torch.cat([t[:0], *(t[b] for b in bags)]).long() for t in (self._starts, self._lengths))
        # How many windows an id is in goes up where one begins, and down where it ends.
        changes = starts.new_zeros(self._values.shape[0] + 1)
        changes.index_add_(0, starts, torch.ones_like(starts))
        changes.index_add_(0, starts + lengths, -torch.ones_like(starts))
        return int((changes.cumsum(0) > 0).sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedWindows:
        """The same on another device; bags that were made stay behind."""
        return self._mapped(lambda t: t.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> KeyedJaggedWindows:
        """The same in page-locked host memory."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> KeyedJaggedWindows:
        new = type(self).__new__(type(self))
        new._keys, new._strides, new._offset_per_key, new._bags = self._keys, self._strides, self._offset_per_key, None
        new._values, new._starts, new._lengths = map(move, (self._values, self._starts, self._lengths))
        return new

    def _outside(self) -> Tensor:
        """[F * B] bool: windows that are not within the values."""
        size, starts, lengths = self._values.shape[0], self._starts.long(), self._lengths.long()
        # Where size - starts overflows, the start is bad already.
        return (starts < 0) | (starts > size) | (lengths < 0) | (lengths > size - starts)

    def _message(self, bag: int) -> str:
        bounds = list(itertools.accumulate(self.stride_per_key(), initial=0))
        f = next(f for f, stop in enumerate(bounds[1:]) if bag < stop)
        return (
            f"starts[{bag}] = {int(self._starts[bag])} and lengths[{bag}] = {int(self._lengths[bag])}, of bag "
            f"{bag - bounds[f]} of {self._keys[f]!r}, are out of range: a window must be within the "
            f"{self._values.shape[0]} values"
        )

    def __repr__(self) -> str:
        return f"KeyedJaggedWindows(keys={self._keys}, bags={self._starts.shape[0]}, values={self._values.shape[0]})"


def _check_tensors(values: Tensor, starts: Tensor, lengths: Tensor) -> None:
    for name, t in (("values", values), ("starts", starts), ("lengths", lengths)):
        if t.dim() != 1 or t.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64 with one dimension, got {t.dtype} {list(t.shape)}")
        if t.device != values.device:
            raise ValueError(f"{name} must be on values' device, {values.device}, got {t.device}")
    if starts.shape != lengths.shape:
        raise ValueError(f"lengths must have starts' shape {list(starts.shape)}, got {list(lengths.shape)}")
