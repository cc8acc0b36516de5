"""The public DLRM's learning-rate policy: linear warm-up, then flat, then a fall with the square of what is left."""

from __future__ import annotations

from rec_kernels.dlrm.config import TrainConfig

LEAST = 1e-7  # learning rates do not fall below it


def learning_rate(config: TrainConfig, base: float, step: int) -> float:
    """The learning rate of step number ``step``, from 0, of parameters whose rate without the policy is ``base``.

    Source: the learning-rate policy of https://github.com/facebookresearch/dlrm (warm-up, start of the decay, steps).
    """
    factor = 1.0
    if step < config.warmup_steps:
        factor = (step + 1) / config.warmup_steps
    elif config.decay_steps and step >= config.decay_start:
        factor = max(1 - (step - config.decay_start + 1) / config.decay_steps, 0.0) ** 2
    return max(base * factor, min(LEAST, base))
