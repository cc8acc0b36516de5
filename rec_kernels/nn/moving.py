"""What lets a jagged container follow an input pipeline to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

_Container = TypeVar("_Container", bound="Moving")


class Moving:
    """A container whose ``_parts`` are attributes that are tensors, such containers, or None."""

    _parts: ClassVar[tuple[str, ...]]

    def to(self: _Container, device: torch.device | str, non_blocking: bool = False) -> _Container:
        """The same on another device."""
        return self._mapped(lambda part: part.to(device=device, non_blocking=non_blocking))

    def pin_memory(self: _Container) -> _Container:
        """The same in page-locked host memory."""
        return self._mapped(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Says that ``stream`` uses it, too: its memory is not reused before what the stream has to do now is done.

        For batches that one stream copies to a GPU and another reads, as ``torch.Tensor.record_stream``. Of tensors in
        host memory nothing is said.
        """
        for name in self._parts:
            part = getattr(self, name)
            if isinstance(part, Moving) or (part is not None and part.device.type != "cpu"):
                part.record_stream(stream)

    def _mapped(self: _Container, move: Callable[[Any], Any]) -> _Container:
        """The same of parts that were moved."""
        raise NotImplementedError
