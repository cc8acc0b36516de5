"""Tables of a collection without a fused optimizer: a rank's shards as parameters, which torch's optimizers train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.training.accumulate import Lookup
from rec_kernels.ops.embedding_bag import table_starts

_ops = torch.ops.rec_kernels


class ShownTables(nn.Module):
    """Parameters of a rank's shards under their tables' names. The collection that has them moves and loads them.

    Args:
        tables: name -> the module that holds the table's weight. only: the name of the parameters that are shown; None:
            all.
    """

    def __init__(self, tables: Mapping[str, nn.Module], only: str | None = None) -> None:
        super().__init__()
        for name, table in tables.items():
            shown = ShownTables({})
            if only is None:
                shown.__dict__["_parameters"] = table._parameters  # one dict: moves replace what is in it
            else:
                shown.register_parameter(only, table._parameters[only])
            self.add_module(name, shown)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShownTables:
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Loads nothing."""


class TorchTables(torch.autograd.Function):
    """A token of a lookup's output. Its backward runs behind the output's, and has the gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, shards: TableCollection, arrived: list[Lookup], *weights: Tensor) -> Tensor:
        """No elements.

        Args:
            shards: this rank's. weights: theirs. arrived: where the output's backward puts the gradients of all ranks.
        """
        ctx.shards, ctx.arrived, ctx.shapes = shards, arrived, [weight.shape for weight in weights]
        return torch.zeros(0, device=shards.device)

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
