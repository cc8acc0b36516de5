"""Jagged containers: the light counterparts of TorchRec's, key-major, int32 or int64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rec_kernels.nn.learned import LearnedOffsets
from rec_kernels.nn.moving import Moving

_INTEGERS = (torch.int32, torch.int64)


def to_offsets(lengths: Tensor) -> Tensor:
    """[len(lengths) + 1], of the dtype of ``lengths``."""
    offsets = lengths.new_zeros(lengths.shape[0] + 1)
    offsets[1:] = torch.cumsum(lengths, 0, dtype=lengths.dtype)
    return offsets


def has_data(t: Tensor) -> bool:
    """Whether a tensor can be looked at without waiting for a GPU, and is not a tracer's."""
    return t.device.type == "cpu" and type(t) is Tensor and not torch.compiler.is_compiling()


def check_integers(name: str, t: Tensor, values: Tensor) -> None:
    """Raises an error unless argument ``name`` is [M] int32 or int64 where ``values`` are. Waits for no GPU."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.dim() != 1 or t.dtype not in _INTEGERS:
        raise ValueError(f"{name} must be int32 or int64 with one dimension, got {t.dtype} {list(t.shape)}")
    if t.device != values.device:
        raise ValueError(f"{name} must be on values' device, {values.device}, got {t.device}")


def _check_weights(weights: Tensor, values: Tensor) -> None:
    if weights.shape != values.shape:
        raise ValueError(f"weights must have values' shape {list(values.shape)}, got {list(weights.shape)}")
    if not weights.is_floating_point():
        raise ValueError(f"weights must be floating-point numbers, got {weights.dtype}")
    if weights.device != values.device:
        raise ValueError(f"weights must be on values' device, {values.device}, got {weights.device}")


def check_offsets(offsets: Tensor, count: int) -> None:
    """Raises ValueError unless they rise from 0 to ``count``."""
    # On the CPU only: elsewhere, features that begin in the wrong place are noted by the kernels.
    if not has_data(offsets):
        return
    if offsets[0] != 0 or offsets[-1] != count:
        raise ValueError(
            f"offsets must start at 0 and end at {count}, the number of values, got {int(offsets[0])} and "
            f"{int(offsets[-1])}"
        )
    falls = (offsets.diff() < 0).nonzero()
    if len(falls):
        i = int(falls[0]) + 1
        raise ValueError(f"offsets[{i}] = {int(offsets[i])} is below the offset before it, {int(offsets[i - 1])}")


def _place(key: str, keys: list[str]) -> int:
    if key not in keys:
        raise KeyError(f"{key!r} is not among the keys {keys}")
    return keys.index(key)


class JaggedTensor(Moving):
    """Rows of different lengths: row b is ``values[offsets[b] : offsets[b+1]]``.

    Args:
        values: [N, ...]; offsets: [B + 1] int32 or int64; weights: [N] float32 or None.
    """

    _parts = ("_values", "_offsets", "_weights")

    def __init__(self, values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> None:
        self._values, self._offsets, self._weights = values, offsets, weights

    def values(self) -> Tensor:
        """[N, ...]."""
        return self._values

    def offsets(self) -> Tensor:
        """[B + 1]."""
        return self._offsets

    def lengths(self) -> Tensor:
        """[B]."""
        return self._offsets.diff()

    def weights_or_none(self) -> Tensor | None:
        """[N] or None."""
        return self._weights

    def to_dense(self) -> list[Tensor]:
        """One tensor per row."""
        bounds = self._offsets.tolist()
        return [self._values[a:b] for a, b in itertools.pairwise(bounds)]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[B, L, ...]: the rows side by side, cut or padded to ``desired_length``; None: the longest row's."""
        lengths = self.lengths()
        batch = lengths.shape[0]  # a symbol in an exported program, which len() would make a number
        if desired_length is None:
            desired_length = int(lengths.max()) if batch else 0
        places = torch.arange(desired_length, device=lengths.device)
        inside = places < lengths[:, None]
        source = (self._offsets[:-1, None] + places)[inside]
        shape = (batch, desired_length, *self._values.shape[1:])
        padded = torch.full(shape, padding_value, dtype=self._values.dtype, device=self._values.device)
        return padded.masked_scatter(inside.view(*inside.shape, *[1] * (len(shape) - 2)), self._values[source])

    def _mapped(self, move: Callable[[Any], Any]) -> JaggedTensor:
        weights = None if self._weights is None else move(self._weights)
        return JaggedTensor(move(self._values), move(self._offsets), weights)


