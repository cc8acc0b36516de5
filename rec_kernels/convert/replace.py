"""``replace_embeddings`` replaces all embedding modules of a model by this package's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rec_kernels.convert.kinds import QUANTIZED, Kind, kind_of, layers_of
from rec_kernels.convert.modules import convert_embeddings, refusal
from rec_kernels.convert.quantized import quantized_parts
from rec_kernels.convert.torch_tables import TrainedBy, flatten_optimizers, parameters_of
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.collection_options import CollectionOptions
from rec_kernels.nn.embedding_layers import EmbeddingLayer
from rec_kernels.nn.training.dense_parameters import dense_parameters, in_backward, mark_replaced

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class FoundEmbedding:
    """An embedding module that ``rk.replace_embeddings`` found in the model.

    Args:
        names: its qualified names in the model; several if it is shared.
        kind: the name of its original class.
        tables: (name, num_embeddings, embedding_dim) of each table; a single-table layer's name is "weight".
        module: the module that the model has now.
        reason: why it was not replaced; "": it was replaced.
        has_new_parameters: True if its tables are new parameters, which existing torch optimizers do not train.
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
    """Result of ``rk.replace_embeddings``; ``str()`` has one line per module.

    Args:
        swapped: the modules that were replaced. left: the modules that were not, each with the reason.
    """

    swapped: list[FoundEmbedding]
    left: list[FoundEmbedding]

    def __str__(self) -> str:
        return "\n".join([f"{len(self.swapped)} swapped, {len(self.left)} left", *map(str, self.swapped + self.left)])


def replace_embeddings(
    model: nn.Module, *, trained_by: TrainedBy = None, **options: Unpack[CollectionOptions]
) -> ReplacedEmbeddings:
    """Replaces the embeddings of a model by this package's, in place, with their rows and optimizer state.

    ``torch.nn.Embedding`` and ``EmbeddingBag`` become ``rk.Embedding`` and ``rk.EmbeddingBag``. TorchRec's
    ``EmbeddingBagCollection`` (also fused or quantized) and ``EmbeddingCollection`` (also quantized) become this
    package's. Their calls and the names of their rows in ``state_dict()`` do not change. Until all are converted, the
    tables are in memory twice.

    Args:
        model: a module with embeddings at any depth, not yet wrapped in DistributedDataParallel.
        trained_by: the torch optimizers, or TorchRec's wrappers, that train the model; see ``rk.import_tables``. The
            replaced tables' state is moved: these optimizers drop their parameters and continue with the others.
            Pending gradients of these tables are lost: call ``step()`` first.
        options: options of ``rk.convert_embeddings``, for all modules. Without ``optimizer``, each module gets the
            counterpart of the optimizer that trained it. If none is known, its tables are ordinary parameters: a
            torch.nn layer converted without any options keeps its parameters, so existing optimizers continue;
            TorchRec collections and layers with options have new ones, which need a new torch optimizer. ``seed``
            increases by one from module to module.

    Returns:
        The modules that were replaced and those that were not: subclasses, modules with hooks, sharded modules,
        FBGEMM's modules (their ``forward`` has other arguments), TorchRec modules with managed collisions, unsupported
        options, and weights that a fused optimizer would share with another module.

    Raises:
        TypeError: the model is itself an embedding, or is not a module.
        ValueError: the model is in DistributedDataParallel; ``trained_by`` has no table of the model; or an error of
            ``rk.convert_embeddings``, prefixed with the module's name. The model is unchanged.
    """
    trainers = flatten_optimizers(trained_by)
    _check_model(model)
    sites: dict[nn.Module, list[_Site]] = defaultdict(list)
    for site in _walk(model, "", set()):
        sites[site.module].append(site)
    if trainers and not any(_has(trainer, module) for trainer in trainers for module in sites):
        raise ValueError("trained_by has no table of the model: it must be the optimizers of model.parameters()")
    owners = parameter_names(model)
    found: list[FoundEmbedding] = []
    for module, uses in sites.items():
        own = [t for t in trainers if _has(t, module)] or (None if trainers else trained_by)
        conversion = _Conversion(module, own, options)
        names, reason = [site.name for site in uses], _reason_to_skip(conversion, owners)
        new = module if reason else _convert(conversion, names[0], len(found))
        is_new = not reason and not conversion.keeps_parameter and bool(dense_parameters(new))
        found.append(FoundEmbedding(names, type(module).__name__, _tables(module), new, reason, is_new))
    for (module, uses), entry in zip(sites.items(), found, strict=True):
        for site in uses:
            site.parent._modules[site.key] = entry.module
        replaced = set(module.parameters()) - set(entry.module.parameters())
        mark_replaced(replaced)
        for trainer in trainers:
            _remove_parameters(trainer, replaced)
    return ReplacedEmbeddings([f for f in found if not f.reason], [f for f in found if f.reason])


@dataclass(frozen=True)
class _Site:
    """One registration of an embedding module: its parent module and its key there."""

    name: str
    parent: nn.Module
    key: str
    module: nn.Module


