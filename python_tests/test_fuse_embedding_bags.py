"""rk.fuse_embedding_bags: lookups of several layers become one with equal bits, or are left with a reason."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rec_kernels as rk


class Model(nn.Module):
    """Four layers, one looked up twice, and an MLP.

    Args:
        combine: called with the model, and functions that look up each layer by its number; returns the output.
        optimizers: of the layers.
    """

    def __init__(self, combine: Callable[..., Tensor] | None = None, optimizers: Any = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        optimizers = optimizers or [rk.Adam(lr=0.05)] * 4
        modes, dims = ("sum", "mean", "mean", "sum"), (8, 8, 4, 16)
        self.bags = nn.ModuleList(
            rk.EmbeddingBag(20 + i, dims[i], mode=modes[i], padding_idx=i, optimizer=optimizers[i], **options)
            for i in range(4)
        )
        self.bottom, self.top = nn.Linear(3, 8), nn.Linear(52, 1)
        self.combine = combine

    def forward(self, dense: Tensor, ids: Tensor, flat: Tensor, offsets: Tensor, factors: Tensor) -> Tensor:
        calls = [
            lambda: self.bags[0](ids[0]),
            lambda: self.bags[1](input=flat, offsets=offsets),
            lambda: self.bags[2](ids[1], None, factors),
            lambda: self.bags[3](ids[0]),
            lambda: self.bags[0](flat, offsets),
        ]
        if self.combine is not None:
            return self.combine(self, calls, ids)
        bottom = self.bottom(dense).relu()
        return self.top(torch.cat([bottom, *(call() for call in calls)], dim=1))


def batch(seed: int) -> tuple[Tensor, ...]:
    """Arguments of the model: 5 samples."""
    generator = torch.Generator().manual_seed(seed)
    ids, flat = torch.randint(20, (2, 5, 3), generator=generator), torch.randint(20, (9,), generator=generator)
    offsets = torch.tensor([0, 2, 2, 7, 8])
    return torch.randn(5, 3, generator=generator), ids, flat, offsets, torch.rand(5, 3, generator=generator)


def trained(model: nn.Module, steps: range) -> list[float]:
    """Losses of training the tables alone: the other layers are shared with the compared model."""
    losses = []
    for step in steps:
        loss = (model(*batch(step)) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (rk.Adam(lr=0.05), {}),
        (rk.RowwiseAdagrad(lr=0.05), {"format": "int8", "rounding": "nearest"}),
        (rk.SGD(lr=0.05), {"output_dtype": torch.bfloat16}),
        ([rk.SGD(lr=0.05), rk.Adam(lr=0.05), rk.LAMB(lr=0.05, betas=(0.5, 0.9)), rk.Adam(lr=0.1)], {}),
    ],
)
def test_same_bits(optimizer: Any, options: dict[str, Any]) -> None:
    """One lookup instead of five has equal bits of outputs and of further training, from a trained state."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer] * 4
    model, example = Model(optimizers=optimizers, **options), batch(0)
    trained(model, range(3))
    model.bags[2].collection.fused_optimizer.param_groups[0]["lr"] = 0.125  # as a scheduler might
    found = rk.fuse_embedding_bags(model, *example)
    assert found.reason == ""
    assert found.groups == [["bags.0", "bags.1", "bags.2", "bags.3", "bags.0"]]
    assert str(found) == "one call: bags.0, bags.1, bags.2, bags.3, bags.0"
    assert not any(isinstance(m, rk.EmbeddingBag) for m in found.model.modules())
    tables = found.model.fused_embedding_bags_0.collection
    assert [table.name for table in tables.tables] == [f"bags_{i}" for i in range(4)]
    assert torch.equal(found.model(*example), model(*example))
    others = [copy.deepcopy(found.model), pickle.loads(pickle.dumps(found.model))]
    losses = trained(model, range(3, 8))
    assert [trained(each, range(3, 8)) for each in (found.model, *others)] == [losses] * 3
    assert int(tables.step) == 8
    for i, layer in enumerate(model.bags[1:], 1):  # the first is looked up twice: its sums have another order
        assert torch.equal(tables.embedding_bags[f"bags_{i}"].weight, layer.weight)


def test_bits_of_nans_and_of_sparse_gradients() -> None:
    """A NaN equals itself, and other layers may have sparse gradients."""

    def beside_a_sparse_layer(model: Any, calls: Any, ids: Tensor) -> Tensor:
        return torch.cat([calls[0](), calls[2](), model.sparse(ids[0])], dim=1).log()

    model = Model(beside_a_sparse_layer)
    model.sparse = nn.EmbeddingBag(20, 4, sparse=True)
    found = rk.fuse_embedding_bags(model, *batch(0))
    assert found.model(*batch(0)).isnan().any()
    assert found.groups == [["bags.0", "bags.2"]]


