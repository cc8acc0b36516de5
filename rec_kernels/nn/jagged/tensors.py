"""KeyedJaggedTensor: jagged ids of several features, with TorchRec's interface, without its dependencies."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rec_kernels.nn.jagged import bounds, build, checks, text
from rec_kernels.nn.jagged.checks import has_data
from rec_kernels.nn.jagged.container import BagContainer, OffsetsContainer
from rec_kernels.nn.jagged.jagged_tensor import JaggedTensor


class KeyedJaggedTensor(BagContainer, OffsetsContainer):
    """Ids of several features for a batch: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.

    Args:
        keys: F feature names, all different.
        values: [N] ids, int32 or int64. Other values, [N, ...], can be split and moved, but not looked up.
        weights: [N] floating-point per-sample weights, or None.
        lengths: [F * B] bag lengths, each at least 0, with a sum of at most N, or
        offsets: [F * B + 1], non-decreasing, in [0, N]; or both, if consistent. Pooled lookups skip ids in no bag,
            before the first offset or after the last.
        stride: B, for a batch without keys, whose tensors do not show it; None: derived from lengths or offsets.
        stride_per_key_per_rank: F lists, each of which sums to the feature's batch size: as stride_per_key.
        stride_per_key: F batch sizes, if they differ between features; lengths or offsets then cover their sum.
        length_per_key, offset_per_key: number of ids per feature, and where each feature's ids start, if the host knows
            them, so that no call waits for a GPU to count. Checked on the CPU, trusted on a GPU.
        lengths_offset_per_key, index_per_key, jt_dict: accepted for TorchRec's callers and ignored; they follow from
            the other arguments.
        inverse_indices: for batch sizes per feature: maps each row of the full batch to a bag of each feature, as names
            and an int64 tensor [F, B]. As in TorchRec.

    Raises:
        ValueError: sizes, dtypes or devices do not match; on the CPU, lengths or offsets are not as above. The message
            names the argument. TypeError: an argument is not a tensor. IndexError: on the CPU, ``inverse_indices`` is
            out of range. On a GPU and in compiled code, tensor contents are not checked here: a lookup reports bad
            ones, see ``rk.EmbeddingBagCollection.check``.
    """

    _tensors = ("_values", "_offsets", "_weights", "_inverse")
    _plain = ("_keys", "_strides", "_inverse_keys")
    _cached = ("_offset_per_key",)
    _from_lengths = False  # whether error messages name lengths
    _stride: int | None = None  # batch size, where it does not follow from the offsets

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
        jt_dict: Mapping[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> None:
        checks.check_values(values)
        self._from_lengths = offsets is None
        offsets = bounds.resolve_offsets(values, lengths, offsets)
        strides, bags = bounds.resolve_strides(stride, stride_per_key_per_rank, stride_per_key), offsets.shape[0] - 1
        checks.check_bags(keys, strides, bags, "lengths" if self._from_lengths else "offsets")
        if strides is None:
            bounds.check_stride(stride, keys, bags)
        if inverse_indices is not None:
            checks.check_inverse(inverse_indices, keys, strides)
        if weights is not None:
            checks.check_weights(weights, values)
        self._set(keys, values, offsets, weights, strides)
        self._stride = stride
        self._inverse_keys, self._inverse = inverse_indices or (None, None)
        checks.check_bounds(offsets, values.shape[0], self._describe_bag, lengths if self._from_lengths else None)
        self._set_given_starts(bounds.resolve_starts(length_per_key, offset_per_key))

    @classmethod
    def _from_parts(
        cls,
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride_per_key: list[int] | None = None,
    ) -> KeyedJaggedTensor:
        """Creates a batch from consistent parts, without checks and inverse indices."""
        new = cls.__new__(cls)
        new._set(keys, values, offsets, weights, stride_per_key)
        return new

    def _set(
        self, keys: list[str], values: Tensor, offsets: Tensor, weights: Tensor | None, strides: list[int] | None
    ) -> None:
        self._keys, self._values, self._offsets, self._weights = list(keys), values, offsets, weights
        self._strides = None if strides is None else list(strides)
        self._inverse_keys, self._inverse, self._offset_per_key = None, None, None

    def stride(self) -> int:
        """Batch size B; the size of the full batch, if features have batch sizes of their own."""
        if self._strides is None and self._keys:
            return (self._offsets.shape[0] - 1) // len(self._keys)
        if self._inverse is not None:
            return self._inverse.shape[1]
        return max(self._strides or [0]) if self._stride is None else self._stride

    def stride_per_key(self) -> list[int]:
        """F batch sizes."""
        return [self.stride()] * len(self._keys) if self._strides is None else list(self._strides)

    def offset_per_key(self) -> list[int]:
        """[F + 1]: start of each feature's ids. Read from the device, and cached until the offsets change.

        Raises:
            ValueError: on a GPU, or after an in-place change, offsets are not non-decreasing in [0, N].
        """
        found = self.known_offset_per_key()
        if found is None:
            bags = self._bag_starts()
            found = bounds.read_at(self._offsets, bags) if self._keys else [0]
            self._check_starts(bags, found)
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
                    f"offsets[{bags[f]}] = {start}, where {where}, must be in [{before}, {count}], between the "
                    "start of the feature before it and the number of values"
                )

    def _set_given_starts(self, starts: list[int] | None) -> None:
        """Caches the feature starts given by a caller. On the CPU they are compared with the offsets."""
        if starts is None or torch.compiler.is_compiling():
            return
        if len(starts) != len(self._keys) + 1:
            raise ValueError(
                f"offset_per_key must have {len(self._keys) + 1} elements, one per key and the end, got {starts}"
            )
        if has_data(self._offsets) and starts != (found := self.offset_per_key()):
            raise ValueError(f"offset_per_key must be {found}, which follows from lengths or offsets, got {starts}")
        self._check_starts(self._bag_starts(), starts)
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
        return self._bag_starts()

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """F lists of one batch size each, if features have batch sizes of their own; else an empty list.

        TorchRec's lists have one batch size per rank.
        """
        return [[size] for size in self.stride_per_key()] if self.variable_stride_per_key() else []

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Returns a shallow copy, for TorchRec's callers: lengths are one-dimensional already."""
        return copy.copy(self)

    def sync(self) -> KeyedJaggedTensor:
        """Reads ``offset_per_key()``, so that later calls do not wait for a GPU, and returns the batch.

        Does nothing in compiled code, and for tensors without data.
        """
        values = self._values
        if not (torch.compiler.is_compiling() or values.is_meta or type(values) is not Tensor):
            self.offset_per_key()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Drops the cached ``offset_per_key()`` and returns the batch."""
        self._offset_per_key = None
        return self

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Names and int64 [F, B], or None."""
        return None if self._inverse is None else (list(self._inverse_keys), self._inverse)

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """Names and int64 [F, B].

        Raises:
            ValueError: the batch has no inverse indices.
        """
        return checks.require("inverse_indices", self.inverse_indices_or_none())

    def __getitem__(self, key: str) -> JaggedTensor:
        i, strides = checks.index_of_key(key, self._keys), self.stride_per_key()
        start, (first, last) = sum(strides[:i]), self.offset_per_key()[i : i + 2]
        offsets = self._offsets[start : start + strides[i] + 1]
        weights = None if self._weights is None else self._weights[first:last]
        return JaggedTensor._from_parts(self._values[first:last], offsets - offsets[0], weights)

    def _plain_values(self) -> list[Any]:
        # A stride that follows from the offsets is left out: a program accepts any batch size.
        is_free = self._stride is not None and (self._strides is not None or not self._keys)
        return [*super()._plain_values(), *([self._stride] if is_free else [])]

    @classmethod
    def _from_attributes(cls, parts: Iterable[Any], values: Iterable[Any]) -> KeyedJaggedTensor:
        *plain, stride = [*values, None][: len(cls._plain) + 1]
        new = super()._from_attributes(parts, plain)
        new._stride = stride
        return new

    def _map_tensors(self, fn: Callable[[Any], Any]) -> KeyedJaggedTensor:
        moved = super()._map_tensors(fn)
        moved._from_lengths = self._from_lengths
        # Read the starts now if that is free, so that no later call waits for a GPU.
        known = self.offset_per_key() if has_data(self._offsets) else self.known_offset_per_key()
        if known is not None:
            moved.keep_offset_per_key(known)
        return moved

    def to(self, device: Any, non_blocking: bool = False, dtype: torch.dtype | None = None) -> KeyedJaggedTensor:
        """Copies the batch to another device; ``dtype``: dtype of the weights, None: unchanged. As in TorchRec."""
        moved = super().to(device, non_blocking)
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """One ``rk.JaggedTensor`` per feature, with offsets even if ``compute_offsets`` is False."""
        return {key: self[key] for key in self._keys}

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Splits the features into consecutive groups of the given sizes, as in TorchRec.

        Raises:
            ValueError: the segments do not sum to the number of features; the batch has ``inverse_indices``.
        """
        segments = checks.integers_of(segments, "segments")
        if min(segments, default=0) < 0 or sum(segments) != len(self._keys):
            raise ValueError(f"segments must be at least 0 and add up to {len(self._keys)}, got {list(segments)}")
        ends = list(itertools.accumulate(segments, initial=0))
        return [self._features(a, b) for a, b in itertools.pairwise(ends)]

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """Selects features by index, in the given order, with omissions and repeats allowed. As in TorchRec.

        Args:
            indices: feature indices. indices_tensor: the same indices on the device, which TorchRec uses; ignored.

        Raises:
            IndexError: an index is out of range. ValueError: an index is not an integer; the batch has
            ``inverse_indices``.
        """
        indices = checks.integers_of(indices, "indices")
        for i in indices:
            if not 0 <= i < len(self._keys):
                raise IndexError(f"indices must be feature numbers in [0, {len(self._keys)}), got {i}")
        if not indices:
            return self._features(0, 0)
        self._refuse_inverse()
        strides, starts = self.stride_per_key(), self.offset_per_key()
        bags, lengths = list(itertools.accumulate(strides, initial=0)), self.lengths()
        spans = [slice(starts[i], starts[i + 1]) for i in indices]
        new_starts = list(itertools.accumulate((span.stop - span.start for span in spans), initial=0))
        if not torch.compiler.is_compiling() and new_starts[-1] >= 2**31:  # compiled code may not know the number
            lengths = lengths.long()
        permuted = self._from_parts(
            [self._keys[i] for i in indices],
            torch.cat([self._values[span] for span in spans]),
            bounds.to_offsets(torch.cat([lengths[bags[i] : bags[i + 1]] for i in indices])),
            None if self._weights is None else torch.cat([self._weights[span] for span in spans]),
            None if self._strides is None else [strides[i] for i in indices],
        )
        permuted._stride = self.stride()
        permuted.keep_offset_per_key(new_starts)
        return permuted

    def _refuse_inverse(self) -> None:
        if self._inverse is not None:
            raise ValueError("the batch must not have inverse_indices, which describe all of its features")

    def _features(self, first: int, last: int) -> KeyedJaggedTensor:
        """Consecutive features as views of this batch."""
        self._refuse_inverse()
        strides, starts = self.stride_per_key(), self.offset_per_key()
        bags, (start, stop) = sum(strides[:first]), (starts[first], starts[last])
        offsets = self._offsets[bags : bags + sum(strides[first:last]) + 1]
        weights = None if self._weights is None else self._weights[start:stop]
        own = None if self._strides is None else strides[first:last]
        part = self._from_parts(self._keys[first:last], self._values[start:stop], offsets - start, weights, own)
        part._stride = self.stride()
        part.keep_offset_per_key([s - start for s in starts[first : last + 1]])
        return part

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """Creates a batch from lengths and reads where each feature starts, which waits for a GPU. As in TorchRec.

        The arguments and errors are those of the constructor and of ``sync()``.
        """
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """``from_lengths_sync`` with offsets."""
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Creates a batch from ``rk.JaggedTensor`` or TorchRec's, by feature.

        As in TorchRec, except that ids in no row are dropped, and that errors are those of ``from_dict()``.
        """
        return KeyedJaggedTensor.from_dict(jt_dict).sync()

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = torch.int64,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """Creates a batch without features, as in TorchRec, except that ids are int64 by default.

        Args:
            is_weighted: whether the result has (empty) weights. lengths_dtype: int32 or int64.
            values_dtype, weights_dtype: None: torch's default dtype.
        """
        values = torch.zeros(0, dtype=values_dtype, device=device)
        weights = torch.zeros(0, dtype=weights_dtype, device=device) if is_weighted else None
        return KeyedJaggedTensor([], values, weights, torch.zeros(0, dtype=lengths_dtype, device=device))

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """A batch without features, with the dtypes, device and batch size of ``kjt``.

        As in TorchRec, without its ``device`` argument.
        """
        values, weights, offsets = kjt.values(), kjt.weights_or_none(), kjt.offsets()
        none = None if weights is None else weights.new_zeros(0)
        return KeyedJaggedTensor([], values.new_zeros(0), none, offsets.new_zeros(0), stride=kjt.stride())

    @staticmethod
    def from_dict(features: Mapping[str, Any], *, padding_value: int | None = None) -> KeyedJaggedTensor:
        """Creates a batch from a dict of features.

        Args:
            features: name -> ids: a tensor [B], one id per sample, or [B, L], L ids per sample; an ``rk.JaggedTensor``
                or TorchRec's; or a list with one list of ids per sample. If batch sizes differ, the batch has one per
                feature. Collections accept such a dict as a batch.
            padding_value: the value in tensors that pads rows and is not an id; None: every value is an id.

        Raises:
            ValueError: wrong shapes or dtypes; only some features have weights; ``padding_value`` is not an integer.
            TypeError: a list contains something other than lists of ids.
        """
        return KeyedJaggedTensor(**build.from_dict(features, padding_value))

    @staticmethod
    def from_lists(
        features: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> KeyedJaggedTensor:
        """Creates a batch from one list of ids per sample of each feature.

        Args:
            features: name -> B lists of ids. weights: name -> B lists of as many weights, or None.
            device: device of the batch; None: the CPU.

        Raises:
            ValueError: weights do not match. TypeError: something other than lists of ids or numbers.
        """
        made = KeyedJaggedTensor(**build.from_lists(features, weights))
        return made if device is None else made.to(device)

    @staticmethod
    def from_padded(keys: Sequence[str], padded: Tensor, padding_value: int) -> KeyedJaggedTensor:
        """Creates a batch from a padded tensor.

        Args:
            keys: F names, all different. padded: [F, B, L] int32 or int64. padding_value: the value that is not an id.

        Raises:
            ValueError: a wrong shape, dtype or ``padding_value``. TypeError: not a tensor.
        """
        return KeyedJaggedTensor(**build.from_padded(keys, padded, padding_value))

    @staticmethod
    def from_offsets_list(
        keys: Sequence[str],
        values: Sequence[Tensor],
        offsets: Sequence[Tensor],
        weights: Sequence[Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """Creates a batch from the input and offsets of each feature, as ``torch.nn.EmbeddingBag`` takes them.

        Args:
            keys: F names, all different. values: ids [N_f] per feature. offsets: [B] per feature, the start of each
                bag, beginning with 0.
            weights: [N_f] per feature, or None.

        Raises:
            ValueError: the number of tensors differs from the number of keys, shapes, dtypes or devices do not match,
            or offsets do not start at 0 or decrease. TypeError: an item is not a tensor.
        """
        return KeyedJaggedTensor(**build.from_offsets_list(keys, values, offsets, weights))

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Concatenates the features of several batches, as in TorchRec.

        Args:
            kjt_list: batches with different keys on one device, all or none with weights, and without
                ``inverse_indices``. If batch sizes differ, the result has one per feature (``stride_per_key``). Ids get
                the wider dtype. If one batch has all features, it is returned unchanged. Ids in no bag are dropped. If
                that needs an ``offset_per_key()`` on a GPU that the host does not know, and in compiled code, they set
                offsets[0] of the result to -1 instead, which its lookup reports.

        Raises:
            ValueError: the list is empty, a key repeats, or a batch is not as above. TypeError: an item is not an
            ``rk.KeyedJaggedTensor``. RuntimeError: devices differ.
        """
        checks.check_each("kjt_list", kjt_list, KeyedJaggedTensor)
        keys = list(itertools.chain.from_iterable(kjt.keys() for kjt in kjt_list))
        if any(kjt.inverse_indices_or_none() is not None for kjt in kjt_list):
            raise ValueError("kjt_list must not have inverse_indices, which describe one batch each")
        parts = [kjt for kjt in kjt_list if kjt.keys()]
        weights = [kjt.weights_or_none() for kjt in parts]
        if len({w is None for w in weights}) > 1:
            without = next(kjt.keys() for kjt, w in zip(parts, weights, strict=True) if w is None)
            raise ValueError(
                f"kjt_list has features without weights, {without}, but others have them: all must have weights, or "
                "none"
            )
        if len(parts) < 2 and len(set(keys)) == len(keys):
            return parts[0] if parts else kjt_list[0]
        checks.check_keys_differ(keys)
        return _concat(parts)

    def __repr__(self) -> str:
        given = self._values, self._offsets, self._weights
        return text.format_bags("KeyedJaggedTensor", self._keys, self.stride_per_key(), *given)


def _concat(parts: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Concatenates the features of at least one batch; names may repeat."""
    own = any(kjt.variable_stride_per_key() or kjt.stride() != parts[0].stride() for kjt in parts)
    values, offsets, factors = zip(*map(_rebased, parts), strict=True)
    ends = list(itertools.accumulate(each.shape[0] for each in values))
    if ends[-1] >= 2**31:
        offsets = tuple(each.long() for each in offsets)
    known = [kjt.known_offset_per_key() for kjt in parts]
    first = offsets[0][:1]
    if None in known and not has_data(first):
        first = first.masked_fill(bounds.have_gaps(values, offsets), -1)
    moved = [each[1:] + start for each, start in zip(offsets, [0, *ends], strict=False)]
    joined = KeyedJaggedTensor._from_parts(
        list(itertools.chain.from_iterable(kjt.keys() for kjt in parts)),
        torch.cat(values),
        torch.cat([first, *moved]),
        None if factors[0] is None else torch.cat(factors),
        [size for kjt in parts for size in kjt.stride_per_key()] if own else None,
    )
    if None not in known:
        starts = [p - places[0] + s for places, s in zip(known, [0, *ends], strict=False) for p in places[:-1]]
        joined.keep_offset_per_key([*starts, ends[-1]])
    return joined


def _rebased(kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Drops values in no bag and shifts offsets to start at 0; offsets may be a view into a larger batch."""
    values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
    known = kjt.known_offset_per_key()
    if known is None and not has_data(offsets):
        return values, offsets, weights
    first, last = (known[0], known[-1]) if known else (int(offsets[0]), int(offsets[-1]))
    if (first, last) == (0, values.shape[0]):
        return values, offsets, weights
    return values[first:last], offsets - first, None if weights is None else weights[first:last]
