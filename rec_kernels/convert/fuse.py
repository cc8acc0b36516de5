"""``fuse_embedding_bags`` merges lookups of several ``rk.EmbeddingBag``s into collection lookups with torch.fx."""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from rec_kernels.convert.compare import difference, preserve_modes
from rec_kernels.convert.modules import HOOKS
from rec_kernels.convert.replace import parameter_names
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_layers import EmbeddingBag, EmbeddingLayer
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.nn.tables.config import EmbeddingBagConfig
from rec_kernels.nn.tables.parameters import RequiresGrad
from rec_kernels.ops.embedding_bag import read_bags

_OPTIONS = ("optimizer", "output_dtype", "bounds_check", "rounding", "seed")
_ARGUMENTS = ("input", "offsets", "per_sample_weights")


@dataclass(frozen=True)
class FusedEmbeddingBags:
    """Result of ``rk.fuse_embedding_bags``; ``str()`` has one line per group.

    Args:
        model: a ``torch.fx.GraphModule``, or the original model if nothing was fused.
        groups: the layer names of each fused call, one name per lookup.
        reason: why nothing was fused; "": at least one group was.
        apart: name of a layer that was not fused -> the reason.
    """

    model: nn.Module
    groups: list[list[str]]
    reason: str
    apart: dict[str, str]

    def __str__(self) -> str:
        lines = [f"one call: {', '.join(group)}" for group in self.groups]
        lines += [f"nothing fused: {self.reason}"] * bool(self.reason)
        return "\n".join(lines + [f"{name} by itself: {why}" for name, why in self.apart.items()])


def fuse_embedding_bags(model: nn.Module, *example_inputs: Any) -> FusedEmbeddingBags:
    """Fuse the lookups of several ``rk.EmbeddingBag``s into single kernel calls, in a ``torch.fx.GraphModule``.

    torch.fx must trace the model, to equal graphs in training and evaluation. Lookups are fused if no node between them
    uses the result of one or may write in place. Layers need fused optimizers, and equal steps and options; optimizers,
    learning rates, row formats and widths may differ. Outputs and gradients for the example are compared bit for bit
    before the result is returned. Training is also bit-identical, with two exceptions: gradients of a layer that is
    looked up twice are added in another order, and stochastic rounding noise depends on a table's index in its
    collection.

    Args:
        model: a model with ``rk.EmbeddingBag``s, such as the result of ``rk.replace_embeddings``. Its ``forward`` runs
            three times, which is visible only in state that ``forward`` itself changes. The result copies the tables
            and shares all other modules; discard the model afterwards.
        example_inputs: arguments of the model's ``forward`` for an example batch.

    Returns:
        The fused module, with the model's ``forward`` signature. ``rk.EmbeddingBagCollection``s replace the layers;
        their tables have the layers' rows, state and names, with ``_`` for dots. If torch.fx cannot trace the model, no
        two layers can be fused, or outputs or gradients differ: the model itself, and the reason.

    Raises:
        TypeError: ``model`` is not a module. ValueError: no example was given.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not example_inputs:
        raise ValueError(
            "example_inputs must be arguments of the model's forward, to compare the outputs with and without fusing"
        )
    traced, reason = _trace(model, example_inputs)
    if traced is None:
        return FusedEmbeddingBags(model, [], reason, {})
    groups, apart = _groups(traced, parameter_names(model))
    if not groups:
        return FusedEmbeddingBags(model, [], "there are no two lookups that may be one", apart)
    names = [[str(node.target) for node in group] for group in groups]
    calls = [f"fused_embedding_bags_{number}" for number in range(len(groups))]
    for call, group in zip(calls, groups, strict=True):
        _fuse(traced, group, call)
    traced.delete_all_unused_submodules()
    traced.recompile()
    if different := difference(model, traced, dict(zip(calls, names, strict=True)), example_inputs):
        return FusedEmbeddingBags(model, [], different, apart)
    return FusedEmbeddingBags(traced, names, "", apart)


class _Tracer(fx.Tracer):
    """A tracer that treats this package's modules as leaves, like torch.nn's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (EmbeddingLayer, TableCollection)) or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module, example: tuple) -> tuple[fx.GraphModule | None, str]:
    """Traces the model; returns the graph, or None and the reason for failure."""
    graphs = []
    placeholders = _containers(model, example)
    with preserve_modes(model):
        for training in (True, False):
            before = set(model.__dict__)
            try:
                graphs.append(fx.GraphModule(model, _Tracer().trace(model.train(training), placeholders)))
            except Exception as error:  # torch.fx runs the model's code, which may raise any exception
                return None, f"torch.fx cannot trace the model: {type(error).__name__}: {error}"
            finally:
                for name in set(model.__dict__) - before:  # constants that torch.fx adds to the model
                    delattr(model, name)
    graphs[0].training = model.training
    if str(graphs[0].graph) != str(graphs[1].graph):
        return None, "torch.fx has another graph in training than in evaluation"
    for node in graphs[0].graph.nodes:
        node.type = None  # a string under postponed annotations, which torch.fx cannot pickle
    return graphs[0], ""


