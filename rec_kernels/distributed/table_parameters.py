"""A rank's shards as parameters for torch's optimizers, and the parameter that freezes fused ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.tables.parameters import Tables
from rec_kernels.nn.training.accumulate import Lookup
from rec_kernels.nn.training.dense_parameters import mark_switch
from rec_kernels.ops.embedding_bag import split_tables

_ops = torch.ops.rec_kernels


class _ParameterView(nn.Module):
    """A view of another module's parameters: that module moves and loads them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _ParameterView:
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Loads nothing."""


class TableViews(_ParameterView, Tables):
    """Views of the parameters of a rank's shards by table: name -> module, as ``Tables``.

    Args:
        tables: name -> the module that holds the table's weight. only: the parameter to include; None: all.
    """

    def __init__(self, tables: Mapping[str, nn.Module], only: str | None = None) -> None:
        nn.Module.__init__(self)
        for name, table in tables.items():
            view = self._modules[name] = _ParameterView()
            # The table's own dict, if it has all parameters: moves replace its items.
            view.__dict__["_parameters"] = table._parameters if only is None else {only: table._parameters[only]}


class AllTablesParameter(nn.Parameter):
    """A parameter without elements that passes ``requires_grad`` of a model on to tables that are not parameters."""

    _set_trains: Callable[[bool], object] = bool  # no effect in a copy
    _in_backward_optimizers: Sequence[torch.optim.Optimizer] = ()  # for TorchRec's in_backward_optimizer_filter

    @classmethod
    def of(
        cls, set_trains: Callable[[bool], object], device: torch.device, *, requires_grad: bool
    ) -> AllTablesParameter:
        """Creates the parameter of a collection.

        Args:
            set_trains: called with each new value of ``requires_grad``. requires_grad: the initial value.
        """
        made = cls(torch.empty(0, dtype=torch.float32, device=device), requires_grad)
        made._set_trains = set_trains
        mark_switch(made)
        return made

    @property
    def requires_grad(self) -> bool:
        """True if tables are trained; setting False freezes all of this rank's."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        super().requires_grad_(value)
        self._set_trains(value)

    def requires_grad_(self, requires_grad: bool = True) -> AllTablesParameter:
        """Sets ``requires_grad``."""
        self.requires_grad = requires_grad
        return self


class DenseTableGradients(torch.autograd.Function):
    """The token of a lookup: its backward runs after the output's and returns the gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, shards: TableCollection, gradients: list[Lookup], *weights: Tensor) -> Tensor:
        """Returns a tensor without elements.

        Args:
            shards: this rank's. weights: of these.
            gradients: a list to which the output's backward appends those of all ranks.
        """
        ctx.shards, ctx.gradients = shards, gradients
        ctx.shapes, ctx.dtypes = [weight.shape for weight in weights], [weight.dtype for weight in weights]
        return torch.zeros(0, dtype=torch.float32, device=shards.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Returns dense gradients, as ``rk.EmbeddingBagCollection`` without a fused optimizer."""
        shards, lookup = ctx.shards, ctx.gradients.pop()
        layout = shards._layout.arguments(lookup.bag_starts, lookup.shared)
        bags = {"values": lookup.values, "offsets": lookup.offsets, "per_sample_weights": lookup.weights}
        flat = _ops.embedding_bag_backward_dense.layout(lookup.grad, shards._weights, **bags, **layout)
        needed, blocks = ctx.needs_input_grad[2:], split_tables(flat, ctx.shapes, ctx.dtypes)
        # A view would keep gradients alive that are not needed.
        return (
            None,
            None,
            *(
                (block if all(needed) else block.clone()) if is_needed else None
                for block, is_needed in zip(blocks, needed, strict=True)
            ),
        )
