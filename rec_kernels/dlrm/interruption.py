"""Early ends of a training run: errors, Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import torch


class TrainingError(RuntimeError):
    """The training cannot go on."""


class NotFiniteError(TrainingError):
    """A loss or a prediction is not finite: the same config comes to it again, whatever else is changed."""


class RunInterruptedError(Exception):
    """Ctrl-C or SIGTERM; a checkpoint has been written to ``directory``."""

    def __init__(self, message: str, directory: Path):
        super().__init__(message)
        self.directory = directory


def out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory was not enough; the CPU's have no type of their own."""
    texts = ("DefaultCPUAllocator", "(out of memory?)")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in texts)


class StopAtSignal:
    """An event that Ctrl-C and SIGTERM set, so that a step ends before the run does. A second one ends it at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> threading.Event:
        self.event, self.before = threading.Event(), {}
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._set) for number in self.SIGNALS}
        return self.event

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _set(self, number: int, frame) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)
        self.event.set()
