"""torch.optim.Optimizer interface of fused optimizers: parameter groups for schedulers and GradScaler."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from rec_kernels.nn.arguments import LARGEST_FLOAT, number_of

#: Optimizer options, here and in torch. A group must not have those that its optimizer would ignore.
OPTIONS = frozenset(
    [
        "alpha",
        "amsgrad",
        "betas",
        "centered",
        "clip_grad_norm",
        "clip_grad_value",
        "dampening",
        "decoupled_weight_decay",
        "eps",
        "initial_accumulator_value",
        "learning_rate",
        "lr_decay",
        "maximize",
        "momentum",
        "nesterov",
        "state_dtype",
        "weight_decay",
        "weight_decay_mode",
    ]
)


class RateGroup(NamedTuple):
    """Tables that share a learning rate.

    Args:
        rate: initial learning rate. names: table names as passed to the collection.
        stored: indices of the stored tables in the collection. table_ids: their ids in the whole model, which index the
            tensor of learning rates.
        numbers: name and hyperparameters of the optimizer, which never change. shows_numbers: whether the parameter
            group includes them, in addition to the learning rate.
    """

    rate: float
    names: list[str]
    stored: list[int]
    table_ids: list[int]
    numbers: dict[str, Any]
    shows_numbers: bool


class FusedGroup(dict):
    """A parameter group that also writes its "lr", a float, into the tensors that the kernels read.

    The value is a float rather than a tensor, because code that saves a learning rate and restores it later (such as
    torch.distributed.checkpoint) would otherwise hold a reference that changes.

    "params" are the tables, plus ``token`` while it has a gradient, for a ``torch.amp.GradScaler`` to inspect. At other
    times the token is omitted, because torch.distributed.checkpoint would treat it as a model parameter.
    """

    kernel_lr: Sequence[Tensor] = ()
    numbers: Mapping[str, Any] = MappingProxyType({})  # options fixed at construction
    token: Tensor | None = None

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        if key == "params" and self.token is not None and self.token.grad is not None:
            return [*found, self.token]
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr":
            value = _checked_rate(value)
            for lr in self.kernel_lr:
                lr.fill_(value)
        if key in self.numbers and value != self.numbers[key]:
            raise ValueError(
                f"{key} = {value!r} must remain {self.numbers[key]!r}: of a fused optimizer only lr can be changed"
            )
        if key in OPTIONS and self.numbers and key not in self.numbers:
            raise ValueError(
                f"{key} = {value!r} is not an option of {self.numbers['optimizer']}: of a fused optimizer only "
                "lr can be changed, and other options are set when the collection is created"
            )
        super().__setitem__(key, value)

    def update(self, *args: object, **kwargs: object) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def _updated(self, other: Any) -> FusedGroup:
        self.update(other)
        return self

    __ior__: Any = _updated  # dict's bypasses __setitem__


def _checked_rate(value: Any) -> float:
    rate = number_of(value)
    if not 0 <= rate <= LARGEST_FLOAT:
        shown = repr(value) if isinstance(value, str | None) else value
        raise ValueError(f"lr = {shown} must be at least 0, and finite as float32")
    return rate


class FusedOptimizer(torch.optim.Optimizer):
    """A fused optimizer as a ``torch.optim.Optimizer``: ``param_groups`` for schedulers and ``torch.amp.GradScaler``.

    ``param_groups[0]["lr"]`` is the learning rate of all tables whose config has neither ``lr`` nor ``optimizer``.
    Every other table has a group of its own, after that one (if it exists), in table order. If any table has its own
    optimizer, groups also show the optimizer's name and hyperparameters, which cannot be changed. A scheduler, or
    assigning a float, changes the rate from the next update on, without recompilation: it is written into ``lr``, which
    the kernels read. ``step`` and ``zero_grad`` change no table: the update happened in the backward. ``state_dict``
    contains the learning rates and entries that schedulers added; row state is in the collection's ``state_dict``.

    ``scaler.step(fused_optimizer)`` tells a ``torch.amp.GradScaler`` that was passed to ``set_grad_scaler`` whether a
    gradient of the collection's outputs has overflowed.

    Args:
        tables: the collection's stored weights: [E, D] float32, float16 or bfloat16, or uint8 rows.
        rate_groups: the tables of each group.
        lr: float32 learning rates that the kernels read: 0-dim, or one per table.
        step: 0-dim int64, the collection's update count.
    """

    # Makes a GradScaler call step() after an overflow as well, without waiting for a GPU.
    _step_supports_amp_scaling = True
    #: True if a captured CUDA graph writes the token's gradient, so that its memory must not be freed.
    is_captured = False
    #: Token of the first group. Compiled code cannot read groups: torch treats them as plain dicts and fails.
    _token: Tensor | None = None

    def __init__(self, tables: Sequence[Tensor], rate_groups: Sequence[RateGroup], lr: Tensor, step: Tensor) -> None:
        self._rate_groups = rate_groups
        shown = [g.numbers if g.shows_numbers else {} for g in rate_groups]
        groups = [
            FusedGroup(params=[tables[i] for i in g.stored], lr=g.rate, **numbers)
            for g, numbers in zip(rate_groups, shown, strict=True)
        ]
        super().__init__(groups, {"lr": rate_groups[0].rate})
        self.rebind(tables, lr, step)

    def __getstate__(self) -> dict[str, Any]:
        # Copying and unpickling the collection rebinds its tables. A separate copy has none.
        groups = [FusedGroup({**group, "params": []}) for group in self.param_groups]
        own = {"param_groups": groups, "state": defaultdict(dict), "_step": None, "_rate_groups": self._rate_groups}
        return super().__getstate__() | own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError, except in the constructor: kernels update the collection's tables only."""
        if hasattr(self, "_step"):
            raise ValueError(
                "a fused optimizer has parameter groups only for its collection's tables: give other "
                "parameters to an optimizer of torch.optim"
            )
        super().add_param_group(param_group)

    def rebind(self, tables: Sequence[Tensor], lr: Tensor, step: Tensor, token: Tensor | None = None) -> None:
        """Binds to new tensors, such as those of a moved collection. Learning rates are kept.

        Args:
            token: [1] float32 that gets a gradient of inf from a skipped update, and of 0 from others; None: losses are
                not scaled.
        """
        groups: Any = self.param_groups
        for group, own in zip(groups, self._rate_groups, strict=True):
            group.kernel_lr = [lr[n] for n in own.table_ids] if lr.dim() else [lr] * bool(own.stored)
            group.numbers = own.numbers
            group.update(params=[tables[i] for i in own.stored], lr=group["lr"])
        self._token = groups[0].token = token
        self.is_captured = False
        self._step = step
        self._show_state()

    def _show_state(self) -> None:
        # torch.distributed.checkpoint allocates gradients as large as the tables for an optimizer without state.
        tables: list[Tensor] = [t for group in self.param_groups for t in group["params"]]
        self.state = defaultdict(dict, {t: {"step": self._step} for t in tables if t.requires_grad})

    @contextlib.contextmanager
    def _tables_only(self) -> Iterator[Any]:
        """The groups without the token, within the block."""
        groups: Any = self.param_groups
        token, groups[0].token = groups[0].token, None
        try:
            yield groups
        finally:
            groups[0].token = token

    def state_dict(self) -> dict[str, Any]:
        """Learning rates and entries of schedulers; with several groups, also the names of their tables."""
        with self._tables_only():
            state = super().state_dict()
        names = [group.names for group in self._rate_groups]
        for group, own in zip(state["param_groups"], self._rate_groups, strict=True):
            group["optimizer"] = own.numbers["optimizer"]
        return state if len(names) == 1 else {**state, "tables": names}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads learning rates, also for the kernels; groups are matched by table names if the state has them.

        Raises:
            ValueError: the state has other groups, those of another optimizer, or a rate that is not finite in float32;
            nothing was changed.
        """
        state_dict = {**state_dict, "param_groups": self._in_order(state_dict)}
        for group, own in zip(state_dict["param_groups"], self._rate_groups, strict=False):
            _checked_rate(group.get("lr", 0.0))
            if (kind := group.get("optimizer", own.numbers["optimizer"])) != own.numbers["optimizer"]:
                raise ValueError(
                    f"the state is of optimizer {kind} for tables {own.names}, which have "
                    f"{own.numbers['optimizer']} in this collection; nothing was changed"
                )
        with self._tables_only() as groups:
            super().load_state_dict(state_dict)
            # torch replaced the groups with plain dicts.
            for group, loaded in zip(groups, self.param_groups, strict=True):
                kept = {name: value for name, value in loaded.items() if name not in OPTIONS | group.numbers.keys()}
                group.update({**kept, "params": group["params"]})
            self.param_groups = groups
            self._show_state()

    def _in_order(self, state_dict: dict) -> list[dict]:
        """A state's groups in this optimizer's order, matched by table names if it has them."""
        groups, names = state_dict["param_groups"], [group.names for group in self._rate_groups]
        given = state_dict.get("tables")
        if given is None:
            return groups
        if sorted(given) != sorted(names):
            raise ValueError(
                f"the state has parameter groups for tables {given}, but the collection for {names}; nothing was "
                "changed"
            )
        return [groups[given.index(tables)] for tables in names]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Discards the overflow that a GradScaler has read by now; returns the closure's value if one is given.

        Raises:
            RuntimeError: called by a GradScaler that was not passed to ``set_grad_scaler``.
        """
        if hasattr(self, "found_inf") and self._token is None:
            raise RuntimeError(
                "the loss was scaled, but this collection's updates used the scaled gradients: call "
                "collection.set_grad_scaler(scaler) before training"
            )
        self.zero_grad(set_to_none=not self.is_captured)
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards an overflow that no GradScaler has read. Tables keep no gradient: the backward consumes it."""
        token = self._token
        if token is None or token.grad is None:
            return
        if set_to_none:
            token.grad = None
        else:
            token.grad.zero_()