class KeyedJaggedTensor(LearnedOffsets, Moving):
    """Ids of several features for a batch: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.

    Args:
        keys: F feature names, all different.
        values: [N] ids, int32 or int64.
        lengths: [F * B] bag lengths, or
        offsets: [F * B + 1]; exactly one of the two. Ids in no bag are left out of pooled lookups.
        weights: [N] float32 (per-sample weights) or None.
        stride_per_key: F batch sizes, where they differ among the features; lengths or offsets are of their sum then.
        inverse_indices: with ``stride_per_key``, which bag of its feature each row of the full batch has: the names,
            and an int64 tensor [F, B]. As in TorchRec.

    Raises:
        ValueError: sizes, dtypes or devices that do not fit together; the message names the argument. TypeError: one is
            no tensor.
    """

    _parts = ("_values", "_offsets", "_weights", "_inverse")

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        *,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        stride_per_key: list[int] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> None:
        if (lengths is None) == (offsets is None):
            raise ValueError("exactly one of lengths and offsets must be given")
        which, given = ("lengths", lengths) if offsets is None else ("offsets", offsets)
        check_integers("values", values, values)
        check_integers(which, given, values)
        check_bags(keys, stride_per_key, given.shape[0] - (0 if offsets is None else 1), which)
        if inverse_indices is not None:
            _check_inverse(inverse_indices, keys, stride_per_key)
        if weights is not None:
            _check_weights(weights, values)
        self._keys, self._values, self._weights = list(keys), values, weights
        self._offsets = to_offsets(lengths) if offsets is None else offsets
        self._strides = None if stride_per_key is None else list(stride_per_key)
        self._inverse_keys, self._inverse = inverse_indices or (None, None)
        self._offset_per_key = None

    def keys(self) -> list[str]:
        """F feature names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """[N] ids."""
        return self._values

    def offsets(self) -> Tensor:
        """[F * B + 1]."""
        return self._offsets

    def lengths(self) -> Tensor:
        """[F * B]."""
        return self._offsets.diff()

    def weights_or_none(self) -> Tensor | None:
        """[N] or None."""
        return self._weights

    def stride(self) -> int:
        """Batch size B; of the full batch, where features have their own."""
        if self._strides is None:
            return (self._offsets.shape[0] - 1) // max(len(self._keys), 1)
        return max(self._strides, default=0) if self._inverse is None else self._inverse.shape[1]

    def stride_per_key(self) -> list[int]:
        """F batch sizes."""
        return [self.stride()] * len(self._keys) if self._strides is None else self._strides

    def variable_stride_per_key(self) -> bool:
        """Whether features have batch sizes of their own."""
        return self._strides is not None

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """The names and [F, B], or None."""
        return None if self._inverse is None else (self._inverse_keys, self._inverse)

    def offset_per_key(self) -> list[int]:
        """[F + 1]: where each feature's ids start. Read from the device, and kept until the offsets change."""
        found = self.known_offset_per_key()
        if found is None:
            bounds = list(itertools.accumulate(self.stride_per_key(), initial=0))
            found = self._offsets[bounds].tolist() if self._keys else [0]
            self.keep_offset_per_key(found)
        return found

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

    def __getitem__(self, key: str) -> JaggedTensor:
        i, strides = _place(key, self._keys), self.stride_per_key()
        start, (first, last) = sum(strides[:i]), self.offset_per_key()[i : i + 2]
        offsets = self._offsets[start : start + strides[i] + 1]
        weights = None if self._weights is None else self._weights[first:last]
        return JaggedTensor(self._values[first:last], offsets - offsets[0], weights)

    def _mapped(self, move: Callable[[Any], Any]) -> KeyedJaggedTensor:
        inverse = None if self._inverse is None else (self._inverse_keys, move(self._inverse))
        moved = KeyedJaggedTensor(
            self._keys,
            move(self._values),
            offsets=move(self._offsets),
            weights=None if self._weights is None else move(self._weights),
            stride_per_key=self._strides,
            inverse_indices=inverse,
        )
        # Where it costs nothing to look, so that nobody has to wait for a GPU afterwards.
        known = self.offset_per_key() if has_data(self._offsets) else self.known_offset_per_key()
        if known is not None:
            moved.keep_offset_per_key(known)
        return moved

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The features of several, one after the other. As in TorchRec.

        Args:
            kjt_list: of different keys and one device, all with weights or none, none with ``inverse_indices``. Batch
                sizes may differ: they are the features' own then (``stride_per_key``). Ids are of the wider dtype.
                If one has all features, it is returned as it is.

        Raises:
            ValueError: none is given, a key is in two of them, or one is not as above. RuntimeError: other devices.
        """
        if not kjt_list:
            raise ValueError("kjt_list is empty: it must have an rk.KeyedJaggedTensor at least")
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
        own = any(kjt.variable_stride_per_key() for kjt in parts) or len({kjt.stride() for kjt in parts}) > 1
        values, offsets, factors = zip(*map(_from_zero, parts), strict=True)
        ends = list(itertools.accumulate(each.shape[0] for each in values))
        if ends[-1] >= 2**31:
            offsets = tuple(each.long() for each in offsets)
        moved = [each[1:] + start for each, start in zip(offsets, [0, *ends], strict=False)]
        joined = KeyedJaggedTensor(
            keys,
            torch.cat(values),
            offsets=torch.cat([offsets[0][:1], *moved]),
            weights=None if factors[0] is None else torch.cat(factors),
            stride_per_key=[size for kjt in parts for size in kjt.stride_per_key()] if own else None,
        )
        known = [kjt.known_offset_per_key() for kjt in parts]
        if all(places is not None for places in known):
            starts = [p - places[0] + s for places, s in zip(known, [0, *ends], strict=False) for p in places[:-1]]
            joined.keep_offset_per_key([*starts, ends[-1]])
        return joined

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(keys={self._keys}, batch={self.stride()}, values={self._values.shape[0]})"


def _from_zero(kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values that bags have, offsets from 0 on, and weights: offsets may be a view of those of a larger batch."""
    values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
    if not has_data(offsets):
        return values, offsets, weights
    first, last = int(offsets[0]), int(offsets[-1])
    if (first, last) == (0, values.shape[0]):
        return values, offsets, weights
    return values[first:last], offsets - first, None if weights is None else weights[first:last]


