"""Fused optimizers: they update each touched row inside the backward. Formulas: docs/numerics.md, "Optimizers"."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from rec_kernels.nn.arguments import check_choice, check_rate, number_of

# Optimizer state: name -> True for one value per element of a table, False for one value per row.
State = dict[str, bool]


@dataclass(frozen=True, kw_only=True, repr=False)
class _Common:
    """Options of every optimizer, documented in ``SGD``, where users and editors find them."""

    weight_decay: float = 0.0
    weight_decay_mode: str = "l2"
    clip_grad_value: float | None = None
    clip_grad_norm: float | None = None
    lr: float
    op_name: ClassVar[str]

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            rate = getattr(self, name)
            check_rate(name, rate)
            if not isinstance(rate, int | float):  # copied, because a tensor's value may change later
                object.__setattr__(self, name, number_of(rate))
        eps: float = getattr(self, "eps", 0.0)
        if 0 < eps < 2.0**-126:
            raise ValueError(f"eps = {eps!r} must be 0 or at least 2^-126, the smallest normal float32")
        check_choice("weight_decay_mode", self.weight_decay_mode, ("l2", "decoupled"))
        for name in ("clip_grad_value", "clip_grad_norm"):
            value = getattr(self, name)
            if value is not None and not number_of(value) > 0:
                raise ValueError(f"{name} = {value!r} must be a number above 0, or None")
            if isinstance(value, torch.Tensor):
                object.__setattr__(self, name, number_of(value))

    def __repr__(self) -> str:
        """The learning rate and every option that is not the default."""
        shown = [f"lr={self.lr}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "lr" and value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def options(self) -> dict[str, object]:
        """The optimizer arguments of the fused op."""
        numbers = {name: getattr(self, name) for name in ("eps", "clip_grad_value", "clip_grad_norm")}
        if self.weight_decay:
            numbers |= {"weight_decay": self.weight_decay, "weight_decay_mode": self.weight_decay_mode}
        used = {name: value for name, value in numbers.items() if value is not None}
        return {"optimizer": self.op_name} | used


@dataclass(frozen=True, repr=False)
class SGD(_Common):
    """Stochastic gradient descent: ``w -= lr * g``. It has no state.

    All optimizers share these arguments. Clipping is applied to a row's summed gradient first, then "l2" decay.

    Args:
        lr: initial learning rate, at least 0; ``collection.fused_optimizer`` changes it.
        clip_grad_value: clamps each element of a row's gradient to [-clip_grad_value, clip_grad_value]; None: off.
        clip_grad_norm: scales a row's gradient down to this L2 norm if it is larger; None: off.
        weight_decay: decay rate, applied only to rows in the batch.
        weight_decay_mode: "l2": adds weight_decay * w to the gradient. "decoupled": subtracts lr * weight_decay * w
            from w separately; LAMB's trust ratio scales this decay as well.

    Raises:
        ValueError: a value is out of range, or an option is unknown.
    """

    lr: float = 0.01
    eps: ClassVar[float] = 0.0
    op_name: ClassVar[str] = "sgd"
    state: ClassVar[State] = {}


@dataclass(frozen=True, repr=False)
class RowwiseAdagrad(_Common):
    """Row-wise Adagrad: ``v += mean(g^2)``, ``w -= lr / (sqrt(v) + eps) * g``, one float32 ``v`` per row.

    Gupta, Bengio and Weston, "Training Highly Multiclass Classifiers", JMLR 2014. Other arguments: see ``rk.SGD``.
    """

    lr: float = 0.01
    eps: float = 1e-8
    op_name: ClassVar[str] = "rowwise_adagrad"
    state: ClassVar[State] = {"sum": False}


@dataclass(frozen=True, kw_only=True, repr=False)
class _Elementwise(_Common):
    """Options of optimizers with elementwise state; ``Adagrad`` documents ``state_dtype``."""

    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, got {self.state_dtype}")


@dataclass(frozen=True, repr=False)
class Adagrad(_Elementwise):
    """Adagrad: ``v += g^2``, ``w -= lr * g / (sqrt(v) + eps)``, one ``v`` per element.

    Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", JMLR 2011.

    Args:
        state_dtype: dtype of the elementwise state: torch.float32, or torch.bfloat16 for half the bytes. bfloat16 is
            rounded by the collection's ``rounding``, stochastically by default, so that small contributions are not
            lost. Per-row state stays float32.

    Other arguments: see ``rk.SGD``.
    """

    lr: float = 0.01
    eps: float = 1e-10
    op_name: ClassVar[str] = "adagrad"
    state: ClassVar[State] = {"sum": True}


@dataclass(frozen=True, repr=False)
class Adam(_Elementwise):
    """Sparse Adam: only rows in the batch and their moments are updated, as in ``torch.optim.SparseAdam``.

    ``m = beta1 m + (1 - beta1) g``, ``v = beta2 v + (1 - beta2) g^2``, ``w -= lr * m' / (sqrt(v') + eps)`` with
    ``m' = m / (1 - beta1^t)`` and ``v' = v / (1 - beta2^t)``; t counts updates of the collection. ``eps`` is added
    after the bias correction, as in ``torch.optim.Adam``; SparseAdam adds it before. The state is two values per
    element. ``betas`` are beta1 and beta2, in [0, 1). Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR
    2015. ``state_dtype``: see ``rk.Adagrad``; other arguments: see ``rk.SGD``.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    op_name: ClassVar[str] = "adam"
    state: ClassVar[State] = {"exp_avg": True, "exp_avg_sq": True}

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            betas = tuple(map(number_of, self.betas))
            # 0.99999999 is 1 as float32. struct rounds it, because a tensor on a meta default device has no values.
            rounded = struct.unpack("2f", struct.pack("2f", *betas))
        except (TypeError, OverflowError, struct.error):
            betas = rounded = (-1.0,)
        if not all(0 <= b < 1 for b in rounded):
            raise ValueError(f"betas = {self.betas!r} must be two numbers in [0, 1) as float32")
        object.__setattr__(self, "betas", betas)

    def options(self) -> dict[str, object]:
        """The optimizer arguments of the fused op."""
        return super().options() | dict(zip(("beta1", "beta2"), self.betas, strict=True))


