"""Comparison of a model and its fused version: outputs and gradients, bit for bit."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_layers import EmbeddingLayer
from rec_kernels.testing import same_bits


@contextlib.contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restores the training mode of every module at the end of the block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training  # train() would set children, which other parents may have, too
            if isinstance(module, EmbeddingLayer):
                module.train(training)  # sets its collection


class _UndoError(Exception):
    """Aborts ``accumulate()`` blocks, so that they do not update tables and state."""


class _Probe:
    """A model's outputs for an example in eval mode, and the gradients of their sum with fixed random weights.

    Args:
        model: the model; its tables and state are unchanged.
        layers: layers whose outputs get gradients. parameters: parameters that get gradients.
        example: arguments of the model's ``forward``.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, nn.Module], example: tuple, parameters: Sequence[Tensor]
    ) -> None:
        self._outputs: list[tuple[str, Tensor]] = []
        self.by_layer: dict[str, list[Tensor | None]] = defaultdict(list)
        self.of_parameters: list[Tensor | None] = []
        with contextlib.suppress(_UndoError), contextlib.ExitStack() as stack:
            stack.enter_context(preserve_modes(model))
            for collection in _fused_collections(model):
                stack.enter_context(collection.accumulate())
            for name, layer in layers.items():
                stack.callback(layer.register_forward_hook(functools.partial(self._record, name)).remove)
            with torch.enable_grad():
                self.outputs = model.eval()(*_pytree.tree_map_only(Tensor, torch.clone, example))
            found = _gradients(self.outputs, [*(output for _, output in self._outputs), *parameters])
            for name, _ in self._outputs:
                self.by_layer[name].append(found.pop(0))
            self.of_parameters += found
            raise _UndoError

    def _record(self, name: str, _: nn.Module, arguments: Any, output: Any) -> None:
        self._outputs += [(name, each) for each in (output if isinstance(output, list) else [output])]


def _fused_collections(model: nn.Module) -> list[Any]:
    found = [m.collection if isinstance(m, EmbeddingLayer) else m for m in model.modules()]
    return [c for c in dict.fromkeys(found) if isinstance(c, TableCollection) and c.optimizer is not None]


def _gradients(outputs: Any, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each input; None if it has none."""
    leaves = [t for t in _pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    wanted = {i: t for i, t in enumerate(inputs) if t.requires_grad}
    found: list[Tensor | None] = [None] * len(inputs)
    if not leaves or not wanted:
        return found
    generator = torch.Generator().manual_seed(0)
    factors = [torch.rand(t.shape, generator=generator).to(t) for t in leaves]
    gradients = torch.autograd.grad(leaves, list(wanted.values()), factors, allow_unused=True)
    for i, gradient in zip(wanted, gradients, strict=True):
        found[i] = gradient
    return found


def difference(model: nn.Module, fused: nn.Module, calls: Mapping[str, Sequence[str]], example: tuple) -> str:
    """A message if outputs or gradients of two models differ in any bit in eval mode; "": they are equal.

    Args:
        calls: name of a fused module, which returns a list -> the names of the modules in ``model`` that compute the
            list's elements. example: arguments of both models.
    """
    own = set(fused.parameters())
    shared = [p for p in model.parameters() if p in own and p.requires_grad]
    layers = {name: model.get_submodule(name) for names in calls.values() for name in names}
    before = _Probe(model, layers, example, shared)
    try:
        after = _Probe(fused, {name: fused.get_submodule(name) for name in calls}, example, shared)
    except Exception as error:  # the traced graph may raise any exception
        return f"the traced model raises {type(error).__name__}: {error}"
    if not _same(before.outputs, after.outputs):
        return "for example_inputs, outputs differ"
    of_layers = [before.by_layer[name].pop(0) for names in calls.values() for name in names]
    of_calls = [gradient for name in calls for gradient in after.by_layer[name]]
    gradients, others = [*of_layers, *before.of_parameters], [*of_calls, *after.of_parameters]
    return "" if _same(gradients, others) else "for example_inputs, gradients differ"


def _same(one: Any, other: Any) -> bool:
    """True if two pytrees have equal structure and leaves; tensors are compared with ``same_bits``."""
    (ours, shape), (others, other_shape) = _pytree.tree_flatten(one), _pytree.tree_flatten(other)
    pairs = zip(ours, others, strict=False)
    return shape == other_shape and all(
        same_bits(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b for a, b in pairs
    )