def check_bags(keys: list[str], strides: list[int] | None, bags: int, which: str) -> None:
    """Raises ValueError unless ``keys`` differ and have ``bags`` bags, as argument ``which`` says; ``strides``: F or
    None."""
    if len(set(keys)) != len(keys):
        raise ValueError(f"keys must differ, got {list(keys)}")
    if strides is None:
        if bags < 0 or (bags % len(keys) if keys else bags):
            raise ValueError(f"{which} describe {bags} bags, which is not a multiple of the {len(keys)} keys")
        return
    if len(strides) != len(keys) or any(s < 0 for s in strides):
        raise ValueError(f"stride_per_key must have a batch size for each of the {len(keys)} keys, got {strides}")
    if sum(strides) != bags:
        raise ValueError(f"{which} describe {bags} bags, and stride_per_key {sum(strides)}")


def _check_inverse(inverse: tuple[list[str], Tensor], keys: list[str], strides: list[int] | None) -> None:
    names, places = inverse
    if strides is None:
        raise ValueError("inverse_indices are for features with batch sizes of their own: give stride_per_key")
    if places.dim() != 2 or places.shape[0] != len(names) or places.dtype != torch.int64:
        raise ValueError(
            f"inverse_indices must be int64 [{len(names)}, B] for its {len(names)} names, got {places.dtype} "
            f"{list(places.shape)}"
        )
    missing = [k for k in keys if k not in names]
    if missing:
        raise ValueError(f"inverse_indices lack the keys {missing}")


class KeyedTensor(Moving):
    """Pooled embeddings [B, sum of D] whose columns belong to named features.

    Args:
        keys: F names; length_per_key: F widths; values: [B, sum of widths].
    """

    _parts = ("_values",)

    def __init__(self, keys: list[str], length_per_key: list[int], values: Tensor) -> None:
        self._keys, self._lengths, self._values = keys, length_per_key, values

    def keys(self) -> list[str]:
        """F names, in column order."""
        return self._keys

    def values(self) -> Tensor:
        """[B, sum of D]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each key."""
        return self._lengths

    def __getitem__(self, key: str) -> Tensor:
        i = _place(key, self._keys)
        start = sum(self._lengths[:i])
        return self._values[:, start : start + self._lengths[i]]

    def to_dict(self) -> dict[str, Tensor]:
        """name -> [B, D]."""
        return dict(zip(self._keys, self._values.split(self._lengths, dim=1), strict=True))

    def _mapped(self, move: Callable[[Any], Any]) -> KeyedTensor:
        return KeyedTensor(self._keys, self._lengths, move(self._values))

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, values={list(self._values.shape)})"
