"""Jagged containers: the light counterparts of TorchRec's, key-major, int32 or int64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rec_kernels.nn.arguments import integer_from
from rec_kernels.nn.jagged import bounds, build, checks, text
from rec_kernels.nn.jagged.batch_facts import BatchFacts
from rec_kernels.nn.jagged.checks import has_data
from rec_kernels.nn.jagged.container import BagContainer
from rec_kernels.ops.status import cannot_read


class JaggedTensor(BagContainer):
    """Rows of different lengths: row b is ``values[offsets[b] : offsets[b+1]]``.

    Args:
        values: [N, ...].
        weights: [N] floating-point numbers or None.
        lengths: [B] int32 or int64, 0 or more, which add up to N at most: in place of offsets, or those of the same
            rows.
        offsets: [B + 1] int32 or int64, which rise, in [0, N]. Values before the first and behind the last are in no
            row.

    The order is TorchRec's.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; on the CPU, offsets that do not rise in [0, N].
            On a GPU, what reads them raises: ``to_dense()``, ``to_padded_dense()``, some lookups. TypeError:
            one is no tensor. Compiled code raises none of these.
    """

    _parts = ("_values", "_offsets", "_weights")

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if not torch.compiler.is_compiling():
            checks.check_values(values)
            given, offsets = offsets, bounds.given_offsets(values, lengths, offsets)
            if weights is not None:
                checks.check_weights(weights, values)
            checks.check_bounds(offsets, values.shape[0], _row, lengths if given is None else None)
        elif offsets is None:
            offsets = bounds.to_offsets(lengths)
        self._values, self._offsets, self._weights = values, offsets, weights

    @classmethod
    def _of(cls, values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Makes it from parts that fit, without checks."""
        new = cls.__new__(cls)
        new._values, new._offsets, new._weights = values, offsets, weights
        return new

    def to_dense(self) -> list[Tensor]:
        """One tensor per row.

        Raises:
            ValueError: on a GPU, or after somebody has written to them, offsets do not rise in [0, N].
        """
        return self._cut(self._values)

    def to_dense_weights(self) -> list[Tensor] | None:
        """``to_dense()`` of the weights, whose errors it raises; None: there are none."""
        return None if self._weights is None else self._cut(self._weights)

    def _cut(self, numbers: Tensor) -> list[Tensor]:
        ends = self._read_offsets().tolist()
        return [numbers[a:b] for a, b in itertools.pairwise(ends)]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[B, L, ...]: the rows side by side, cut or padded to ``desired_length``; None: the longest row's.

        On a GPU the host waits. Compiled code does not look at offsets: a row with bad ones has padding, or torch's
        index error.

        Raises:
            ValueError: as ``to_dense()``; ``desired_length`` is no integer, or below 0.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """[B, L]: ``to_padded_dense()`` of the weights, whose errors it raises; None: there are none."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, numbers: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        if not cannot_read(self._offsets):
            self._read_offsets()
        lengths = self.lengths()
        batch = lengths.shape[0]  # a symbol in an exported program, which len() would make a number
        if desired_length is None:
            desired_length = int(lengths.max()) if batch else 0
        elif not isinstance(desired_length, torch.SymInt):
            desired_length = integer_from(0, "desired_length", desired_length)
        places = torch.arange(desired_length, device=lengths.device)
        inside = places < lengths[:, None]
        source = (self._offsets[:-1, None] + places)[inside]
        shape = (batch, desired_length, *numbers.shape[1:])
        padded = torch.full(shape, padding_value, dtype=numbers.dtype, device=numbers.device)
        return padded.masked_scatter(inside.view(*inside.shape, *[1] * (len(shape) - 2)), numbers[source])

    @staticmethod
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> JaggedTensor:
        """Rows that are tensors each. As in TorchRec.

        Args:
            values: B tensors [N_b, ...], one at least. weights: B tensors [N_b] or None.

        Raises:
            ValueError: there are none, or weights are no floating-point numbers, or not of the rows' lengths.
        """
        return JaggedTensor(*build.from_rows(values, weights))

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """The first numbers of each row of a tensor. As in TorchRec.

        Args:
            values: [B, L, ...]. lengths: [B] int32 or int64, in [0, L]. weights: [B, L] or None.

        Raises:
            ValueError: a shape or dtype is not as above; on the CPU, a length.
        """
        return JaggedTensor(*build.from_prefixes(values, lengths, weights))

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """Makes a tensor without rows. As in TorchRec, but offsets are [0].

        Args:
            is_weighted: whether it has weights, of which there are none. values_dtype, weights_dtype: torch's default
                where None. lengths_dtype: int32 or int64.
        """
        weights = torch.zeros(0, dtype=weights_dtype, device=device) if is_weighted else None
        return JaggedTensor(
            torch.zeros(0, dtype=values_dtype, device=device),
            offsets=torch.zeros(1, dtype=lengths_dtype, device=device),
            weights=weights,
        )

    @staticmethod
    def empty_like(jt: JaggedTensor) -> JaggedTensor:
        """A tensor without rows, of the dtypes and the device of another. As in TorchRec, without its ``device``."""
        weights = None if jt.weights_or_none() is None else jt.weights().new_zeros(0)
        return JaggedTensor(jt.values().new_zeros(0), weights, jt.lengths().new_zeros(0))

    def _read_offsets(self) -> Tensor:
        """Checks the offsets and returns them on the CPU; those of a tracer stay as they are."""
        if self._offsets.is_meta or type(self._offsets) is not Tensor:
            return self._offsets
        offsets = self._offsets.cpu()
        checks.check_bounds(offsets, self._values.shape[0], _row)
        return offsets

    def __repr__(self) -> str:
        return text.of_rows("JaggedTensor", self._values, self._offsets, self._weights)


def _row(number: int) -> str:
    return f"row {number}"


class KeyedJaggedTensor(BatchFacts):
    """Ids of several features for a batch: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.

    Args:
        keys: F feature names, all different.
        values: [N] ids, int32 or int64. Other numbers, [N, ...], can be cut and moved, but not looked up.
        weights: [N] floating-point numbers (per-sample weights) or None.
        lengths: [F * B] bag lengths, 0 or more, which add up to N at most, or
        offsets: [F * B + 1], which rise, in [0, N]; or both, of the same bags. Ids in no bag, before the first or
            behind the last, are left out of pooled lookups.
        stride: B, which a batch without keys does not show; None: as lengths or offsets say.
        stride_per_key_per_rank: F lists of numbers, which add up to the features' batch sizes: as stride_per_key.
        stride_per_key: F batch sizes, where they differ among the features; lengths or offsets are of their sum then.
        length_per_key, offset_per_key: how many ids features have, and where these start, if the host knows it, so that
            no call waits for a GPU to count them. They are checked on the CPU, and trusted on a GPU.
        lengths_offset_per_key, index_per_key, jt_dict: of TorchRec's callers; they follow from the others and are not
            looked at.
        inverse_indices: with batch sizes of the features' own, which bag of its feature each row of the full batch has:
            the names, and an int64 tensor [F, B]. As in TorchRec.

    Raises:
        ValueError: sizes, dtypes or devices that do not fit together; on the CPU, lengths or offsets that are not as
            above. The message names the argument. TypeError: one is no tensor. IndexError: on the CPU,
            ``inverse_indices`` name a bag that is not there. Of tensors on a GPU, and in compiled code, numbers are not
            looked at: a lookup tells, see ``rk.EmbeddingBagCollection.check``.
    """

    _parts = ("_values", "_offsets", "_weights", "_inverse")
    _others = ("_keys", "_strides", "_inverse_keys")
    _learned = ("_offset_per_key",)
    _from_lengths = False  # whether messages name lengths
    _stride: int | None = None  # batch size of a batch whose bags do not say it

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
        offsets = bounds.given_offsets(values, lengths, offsets)
        strides, bags = bounds.given_strides(stride, stride_per_key_per_rank, stride_per_key), offsets.shape[0] - 1
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
        checks.check_bounds(offsets, values.shape[0], self._place_of_bag, lengths if self._from_lengths else None)
        self._believe(bounds.given_starts(length_per_key, offset_per_key))

    @classmethod
    def _of(
        cls,
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride_per_key: list[int] | None = None,
    ) -> KeyedJaggedTensor:
        """Makes it from parts that fit, without checks and inverse indices."""
        new = cls.__new__(cls)
        new._set(keys, values, offsets, weights, stride_per_key)
        return new

    def _set(
        self, keys: list[str], values: Tensor, offsets: Tensor, weights: Tensor | None, strides: list[int] | None
    ) -> None:
        self._keys, self._values, self._offsets, self._weights = list(keys), values, offsets, weights
        self._strides = None if strides is None else list(strides)
        self._inverse_keys, self._inverse, self._offset_per_key = None, None, None

    def keys(self) -> list[str]:
        """F feature names, in order."""
        return list(self._keys)

    def stride(self) -> int:
        """Batch size B; of the full batch, where features have their own."""
        if self._strides is None and self._keys:
            return (self._offsets.shape[0] - 1) // len(self._keys)
        if self._inverse is not None:
            return self._inverse.shape[1]
        return max(self._strides or [0]) if self._stride is None else self._stride

    def stride_per_key(self) -> list[int]:
        """F batch sizes."""
        return [self.stride()] * len(self._keys) if self._strides is None else list(self._strides)

    def variable_stride_per_key(self) -> bool:
        """True if features have batch sizes of their own."""
        return self._strides is not None

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """The names and [F, B], or None."""
        return None if self._inverse is None else (list(self._inverse_keys), self._inverse)

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """The names and [F, B].

        Raises:
            ValueError: there are none.
        """
        return checks.there("inverse_indices", self.inverse_indices_or_none())

    def __getitem__(self, key: str) -> JaggedTensor:
        i, strides = checks.place_of_key(key, self._keys), self.stride_per_key()
        start, (first, last) = sum(strides[:i]), self.offset_per_key()[i : i + 2]
        offsets = self._offsets[start : start + strides[i] + 1]
        weights = None if self._weights is None else self._weights[first:last]
        return JaggedTensor._of(self._values[first:last], offsets - offsets[0], weights)

    def _mapped(self, move: Callable[[Any], Any]) -> KeyedJaggedTensor:
        moved = super()._mapped(move)
        moved._from_lengths, moved._stride = self._from_lengths, self._stride
        # Looks now where that costs nothing, so that no later call waits for a GPU.
        known = self.offset_per_key() if has_data(self._offsets) else self.known_offset_per_key()
        if known is not None:
            moved.keep_offset_per_key(known)
        return moved

    def to(self, device: Any, non_blocking: bool = False, dtype: torch.dtype | None = None) -> KeyedJaggedTensor:
        """Copies the batch to another device; ``dtype`` is that of its weights then, None: theirs. As in TorchRec."""
        moved = super().to(device, non_blocking)
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """A ``rk.JaggedTensor`` for each feature, with offsets, even if ``compute_offsets`` asks for none."""
        return {key: self[key] for key in self._keys}

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """The features in pieces of so many, one after the other. As in TorchRec.

        Raises:
            ValueError: the segments are not all features together; the batch has ``inverse_indices``.
        """
        segments = checks.integers_of(segments, "segments")
        if min(segments, default=0) < 0 or sum(segments) != len(self._keys):
            raise ValueError(f"segments must be at least 0 and {len(self._keys)} together, got {list(segments)}")
        ends = list(itertools.accumulate(segments, initial=0))
        return [self._features(a, b) for a, b in itertools.pairwise(ends)]

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """The features with these numbers, in this order; some may be left out, or come twice. As in TorchRec.

        Args:
            indices: numbers of features. indices_tensor: the same on the device, which TorchRec uses.

        Raises:
            IndexError: a number is out of range. ValueError: one is no integer; the batch has ``inverse_indices``.
        """
        indices = checks.integers_of(indices, "indices")
        for i in indices:
            if not 0 <= i < len(self._keys):
                raise IndexError(f"indices must be numbers of features, in [0, {len(self._keys)}), got {i}")
        if not indices:
            return self._features(0, 0)
        permuted = _joined([self._features(i, i + 1) for i in indices])
        permuted._stride = self.stride()
        return permuted

    def _features(self, first: int, last: int) -> KeyedJaggedTensor:
        """Some neighbouring features, views of this batch."""
        if self._inverse is not None:
            raise ValueError("the batch has inverse_indices, which are of all its features")
        strides, starts = self.stride_per_key(), self.offset_per_key()
        bags, (start, stop) = sum(strides[:first]), (starts[first], starts[last])
        offsets = self._offsets[bags : bags + sum(strides[first:last]) + 1]
        weights = None if self._weights is None else self._weights[start:stop]
        own = None if self._strides is None else strides[first:last]
        part = self._of(self._keys[first:last], self._values[start:stop], offsets - start, weights, own)
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
        """A batch of lengths, of which the host knows where features start: it waits for a GPU. As in TorchRec.

        The arguments and errors are the constructor's, and those of ``sync()``.
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
        """``from_lengths_sync`` of offsets."""
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """A batch of jagged features, ``rk.JaggedTensor`` or TorchRec's. As in TorchRec, but for ids in no row, which
        are left out, and errors: those of ``from_dict()``."""
        return KeyedJaggedTensor.from_dict(jt_dict).sync()

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = torch.int64,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """A batch without features. As in TorchRec, but for the ids' dtype, which is int64 if nothing else is asked.

        Args:
            is_weighted: whether it has weights, of which there are none. values_dtype, weights_dtype: torch's default
                where None. lengths_dtype: int32 or int64.
        """
        values = torch.zeros(0, dtype=values_dtype, device=device)
        weights = torch.zeros(0, dtype=weights_dtype, device=device) if is_weighted else None
        return KeyedJaggedTensor([], values, weights, torch.zeros(0, dtype=lengths_dtype, device=device))

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """A batch without features, of the dtypes, the device and the batch size of another. As in TorchRec, without
        its ``device``."""
        values, weights, offsets = kjt.values(), kjt.weights_or_none(), kjt.offsets()
        none = None if weights is None else weights.new_zeros(0)
        return KeyedJaggedTensor([], values.new_zeros(0), none, offsets.new_zeros(0), stride=kjt.stride())

    @staticmethod
    def from_dict(features: Mapping[str, Any], *, padding_value: int | None = None) -> KeyedJaggedTensor:
        """A batch of features that each have ids of their own.

        Args:
            features: name -> ids: a tensor [B], an id for each sample, or [B, L], L ids for each; a
                ``rk.JaggedTensor`` or TorchRec's; or a list with a list of ids for each sample. Batch sizes may
                differ: they are the features' own then. Collections take such a dict for a batch.
            padding_value: the number that is no id in tensors, but fills rows; None: all are ids.

        Raises:
            ValueError: shapes or dtypes that are not as above; weights of some features and not of others; a
            ``padding_value`` that is no integer. TypeError: a list has something else than lists of ids.
        """
        return KeyedJaggedTensor(**build.from_dict(features, padding_value))

    @staticmethod
    def from_lists(
        features: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> KeyedJaggedTensor:
        """A batch from lists, with a list of ids for each sample of each feature.

        Args:
            features: name -> B lists of ids. weights: name -> B lists of as many numbers, or None.
            device: of the batch; None: the CPU.

        Raises:
            ValueError: weights do not fit. TypeError: something else than lists of ids or numbers.
        """
        made = KeyedJaggedTensor(**build.from_lists(features, weights))
        return made if device is None else made.to(device)

    @staticmethod
    def from_padded(keys: Sequence[str], padded: Tensor, padding_value: int) -> KeyedJaggedTensor:
        """A batch from a padded tensor.

        Args:
            keys: F names, all different. padded: [F, B, L] int32 or int64. padding_value: the number that is no id.

        Raises:
            ValueError: shape, dtype or ``padding_value`` are not as above. TypeError: no tensor.
        """
        return KeyedJaggedTensor(**build.from_padded(keys, padded, padding_value))

    @staticmethod
    def from_offsets_list(
        keys: Sequence[str],
        values: Sequence[Tensor],
        offsets: Sequence[Tensor],
        weights: Sequence[Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """A batch from the inputs and offsets of each feature, as ``torch.nn.EmbeddingBag`` takes them.

        Args:
            keys: F names, all different. values: ids [N_f] of each. offsets: [B] of each, where bags start, from 0 on.
            weights: [N_f] of each, or None.

        Raises:
            ValueError: another number of tensors than keys, shapes, dtypes or devices that do not fit, offsets that do
            not start at 0 or do not rise. TypeError: one is no tensor.
        """
        return KeyedJaggedTensor(**build.from_offsets_list(keys, values, offsets, weights))

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The features of several, one after the other. As in TorchRec.

        Args:
            kjt_list: of different keys and one device, all with weights or none, none with ``inverse_indices``. Batch
                sizes may differ: they are the features' own then (``stride_per_key``). Ids are of the wider dtype.
                If one has all features, it is returned as it is. Ids in no bag are left out. Of a batch on a GPU whose
                ``offset_per_key()`` the host does not know, and in compiled code, they make offsets[0] of the result
                -1, which its lookup tells.

        Raises:
            ValueError: none is given, a key is in two of them, or one is not as above. TypeError: one is no
            ``rk.KeyedJaggedTensor``. RuntimeError: other devices.
        """
        checks.check_each("kjt_list", kjt_list, KeyedJaggedTensor)
        keys = list(itertools.chain.from_iterable(kjt.keys() for kjt in kjt_list))
        if any(kjt.inverse_indices_or_none() is not None for kjt in kjt_list):
            raise ValueError("kjt_list has inverse_indices, which are of a batch of their own")
        parts = [kjt for kjt in kjt_list if kjt.keys()]
        weights = [kjt.weights_or_none() for kjt in parts]
        if len({w is None for w in weights}) > 1:
            without = next(kjt.keys() for kjt, w in zip(parts, weights, strict=True) if w is None)
            raise ValueError(f"kjt_list has features with weights, and without, {without}: all must have them, or none")
        if len(parts) < 2 and len(set(keys)) == len(keys):
            return parts[0] if parts else kjt_list[0]
        checks.check_keys_differ(keys)
        return _joined(parts)

    def __repr__(self) -> str:
        given = self._values, self._offsets, self._weights
        return text.of_bags("KeyedJaggedTensor", self._keys, self.stride_per_key(), *given)


def _joined(parts: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Features of batches, one after the other, whose names may be the same. One batch or more."""
    own = any(kjt.variable_stride_per_key() or kjt.stride() != parts[0].stride() for kjt in parts)
    values, offsets, factors = zip(*map(_from_zero, parts), strict=True)
    ends = list(itertools.accumulate(each.shape[0] for each in values))
    if ends[-1] >= 2**31:
        offsets = tuple(each.long() for each in offsets)
    known = [kjt.known_offset_per_key() for kjt in parts]
    first = offsets[0][:1]
    if None in known and not has_data(first):
        first = first.masked_fill(bounds.have_gaps(values, offsets), -1)
    moved = [each[1:] + start for each, start in zip(offsets, [0, *ends], strict=False)]
    joined = KeyedJaggedTensor._of(
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


def _from_zero(kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values that bags have, offsets from 0 on, and weights: offsets may be a view of those of a larger batch."""
    values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
    known = kjt.known_offset_per_key()
    if known is None and not has_data(offsets):
        return values, offsets, weights
    first, last = (known[0], known[-1]) if known else (int(offsets[0]), int(offsets[-1]))
    if (first, last) == (0, values.shape[0]):
        return values, offsets, weights
    return values[first:last], offsets - first, None if weights is None else weights[first:last]