def test_batch_sizes_of_their_own() -> None:
    """Layers may have different numbers of bags, offsets that end before the ids do, and ids of two dtypes."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            options: Any = {"optimizer": rk.SGD(lr=0.5), "include_last_offset": True}
            self.a, self.b = rk.EmbeddingBag(20, 4, **options), rk.EmbeddingBag(20, 4, **options)

        def forward(self, a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> tuple[Tensor, dict]:
            return self.a(a, a_offsets), {"b": self.b(b, b_offsets)}

    model = Two()
    example = (
        torch.arange(9),
        torch.tensor([0, 4, 7]),
        torch.arange(5, dtype=torch.int32),
        torch.tensor([0, 1, 2, 5, 5]),
    )
    found = rk.fuse_embedding_bags(model, *example)
    assert found.groups == [["a", "b"]]
    outputs = found.model(*example), model(*example)
    assert [tuple(o[0].shape) for o in outputs] == [(2, 4)] * 2
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1]["b"], outputs[1][1]["b"])
    with pytest.raises(IndexError, match=r"= 99 .*is out of range"):
        found.model(torch.full((9,), 99), *example[1:])


class Lists(nn.Module):
    """A model with lists as arguments, as in public implementations of DLRM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(rk.EmbeddingBag(20, 4, mode="sum", optimizer=rk.SGD(lr=0.5)) for _ in range(3))

    def forward(self, dense: Tensor, offsets: list[Tensor], ids: dict[str, Tensor]) -> dict[str, Any]:
        """Outputs in a tree."""
        found = [bag(i, o) for bag, o, i in zip(self.bags, offsets, ids.values(), strict=True)]
        return {"pooled": torch.cat(found, dim=1), "all": (dense, found)}


def test_lists_and_dicts() -> None:
    """Arguments and outputs that are lists and dicts stay so, also of a copy and of a pickle."""
    offsets = [torch.tensor([0, 2]), torch.tensor([0, 0]), torch.tensor([0, 4])]
    example = torch.ones(2), offsets, {n: torch.arange(i, i + 4) for i, n in enumerate("abc")}
    model = Lists()
    found = rk.fuse_embedding_bags(model, *example)
    assert str(found) == "one call: bags.0, bags.1, bags.2"
    for fused in (found.model, copy.deepcopy(found.model), pickle.loads(pickle.dumps(found.model))):
        output = fused(*example)
        assert torch.equal(output["pooled"], model(*example)["pooled"])
        assert [len(o) for o in output["all"]] == [2, 3]
    assert rk.fuse_embedding_bags(model, example[0], offsets, dict(example[2])).groups


class Strange(nn.Module):
    """A model whose forward does not name its module self: torch.fx makes a wrong signature with lists."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(rk.EmbeddingBag(20, 4, optimizer=rk.SGD()) for _ in range(2))

    def forward(this, ids: list[Tensor]) -> Tensor:  # noqa: N805
        return torch.cat([bag(i) for bag, i in zip(this.bags, ids, strict=True)], dim=1)


def test_a_traced_model_that_fails() -> None:
    """If the traced model fails, the original is returned."""
    model = Strange()
    found = rk.fuse_embedding_bags(model, [torch.tensor([[1]]), torch.tensor([[2]])])
    assert found.model is model
    assert found.reason.startswith("the traced model raises TypeError: ")


def cat(model: Any, calls: Any, ids: Tensor) -> Tensor:
    """Concatenates all outputs."""
    return torch.cat([call() for call in calls], dim=1)


def used_between(model: Any, calls: Any, ids: Tensor) -> Tensor:
    """The second layer's output is used before the third and fourth lookups."""
    first = [calls[0](), calls[1]()]
    used = first[1].tanh()
    return torch.cat([first[0], used, calls[2](), calls[3]()], dim=1)


@torch.fx.wrap
def wrapped(ids: Tensor) -> Tensor:
    """A function that torch.fx does not trace into."""
    return ids.fill_(7)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "method": lambda ids: ids.fill_(7),
    "function": lambda ids: torch.fill_(ids, 7),
    "item": lambda ids: operator.setitem(ids, 1, 7),
    "operator": lambda ids: operator.iadd(ids, 1),
    "out": lambda ids: torch.add(ids, 1, out=ids),
    "inplace": lambda ids: nn.functional.relu(ids, inplace=True),
    "module": nn.ReLU(inplace=True),
    "wrapped": lambda ids: wrapped(ids),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_between(name: str) -> None:
    """A lookup is not moved past operations that may write to its ids."""

    def written(model: Any, calls: Any, ids: Tensor) -> Tensor:
        mine = ids + 0
        first = model.bags[0](mine[0])
        (model.relu if name == "module" else WRITES[name])(mine)
        return torch.cat([first, model.bags[1](mine[1])], dim=1)

    model = Model(written)
    model.relu = WRITES["module"]
    found = rk.fuse_embedding_bags(model, *batch(0))
    assert (found.groups, found.model) == ([], model)
    refused = {
        "item": "torch.fx cannot trace the model: TypeError: 'Proxy' object does not support item assignment",
        "operator": "for example_inputs, outputs differ",  # torch.fx assumes that it does not write
    }
    assert found.reason == refused.get(name, "there are no two lookups that may be one")