@dataclass(frozen=True)
class _Conversion:
    """An embedding module, the optimizers that train it, and the options of its replacement."""

    module: Any
    trained_by: TrainedBy
    options: CollectionOptions

    @property
    def keeps_parameter(self) -> bool:
        """True if the replacement reuses the module's parameter object."""
        layer = type(self.module) in (nn.Embedding, nn.EmbeddingBag)
        applied = self.trained_by is None and in_backward(self.module.parameters())
        fused = "optimizer" not in self.options and (self.trained_by or applied)
        return layer and not fused and all(value is None for value in self.options.values())


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or kind_of(model) is not None:
        raise TypeError(
            f"model must be a module that contains embeddings, got {type(model).__name__}: convert a single "
            "embedding with rk.convert_embeddings"
        )
    wrapped = [name for name, m in model.named_modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    if wrapped:
        raise ValueError(
            f"model: {wrapped[0] or 'it'} is a DistributedDataParallel, which has already registered its "
            "parameters: replace the embeddings before wrapping"
        )


def _walk(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[_Site]:
    """Yields every registration of an embedding module below ``module``."""
    seen.add(module)
    for key, child in module._modules.items():
        name = f"{prefix}{key}"
        if child is None or _is_ours(child):
            continue
        if kind_of(child) is not None:
            yield _Site(name, module, key, child)
        elif child not in seen:
            yield from _walk(child, f"{name}.", seen)


def _is_ours(module: nn.Module) -> bool:
    """True for this package's layers and collections, including sharded ones."""
    is_sharded = kind_of(module) is Kind.SHARDED and type(module).__module__.startswith("rec_kernels.")
    return is_sharded or isinstance(module, (EmbeddingLayer, TableCollection))


def _tables(module: Any) -> list[tuple[str, int, int]]:
    kind = kind_of(module)
    if kind is Kind.FBGEMM:
        return [(f"t{i}", *spec[:2]) for i, spec in enumerate(module.embedding_specs)]
    if kind in QUANTIZED:
        return [spec[:3] for part in quantized_parts(module) for spec in part.embedding_specs]
    return [(name, *layer.weight.shape) for name, layer in layers_of(module).items()]


def parameter_names(model: nn.Module) -> dict[Tensor, list[str]]:
    """Parameter -> its qualified names in the model; several if modules share it."""
    found: dict[Tensor, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[parameter].append(f"{name}.{key}" if name else key)
    return found


def _has(trainer: torch.optim.Optimizer, module: nn.Module) -> bool:
    """True if the optimizer has a parameter of the module."""
    own = set(module.parameters())
    return any(p in own for p in parameters_of(trainer))


def _reason_to_skip(conversion: _Conversion, owners: dict[Tensor, list[str]]) -> str:
    """The reason not to replace a module; "": it can be replaced."""
    module, kind = conversion.module, kind_of(conversion.module)
    if kind in (Kind.FBGEMM, Kind.FBGEMM_QUANTIZED):
        return "FBGEMM's module takes ids and offsets: rk.convert_embeddings makes a collection of it"
    if kind is Kind.OTHER:
        return f"no module here replaces {type(module).__module__}.{type(module).__name__}"
    if reason := refusal(module):
        return reason
    for parameter in module.parameters():
        if len(owners[parameter]) > 1 and not conversion.keeps_parameter:
            return f"its weight is shared ({' and '.join(owners[parameter])}), and its replacement would have its own"
    return ""


def _convert(conversion: _Conversion, name: str, seed_offset: int) -> nn.Module:
    """Converts the module; errors are prefixed with its name."""
    options: Any = {**conversion.options}
    if conversion.trained_by and options.get("optimizer", True) is None and not conversion.keeps_parameter:
        raise ValueError(
            f"{name}: with optimizer=None its tables have new parameters, which trained_by does not have: omit "
            "trained_by and create torch's optimizer afterwards, or omit optimizer"
        )
    if not conversion.keeps_parameter and kind_of(conversion.module) not in QUANTIZED:
        options["seed"] = (options.get("seed") or 0) + seed_offset
    try:
        return convert_embeddings(conversion.module, trained_by=conversion.trained_by, **options)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}") from error


def _remove_parameters(trainer: Any, removed: set[Any]) -> None:
    """Removes parameters from an optimizer or TorchRec wrapper. Empty groups stay, because schedulers count groups."""
    named = vars(trainer).get("params")
    if isinstance(named, dict):
        for name in [name for name, parameter in named.items() if parameter in removed]:
            del named[name]
    if hasattr(trainer, "_replicate_params"):  # TorchRec clips the gradients of these parameters together
        trainer._replicate_params = [p for p in trainer._replicate_params if p not in removed]
    for group in trainer.param_groups:
        group["params"] = [p for p in group["params"] if p not in removed]
    for parameter in removed:
        trainer.state.pop(parameter, None)
