"""Layers of torch.nn, alone or in TorchRec collections, and the torch optimizers that train them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.convert.external_tables import (
    FAMILIES,
    ExternalTables,
    Family,
    TableTensors,
    check_state,
    check_weight,
    refuse_options,
)
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.training.dense_parameters import in_backward

#: The type of ``trained_by``: torch optimizers, or TorchRec's wrappers of them.
TrainedBy = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

_FAMILIES = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.SparseAdam: "adam",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
}
_ROWWISE = "torchrec.optim.rowwise_adagrad"  # a module of TorchRec, which is not imported
#: Options of torch's optimizers that this package does not implement -> the value that disables each.
_NEUTRAL_VALUES: dict[str, object] = {
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "lr_decay": 0,
    "weight_decay": 0,
    "maximize": False,
    "amsgrad": False,
}


class TorchTables(ExternalTables):
    """Tables that are ordinary parameters, and the torch optimizers that train them.

    Args:
        layers: table name -> the module that has its ``weight``.
        trained_by: optimizers that train the weights; they may have other parameters too. None: optimizers that torch
            runs in the backward, if any. Without an optimizer only the rows are known.

    Raises:
        TypeError, ValueError: an argument is not an optimizer, a weight has no or several optimizers, or an optimizer
            has no equivalent.
    """

    def __init__(self, layers: Mapping[str, nn.Module], trained_by: TrainedBy) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        for name, layer in layers.items():
            weight: Any = layer.weight
            check_weight(name, weight)
            if other := next((n for n, w in self._weights.items() if w is weight), None):
                raise ValueError(f"tables {other!r} and {name!r} share a weight: each must have its own")
            self._weights[name] = weight
        self._trainers: list[torch.optim.Optimizer] = []
        self._given = flatten_optimizers(trained_by)
        self.is_trained = any(weight.requires_grad for weight in self._weights.values())
        given = unwrap_optimizers(trained_by)
        for name, weight in self._weights.items():
            found = _optimizers_of(weight, in_backward([weight]) if trained_by is None else given)
            if len(found) > 1:
                raise ValueError(f"table {name!r} has {len(found)} optimizers: it must have one, or none")
            self._trainers += found
        if not self._trainers and not given:
            return
        if len(self._trainers) < len(self._weights):
            missing = next(name for name, weight in self._weights.items() if not _optimizers_of(weight, self._trainers))
            raise ValueError(
                f"trained_by does not have the weight of table {missing!r}: it must be the optimizer of "
                "theirs.parameters(), or a list of several"
            )
        self.families = [Family(_family(trainer), type(trainer).__name__) for trainer in self._trainers]

    def names(self) -> list[str]:
        return list(self._weights)

    def weights(self) -> list[Tensor]:
        return [weight.detach() for weight in self._weights.values()]

    def read(self) -> list[TableTensors]:
        """Reads rows and state of the tables; state is zeros before the first step."""
        if not self.families:
            return [TableTensors(name, weight.detach()) for name, weight in self._weights.items()]
        tables = zip(self._weights.items(), self._trainers, self.families, strict=True)
        return [self._read(name, weight, trainer, family) for (name, weight), trainer, family in tables]

    def _read(self, name: str, weight: nn.Parameter, trainer: torch.optim.Optimizer, family: Family) -> TableTensors:
        found = trainer.state.get(weight, {})
        kinds = FAMILIES[family.name].state
        others = sorted(kind for kind, value in found.items() if kind not in (*kinds, "step") and value is not None)
        if _group(trainer, weight).get("amsgrad"):
            others = ["max_exp_avg_sq"]
        if others:
            raise ValueError(
                f"table {name!r}: {', '.join(others)} of {family.described} has no counterpart in this package; "
                "trained_by=[] copies rows only"
            )
        size, rows = weight.shape, weight.shape[:1]
        state = {
            kind: found[kind] if kind in found else torch.zeros(size if each else rows, device=weight.device)
            for kind, each in kinds.items()
        }
        if family.name == "rowwise_adagrad" and state["sum"].dim() == 2:
            state["sum"] = state["sum"].squeeze(1)  # TorchRec has it as [E, 1]
        check_state(name, family.name, weight, state)
        step = found.get("step")
        steps = (0 if kinds else None) if step is None else int(step)
        return TableTensors(name, weight.detach(), state, steps, family)

    def write(self, tables: Sequence[TableTensors]) -> None:
        """Copies into the parameters and the optimizers' state, creating missing state."""
        for name, weight in self._weights.items():
            if weight.numel() > 1 and 0 in weight.stride():
                raise ValueError(f"table {name!r}: weight must have memory for each element, got an expanded tensor")
        with torch.no_grad():
            for weight, given in zip(self._weights.values(), tables, strict=True):
                weight.copy_(given.weight)
        for weight, trainer, given in zip(self._weights.values(), self._trainers, tables, strict=False):
            if not given.state:
                continue
            own = trainer.state[weight]
            for kind, values in given.state.items():
                if kind in own:
                    own[kind].copy_(values.view_as(own[kind]))
                else:
                    own[kind] = values.to(weight.device, weight.dtype, copy=True)
            if isinstance(own.get("step"), Tensor):
                own["step"].fill_(given.step)
            else:
                own["step"] = _first_step(trainer, weight, given.step)

    def counterparts(self) -> list[Optimizer]:
        trained = list(zip(self._weights.values(), self._trainers, self.families, strict=True))
        for weight, _, _ in trained:
            _refuse_clipping(weight, self._given)
        return [_counterpart(weight, trainer, family) for weight, trainer, family in trained]


