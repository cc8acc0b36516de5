"""A rank's shards as parameters, which torch's optimizers train; and the one that stands for shards of a fused one."""

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
from rec_kernels.ops.embedding_bag import table_starts

_ops = torch.ops.rec_kernels


class _Shown(nn.Module):
    """Parameters that another module has, which moves and loads them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Shown:
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Loads nothing."""


class ShownTables(_Shown, Tables):
    """Parameters of a rank's shards under their tables' names: name -> module, as ``Tables``.

    Args:
        tables: name -> the module that holds the table's weight. only: the name of the parameters that are shown; None:
            all.
    """

    def __init__(self, tables: Mapping[str, nn.Module], only: str | None = None) -> None:
        nn.Module.__init__(self)
        for name, table in tables.items():
            shown = self._modules[name] = _Shown()
            # Where all are shown, they are the table's own dict: moves replace what is in it.
            shown.__dict__["_parameters"] = table._parameters if only is None else {only: table._parameters[only]}


class AllTables(nn.Parameter):
    """A parameter of no elements, by which ``requires_grad`` of a whole model reaches tables that are no parameters."""

    _told: Callable[[bool], object] = bool  # a copy tells no one
    _in_backward_optimizers: Sequence[torch.optim.Optimizer] = ()  # for TorchRec's in_backward_optimizer_filter

    @classmethod
    def of(cls, told: Callable[[bool], object], device: torch.device, *, requires_grad: bool) -> AllTables:
        """The parameter of a collection.

        Args:
            told: called with what ``requires_grad`` is set to. requires_grad: at first.
        """
        made = cls(torch.empty(0, dtype=torch.float32, device=device), requires_grad)
        made._told = told
        mark_switch(made)
        return made

    @property
    def requires_grad(self) -> bool:
        """True if tables are trained; False, once set, freezes all of this rank's."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        super().requires_grad_(value)
        self._told(value)

    def requires_grad_(self, requires_grad: bool = True) -> AllTables:
        """Sets ``requires_grad``."""
        self.requires_grad = requires_grad
        return self


class TorchTables(torch.autograd.Function):
    """A token of a lookup's output. Its backward runs behind the output's, and has the gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, shards: TableCollection, arrived: list[Lookup], *weights: Tensor) -> Tensor:
        """No elements.

        Args:
            shards: this rank's. weights: theirs. arrived: where the output's backward puts the gradients of all ranks.
        """
        ctx.shards, ctx.arrived, ctx.shapes = shards, arrived, [weight.shape for weight in weights]
        return torch.zeros(0, dtype=torch.float32, device=shards.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Dense gradients, as of ``rk.EmbeddingBagCollection`` without a fused optimizer."""
        shards, lookup = ctx.shards, ctx.arrived.pop()
        layout = shards._layout.arguments(lookup.bag_starts, lookup.shared)
        bags = {"values": lookup.values, "offsets": lookup.offsets, "per_sample_weights": lookup.weights}
        flat = _ops.embedding_bag_backward_dense.layout(lookup.grad, shards._weights, **bags, **layout)
        starts = table_starts([shape.numel() for shape in ctx.shapes])
        wanted = ctx.needs_input_grad[2:]
        blocks = [flat[s : s + shape.numel()].view(shape) for s, shape in zip(starts, ctx.shapes, strict=False)]
        # A view would keep the memory of gradients that nobody wants.
        return (
            None,
            None,
            *(
                (block if all(wanted) else block.clone()) if want else None
                for block, want in zip(blocks, wanted, strict=True)
            ),
        )
