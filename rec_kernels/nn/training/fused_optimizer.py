"""The face of fused optimizers: parameter groups for schedulers and GradScaler, as torch's optimizers have them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from rec_kernels.nn.arguments import LARGEST_FLOAT, number_of

#: Options of optimizers, here and in torch: in a group of an optimizer that lacks them they would be read by nobody.
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
    """Tables that have one learning rate.

    Args:
        rate: what it begins with. names: of the tables, as a collection was given them.
        stored: the tables' numbers in a collection. table_ids: in the whole model, and so in the tensor of rates.
        numbers: the optimizer's name and numbers, which never change. shows_numbers: whether the parameter group has
            them, beside the learning rate.
    """

    rate: float
    names: list[str]
    stored: list[int]
    table_ids: list[int]
    numbers: dict[str, Any]
    shows_numbers: bool


class FusedGroup(dict):
    """A parameter group whose "lr", a number, is written into the tensors that the kernels read, too.

    It is a number and not a tensor, because code that sets a learning rate aside and puts it back later (as
    torch.distributed.checkpoint does) would find it changed.

    "params" are the tables, and while it has a gradient ``token``, too, for a ``torch.amp.GradScaler`` to look at. At
    other times it is left out: torch.distributed.checkpoint would take it for a parameter of the model.
    """

    kernel_lr: Sequence[Tensor] = ()
    numbers: Mapping[str, Any] = MappingProxyType({})  # what is as it was built
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
                f"{key} = {value!r} must be {self.numbers[key]!r}, as the table's optimizer was built: of a fused "
                "optimizer only lr can be changed"
            )
        if key in OPTIONS and self.numbers and key not in self.numbers:
            raise ValueError(
                f"{key} = {value!r} is not an option of {self.numbers['optimizer']}: of a fused optimizer only lr can "
                "be changed, and other options are given when the collection is made"
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

    __ior__: Any = _updated  # dict's would go past __setitem__


def _checked_rate(value: Any) -> float:
    rate = number_of(value)
    if not 0 <= rate <= LARGEST_FLOAT:
        shown = repr(value) if isinstance(value, str | None) else value
        raise ValueError(f"lr = {shown} must be at least 0, and finite as float32")
    return rate


class FusedOptimizer(torch.optim.Optimizer):
    """The face of a fused optimizer: ``param_groups`` for learning-rate schedulers and ``torch.amp.GradScaler``.

    ``param_groups[0]["lr"]`` is the learning rate of all tables whose config has neither ``lr`` nor ``optimizer``. A
    table with one is a group of its own, behind that one, if it is there, in the order of tables. If a table has an
    optimizer, groups say which one is theirs, and its numbers, which cannot be changed. A scheduler, or the assignment
    of a number, changes a rate from the next update on, without recompiling anything: it is written into ``lr``, which
    the kernels read. ``step`` and ``zero_grad`` change no table: the update happened in the backward. ``state_dict``
    has the learning rates and what schedulers have added; state of rows is in the collection's.

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
    #: The token of the first group. Compiled code cannot read groups: torch takes them for plain dicts, and fails.
    _token: Tensor | None = None

    def __init__(self, tables: Sequence[Tensor], rate_groups: Sequence[RateGroup], lr: Tensor, step: Tensor) -> None:
        self._rate_groups = rate_groups
        shown = [g.numbers if g.shows_numbers else {} for g in rate_groups]
        groups = [
            FusedGroup(params=[tables[i] for i in g.stored], lr=g.rate, **numbers)
            for g, numbers in zip(rate_groups, shown, strict=True)
        ]
        super().__init__(groups, {"lr": rate_groups[0].rate})
        self.retie(tables, lr, step)

    def __getstate__(self) -> dict[str, Any]:
        # Copying and unpickling the collection ties its tables again. By itself, a copy has none.
        groups = [FusedGroup({**group, "params": []}) for group in self.param_groups]
        own = {"param_groups": groups, "state": defaultdict(dict), "_step": None, "_rate_groups": self._rate_groups}
        return super().__getstate__() | own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError, but for the groups that it is made with: kernels update the tables alone."""
        if hasattr(self, "_step"):
            raise ValueError(
                "a collection's fused optimizer has groups of the collection's tables and no others: give other "
                "parameters to an optimizer of torch.optim"
            )
        super().add_param_group(param_group)

    def retie(self, tables: Sequence[Tensor], lr: Tensor, step: Tensor, token: Tensor | None = None) -> None:
        """Uses other tensors from now on: those of the collection after it has moved. The learning rate stays.

        Args:
            token: what gets a gradient of inf from an update that was skipped, and of 0 from others: [1] float32; None:
                losses are not scaled.
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
        """The learning rates, and what schedulers have added; of several groups, whose tables they are of."""
        with self._tables_only():
            state = super().state_dict()
        names = [group.names for group in self._rate_groups]
        for group, own in zip(state["param_groups"], self._rate_groups, strict=True):
            group["optimizer"] = own.numbers["optimizer"]
        return state if len(names) == 1 else {**state, "tables": names}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the learning rates, for the kernels too; of groups that say so, by the names of their tables.

        Raises:
            ValueError: the state has other groups, those of another optimizer, or a rate that is not finite as float32;
            nothing was changed.
        """
        state_dict = {**state_dict, "param_groups": self._in_order(state_dict)}
        for group, own in zip(state_dict["param_groups"], self._rate_groups, strict=False):
            _checked_rate(group.get("lr", 0.0))
            if (kind := group.get("optimizer", own.numbers["optimizer"])) != own.numbers["optimizer"]:
                raise ValueError(
                    f"the state is of optimizer {kind} for tables {own.names}, which have {own.numbers['optimizer']} "
                    "here; nothing was changed"
                )
        with self._tables_only() as groups:
            super().load_state_dict(state_dict)
            # torch puts plain dicts in the groups' place.
            for group, loaded in zip(groups, self.param_groups, strict=True):
                kept = {name: value for name, value in loaded.items() if name not in OPTIONS | group.numbers.keys()}
                group.update({**kept, "params": group["params"]})
            self.param_groups = groups
            self._show_state()

    def _in_order(self, state_dict: dict) -> list[dict]:
        """A state's groups in the order of these, by the names of their tables if it has them."""
        groups, names = state_dict["param_groups"], [group.names for group in self._rate_groups]
        given = state_dict.get("tables")
        if given is None:
            return groups
        if sorted(given) != sorted(names):
            raise ValueError(f"the state has groups of tables {given}, and the collection {names}; nothing was changed")
        return [groups[given.index(tables)] for tables in names]

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
