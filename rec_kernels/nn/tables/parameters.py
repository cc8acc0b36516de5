"""The modules that hold a collection's parameters, one per table."""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.load_state import copied


class RequiresGrad:
    """Replaces ``requires_grad_`` of a parameter that torch cannot train, so that a model's ``requires_grad_`` works.

    It is set on byte parameters, for which torch raises, and on parameters of collections whose tables nothing trains.
    It returns None and does not change torch's own ``requires_grad``.

    Attributes:
        requires_grad: True if the table is trained.
    """

    def __init__(self, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad

    def __call__(self, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad

    @staticmethod
    def of(weight: Tensor) -> Any:
        """The object with a table's ``requires_grad``: the weight, or its ``RequiresGrad``."""
        return weight.__dict__.get("requires_grad_", weight)

    @staticmethod
    def copy_to(before: Tensor, after: Tensor) -> None:
        """Copies the ``RequiresGrad`` of a parameter, if any, to its replacement."""
        if "requires_grad_" in before.__dict__:
            after.__dict__["requires_grad_"] = RequiresGrad(before.__dict__["requires_grad_"].requires_grad)


def refuse_replacing(module: nn.Module, name: str, other: object, holder: str | None = None) -> None:
    """Raises RuntimeError if a module that holds tables would be replaced. DataParallel replicas are exempt.

    Args:
        module: the parent module. name: the attribute. other: the new value.
        holder: the only attribute that is protected; None: all are.
    """
    if holder not in (None, name) or "_is_replica" in module.__dict__:
        return
    if other is None or other is not module._modules.get(name):
        raise RuntimeError(
            f"{name} of {type(module).__name__} cannot be replaced by another module: lookups read the "
            "collection's own memory. Create a new collection, or write the weights in place, with "
            "load_state_dict(), or with copy_() under torch.no_grad()"
        )


def refuse_reset(module: nn.Module) -> NoReturn:
    """Raises RuntimeError: a collection cannot initialize its tables again."""
    raise RuntimeError(
        f"reset_parameters() of {type(module).__name__}: the rows of its tables are initialized only once, when "
        "it is created. Create a new one, or load a state: to_empty() leaves rows, optimizer state and step "
        "undefined"
    )


class Table(nn.Module):
    """Holds one table's parameters: views of the collection's flat tensors, and the projection, if any."""

    weight: nn.Parameter
    projection: nn.Parameter  # only for tables with a projection
    in_bytes = False  # True if the flat weight tensor is uint8, and torch's optimizers do not train its views
    in_file = False  # True if the weights are in a file, and not part of a state

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        views = ["weight", *self._views()]
        if self.in_file:
            del destination[prefix + views.pop(0)]
        # Each entry gets its own storage in the same memory: pickle writes the whole storage of a view, and torch.save
        # rejects a storage with several dtypes. With keep_vars, entries may be the module's own parameters.
        for name in [] if keep_vars and not self.in_bytes else views:
            rows = destination[prefix + name].detach()
            if type(rows) is Tensor and not rows.is_meta:
                own = torch.from_dlpack(rows)
                is_parameter = keep_vars and name == "weight"
                destination[prefix + name] = nn.Parameter(own, requires_grad=False) if is_parameter else own

    def _views(self) -> dict[str, Tensor]:
        """The fused optimizer's state tensors, which are views of flat tensors like the weight."""
        return {name: t for name, t in self._buffers.items() if name != "format"}

    def empty_views(self) -> dict[int, Tensor]:
        """Maps the ``id`` of each view of a flat tensor to an empty tensor of the same kind."""
        return {id(self.weight): self._empty_weight()} | {id(t): t.new_empty(0) for t in self._views().values()}

    def without_rows(self) -> Table:
        """Copies the table with an empty weight and no state, for pickling; its collection pickles the rows."""
        other = copy.copy(self)
        other._parameters = {**self._parameters, "weight": self._empty_weight()}
        other._buffers = {name: t for name, t in self._buffers.items() if name == "format"}
        return other

    def _empty_weight(self) -> nn.Parameter:
        empty = nn.Parameter(self.weight.detach().new_empty(0), requires_grad=self.weight.requires_grad)
        RequiresGrad.copy_to(self.weight, empty)
        return empty

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        *args: object,
    ) -> None:
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, copied(local_metadata), strict, missing, *args)
        missing_keys += [name for name in missing if not (self.in_file and name == f"{prefix}weight")]


class Tables(nn.Module):
    """name -> Table. Unlike nn.ModuleDict, any name is allowed, "type" and "keys" too: ``tables["keys"]`` is a table.

    Args:
        features: the collection's features. weights: the flat tensor; each table's weight is a view of it.
        in_bytes, in_file: see ``Table``.
        trains: True if weights of float dtypes require gradients.
        device: device of the projections.
    """

    def __init__(
        self,
        features: FeatureMap,
        weights: Tensor,
        *,
        in_bytes: bool,
        in_file: bool,
        trains: bool,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self._modules.update({table.name: Table() for table in features.stored})
        for i, table in enumerate(features.stored):
            holder = self[table.name]
            rows = features.storage.view(weights, i)
            holder.weight = nn.Parameter(rows, requires_grad=trains and rows.is_floating_point())
            holder.in_bytes, holder.in_file = in_bytes, in_file
        for config in features.tables:
            if config.projection:
                matrix = torch.empty(config.projection, dtype=torch.float32, device=device)
                self[config.name].projection = nn.Parameter(nn.init.xavier_uniform_(matrix))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) or name in self.__dict__.get("_modules", ()):
            refuse_replacing(self, name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Raises RuntimeError: tables cannot be added or replaced."""
        refuse_replacing(self, name, module)

    def weights(self) -> list[nn.Parameter]:
        """The tables' parameters."""
        return [self[name].weight for name in self]

    def without_rows(self) -> Tables:
        """Copies the tables for pickling, each by ``Table.without_rows``."""
        other = copy.copy(self)
        other._modules = {name: self[name].without_rows() for name in self}
        return other

    def __getitem__(self, name: str) -> Table:
        table: Any = self._modules[name]
        return table

    def keys(self) -> KeysView[str]:
        """The tables' names, in their order."""
        return self._modules.keys()

    def values(self) -> ValuesView[Table]:
        """The tables' modules."""
        return self._by_name.values()

    def items(self) -> ItemsView[str, Table]:
        """Names and modules."""
        return self._by_name.items()

    @property
    def _by_name(self) -> dict[str, Table]:
        modules: Any = self._modules
        return modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules
