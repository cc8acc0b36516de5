"""Selects the parameters for a torch optimizer, and warns about optimizers that were given others."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rec_kernels.nn.tables.config import StoredTable
from rec_kernels.nn.tables.parameters import RequiresGrad
from rec_kernels.nn.training.fused_optimizer import FusedGroup, FusedOptimizer
from rec_kernels.ops.row_formats import FLOAT_DTYPES
from rec_kernels.ops.tracing import is_exporting

_MARK = "_rec_kernels_mark"  # an attribute of a parameter


class _Mark:
    """Marks a table's parameter as not trained by torch's optimizers. Pickling a parameter alone drops the mark."""

    def __reduce__(self) -> tuple:
        return bool, ()


_FUSED, _UNTRAINED, _REPLACED, _SWITCH = _Mark(), _Mark(), _Mark(), _Mark()
_checked_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that no fused optimizer updates; pass these to a torch optimizer.

    Args:
        module: a model with or without collections.

    Returns:
        The parameters that require gradients, in the order of ``module.parameters()``, without the tables of
        collections that have a fused optimizer. Projections of narrow tables are included.
    """
    return [p for p in module.parameters() if p.requires_grad and getattr(p, _MARK, None) not in (_FUSED, _SWITCH)]


def mark_fused(weight: nn.Parameter) -> None:
    """Marks a parameter as updated by a fused optimizer."""
    weight.__dict__[_MARK] = _FUSED


def mark_switch(switch: nn.Parameter) -> None:
    """Marks an empty parameter that stands for tables that are not parameters."""
    switch.__dict__[_MARK] = _SWITCH


def mark_replaced(weights: Iterable[nn.Parameter]) -> None:
    """Marks parameters that a model no longer uses, because replacements took their place."""
    for weight in weights:
        weight.__dict__[_MARK] = _REPLACED


def in_backward(weights: Iterable[nn.Parameter]) -> list[Optimizer]:
    """The optimizers that torch runs in the backward for these parameters, in order."""
    return [optimizer for weight in weights for optimizer in getattr(weight, "_in_backward_optimizers", ())]


class Untrained:
    """Warns about tables without optimizer in formats that torch cannot train.

    Args:
        tables: the tables, also those in formats that torch can train.
    """

    def __init__(self, tables: Sequence[StoredTable]) -> None:
        self._formats = {t.name: t.format for t in tables if t.format not in FLOAT_DTYPES}
        self._grad_flags: list[RequiresGrad] = []
        self._has_warned = False

    def watch(self, weights: Sequence[nn.Parameter]) -> None:
        """Marks these parameters, the tables' from now on, as trained by nothing."""
        for weight in weights:
            weight.__dict__[_MARK] = _UNTRAINED
            weight.__dict__.setdefault("requires_grad_", RequiresGrad())
        self._grad_flags = list(map(RequiresGrad.of, weights))

    def before_lookup(self, *, training: bool) -> None:
        """Warns once, at the first training lookup with gradients enabled, unless all tables are frozen."""
        if self._has_warned or not training or not any(flag.requires_grad for flag in self._grad_flags):
            return
        if torch.compiler.is_compiling():
            from rec_kernels.ops.graph_breaks import warn_while_traced

            if not is_exporting():
                warn_while_traced(_warn_of_untrained, self._formats)
        else:
            self._has_warned = True
            _warn_of_untrained(self._formats)


def _warn_of_untrained(formats: dict[str, str]) -> None:
    """Emits the UserWarning that nothing trains the collection's tables."""
    warnings.warn(
        "a training lookup by a collection whose tables nothing trains: torch has no gradients of rows in "
        f"formats other than fp32, fp16 and bf16 ({formats} here), nor of tables beside them. Build the collection "
        "with a fused optimizer, such as rk.RowwiseAdagrad(lr=0.05). To leave the tables unchanged, call its "
        "requires_grad_(False), or look up in eval() mode or under torch.no_grad()",
        stacklevel=2,
    )


def _warn(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Step pre-hook of torch optimizers: warns once per optimizer about parameters that it does not train."""
    if optimizer in _checked_optimizers or isinstance(optimizer, FusedOptimizer):
        return
    _checked_optimizers.add(optimizer)
    # TorchRec's CombinedOptimizer mixes groups of fused optimizers with others.
    given = [p for group in optimizer.param_groups if not isinstance(group, FusedGroup) for p in group["params"]]
    marks = {getattr(p, _MARK, None) for p in given}
    if any(getattr(p, _MARK, None) is _UNTRAINED and RequiresGrad.of(p).requires_grad for p in given):
        warnings.warn(
            f"{type(optimizer).__name__} was given tables of a collection that nothing trains: rows in formats "
            "other than fp32, fp16 and bf16 need a fused optimizer. Build it with one, such as "
            "rk.RowwiseAdagrad(lr=0.05), or leave its tables unchanged by giving the optimizer "
            "rk.dense_parameters(model)",
            stacklevel=3,
        )
    if _REPLACED in marks:
        warnings.warn(
            f"{type(optimizer).__name__} was given tables that rk.replace_embeddings has since replaced, and "
            "does not train the new ones: create it from rk.dense_parameters(model) after the replacement, or "
            "pass it as trained_by=",
            stacklevel=3,
        )
    if _FUSED in marks:
        warnings.warn(
            f"{type(optimizer).__name__} was given tables that a fused optimizer updates: its learning rate, "
            "weight decay and schedulers do not affect them. Give it rk.dense_parameters(model); set the "
            "options of tables in their collection's optimizer, and give schedulers collection.fused_optimizer",
            stacklevel=3,
        )


register_optimizer_step_pre_hook(_warn)
