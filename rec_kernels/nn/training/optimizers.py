"""Optimizers that run inside the backward, once per touched row. What they compute: docs/numerics.md, "Optimizers"."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor

from rec_kernels.nn.arguments import LARGEST_FLOAT, check_choice, check_rate

# State of an optimizer: name -> whether it has an element for every element of a table, and not only for every row.
State = dict[str, bool]


@dataclass(frozen=True, kw_only=True, repr=False)
class _Common:
    """Options of every optimizer: clipping and weight decay, in this order, before the gradient is used.

    Args:
        clip_grad_value: elements of a row's summed gradient are limited to +-this; None: not.
        clip_grad_norm: a row's gradient that is longer than this is shortened to it; None: not.
        weight_decay: the rate, of rows that the batch names.
        weight_decay_mode: "l2": weight_decay * w is added to the gradient. "decoupled": w shrinks by
            lr * weight_decay * w beside the update; LAMB scales the decay, too, with the row's length.

    Raises:
        ValueError: a number is out of its range, or a name unknown.
    """

    weight_decay: float = 0.0
    weight_decay_mode: str = "l2"
    clip_grad_value: float | None = None
    clip_grad_norm: float | None = None
    lr: float
    op_name: ClassVar[str]

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_rate(name, getattr(self, name))
        check_choice("weight_decay_mode", self.weight_decay_mode, ("l2", "decoupled"))
        for name in ("clip_grad_value", "clip_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value} must be above 0, or None")

    def __repr__(self) -> str:
        """The learning rate, and what is not the default."""
        shown = [f"lr={self.lr}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "lr" and value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def options(self) -> dict[str, object]:
        """The arguments of the fused op that say how gradients are used."""
        numbers = {name: getattr(self, name) for name in ("eps", "clip_grad_value", "clip_grad_norm")}
        if self.weight_decay:
            numbers |= {"weight_decay": self.weight_decay, "weight_decay_mode": self.weight_decay_mode}
        used = {name: value for name, value in numbers.items() if value is not None}
        return {"optimizer": self.op_name} | used


@dataclass(frozen=True, repr=False)
class SGD(_Common):
    """Stochastic gradient descent: ``w -= lr * g``. No state."""

    lr: float = 0.01
    eps: ClassVar[float] = 0.0
    op_name: ClassVar[str] = "sgd"
    state: ClassVar[State] = {}


@dataclass(frozen=True, repr=False)
class RowwiseAdagrad(_Common):
    """Row-wise Adagrad: ``v += mean(g^2)``, ``w -= lr / (sqrt(v) + eps) * g``, one float32 ``v`` per row.

    Gupta, Bengio and Weston, "Training Highly Multiclass Classifiers", JMLR 2014.
    """

    lr: float = 0.01
    eps: float = 1e-8
    op_name: ClassVar[str] = "rowwise_adagrad"
    state: ClassVar[State] = {"sum": False}


@dataclass(frozen=True, kw_only=True, repr=False)
class _Elementwise(_Common):
    """Options of optimizers with state for every element.

    Args:
        state_dtype: of that state: torch.float32, or torch.bfloat16, half the bytes. It is rounded as the collection's
            ``rounding`` says, stochastically by default, so that small contributions are not lost. State per row stays
            float32.
    """

    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, got {self.state_dtype}")


@dataclass(frozen=True, repr=False)
class Adagrad(_Elementwise):
    """Adagrad: ``v += g^2``, ``w -= lr * g / (sqrt(v) + eps)``, a ``v`` per element.

    Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", JMLR 2011.
    """

    lr: float = 0.01
    eps: float = 1e-10
    op_name: ClassVar[str] = "adagrad"
    state: ClassVar[State] = {"sum": True}


@dataclass(frozen=True, repr=False)
class Adam(_Elementwise):
    """Adam of the rows that a batch names; the others rest, as in ``torch.optim.SparseAdam``.

    ``m = beta1 m + (1 - beta1) g``, ``v = beta2 v + (1 - beta2) g^2``, ``w -= lr * m' / (sqrt(v') + eps)`` with
    ``m' = m / (1 - beta1^t)`` and ``v' = v / (1 - beta2^t)``, t counting updates of the collection. ``eps`` is
    ``torch.optim.Adam``'s, which SparseAdam adds to ``sqrt(v)``, before the correction. Two numbers per
    element. ``betas``: beta1 and beta2, in [0, 1). Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR
    2015.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    op_name: ClassVar[str] = "adam"
    state: ClassVar[State] = {"exp_avg": True, "exp_avg_sq": True}

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            # float32, for which 0.99999999 is too close to 1. On the CPU: the default device may have no numbers.
            betas = torch.tensor([*self.betas], dtype=torch.float32, device="cpu")
        except (TypeError, ValueError):
            betas = torch.empty(0, device="cpu")
        if betas.shape != (2,) or not all(0 <= b < 1 for b in betas.tolist()):
            raise ValueError(f"betas = {self.betas!r} must be two numbers in [0, 1) as float32")

    def options(self) -> dict[str, object]:
        """The arguments of the fused op that say how gradients are used."""
        return super().options() | dict(zip(("beta1", "beta2"), self.betas, strict=True))