@dataclass(frozen=True, repr=False)
class AdamW(Adam):
    """Sparse Adam with decoupled weight decay and the defaults of ``torch.optim.AdamW``, for rows in the batch.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    weight_decay: float = dataclasses.field(default=0.01, kw_only=True)
    weight_decay_mode: str = dataclasses.field(default="decoupled", kw_only=True)


@dataclass(frozen=True, repr=False)
class RowwiseAdam(Adam):
    """Adam with one second moment per row: ``v = beta2 v + (1 - beta2) mean(g^2)``.

    The state is one value per element and one per row. Arguments: see ``rk.Adam``.
    """

    op_name: ClassVar[str] = "rowwise_adam"
    state: ClassVar[State] = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True, repr=False)
class LAMB(Adam):
    """LAMB: Adam with the step ``r = m' / (sqrt(v') + eps)`` scaled per row by the trust ratio ``|w| / |r|``.

    If either row norm is 0, the ratio is 1. You et al., "Large Batch Optimization for Deep Learning: Training BERT in
    76 minutes", ICLR 2020. Arguments: see ``rk.Adam``.
    """

    op_name: ClassVar[str] = "lamb"


Optimizer = SGD | RowwiseAdagrad | Adagrad | Adam


def check_optimizer(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a fused optimizer or None."""
    if not isinstance(value, (Optimizer, type(None))):
        raise ValueError(
            f"{name} must be rk.SGD, rk.Adagrad, rk.RowwiseAdagrad, rk.Adam, rk.AdamW, rk.RowwiseAdam or rk.LAMB, an "
            f"instance such as rk.SGD(lr=0.1), or None, got {value!r}"
        )
