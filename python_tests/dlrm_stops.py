"""Interrupted runs of the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from dlrm_tiny import TinyData


class StopAfter:
    """Replaces the event that Ctrl-C sets; it is set after a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def is_set(self) -> bool:
        self.steps -= 1
        return self.steps < 0


@contextlib.contextmanager
def told_to_stop(steps: int) -> Iterator[None]:
    """Sets the stop event of runs in this block after ``steps`` steps, as Ctrl-C does."""
    from rec_kernels.dlrm.train import Run

    fit = Run.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "fit", lambda run, stop, **options: fit(run, StopAfter(steps - 1), **options))
        yield


@contextlib.contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """A block that trains a run, which must be interrupted after this step."""
    from rec_kernels.dlrm import RunInterruptedError

    with told_to_stop(steps), pytest.raises(RunInterruptedError, match=f"interrupted after step {steps} of"):
        yield


def stopped_run(runs_dir: Path) -> Path:
    """The folder of a run of ``TinyData`` that was stopped after 3 of 8 steps."""
    from rec_kernels.dlrm import TrainConfig, train

    with stopped_after(3):
        train(TrainConfig(data="dlrm_tiny:tiny", batch_size=50, run="run", runs_dir=str(runs_dir)), TinyData())
    return runs_dir / "run"
