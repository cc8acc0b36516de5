"""KeyedJaggedWindows: bags that are windows of one buffer, so that shared ids are stored once."""

from __future__ import annotations

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
from rec_kernels.ops.tracing import cannot_read


class KeyedJaggedWindows(OffsetsContainer):
    """Ids of several features for a batch, in one buffer: bag i is ``values[starts[i] : starts[i] + lengths[i]]``.

    Bags are key-major, as in ``rk.KeyedJaggedTensor``: with B samples, bag (f, b) has index f * B + b. For example, the
    histories of one user's samples are windows of that user's full history. ``from_kjt`` finds windows in a batch; data
    with known sequences can use the constructor. Only the buffer and the windows are moved to a device; ``to_kjt()``
    builds the bags there. Do not modify inference tensors afterwards; after changes to other tensors, bags are built
    again.

    Args:
        keys: F feature names, all different.
        values: [N] ids, int32 or int64.
        starts: [F * B] int32 or int64, in [0, N].
        lengths: [F * B] int32 or int64, in [0, N - ``starts``].
        stride_per_key: F batch sizes, if they differ between features; starts and lengths then cover their sum.

    Source: partial deduplication of Zhao et al., "RecD: Deduplication for End-to-End Deep Learning Recommendation Model
    Training Infrastructure", MLSys 2023, arXiv:2211.05239.

    Raises:
        ValueError: sizes, dtypes or devices do not match; the message names the argument. IndexError: a window is
            outside of the values (on the CPU; on a GPU when its bags are built or counted).
    """

    _tensors = ("_values", "_starts", "_lengths")
    _plain = ("_keys", "_strides")
    _cached = ("_offset_per_key", "_bags")

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
            self.offset_per_key()  # cached from now on, also after a move

    @classmethod
    def from_kjt(cls, kjt) -> KeyedJaggedWindows:
        """Finds windows in a batch: a bag that begins with the last ids of an earlier one overlaps it in the buffer.

        Uses ``rk.jagged_overlaps``, on the CPU. A user's bags must be in order of time; other bags may lie between
        them.

        Args:
            kjt: ``rk.KeyedJaggedTensor`` or TorchRec's, without weights, which is not modified.

        Raises:
            ValueError: the batch has weights or inverse indices, is not on the CPU, or has bad offsets. TypeError:
            ``kjt`` is not a batch.
        """
        check_batch("kjt", kjt)
        if kjt.weights_or_none() is not None:
            raise ValueError(
                "kjt must not have weights: windows share ids, and an id may have another weight in each of its bags"
            )
        if getattr(kjt, "inverse_indices_or_none", lambda: None)() is not None:
            raise ValueError("kjt must not have inverse_indices: use rk.InverseKeyedJaggedTensor for shared bags")
        offsets = kjt.offsets()
        if offsets.device.type != "cpu":
            raise ValueError(f"kjt must be on the CPU, got {offsets.device}: find windows before moving a batch")
        values, starts = jagged_overlaps(kjt.values(), offsets)
        strides = list(kjt.stride_per_key()) if getattr(kjt, "variable_stride_per_key", bool)() else None
        return cls(list(kjt.keys()), values, starts, offsets.diff(), stride_per_key=strides)

    def values(self) -> Tensor:
        """[N]: the buffer of ids."""
        return self._values

    def starts(self) -> Tensor:
        """[F * B]: start of each bag in the buffer."""
        return self._starts

    def lengths(self) -> Tensor:
        """[F * B]."""
        return self._lengths

    def stride_per_key(self) -> list[int]:
        """F batch sizes."""
        if self._strides is not None:
            return list(self._strides)
        return [self._starts.shape[0] // max(len(self._keys), 1)] * len(self._keys)

    def offset_per_key(self) -> list[int]:
        """[F + 1]: start of each feature's ids in ``to_kjt()``. On a GPU the host may wait, once.

        Raises:
            IndexError: on a GPU, or after an in-place change, a window is outside of the values.
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
        """``offset_per_key()`` if the host knows it; None if it must be read from the device."""
        return _if_unchanged(self._offset_per_key, self._starts, self._lengths)

    def keep_offset_per_key(self, offset_per_key: list[int]) -> None:
        """Caches starts that were read from the tensors in their current version."""
        self._offset_per_key = _with_versions(offset_per_key, self._starts, self._lengths)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_bags": None}  # larger than the windows, and rebuilt on demand

    def to_kjt(self) -> KeyedJaggedTensor:
        """The bags as separate ids, built on the first call and cached.

        The host waits for a GPU only if the windows were created there. Compiled code and captured CUDA graphs build
        uncached bags, because later runs have other ids.

        Raises:
            IndexError: as ``offset_per_key``.
        """
        if cannot_read(self._values):
            return self._build_bags()
        tensors = (self._values, self._starts, self._lengths)
        bags = _if_unchanged(self._bags, *tensors)
        if bags is None:
            with torch.inference_mode(False):  # training may reuse bags that were built under inference mode
                bags = self._build_bags()
            self._bags = _with_versions(bags, *tensors)
        return bags

    def _build_bags(self) -> KeyedJaggedTensor:
        # Sizes are symbolic in compiled code, and unknown for meta tensors.
        if torch.compiler.is_compiling() or self._starts.is_meta:
            known = self.known_offset_per_key()
        else:
            known = self.offset_per_key()
        total = None if known is None else known[-1]
        values, offsets = jagged_windows(self._values, self._starts, self._lengths, total=total)
        bags = KeyedJaggedTensor._from_parts(self._keys, values, offsets, None, self._strides)
        if known is not None:
            bags.keep_offset_per_key(known)
        return bags

    def num_stored(self, keys: Sequence[str]) -> int:
        """Number of ids of the buffer that are in bags of these features, each counted once. On a GPU the host waits.

        Raises:
            ValueError: ``keys`` is a string, not a list. KeyError: an unknown feature. IndexError: as
            ``offset_per_key``.
        """
        check_keys(keys, self._keys)
        self.offset_per_key()
        bags = self._bag_starts()
        chosen = [slice(bags[f], bags[f + 1]) for f, key in enumerate(self._keys) if key in keys]
        starts, lengths = (torch.cat([t[:0], *(t[b] for b in chosen)]).long() for t in (self._starts, self._lengths))
        return int(_newly_covered(starts, lengths).sum())

    def num_stored_of_keys(self) -> dict[str, int]:
        """``num_stored([key])`` of each key, with the same errors, in one pass."""
        self.offset_per_key()
        # Shift the windows of each feature into a range of their own.
        bags, device = self.stride_per_key(), self._starts.device
        buffers = torch.arange(len(bags), device=device) * (self._values.shape[0] + 1)
        buffers = buffers.repeat_interleave(torch.tensor(bags, dtype=torch.int64, device=device))
        counts = _newly_covered(self._starts + buffers, self._lengths.long())
        return dict(zip(self._keys, to_offsets(counts)[self._bag_starts()].diff().tolist(), strict=True))

    def record_stream(self, stream: torch.Stream) -> None:
        """Records the stream for all tensors, including cached bags."""
        super().record_stream(stream)
        if self._bags is not None:
            self._bags[1].record_stream(stream)

    def _map_tensors(self, fn: Callable[[Any], Any]) -> KeyedJaggedWindows:
        new = super()._map_tensors(fn)  # cached bags are not moved
        known = self.known_offset_per_key()
        if known is not None:
            new.keep_offset_per_key(known)
        return new

    def _outside(self) -> Tensor:
        """[F * B] bool: windows that are outside of the values."""
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


def _with_versions(found: Any, *tensors: Tensor) -> tuple[list, Any]:
    """Pairs a value with the current version counters of the tensors it was computed from."""
    return _versions(tensors), found


def _if_unchanged(kept: tuple[list, Any] | None, *tensors: Tensor) -> Any:
    """Returns the cached value, or None if the tensors were modified since.

    Compiled code cannot see modifications and always returns it.
    """
    if kept is None:
        return None
    return kept[1] if torch.compiler.is_compiling() or kept[0] == _versions(tensors) else None


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Version counters, which increase with each change; None for inference tensors, which have none."""
    if torch.compiler.is_compiling():
        return []
    return [None if t.is_inference() else t._version for t in tensors]


def _newly_covered(starts: Tensor, lengths: Tensor) -> Tensor:
    """[M] int64: sorted by start, number of positions of each window that no earlier window covers."""
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
