"""What a jagged container has learned of its tensors, and how its copies have it."""

from __future__ import annotations

from typing import Any


class LearnedOffsets:
    """A container that keeps in ``_offset_per_key`` the versions of its tensors and what was learned of these.

    Copies and pickles begin with what is still true: their tensors are others, which count changes of their own.
    """

    _offset_per_key: tuple[Any, list[int]] | None

    def known_offset_per_key(self) -> list[int] | None:
        """``offset_per_key()``, if the host knows it; None: it would have to be read from the device."""
        raise NotImplementedError

    def keep_offset_per_key(self, offset_per_key: list[int]) -> None:
        """Keeps what was learned of the tensors as they are now."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offset_per_key": self.known_offset_per_key()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _offset_per_key=None)
        if state["_offset_per_key"] is not None:
            self.keep_offset_per_key(state["_offset_per_key"])
