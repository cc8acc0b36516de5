"""The public DLRM's learning-rate policy: linear warm-up, then flat, then a fall with the square of what is left."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rec_kernels.dlrm.config import TrainConfig

LEAST = 1e-7  # learning rates do not fall below it


class Schedule:
    """Sets the learning rates of optimizers before each step. What it sets depends on the step alone.

    Source: the learning-rate policy of https://github.com/facebookresearch/dlrm (warm-up, start of the decay, steps).
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], config: TrainConfig):
        self.config = config
        self._optimizers = list(optimizers)
        self._base = [float(group["lr"]) for group in self._groups()]
        self._factor: float | None = None

    def factor(self, step: int) -> float:
        """What step number ``step``, from 0, multiplies the learning rates with."""
        c = self.config
        if step < c.warmup_steps:
            return (step + 1) / c.warmup_steps
        if c.decay_steps and step >= c.decay_start:
            return max(1 - (step - c.decay_start + 1) / c.decay_steps, 0.0) ** 2
        return 1.0

    def rate(self, base: float, step: int) -> float:
        """The learning rate of step number ``step`` where the config says ``base``."""
        return max(base * self.factor(step), min(LEAST, base))

    def set(self, step: int) -> None:
        """Sets the learning rates of step number ``step``."""
        factor = self.factor(step)
        if factor == self._factor:
            return
        self._factor = factor
        for group, base in zip(self._groups(), self._base, strict=True):
            group["lr"] = self.rate(base, step)

    def _groups(self) -> list[dict]:
        # Asked for anew: load_state_dict replaces them.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]
