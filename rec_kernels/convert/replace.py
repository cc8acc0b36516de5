"""``replace_embeddings``: this package's modules in the place of the embeddings of a whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rec_kernels.convert.modules import ConvertOptions, convert_embeddings, refusal
from rec_kernels.convert.quantized import is_fbgemm_quantized, is_quantized, quantized_parts
from rec_kernels.convert.tables import is_fbgemm, is_other, is_ours, is_sharded, torchrec_layers
from rec_kernels.convert.torch_peer import TrainedBy, every, parameters_of
from rec_kernels.nn.training.dense_parameters import dense_parameters, in_backward, mark_replaced

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class FoundEmbedding:
    """One module with embeddings that ``rk.replace_embeddings`` has found.

    Args:
        names: its places in the model. kind: its class before.
        tables: name, num_embeddings and embedding_dim of each table; a layer of one table has it as "weight".
        module: what is there now. reason: why it was left as it was; "": it was swapped.
        has_new_parameters: whether optimizers of torch that were made before do not have its tables, and others are to.
    """

    names: list[str]
    kind: str
    tables: list[tuple[str, int, int]]
    module: nn.Module
    reason: str = ""
    has_new_parameters: bool = False

    def __str__(self) -> str:
        tables = ", ".join(f"{name} {rows} x {columns}" for name, rows, columns in self.tables)
        what = f"{' = '.join(self.names)}: {self.kind}" + (f" ({tables})" if tables else "")
        if self.reason:
            return f"{what} left: {self.reason}"
        new = "; its parameters are new, for an optimizer of torch made from now on" if self.has_new_parameters else ""
        return f"{what} -> rk.{type(self.module).__name__}{new}"


@dataclass(frozen=True)
class ReplacedEmbeddings:
    """Result of ``rk.replace_embeddings``; printed, a line for each module.

    Args:
        swapped: the modules that are this package's now. left: those that are as they were, with the reason.
    """

    swapped: list[FoundEmbedding]
    left: list[FoundEmbedding]

    def __str__(self) -> str:
        return "\n".join([f"{len(self.swapped)} swapped, {len(self.left)} left", *map(str, self.swapped + self.left)])


def replace_embeddings(
    model: nn.Module, *, trained_by: TrainedBy = None, **options: Unpack[ConvertOptions]
) -> ReplacedEmbeddings:
    """Swaps the embeddings inside a model for this package's, with their rows and optimizer state, in place.

    ``torch.nn.Embedding`` and ``EmbeddingBag`` become ``rk.Embedding`` and ``rk.EmbeddingBag``, TorchRec's
    ``EmbeddingBagCollection``, fused and quantized ones too, and ``EmbeddingCollection``, quantized ones too, those of
    this package. They are called as before, and the names of rows in ``state_dict()`` stay. Until all are converted,
    the tables are in memory twice.

    Args:
        model: holds the embeddings at any depth, and is not in DistributedDataParallel yet.
        trained_by: optimizers of torch, or TorchRec's wrappers, that train the model; ``rk.import_tables``'s. Tables
            that they have are taken over with their state: such an optimizer of torch loses their parameters, and goes
            on with the others'. A gradient that waits for its step is lost: make the step first.
        options: ``rk.convert_embeddings``'s, for all of them. Without ``optimizer``, each has the counterpart of what
            trained it; without that, its tables are ordinary parameters: of a layer of torch.nn without any option the
            same ones as before, so that optimizers go on; TorchRec's collections, and layers with options, have new
            ones, for optimizers of torch that are made afterwards. Each next module's ``seed`` is larger by one.

    Returns:
        What was swapped and what was left: subclasses, modules with hooks, sharded ones, FBGEMM's (whose ``forward``
        takes other arguments), TorchRec's with managed collisions, options that are not offered, and weights that a
        fused optimizer would have to share with another module.

    Raises:
        TypeError: the model is itself an embedding, or no module. ValueError: DistributedDataParallel has it;
        ``trained_by`` has no table of the model; and as ``rk.convert_embeddings``, with the module's name in front.
        Nothing was changed.
    """
    trainers = every(trained_by)
    _check(model, trainers)
    places: dict[nn.Module, list[_Place]] = defaultdict(list)
    for place in _walk(model, "", set()):
        places[place.module].append(place)
    holders = holders_of(model)
    found: list[FoundEmbedding] = []
    for module, at in places.items():
        own = _Trained(module, [t for t in trainers if _has(t, module)] or (None if trainers else trained_by), options)
        names, reason = [place.name for place in at], _reason(module, own, holders)
        made = module if reason else _convert(own, names[0], len(found))
        anew = not reason and not own.is_parameter and bool(dense_parameters(made))
        found.append(FoundEmbedding(names, type(module).__name__, _tables(module), made, reason, anew))
    for (module, at), entry in zip(places.items(), found, strict=True):
        for place in at:
            place.parent._modules[place.key] = entry.module
        gone = set(module.parameters()) - set(entry.module.parameters())
        mark_replaced(gone)
        for trainer in trainers:
            _forget(trainer, gone)
    return ReplacedEmbeddings([f for f in found if not f.reason], [f for f in found if f.reason])


@dataclass(frozen=True)
class _Place:
    """A module with embeddings, and where it is."""

    name: str
    parent: nn.Module
    key: str
    module: nn.Module


@dataclass(frozen=True)
class _Trained:
    """A module with embeddings, what trains it, and the options of its replacement."""

    module: Any
    trained_by: TrainedBy
    options: ConvertOptions

    @property
    def is_parameter(self) -> bool:
        """True if the replacement has the very parameter of the module."""
        layer = type(self.module) in (nn.Embedding, nn.EmbeddingBag)
        applied = self.trained_by is None and in_backward(self.module.parameters())
        fused = "optimizer" not in self.options and (self.trained_by or applied)
        return layer and not fused and all(value is None for value in self.options.values())


def _check(model: Any, trainers: list[torch.optim.Optimizer]) -> None:
    """Raises TypeError or ValueError if it cannot be a model whose embeddings are replaced."""
    if not isinstance(model, nn.Module) or _is_embedding(model):
        raise TypeError(
            f"model must be a module that has embeddings inside, got {type(model).__name__}: rk.convert_embeddings is "
            "for a single one"
        )
    wrapped = [name for name, m in model.named_modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    if wrapped:
        raise ValueError(
            f"model: {wrapped[0] or 'it'} is a DistributedDataParallel, which has noted its parameters: replace first, "
            "then wrap"
        )
    if trainers and not any(_has(t, place.module) for t in trainers for place in _walk(model, "", set())):
        raise ValueError("trained_by has no table of the model: it must be optimizers that have model.parameters()")


def _walk(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[_Place]:
    """The places of embeddings below a module."""
    seen.add(module)
    for key, child in module._modules.items():
        name = f"{prefix}{key}"
        if child is None or is_ours(child):
            continue
        if _is_embedding(child):
            yield _Place(name, module, key, child)
        elif child not in seen:
            yield from _walk(child, f"{name}.", seen)


def _is_embedding(module: Any) -> bool:
    is_layer = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    is_theirs = is_fbgemm(module) or is_quantized(module) or torchrec_layers(module) is not None or is_other(module)
    return is_layer or is_theirs or is_sharded(module)


def _tables(module: Any) -> list[tuple[str, int, int]]:
    if is_fbgemm(module):
        return [(f"t{i}", *spec[:2]) for i, spec in enumerate(module.embedding_specs)]
    if is_quantized(module):
        return [spec[:3] for part in quantized_parts(module) for spec in part.embedding_specs]
    unknown = is_sharded(module) or is_other(module)
    layers: dict[str, Any] = torchrec_layers(module) or ({} if unknown else {"weight": module})
    return [(name, *layer.weight.shape) for name, layer in layers.items()]


def holders_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """Parameter -> its names in the model: several where modules share it."""
    found: dict[Tensor, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[parameter].append(f"{name}.{key}" if name else key)
    return found


def _has(trainer: torch.optim.Optimizer, module: nn.Module) -> bool:
    """True if an optimizer has a parameter of a module."""
    own = set(module.parameters())
    return any(p in own for p in parameters_of(trainer))


def _reason(module: Any, own: _Trained, holders: dict[Tensor, list[str]]) -> str:
    """A reason to leave a module; "": it can be swapped."""
    if is_fbgemm(module) or is_fbgemm_quantized(module):
        return "FBGEMM's module takes ids and offsets: rk.convert_embeddings makes a collection of it"
    if is_other(module):
        return f"no module here takes the place of {type(module).__module__}.{type(module).__name__}"
    if reason := refusal(module):
        return reason
    for parameter in module.parameters():
        if len(holders[parameter]) > 1 and not own.is_parameter:
            return f"its weight is {' and '.join(holders[parameter])}, and one module's alone where it is fused"
    return ""


def _convert(own: _Trained, name: str, number: int) -> nn.Module:
    """The module's replacement; errors have its name in front."""
    options: Any = {**own.options}
    if own.trained_by and options.get("optimizer", True) is None and not own.is_parameter:
        raise ValueError(
            f"{name}: with optimizer=None its tables have new parameters, which trained_by does not have: leave out "
            "trained_by and make torch's optimizer afterwards, or leave out optimizer"
        )
    if not own.is_parameter and not is_quantized(own.module):
        options["seed"] = (options.get("seed") or 0) + number
    try:
        return convert_embeddings(own.module, trained_by=own.trained_by, **options)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}") from error


def _forget(trainer: Any, gone: set[Any]) -> None:
    """Takes parameters out of an optimizer or a wrapper of TorchRec's. Groups stay, as schedulers count them."""
    named = vars(trainer).get("params")
    if isinstance(named, dict):
        for name in [name for name, parameter in named.items() if parameter in gone]:
            del named[name]
    if hasattr(trainer, "_replicate_params"):  # whose gradients are clipped together
        trainer._replicate_params = [p for p in trainer._replicate_params if p not in gone]
    for group in trainer.param_groups:
        group["params"] = [p for p in group["params"] if p not in gone]
    for parameter in gone:
        trainer.state.pop(parameter, None)