def _containers(model: nn.Module, example: tuple) -> dict[str, Any]:
    """The container arguments (lists, tuples, dicts), with torch.fx's placeholder instead of each leaf."""
    arguments = inspect.signature(model.forward).bind(*example).arguments
    containers = {name: value for name, value in arguments.items() if isinstance(value, (list, tuple, dict))}
    return {name: _pytree.tree_map(lambda _: fx.PH, value) for name, value in containers.items()}


def _groups(traced: fx.GraphModule, owners: Mapping[Tensor, list[str]]) -> tuple[list[list[fx.Node]], dict[str, str]]:
    """Groups of lookups that can be fused, in graph order; and layer name -> reason for the others."""
    apart, used = {}, [str(node.target) for node in traced.graph.nodes if node.op == "get_attr"]
    for node, layer in _lookups(traced):
        name = str(node.target)
        if any(attribute.startswith(f"{name}.") for attribute in used):
            apart[name] = "its weight is used beside lookups"
        elif reason := _reason_not_to_fuse(layer, owners):
            apart[name] = reason
    while True:
        groups, groups_of = _runs(traced, apart), defaultdict(set)
        for number, group in enumerate(groups):
            for node in group:
                groups_of[str(node.target)].add(number)
        scattered = [name for name, numbers in groups_of.items() if len(numbers) > 1]
        if not scattered:
            break
        apart |= dict.fromkeys(scattered, "something between its lookups keeps them apart")
    single = [str(group[0].target) for group in groups if len(group) == 1]
    apart |= dict.fromkeys(single, "no other lookup may be made with it")
    return [group for group in groups if len(group) > 1], apart


def _lookups(traced: fx.GraphModule) -> list[tuple[fx.Node, EmbeddingBag]]:
    """The nodes that call an ``rk.EmbeddingBag``."""
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    found = [(node, traced.get_submodule(str(node.target))) for node in calls]
    return [(node, layer) for node, layer in found if isinstance(layer, EmbeddingBag)]


def _runs(traced: fx.GraphModule, apart: Mapping[str, str]) -> list[list[fx.Node]]:
    """Groups lookups with equal options such that no node between them uses a result or may write in place."""
    found: list[list[fx.Node]] = []
    layers: dict[fx.Node, Any] = dict(_lookups(traced))
    open_runs: list[list[fx.Node]] = []
    for node in traced.graph.nodes:
        writes = _may_write(node, traced)
        closed = [run for run in open_runs if writes or set(node.all_input_nodes) & set(run)]
        found += closed
        open_runs = [run for run in open_runs if run not in closed]
        if node not in layers or node.target in apart:
            continue
        same = [run for run in open_runs if _options(layers[run[0]]) == _options(layers[node])]
        if same:
            same[0].append(node)
        else:
            open_runs.append([node])
    return found + open_runs


