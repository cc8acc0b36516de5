"""KeyedJaggedWindows: bags that are windows of one buffer, so that what they have in common is kept once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rec_kernels.nn.jagged.bounds import to_offsets
from rec_kernels.nn.jagged.checks import check_bags, check_batch, check_integers, has_data, integers_of
from rec_kernels.nn.jagged.container import OffsetsContainer
from rec_kernels.nn.jagged.select_features import check_keys
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.ops.jagged_overlaps import jagged_overlaps
from rec_kernels.ops.jagged_windows import jagged_windows
from rec_kernels.ops.status import cannot_read


class KeyedJaggedWindows(OffsetsContainer):
    """Ids of several features for a batch, in one buffer: bag i is ``values[starts[i] : starts[i] + lengths[i]]``.

    Bags are key-major, as those of ``rk.KeyedJaggedTensor``: with B samples, bag (f, b) is number f * B + b. The
    histories of one user's samples are such windows of all that the user has done. ``from_kjt`` finds windows in a
    batch; data that knows its sequences gives them here. What is moved to a device is the buffer; ``to_kjt()`` makes
    bags of it there. Nobody writes to inference tensors afterwards; after others were written to, bags are made anew.

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

    _parts = ("_values", "_starts", "_lengths")
    _others = ("_keys", "_strides")
    _learned = ("_offset_per_key", "_bags")

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
        strides = None if stride_per_key is None else integers_of(stride_per_key, "stride_per_key")
        check_bags(keys, strides, len(starts), "starts")
        self._keys, self._values, self._starts, self._lengths = list(keys), values, starts, lengths
        self._strides = strides
        self._offset_per_key = None
        self._bags: tuple[list, KeyedJaggedTensor] | None = None
        if has_data(starts):
            self.offset_per_key()  # is known from now on, when they have been moved, too

    @classmethod
    def from_kjt(cls, kjt) -> KeyedJaggedWindows:
        """Finds windows in a batch: a bag that begins with the last ids of an earlier one is laid over it.

        By ``rk.jagged_overlaps``, on the CPU. Bags of one user come in the order of their time, others may lie between.

        Args:
            kjt: ``rk.KeyedJaggedTensor`` or TorchRec's, without weights, which stays as it is.

        Raises:
            ValueError: the batch has weights or inverse indices, is not on the CPU, or has bad offsets. TypeError: it
            is none.
        """
        check_batch("kjt", kjt)
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
        return list(self._keys)

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
            return list(self._strides)
        return [self._starts.shape[0] // max(len(self._keys), 1)] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """True if features have batch sizes of their own."""
        return self._strides is not None

    def offset_per_key(self) -> list[int]:
        """[F + 1]: where each feature's ids start in ``to_kjt()``. On a GPU the host may wait, once.

        Raises:
            IndexError: on a GPU, or after somebody has written to them, a window is not within the values.
        """
        found = self.known_offset_per_key()
        if found is None:
            bad, offsets = self._outside(), to_offsets(self._lengths.long())
            *found, any_bad = torch.cat([offsets[self._bag_starts()], bad.any()[None].long()]).tolist()
            if any_bad:
                raise IndexError(self._message(int(bad.nonzero()[0])))
            self.keep_offset_per_key(found)
        return list(found)

    def known_offset_per_key(self) -> list[int] | None:
        """``offset_per_key()``, if the host knows it; None: it would have to be read from the device."""
        return _still(self._offset_per_key, self._starts, self._lengths)

    def keep_offset_per_key(self, offset_per_key: list[int]) -> None:
        """Keeps what was learned of starts and lengths as they are now."""
        self._offset_per_key = _kept(offset_per_key, self._starts, self._lengths)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_bags": None}  # larger than the windows, and can be made again

    def to_kjt(self) -> KeyedJaggedTensor:
        """The bags, each with ids of its own: made when they are first asked for, and kept.

        Ids of a GPU are waited for only if the windows were given there. Compiled code and a CUDA graph that is being
        captured make bags of their own, as later calls of them have other ids.

        Raises:
            IndexError: as of ``offset_per_key``.
        """
        if cannot_read(self._values):
            return self._made_bags()
        tensors = (self._values, self._starts, self._lengths)
        bags = _still(self._bags, *tensors)
        if bags is None:
            with torch.inference_mode(False):  # a training may go on with bags that an evaluation asked for
                bags = self._made_bags()
            self._bags = _kept(bags, *tensors)
        return bags

    def _made_bags(self) -> KeyedJaggedTensor:
        # Sizes that are not known: compiled code has them as symbols, and meta tensors have none.
        if torch.compiler.is_compiling() or self._starts.is_meta:
            known = self.known_offset_per_key()
        else:
            known = self.offset_per_key()
        total = None if known is None else known[-1]
        values, offsets = jagged_windows(self._values, self._starts, self._lengths, total=total)
        bags = KeyedJaggedTensor._of(self._keys, values, offsets, None, self._strides)
        if known is not None:
            bags.keep_offset_per_key(known)
        return bags

    def num_stored(self, keys: Sequence[str]) -> int:
        """Number of the buffer's ids that are in bags of these features, each counted once. On a GPU the host waits.

        Raises:
            ValueError: ``keys`` is a name and no list. KeyError: there is no such feature. IndexError: as of
            ``offset_per_key``.
        """
        check_keys(keys, self._keys)
        self.offset_per_key()
        bags = self._bag_starts()
        chosen = [slice(bags[f], bags[f + 1]) for f, key in enumerate(self._keys) if key in keys]
        starts, lengths = (torch.cat([t[:0], *(t[b] for b in chosen)]).long() for t in (self._starts, self._lengths))
        return int(_not_before(starts, lengths).sum())

    def num_stored_of_keys(self) -> dict[str, int]:
        """``num_stored([key])`` of each key, whose errors it raises, all counted at once."""
        self.offset_per_key()
        # Every feature's windows in a buffer of their own, one behind the other.
        bags, device = self.stride_per_key(), self._starts.device
        buffers = torch.arange(len(bags), device=device) * (self._values.shape[0] + 1)
        buffers = buffers.repeat_interleave(torch.tensor(bags, dtype=torch.int64, device=device))
        counts = _not_before(self._starts + buffers, self._lengths.long())
        return dict(zip(self._keys, to_offsets(counts)[self._bag_starts()].diff().tolist(), strict=True))

    def record_stream(self, stream: torch.Stream) -> None:
        """Records the stream for all tensors, of bags that were made, too."""
        super().record_stream(stream)
        if self._bags is not None:
            self._bags[1].record_stream(stream)

    def _mapped(self, move: Callable[[Any], Any]) -> KeyedJaggedWindows:
        new = super()._mapped(move)  # bags that were made stay behind
        known = self.known_offset_per_key()
        if known is not None:
            new.keep_offset_per_key(known)
        return new

    def _bag_starts(self) -> list[int]:
        """[F + 1]: the number of each feature's first bag."""
        return list(itertools.accumulate(self.stride_per_key(), initial=0))

    def _outside(self) -> Tensor:
        """[F * B] bool: windows that are not within the values."""
        size, starts, lengths = self._values.shape[0], self._starts.long(), self._lengths.long()
        # An overflow of size - starts is harmless: the start is bad already.
        return (starts < 0) | (starts > size) | (lengths < 0) | (lengths > size - starts)

    def _message(self, bag: int) -> str:
        bounds = self._bag_starts()
        f = next(f for f, stop in enumerate(bounds[1:]) if bag < stop)
        return (
            f"starts[{bag}] = {int(self._starts[bag])} and lengths[{bag}] = {int(self._lengths[bag])}, of bag "
            f"{bag - bounds[f]} of {self._keys[f]!r}, are out of range: a window must be within the "
            f"{self._values.shape[0]} values"
        )

    def __repr__(self) -> str:
        return f"KeyedJaggedWindows(keys={self._keys}, bags={self._starts.shape[0]}, values={self._values.shape[0]})"


def _kept(found: Any, *tensors: Tensor) -> tuple[list, Any]:
    """Keeps facts learned of the tensors as they are now."""
    return _versions(tensors), found


def _still(kept: tuple[list, Any] | None, *tensors: Tensor) -> Any:
    """Returns what was kept, or None if the tensors were written to since; compiled code, which cannot see that,
    trusts."""
    if kept is None:
        return None
    return kept[1] if torch.compiler.is_compiling() or kept[0] == _versions(tensors) else None


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """They rise with each change; None: nobody counts those of an inference tensor."""
    if torch.compiler.is_compiling():
        return []
    return [None if t.is_inference() else t._version for t in tensors]


def _not_before(starts: Tensor, lengths: Tensor) -> Tensor:
    """[M] int64: in the order of their starts, how many places a window has that are in none before it."""
    starts, order = starts.sort()
    ends = (starts + lengths[order]).cummax(0).values
    before = starts.clone()
    before[1:] = torch.maximum(starts[1:], ends[:-1])
    return ends - before


def _check_tensors(values: Tensor, starts: Tensor, lengths: Tensor) -> None:
    for name, t in (("values", values), ("starts", starts), ("lengths", lengths)):
        check_integers(name, t, values)
    if starts.shape != lengths.shape:
        raise ValueError(f"lengths must have starts' shape {list(starts.shape)}, got {list(lengths.shape)}")