def _counterpart(weight: nn.Parameter, trainer: torch.optim.Optimizer, family: Family) -> Optimizer:
    group = _group(trainer, weight)
    if isinstance(trainer, (torch.optim.Adam, torch.optim.AdamW)):
        raise ValueError(
            f"{family.described} has no counterpart here (it moves every row in every step, rk.Adam only "
            "looked-up rows): pass the optimizer to continue with as optimizer="
        )
    if type(trainer).__module__.split(".")[0] not in ("torch", "torchrec"):
        raise ValueError(
            f"{family.described} may have its own formulas: pass the optimizer to continue with as optimizer="
        )
    wrong = {k: group[k] for k, off in _NEUTRAL_VALUES.items() if k in group and group[k] != off}
    refuse_options(family.described, wrong, "these change the formula, or rows that are not looked up")
    found = {name: group[name] for name in ("lr", "eps", "betas") if name in group}
    numbers: dict[str, Any] = {name: tuple(map(float, v)) if name == "betas" else float(v) for name, v in found.items()}
    return FAMILIES[family.name](**numbers)


def _first_step(trainer: torch.optim.Optimizer, weight: nn.Parameter, step: int) -> int | Tensor:
    """``step`` as the torch optimizer stores it: on the weight's device if the optimizer is fused or capturable."""
    if isinstance(trainer, torch.optim.SparseAdam):
        return step
    group = _group(trainer, weight)
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(step), dtype=torch.float32, device=weight.device if on_device else "cpu")


def _group(trainer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Any]:
    """The parameter group that contains the weight."""
    return next(group for group in trainer.param_groups if any(weight is p for p in group["params"]))


def flatten_optimizers(trained_by: Any) -> list[torch.optim.Optimizer]:
    """All distinct optimizers in ``trained_by``: torch optimizers and TorchRec wrappers, including nested ones."""
    if trained_by is None:
        return []
    if isinstance(trained_by, (list, tuple)):
        return list(dict.fromkeys(inner for each in trained_by for inner in flatten_optimizers(each)))
    if not isinstance(trained_by, torch.optim.Optimizer):
        raise TypeError(f"trained_by must be a torch.optim.Optimizer, a list of some or None, got {trained_by!r}")
    return [trained_by, *flatten_optimizers(_wrapped_optimizers(trained_by))]


def unwrap_optimizers(trained_by: Any) -> list[torch.optim.Optimizer]:
    """All distinct torch optimizers in ``trained_by``, without TorchRec's wrappers."""
    return [optimizer for optimizer in flatten_optimizers(trained_by) if _wrapped_optimizers(optimizer) is None]


def _wrapped_optimizers(optimizer: Any) -> list[torch.optim.Optimizer] | None:
    """The optimizers inside a TorchRec wrapper; None: it is not a wrapper."""
    if type(optimizer).__module__.startswith("torchrec.optim."):
        if hasattr(optimizer, "_optimizer"):  # a KeyedOptimizerWrapper, or one that clips or warms up
            return [optimizer._optimizer]
        if hasattr(optimizer, "optimizers"):  # a CombinedOptimizer
            return [inner for _, inner in optimizer.optimizers]
    return None


def _refuse_clipping(weight: nn.Parameter, given: Sequence[Any]) -> None:
    """Raises ValueError if a TorchRec wrapper clips the gradient of the weight."""
    for clipper in _optimizers_of(weight, [o for o in given if getattr(o, "_clipping", None) is not None]):
        if clipper._clipping.name != "NONE":
            options = {"clipping": clipper._clipping.name, "max_gradient": clipper._max_gradient}
            why = "clip_grad_value and clip_grad_norm of an optimizer here are of a row's summed gradient"
            refuse_options(type(clipper).__name__, options, why)


def _optimizers_of(weight: nn.Parameter, trainers: Sequence[Any]) -> list[Any]:
    return [t for t in trainers if any(weight is p for p in parameters_of(t))]


def parameters_of(trainer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields the parameters of all groups."""
    for group in trainer.param_groups:
        yield from group["params"]


def _family(trainer: torch.optim.Optimizer) -> str:
    """The family of a torch or TorchRec optimizer; raises ValueError if it has none."""
    for kind in type(trainer).__mro__:
        if kind in _FAMILIES:
            return _FAMILIES[kind]
        if kind.__module__ == _ROWWISE and kind.__name__ == "RowWiseAdagrad":
            return "rowwise_adagrad"
    raise ValueError(
        f"trained_by: {type(trainer).__name__} has no counterpart here: it must be torch.optim.SGD, Adagrad, "
        "SparseAdam, Adam or AdamW, or TorchRec's RowWiseAdagrad"
    )
