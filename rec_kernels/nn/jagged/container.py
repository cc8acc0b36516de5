"""Base classes of the jagged containers: moves, pytrees, and caches of what was read from their offsets."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from rec_kernels.nn.jagged.checks import require

_Container = TypeVar("_Container", bound="JaggedContainer")


class JaggedContainer:
    """Base class that copies and moves a container by the names of its attributes, and makes it a pytree.

    ``_tensors`` are tensors, nested containers, or None; ``_plain`` are plain values; ``_cached`` are cached facts
    about these tensors, None where unknown; a container made of other tensors starts without them.
    """

    _tensors: ClassVar[tuple[str, ...]]
    _plain: ClassVar[tuple[str, ...]] = ()
    _cached: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "_tensors" in vars(cls):  # a container, neither a base class nor a variant of one
            _register_pytree(cls)

    @classmethod
    def _from_attributes(cls: type[_Container], parts: Iterable[Any], values: Iterable[Any]) -> _Container:
        """Creates a container without checks; parts may be any stand-ins for tensors."""
        new = cls.__new__(cls)
        for name, value in zip((*cls._tensors, *cls._plain), (*parts, *values), strict=True):
            setattr(new, name, value)
        for name in cls._cached:
            setattr(new, name, None)
        return new

    def to(self: _Container, device: torch.device | str, non_blocking: bool = False) -> _Container:
        """Copies the container to another device."""
        return self._map_tensors(lambda part: part.to(device=device, non_blocking=non_blocking))

    def pin_memory(self: _Container) -> _Container:
        """Copies the container to page-locked host memory."""
        return self._map_tensors(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Marks the tensors as used by ``stream``, as ``torch.Tensor.record_stream``.

        Use it for batches that one stream copies to a GPU and another reads. Tensors in host memory are skipped.
        """
        for name in self._tensors:
            part = getattr(self, name)
            if isinstance(part, JaggedContainer) or (part is not None and part.device.type != "cpu"):
                part.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Total bytes of its tensors. As in TorchRec, which counts lengths in addition to offsets."""
        parts = [part for part in self._parts() if part is not None]
        return sum(p.size_in_bytes() if isinstance(p, JaggedContainer) else p.nbytes for p in parts)

    def _parts(self) -> list[Any]:
        return [getattr(self, name) for name in self._tensors]

    def _map_tensors(self: _Container, fn: Callable[[Any], Any]) -> _Container:
        """Applies ``fn`` to every tensor and returns the new container."""
        parts = [None if part is None else fn(part) for part in self._parts()]
        return self._from_attributes(parts, self._plain_values())

    def _plain_values(self) -> list[Any]:
        """The values for ``_from_attributes``, which are constants in a program of ``torch.export``."""
        return [getattr(self, name) for name in self._plain]


def _register_pytree(kind: type[JaggedContainer]) -> None:
    """Registers a container for ``torch.export`` and ``torch.utils._pytree``, and for torch's safe unpickling."""

    def flatten(x: JaggedContainer) -> tuple[list, list]:
        # Lists survive saving and loading a program unchanged.
        return [getattr(x, name) for name in kind._tensors], x._plain_values()

    def flatten_with_keys(x: JaggedContainer) -> tuple[list, list]:
        leaves, context = flatten(x)
        return [(_pytree.GetAttrKey(n), leaf) for n, leaf in zip(kind._tensors, leaves, strict=True)], context

    _pytree.register_pytree_node(
        kind,
        flatten,
        kind._from_attributes,
        serialized_type_name=f"rec_kernels.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    # A saved program holds example inputs, which are only tensors and names: loading them executes no code.
    torch.serialization.add_safe_globals([kind])


class BagContainer(JaggedContainer):
    """Base class for bags: the B rows of an ``rk.JaggedTensor``, or F * B bags of an ``rk.KeyedJaggedTensor``."""

    _values: Tensor
    _offsets: Tensor
    _weights: Tensor | None

    def values(self) -> Tensor:
        """[N, ...]: values of all bags, such as ids."""
        return self._values

    def offsets(self) -> Tensor:
        """[bags + 1]."""
        return self._offsets

    def lengths(self) -> Tensor:
        """[bags]."""
        return self._offsets.diff()

    def weights_or_none(self) -> Tensor | None:
        """[N] or None."""
        return self._weights

    def weights(self) -> Tensor:
        """[N].

        Raises:
            ValueError: the container has no weights.
        """
        return require("weights", self._weights)

    def lengths_or_none(self) -> Tensor:
        """[bags]; never None. In TorchRec, bags may have offsets only."""
        return self.lengths()

    def offsets_or_none(self) -> Tensor:
        """[bags + 1]; never None. In TorchRec, bags may have lengths only."""
        return self._offsets

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def __str__(self) -> str:
        return f"{self!r}\n"  # as TorchRec's does


class OffsetsContainer(JaggedContainer):
    """Key-major bags of several features, with a cache of where each feature's ids start, ``_offset_per_key``.

    The cache has the version counters of the tensors it was read from. Copies and pickles keep one that is still valid,
    with the version counters of their own tensors.
    """

    _keys: list[str]
    _strides: list[int] | None  # batch sizes, if they differ
    _offset_per_key: tuple[Any, list[int]] | None

    def keys(self) -> list[str]:
        """F feature names, in order."""
        return list(self._keys)

    @abstractmethod
    def stride_per_key(self) -> list[int]:
        """F batch sizes."""

    def variable_stride_per_key(self) -> bool:
        """True if features have batch sizes of their own."""
        return self._strides is not None

    def _bag_starts(self) -> list[int]:
        """[F + 1]: index of each feature's first bag."""
        return list(itertools.accumulate(self.stride_per_key(), initial=0))

    @abstractmethod
    def known_offset_per_key(self) -> list[int] | None:
        """``offset_per_key()`` if the host knows it; None if it must be read from the device."""

    @abstractmethod
    def keep_offset_per_key(self, offset_per_key: list[int]) -> None:
        """Caches starts that were read from the tensors in their current version."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offset_per_key": self.known_offset_per_key()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _offset_per_key=None)
        if state["_offset_per_key"] is not None:
            self.keep_offset_per_key(state["_offset_per_key"])