@dataclass(frozen=True, repr=False)
class AdamW(Adam):
    """Adam whose weight decay is decoupled, with the defaults of ``torch.optim.AdamW``; of rows that a batch names.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    weight_decay: float = dataclasses.field(default=0.01, kw_only=True)
    weight_decay_mode: str = dataclasses.field(default="decoupled", kw_only=True)


@dataclass(frozen=True, repr=False)
class RowwiseAdam(Adam):
    """Adam with one second moment per row, ``v = beta2 v + (1 - beta2) mean(g^2)``: one number per element and row."""

    op_name: ClassVar[str] = "rowwise_adam"
    state: ClassVar[State] = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True, repr=False)
class LAMB(Adam):
    """Adam whose step goes with the row's length: ``lr * |w| / |r|`` for ``lr``, r being ``m' / (sqrt(v') + eps)``.

    Norms are of a row; where one is 0, the factor is ``lr``. You et al., "Large Batch Optimization for Deep Learning:
    Training BERT in 76 minutes", ICLR 2020.
    """

    op_name: ClassVar[str] = "lamb"


Optimizer = SGD | RowwiseAdagrad | Adagrad | Adam


class RateGroup(NamedTuple):
    """Tables that have one learning rate.

    Args:
        rate: what it begins with.
        stored: the tables' numbers in a collection. table_ids: in the whole model, and so in the tensor of rates.
    """

    rate: float
    stored: list[int]
    table_ids: list[int]


class _Group(dict):
    """A parameter group whose "lr", a number, is written into the tensors that the kernels read, too.

    It is a number and not a tensor, because code that sets a learning rate aside and puts it back later (as
    torch.distributed.checkpoint does) would find it changed.

    "params" are the tables, and while it has a gradient ``token``, too, for a ``torch.amp.GradScaler`` to look at. At
    other times it is left out: torch.distributed.checkpoint would take it for a parameter of the model.
    """

    kernel_lr: Sequence[Tensor] = ()
    token: Tensor | None = None

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        if key == "params" and self.token is not None and self.token.grad is not None:
            return [*found, self.token]
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr":
            value = float(value)
            if not abs(value) <= LARGEST_FLOAT:
                raise ValueError(f"lr = {value} must be finite as float32")
            for lr in self.kernel_lr:
                lr.fill_(value)
        super().__setitem__(key, value)

    def update(self, *args: object, **kwargs: object) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def _updated(self, other: Any) -> _Group:
        self.update(other)
        return self

    __ior__: Any = _updated  # dict's would go past __setitem__


class FusedOptimizer(torch.optim.Optimizer):
    """The face of a fused optimizer: ``param_groups`` for learning-rate schedulers and ``torch.amp.GradScaler``.

    ``param_groups[0]["lr"]`` is the learning rate of all tables whose config has no ``lr``. A table with one is a group
    of its own, behind that one, if it is there, in the order of tables. A scheduler, or the assignment of a number,
    changes a rate from the next update on, without recompiling anything: it is written into ``lr``, which the kernels
    read. ``step`` and ``zero_grad`` change no table: the update happened in the backward. ``state_dict`` has the
    learning rates and what schedulers have added; state of rows is in the collection's.

    ``scaler.step(fused_optimizer)`` tells a ``torch.amp.GradScaler`` that the collection knows (``set_grad_scaler``)
    whether a gradient of its outputs has overflowed.

    Args:
        tables: the collection's weights, as they are stored: [E, D] float32, float16 or bfloat16, or uint8 rows.
        rate_groups: the tables of each group.
        lr: float32, the tensor that the kernels read: 0-dim, or one for each table.
        step: 0-dim int64, the collection's count of updates.
    """

    # A GradScaler calls step() after an overflow, too, and need not wait for a GPU to know of it.
    _step_supports_amp_scaling = True
    #: True if a captured CUDA graph writes the token's gradient, whose memory must then stay.
    is_captured = False

    def __init__(self, tables: Sequence[Tensor], rate_groups: Sequence[RateGroup], lr: Tensor, step: Tensor) -> None:
        self._rate_groups = rate_groups
        groups = [_Group(params=[tables[i] for i in g.stored], lr=g.rate) for g in rate_groups]
        super().__init__(groups, {"lr": rate_groups[0].rate})
        self.retie(tables, lr, step)

    def __getstate__(self) -> dict[str, Any]:
        # Copying and unpickling the collection ties its tables again. By itself, a copy has none.
        groups = [_Group({**group, "params": []}) for group in self.param_groups]
        own = {"param_groups": groups, "state": defaultdict(dict), "_step": None, "_rate_groups": self._rate_groups}
        return super().__getstate__() | own

    def retie(self, tables: Sequence[Tensor], lr: Tensor, step: Tensor, token: Tensor | None = None) -> None:
        """Uses other tensors from now on: those of the collection after it has moved. The learning rate stays.

        Args:
            token: what gets a gradient of inf from an update that was skipped, and of 0 from others: [1] float32; None:
                losses are not scaled.
        """
        groups: Any = self.param_groups
        for group, own in zip(groups, self._rate_groups, strict=True):
            group.kernel_lr = [lr[n] for n in own.table_ids] if lr.dim() else [lr] * bool(own.stored)
            group.update(params=[tables[i] for i in own.stored], lr=group["lr"])
        groups[0].token, self.is_captured = token, False
        self._step = step
        self._show_state()

    def _show_state(self) -> None:
        # torch.distributed.checkpoint gives an optimizer without state gradients as large as the tables.
        tables: list[Tensor] = [t for group in self.param_groups for t in group["params"]]
        self.state = defaultdict(dict, {t: {"step": self._step} for t in tables if t.requires_grad})

    @contextlib.contextmanager
    def _tables_only(self) -> Iterator[Any]:
        """The groups, without the token."""
        groups: Any = self.param_groups
        token, groups[0].token = groups[0].token, None
        try:
            yield groups
        finally:
            groups[0].token = token

    def state_dict(self) -> dict[str, Any]:
        """The learning rates, and what schedulers have added."""
        with self._tables_only():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the learning rates, for the kernels too."""
        with self._tables_only() as groups:
            super().load_state_dict(state_dict)
            # torch puts plain dicts in the groups' place.
            for group, loaded in zip(groups, self.param_groups, strict=True):
                group.update({**loaded, "params": group["params"]})
            self.param_groups = groups
            self._show_state()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Forgets what a GradScaler has seen by now; returns the closure's value if one is given.

        Raises:
            RuntimeError: a GradScaler has called it that the collection does not know.
        """
        if hasattr(self, "found_inf") and self._token is None:
            raise RuntimeError(
                "the loss was scaled, and the updates of this collection were made with gradients as large as that: "
                "call collection.set_grad_scaler(scaler) before the training"
            )
        self.zero_grad(set_to_none=not self.is_captured)
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what a GradScaler has not seen yet. Tables keep no gradient: the backward uses it up."""
        token = self._token
        if token is None or token.grad is None:
            return
        if set_to_none:
            token.grad = None
        else:
            token.grad.zero_()

    @property
    def _token(self) -> Tensor | None:
        group: Any = self.param_groups[0]
        return group.token
