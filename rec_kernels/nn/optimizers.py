"""Optimizers that run inside the backward, once per touched row. What they compute: docs/numerics.md, "Optimizers"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


def _check_positive(name: str, value: float, zero_allowed: bool) -> None:
    if not (value > 0 or (zero_allowed and value == 0)):
        raise ValueError(f"{name} = {value} must be {'at least' if zero_allowed else 'above'} 0")


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: ``w -= lr * g``. No state."""

    lr: float = 0.01
    eps: ClassVar[float] = 0.0
    op_name: ClassVar[str] = "sgd"
    has_sum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive("lr", self.lr, zero_allowed=True)


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Row-wise Adagrad: ``v += mean(g^2)``, ``w -= lr / (sqrt(v) + eps) * g``, one float32 ``v`` per row."""

    lr: float = 0.01
    eps: float = 1e-8
    op_name: ClassVar[str] = "rowwise_adagrad"
    has_sum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_positive("lr", self.lr, zero_allowed=True)
        _check_positive("eps", self.eps, zero_allowed=True)


class _Group(dict):
    """A parameter group whose "lr" stays the tensor that the kernels read: assigning a number writes into it."""

    def __setitem__(self, key: str, value: object) -> None:
        if key == "lr" and isinstance(self.get("lr"), Tensor):
            self["lr"].fill_(value)
        else:
            super().__setitem__(key, value)


class FusedOptimizer(torch.optim.Optimizer):
    """The face of a fused optimizer: ``param_groups`` for learning-rate schedulers.

    ``param_groups[0]["lr"]`` is the 0-dim float32 tensor that the kernels read, so a scheduler, or the assignment of a
    number, changes the learning rate without recompiling anything. ``step`` and ``zero_grad`` do nothing: the update
    happened in the backward.
    """

    def __init__(self, tables: list[Tensor], lr: Tensor) -> None:
        super().__init__([_Group(params=tables, lr=lr)], {"lr": lr})

    def retie(self, tables: list[Tensor], lr: Tensor) -> None:
        """Other tensors from now on: those of the collection after it has moved."""
        self.param_groups[0] = _Group({**self.param_groups[0], "params": tables, "lr": lr})

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the learning rate into the tensor that the kernels read."""
        lr = self.param_groups[0]["lr"]
        super().load_state_dict(state_dict)
        lr.fill_(self.param_groups[0]["lr"])
        self.retie(self.param_groups[0]["params"], lr)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Nothing to do; returns closure's value if one is given."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: fused tables have no gradient."""
