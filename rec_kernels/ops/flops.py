"""Formulas by which ``torch.utils.flop_counter.FlopCounterMode`` counts the ops that multiply matrices.

As in torch, a multiply-add counts as two operations and anything else as none. An op counts its mathematical work, not
what a backend recomputes to save memory.

``torch.utils.flop_counter`` imports Triton, which takes longer than all of ``rec_kernels``. The formulas are registered
when the user imports it, before ``rec_kernels`` or after.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

import torch

from rec_kernels.ops.dot_interaction import num_pairs
from rec_kernels.ops.grouped_projection import num_weights

_ops = torch.ops.rec_kernels
Shape = Sequence[int]


def _dot_interaction(dense: Shape, sparse: Shape, self_interaction: bool = False, *_, **__) -> int:
    """A product of D terms for each pair."""
    batch, columns = dense
    return 2 * batch * num_pairs(sparse[1], self_interaction) * columns


def _dot_interaction_backward(grad: Shape, *forward, **options) -> int:
    """A pair's gradient goes to both of its vectors."""
    return 2 * _dot_interaction(*forward, **options)


def _factorization_machine(x: Shape, y: Shape, *_, **__) -> int:
    """x^T y, and x times that."""
    batch, vectors, columns = x
    return 2 * 2 * batch * vectors * columns * y[-1]


def _factorization_machine_backward(grad: Shape, *forward, **options) -> int:
    """The gradients of both factors of both products."""
    return 2 * _factorization_machine(*forward, **options)


def _grouped_projection(
    x: Shape, weights: Shape, in_dims: Shape, out_dims: Shape, outputs: Shape, *, out_shape: Shape
) -> int:
    """A matrix for each group but those that are copied; also of the gradients, where x is grad."""
    return 2 * x[0] * num_weights(in_dims, out_dims, outputs)


_FORMULAS = {
    _ops.dot_interaction: _dot_interaction,
    _ops.dot_interaction_backward: _dot_interaction_backward,
    _ops.factorization_machine: _factorization_machine,
    _ops.factorization_machine_backward: _factorization_machine_backward,
    _ops.grouped_projection: _grouped_projection,
    _ops.grouped_projection_backward_input: _grouped_projection,
    _ops.grouped_projection_backward_weights: _grouped_projection,
}
_COUNTER = "torch.utils.flop_counter"


def _register(counter: ModuleType) -> None:
    for op, formula in _FORMULAS.items():
        counter.register_flop_formula(op)(formula)


class _Loader(SourceFileLoader):
    """Runs the counter's module and registers the formulas."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _register(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _WhenImported)]


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds the counter's module where Python does, and has it run by ``_Loader``.

    A ``FlopCounterMode`` copies the formulas when it is made: at an op's first call it would be too late.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the counter's module spec with a loader that registers the formulas; None for other modules."""
        if name != _COUNTER:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


if _COUNTER in sys.modules:
    _register(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _WhenImported())
