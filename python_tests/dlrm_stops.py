"""Runs of the trainer that are stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from dlrm_tiny import TinyData


class StopAfter:
    """Looks like the event that Ctrl-C sets, after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def is_set(self) -> bool:
        self.steps -= 1
        return self.steps < 0


def stopped_run(runs_dir: Path) -> Path:
    """The folder of a run of ``TinyData`` that was stopped after 3 of 8 steps."""
    from rec_kernels.dlrm import TrainConfig, train
    from rec_kernels.dlrm.train import Run, RunInterruptedError

    config, fit = TrainConfig(data="dlrm_tiny:tiny", batch_size=50, run="run", runs_dir=str(runs_dir)), Run.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "fit", lambda run, stop, **options: fit(run, StopAfter(2), **options))
        with pytest.raises(RunInterruptedError):
            train(config, TinyData())
    return runs_dir / "run"
