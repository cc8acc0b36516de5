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
    """A parameter group whose "lr", a number, is written into the tensor that the kernels read, too.

    A number and not that tensor, because code that sets a learning rate aside and puts it back later (as
    torch.distributed.checkpoint does) would find the tensor changed.
    """

    kernel_lr: Tensor | None = None

    def __setitem__(self, key: str, value: object) -> None:
        if key == "lr":
            value = float(value)
            if self.kernel_lr is not None:
                self.kernel_lr.fill_(value)
        super().__setitem__(key, value)

    def update(self, *args: object, **kwargs: object) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class FusedOptimizer(torch.optim.Optimizer):
    """The face of a fused optimizer: ``param_groups`` for learning-rate schedulers.

    ``param_groups[0]["lr"]`` is the learning rate. A scheduler, or the assignment of a number, changes it from the next
    update on, without recompiling anything: it is written into ``lr``, which the kernels read. ``step`` and
    ``zero_grad`` do nothing: the update happened in the backward. ``state_dict`` has the learning rate and what
    schedulers have added; state of rows is in the collection's.

    Args:
        tables: the collection's weights, [E, D] float32 each.
        rate: the learning rate.
        lr: 0-dim float32, the tensor that the kernels read.
    """

    def __init__(self, tables: list[Tensor], rate: float, lr: Tensor) -> None:
        super().__init__([_Group(params=tables, lr=rate)], {"lr": rate})
        self.retie(tables, lr)

    def retie(self, tables: list[Tensor], lr: Tensor) -> None:
        """Other tensors from now on: those of the collection after it has moved. The learning rate stays."""
        group = self.param_groups[0]
        group.kernel_lr = lr
        group.update(params=tables, lr=group["lr"])

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the learning rate, for the kernels too."""
        group = self.param_groups[0]
        super().load_state_dict(state_dict)
        # torch puts a plain dict in the group's place.
        group.update({**self.param_groups[0], "params": group["params"]})
        self.param_groups[0] = group

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Nothing to do; returns closure's value if one is given."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: fused tables have no gradient."""
