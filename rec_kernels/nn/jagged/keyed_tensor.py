"""KeyedTensor: pooled embeddings with one block of columns per feature."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rec_kernels.nn.jagged import checks, text
from rec_kernels.nn.jagged.container import JaggedContainer


class KeyedTensor(JaggedContainer):
    """Pooled embeddings [B, sum of D] with one block of columns per named feature.

    Args:
        keys: F names, all different; length_per_key: F widths; values: [B, sum of widths].
        key_dim: dimension along which keys are concatenated; must be 1. TorchRec allows others.

    Raises:
        ValueError: the arguments do not match. TypeError: ``values`` is not a tensor.
    """

    _tensors = ("_values",)
    _plain = ("_keys", "_lengths")

    def __init__(self, keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int = 1) -> None:
        _check_dims(key_dim=key_dim)
        widths = checks.checked_widths(keys, length_per_key, values)
        self._keys, self._lengths, self._values = list(keys), widths, values

    @classmethod
    def _from_parts(cls, keys: list[str], length_per_key: list[int], values: Tensor) -> KeyedTensor:
        """Creates a tensor from consistent parts, without checks."""
        new = cls.__new__(cls)
        new._keys, new._lengths, new._values = keys, length_per_key, values
        return new

    def keys(self) -> list[str]:
        """F names, in column order."""
        return list(self._keys)

    def values(self) -> Tensor:
        """[B, sum of D]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Number of columns of each key."""
        return list(self._lengths)

    def __getitem__(self, key: str) -> Tensor:
        i = checks.index_of_key(key, self._keys)
        start = sum(self._lengths[:i])
        return self._values[:, start : start + self._lengths[i]]

    def offset_per_key(self) -> list[int]:
        """[F + 1]: where each key's columns start."""
        return list(itertools.accumulate(self._lengths, initial=0))

    def key_dim(self) -> int:
        """The dimension along which keys are concatenated: 1, the columns."""
        return 1

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    @staticmethod
    def from_tensor_list(keys: list[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1) -> KeyedTensor:
        """Concatenates one block [B, D] per key, as in TorchRec.

        Args:
            key_dim, cat_dim: must be 1. TorchRec allows others.

        Raises:
            ValueError: the number of tensors differs from the number of keys, or a tensor is not [B, D] with the same
            B.
        """
        _check_dims(key_dim=key_dim, cat_dim=cat_dim)
        tensors = list(tensors)
        for i, tensor in enumerate(tensors):
            checks.check_tensor(f"tensors[{i}]", tensor)
        if len(tensors) != len(keys) or any(t.dim() != 2 for t in tensors):
            shapes = [list(t.shape) for t in tensors]
            raise ValueError(f"tensors must be one [B, D] for each of {len(keys)} keys, got {shapes}")
        if len({t.shape[0] for t in tensors}) > 1:
            raise ValueError(f"tensors must have equal numbers of rows, got {[t.shape[0] for t in tensors]}")
        return KeyedTensor(list(keys), [t.shape[1] for t in tensors], torch.cat(tensors, dim=1))

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """[B, columns of its keys] per group of keys, which may come from several tensors. As in TorchRec.

        Raises:
            KeyError: no tensor has a key. ValueError: a key is in two tensors; a group is not a list, or is empty.
        """
        for i, group in enumerate(groups):
            if isinstance(group, str) or not isinstance(group, Collection) or not len(group):
                raise ValueError(f"groups[{i}] must be a non-empty list of keys, got {group!r}")
        pairs = [pair for tensor in keyed_tensors for pair in tensor.to_dict().items()]
        checks.check_keys_differ([key for key, _ in pairs])
        blocks = dict(pairs)
        unknown = [key for group in groups for key in group if key not in blocks]
        if unknown:
            raise KeyError(f"groups name {unknown}, which are not among the keys {list(blocks)}")
        return [torch.cat([blocks[key] for key in group], dim=1) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """``regroup`` with a name per group, as in TorchRec.

        Raises:
            ValueError: the number of names differs from the number of groups, or names repeat. KeyError: no tensor has
            a key.
        """
        if len(keys) != len(groups):
            raise ValueError(f"keys must have one name for each of {len(groups)} groups, got {list(keys)}")
        checks.check_keys_differ(keys)
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to_dict(self) -> dict[str, Tensor]:
        """name -> [B, D]."""
        return dict(zip(self._keys, self._values.split(self._lengths, dim=1), strict=True))

    def __repr__(self) -> str:
        return text.format_columns("KeyedTensor", self.to_dict(), self._values)

    def __str__(self) -> str:
        return f"{self!r}\n"  # as TorchRec's does


def _check_dims(**dims: int) -> None:
    for name, dim in dims.items():
        if dim != 1:
            raise ValueError(f"{name} must be 1, the columns, got {dim}")
