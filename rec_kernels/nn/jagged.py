"""Jagged containers: the light counterparts of TorchRec's, key-major, int32 or int64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def _to_offsets(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros(lengths.shape[0] + 1)
    offsets[1:] = torch.cumsum(lengths, 0, dtype=lengths.dtype)
    return offsets


def _place(key: str, keys: list[str]) -> int:
    if key not in keys:
        raise KeyError(f"{key!r} is not among the keys {keys}")
    return keys.index(key)


class JaggedTensor:
    """Rows of different lengths: row b is ``values[offsets[b] : offsets[b+1]]``.

    Args:
        values: [N, ...]; offsets: [B + 1] int32 or int64; weights: [N] float32 or None.
    """

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


class KeyedJaggedTensor:
    """Ids of several features for a batch: bag (f, b) is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.

    Args:
        keys: F feature names, all different.
        values: [N] ids, int32 or int64.
        lengths: [F * B] bag lengths, or
        offsets: [F * B + 1]; exactly one of the two.
        weights: [N] float32 (per-sample weights) or None.

    Raises:
        ValueError: sizes that do not fit together; the message names the argument.
    """

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        *,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        if (lengths is None) == (offsets is None):
            raise ValueError("exactly one of lengths and offsets must be given")
        if len(set(keys)) != len(keys):
            raise ValueError(f"keys must differ, got {list(keys)}")
        bags = lengths.shape[0] if offsets is None else offsets.shape[0] - 1
        if bags < 0 or (bags % len(keys) if keys else bags):
            which = "lengths" if offsets is None else "offsets"
            raise ValueError(f"{which} describe {bags} bags, which is not a multiple of the {len(keys)} keys")
        if weights is not None and weights.shape != values.shape:
            raise ValueError(f"weights must have values' shape {list(values.shape)}, got {list(weights.shape)}")
        self._keys, self._values, self._weights = list(keys), values, weights
        self._offsets = _to_offsets(lengths) if offsets is None else offsets

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
        """Batch size B."""
        return (self._offsets.shape[0] - 1) // max(len(self._keys), 1)

    def __getitem__(self, key: str) -> JaggedTensor:
        i, batch = _place(key, self._keys), self.stride()
        offsets = self._offsets[i * batch : (i + 1) * batch + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        weights = None if self._weights is None else self._weights[first:last]
        return JaggedTensor(self._values[first:last], offsets - offsets[0], weights)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """The same on another device."""
        move = {"device": device, "non_blocking": non_blocking}
        weights = None if self._weights is None else self._weights.to(**move)
        return KeyedJaggedTensor(self._keys, self._values.to(**move), offsets=self._offsets.to(**move), weights=weights)

    def pin_memory(self) -> KeyedJaggedTensor:
        """The same in page-locked host memory."""
        weights = None if self._weights is None else self._weights.pin_memory()
        return KeyedJaggedTensor(
            self._keys, self._values.pin_memory(), offsets=self._offsets.pin_memory(), weights=weights
        )

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(keys={self._keys}, batch={self.stride()}, values={self._values.shape[0]})"


def select_keys(kjt, keys: list[str]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(values, offsets, weights) of ``keys`` in that order (repeats allowed), from a KeyedJaggedTensor or TorchRec's.

    No copy when the keys are already these. Raises KeyError naming a key that is missing.
    """
    have = list(kjt.keys())
    values, offsets, weights = kjt.values(), kjt.offsets(), kjt.weights_or_none()
    if have == keys:
        return values, offsets, weights
    missing = [k for k in keys if k not in have]
    if missing:
        raise KeyError(f"features {missing} are not among the input's keys {have}")
    batch = (offsets.shape[0] - 1) // len(have)
    order = torch.tensor([have.index(k) for k in keys], dtype=torch.int64, device=offsets.device)
    bags = (order[:, None] * batch + torch.arange(batch, device=offsets.device)).reshape(-1)
    lengths = offsets.diff()[bags]
    new_offsets = _to_offsets(lengths)
    # Position i of the output comes from its bag's start plus its place within the bag.
    within = torch.arange(int(new_offsets[-1]), device=offsets.device)
    source = within + torch.repeat_interleave(offsets[bags] - new_offsets[:-1], lengths)
    return values[source], new_offsets, None if weights is None else weights[source]


class KeyedTensor:
    """Pooled embeddings [B, sum of D] whose columns belong to named features.

    Args:
        keys: F names; length_per_key: F widths; values: [B, sum of widths].
    """

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

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, values={list(self._values.shape)})"
