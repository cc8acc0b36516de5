"""Base of the jagged containers: they follow an input pipeline to a GPU, and remember what was read of their
offsets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from rec_kernels.nn.jagged.checks import there

_Container = TypeVar("_Container", bound="JaggedContainer")


class JaggedContainer:
    """A container, by the names of its attributes.

    ``_parts`` are tensors, such containers, or None; ``_others`` are plain values; ``_learned`` are facts of the parts,
    which hold for no others, and None where nothing is known.
    """

    _parts: ClassVar[tuple[str, ...]]
    _others: ClassVar[tuple[str, ...]] = ()
    _learned: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def _made(cls: type[_Container], parts: Iterable[Any], others: Iterable[Any]) -> _Container:
        """Makes a container without checks: parts may be anything that stands for a tensor."""
        new = cls.__new__(cls)
        for name, value in zip((*cls._parts, *cls._others), (*parts, *others), strict=True):
            setattr(new, name, value)
        for name in cls._learned:
            setattr(new, name, None)
        return new

    def to(self: _Container, device: torch.device | str, non_blocking: bool = False) -> _Container:
        """Copies the container to another device."""
        return self._mapped(lambda part: part.to(device=device, non_blocking=non_blocking))

    def pin_memory(self: _Container) -> _Container:
        """Copies the container to page-locked host memory."""
        return self._mapped(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Says that ``stream`` uses it, too: its memory is not reused before what the stream has to do now is done.

        For batches that one stream copies to a GPU and another reads, as ``torch.Tensor.record_stream``. Of tensors in
        host memory nothing is said.
        """
        for name in self._parts:
            part = getattr(self, name)
            if isinstance(part, JaggedContainer) or (part is not None and part.device.type != "cpu"):
                part.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Bytes of the numbers of its tensors. As in TorchRec, which counts lengths beside offsets."""
        parts = [part for name in self._parts if (part := getattr(self, name)) is not None]
        return sum(p.size_in_bytes() if isinstance(p, JaggedContainer) else p.nbytes for p in parts)

    def _mapped(self: _Container, move: Callable[[Any], Any]) -> _Container:
        """A container of its parts as ``move`` returns them."""
        parts = [None if (part := getattr(self, name)) is None else move(part) for name in self._parts]
        return self._made(parts, [getattr(self, name) for name in self._others])


class BagContainer(JaggedContainer):
    """A container of bags: those of a ``rk.JaggedTensor`` are B rows, of a ``rk.KeyedJaggedTensor`` F * B bags."""

    _values: Tensor
    _offsets: Tensor
    _weights: Tensor | None

    def values(self) -> Tensor:
        """[N, ...]: the numbers of all bags, such as ids."""
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
            ValueError: there are none.
        """
        return there("weights", self._weights)

    def lengths_or_none(self) -> Tensor:
        """[bags], as in TorchRec, where bags may have offsets only."""
        return self.lengths()

    def offsets_or_none(self) -> Tensor:
        """[bags + 1], as in TorchRec, where bags may have lengths only."""
        return self._offsets

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def __str__(self) -> str:
        return f"{self!r}\n"  # TorchRec's end so


class OffsetsContainer(JaggedContainer):
    """A container that keeps in ``_offset_per_key`` the versions of its tensors and what was read of these.

    Copies and pickles begin with what is still true: their tensors are others, which count changes of their own.
    """

    _offset_per_key: tuple[Any, list[int]] | None

    @abstractmethod
    def known_offset_per_key(self) -> list[int] | None:
        """``offset_per_key()``, if the host knows it; None: it would have to be read from the device."""

    @abstractmethod
    def keep_offset_per_key(self, offset_per_key: list[int]) -> None:
        """Keeps what was read of the tensors as they are now."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offset_per_key": self.known_offset_per_key()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _offset_per_key=None)
        if state["_offset_per_key"] is not None:
            self.keep_offset_per_key(state["_offset_per_key"])
