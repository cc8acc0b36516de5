"""The parameters of a model that a torch optimizer is to be given, and a warning to one that was given others."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rec_kernels.nn.training.fused_optimizer import FusedOptimizer

_MARK = "_rec_kernels_mark"  # an attribute of a parameter


class _Mark:
    """Says of a table's parameter that torch's optimizers do not train it. One that is pickled alone has none."""

    def __reduce__(self) -> tuple:
        return bool, ()


_FUSED, _UNTRAINED, _REPLACED = _Mark(), _Mark(), _Mark()
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that no fused optimizer updates: what a torch optimizer is to be given.

    Args:
        module: with collections anywhere in it, or none.

    Returns:
        Its parameters that require gradients, in the order of ``module.parameters()``, without the tables of
        collections that have a fused optimizer. Projections of narrow tables are among them.
    """
    return [p for p in module.parameters() if p.requires_grad and getattr(p, _MARK, None) is not _FUSED]


def mark_fused(weight: nn.Parameter) -> None:
    """Says of a parameter that a fused optimizer updates it."""
    weight.__dict__[_MARK] = _FUSED


def mark_untrained(weights: Iterable[nn.Parameter]) -> None:
    """Says of tables that they are in a collection without optimizer whose formats torch cannot train."""
    for weight in weights:
        weight.__dict__[_MARK] = _UNTRAINED


def mark_replaced(weights: Iterable[nn.Parameter]) -> None:
    """Says of parameters that a model has had others in their place since an optimizer may have been made."""
    for weight in weights:
        weight.__dict__[_MARK] = _REPLACED


def in_backward(weights: Iterable[nn.Parameter]) -> list[Optimizer]:
    """The optimizers that torch was told to run in the backward for some parameters, in their order."""
    return [optimizer for weight in weights for optimizer in getattr(weight, "_in_backward_optimizers", ())]


def _warn(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step of any torch optimizer: says once what it does not do."""
    if optimizer in _seen or isinstance(optimizer, FusedOptimizer):
        return
    _seen.add(optimizer)
    marks = {getattr(p, _MARK, None) for group in optimizer.param_groups for p in group["params"]}
    if _UNTRAINED in marks:
        warnings.warn(
            f"{type(optimizer).__name__} was given tables of a collection that nothing trains: rows in a format other "
            "than fp32 need a fused optimizer. Build it with one, rk.RowwiseAdagrad(lr=0.05) say, or leave the tables "
            "out by rk.dense_parameters(model), if they are to stay as they are",
            stacklevel=3,
        )
    if _REPLACED in marks:
        warnings.warn(
            f"{type(optimizer).__name__} was given tables that rk.replace_embeddings has replaced since, and does not "
            "train those that the model has now: make it from rk.dense_parameters(model) after the replacement, or "
            "name it in trained_by=",
            stacklevel=3,
        )
    if _FUSED in marks:
        warnings.warn(
            f"{type(optimizer).__name__} was given tables that a fused optimizer updates: its learning rate, weight "
            "decay and schedulers do not reach them. Give it rk.dense_parameters(model); tables have the options of "
            "their collection's optimizer, and collection.fused_optimizer is for schedulers",
            stacklevel=3,
        )


register_optimizer_step_pre_hook(_warn)
