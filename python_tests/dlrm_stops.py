"""Runs of the trainer that are stopped."""

from __future__ import annotations


class StopAfter:
    """Looks like the event that Ctrl-C sets, after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def is_set(self) -> bool:
        self.steps -= 1
        return self.steps < 0