def test_order_is_kept() -> None:
    """A lookup is not moved past a use of an output of its group."""
    found = rk.fuse_embedding_bags(Model(used_between), *batch(0))
    assert found.groups == [["bags.0", "bags.1"], ["bags.2", "bags.3"]]


def scattered(model: Any, calls: Any, ids: Tensor) -> Tensor:
    """The first layer is looked up before and after a use of its output."""
    first = calls[0]()
    return torch.cat([first + 1, calls[1](), calls[2](), calls[0]()], dim=1)


def beside(model: Any, calls: Any, ids: Tensor) -> Tensor:
    """A weight is used beside its lookup."""
    return torch.cat([call() for call in calls[:4]], dim=1).sum() + model.bags[0].weight.square().sum()


def test_layers_by_themselves() -> None:
    """Layers that cannot be fused each have a reason."""
    found = rk.fuse_embedding_bags(Model(scattered), *batch(0))
    assert found.groups == [["bags.1", "bags.2"]]
    assert found.apart == {"bags.0": "something between its lookups keeps them apart"}
    assert str(found).splitlines()[1] == "bags.0 by itself: something between its lookups keeps them apart"
    found = rk.fuse_embedding_bags(Model(beside), *batch(0))
    assert found.groups == [["bags.1", "bags.2", "bags.3"]]
    assert found.apart == {"bags.0": "its weight is used beside lookups"}
    model = Model(cat)
    for i in (2, 3):
        model.bags[i](torch.tensor([[1]])).sum().backward()  # counts a step
    found = rk.fuse_embedding_bags(model, *batch(0))
    assert found.groups == [["bags.0", "bags.1", "bags.0"], ["bags.2", "bags.3"]]
    model = Model(cat)
    model.bags[1].collection.freeze("input")
    model.bags[2].register_forward_hook(lambda *_: None)
    model.other = nn.Linear(16, 23, bias=False)
    model.other.weight = model.bags[3].weight
    found = rk.fuse_embedding_bags(model, *batch(0))
    assert found.groups == [["bags.0", "bags.0"]]
    assert found.apart == {
        "bags.1": "it has a frozen feature",
        "bags.2": "it has hooks",
        "bags.3": "its weight is bags.3.weight and other.weight",
    }
    plain = nn.Sequential(rk.EmbeddingBag(9, 4))
    assert rk.fuse_embedding_bags(plain, torch.ones(2, 2, dtype=torch.int64)).apart == {
        "0": "it has no fused optimizer"
    }


class Reversed(torch.autograd.Function):
    """A custom gradient, which torch.fx does not record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def test_models_that_are_not_traced() -> None:
    """Reasons are torch.fx's errors, or differing graphs, outputs or gradients; modes and tables stay as they were."""

    def branches(model: Any, calls: Any, ids: Tensor) -> Tensor:
        return cat(model, calls, ids) if ids.sum() > 0 else ids

    def trains(model: Any, calls: Any, ids: Tensor) -> Tensor:
        return nn.functional.dropout(cat(model, calls, ids), training=model.training)

    def random(model: Any, calls: Any, ids: Tensor) -> Tensor:
        return cat(model, calls, ids) + torch.rand(())

    def silent(model: Any, calls: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():  # not recorded by torch.fx
            first = calls[0]()
        return torch.cat([first, calls[1](), model.bottom(calls[2]()[:, :3])], dim=1)

    def reversed_gradient(model: Any, calls: Any, ids: Tensor) -> Tensor:
        first, second = calls[0](), calls[2]()
        return torch.cat([Reversed.apply(first), second], dim=1)

    def negative_zeros(model: Any, calls: Any, ids: Tensor) -> Tensor:
        first, second = calls[0](), calls[2]()
        return torch.cat([Reversed.apply(first) * 0, second], dim=1)

    for combine, reason in (
        (branches, "torch.fx cannot trace the model: TraceError: symbolically traced variables cannot be used"),
        (trains, "torch.fx has another graph in training than in evaluation"),
        (silent, "for example_inputs, gradients differ"),
        (reversed_gradient, "for example_inputs, gradients differ"),
        (negative_zeros, "for example_inputs, gradients differ"),
        (random, "for example_inputs, outputs differ"),
    ):
        model = Model(combine)
        model.again = nn.ModuleList([model.bags[1].eval()])  # a second parent, in training
        before = copy.deepcopy(model.state_dict())
        found = rk.fuse_embedding_bags(model, *batch(0))
        assert found.model is model
        assert found.reason.startswith(reason)
        assert str(found).startswith(f"nothing fused: {reason}")
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
        assert not [name for name in vars(model) if "constant" in name]
        assert [m.training for m in model.bags] == [True, False, True, True]
        assert [m.collection.training for m in model.bags] == [True, False, True, True]