def _may_write(node: fx.Node, traced: fx.GraphModule) -> bool:
    """True if a node may write a tensor that a lookup reads; lookups are not moved past it."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    if node.op != "call_function":
        return False
    module = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
    name = getattr(node.target, "__name__", "")
    if module == "_operator":
        return False  # torch.fx records no in-place operators
    options = node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace", False))
    return options or name.endswith("_") or module not in ("torch", "math", "builtins")


def _reason_not_to_fuse(layer: EmbeddingBag, owners: Mapping[Tensor, list[str]]) -> str:
    """The reason why a layer cannot be a table of a collection; "": it can."""
    collection = layer.collection
    if collection is None or collection.optimizer is None:
        return "it has no fused optimizer"
    if layer.mode == "max":
        return 'its mode is "max"'
    for name, has in (
        ("a row cache", collection.row_cache is not None),
        ("a compression", collection.tables[0].compression is not None),
        ("a GradScaler, which copies do not have", collection._update._scaler is not None),
        ("a frozen feature", bool(collection._layout.frozen)),
        ("hooks", any(getattr(layer, name) for name in HOOKS)),
    ):
        if has:
            return f"it has {name}"
    others = owners[layer.weight]
    return f"its weight is {' and '.join(others)}" if len(others) > 1 else ""


def _options(layer: EmbeddingBag) -> tuple:
    """The state and options that all tables of a collection share."""
    collection = layer.collection
    state = int(collection.step), collection.device, layer.training
    return *state, collection.output_dtype, collection.bounds_check, collection.rounding


class _FusedBags(nn.Module):
    """Computes the lookups of several layers as one collection lookup.

    Args:
        layers: table name -> the layer that provides its rows and state.
        calls: the table of each lookup, and its ``include_last_offset``.
    """

    def __init__(self, layers: dict[str, EmbeddingBag], calls: list[tuple[str, bool]]) -> None:
        super().__init__()
        self._last = [last for _, last in calls]
        self._keys = [f"{name}_{i}" for i, (name, _) in enumerate(calls)]
        features = {name: [k for k, (n, _) in zip(self._keys, calls, strict=True) if n == name] for name in layers}
        first: Any = next(iter(layers.values()))
        tables = [
            replace(_config(layer, first), name=name, feature_names=features[name], init=nn.init.zeros_)
            for name, layer in layers.items()
        ]
        options = {name: getattr(first.collection, name) for name in _OPTIONS}
        self.collection = EmbeddingBagCollection(tables, device=first.collection.device, **options)
        state = {}
        for name, layer in layers.items():
            for kind, values in layer.collection.state_dict().items():
                state[kind.replace("embedding_bags.weight.", f"embedding_bags.{name}.", 1)] = values
        self.collection.load_state_dict(state)
        self.collection.fused_optimizer.param_groups[0]["lr"] = float(first.collection.lr)
        for name, layer in layers.items():
            self.collection.embedding_bags[name].weight.requires_grad_(RequiresGrad.of(layer.weight).requires_grad)
        self.train(first.training)

    def forward(self, calls: Sequence[tuple[Tensor, Tensor | None, Tensor | None]]) -> list[Tensor]:
        """The outputs [B_i, D_i] of lookups, each with ``input``, ``offsets`` and ``per_sample_weights``."""
        bags = [read_bags(*call, last) for call, last in zip(calls, self._last, strict=True)]
        if any(factors is not None for *_, factors in bags):  # all lookups need weights then; 1 changes nothing
            bags = [(i, o, torch.ones_like(i, dtype=torch.float32) if f is None else f.float()) for i, o, f in bags]
        each = [KeyedJaggedTensor([k], i, f, offsets=o) for k, (i, o, f) in zip(self._keys, bags, strict=True)]
        found = self.collection.by_feature(KeyedJaggedTensor.concat(each))
        return [found[key] for key in self._keys]


def _config(layer: EmbeddingBag, first: EmbeddingBag) -> EmbeddingBagConfig:
    """The table configuration of a layer, with its own optimizer and lr if they differ from the first layer's."""
    config: Any = layer.collection.tables[0]
    optimizer, rate = layer.collection.optimizer, float(layer.collection.lr)
    if optimizer == first.collection.optimizer and rate == float(first.collection.lr):
        return config
    return replace(config, optimizer=optimizer, lr=rate)


def _fuse(traced: fx.GraphModule, group: list[fx.Node], name: str) -> None:
    """Replaces a group of lookups by one call after the last of them."""
    names: dict[str, str] = {}
    for node in group:
        base = str(node.target).replace(".", "_")
        used = {other for target, other in names.items() if target != node.target}
        names[str(node.target)] = base if base not in used else f"{base}_{len(names)}"
    layers: dict[str, Any] = {own: traced.get_submodule(target) for target, own in names.items()}
    calls = [(names[str(n.target)], layers[names[str(n.target)]].include_last_offset) for n in group]
    traced.add_submodule(name, _FusedBags(layers, calls))
    inputs = []
    for node in group:
        arguments = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
        inputs.append(tuple(arguments.get(name) for name in _ARGUMENTS))
    with traced.graph.inserting_after(group[-1]):
        call = traced.graph.call_module(name, (inputs,))
    at = call
    for number, node in enumerate(group):
        with traced.graph.inserting_after(at):
            at = traced.graph.call_function(operator.getitem, (call, number))
        node.replace_all_uses_with(at)
        traced.graph.erase_node(node)
