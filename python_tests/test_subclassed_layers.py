"""Subclasses of the layers and collections, with added parameters, buffers and modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import rec_kernels as rk

ADDED = ["mean", "proj.bias", "proj.weight", "scale"]
OPTIONS = [
    {},
    {"optimizer": rk.SGD(lr=0.1)},
    {"optimizer": rk.Adam(lr=0.1), "format": "int8"},
    {"optimizer": rk.SGD(lr=0.1), "cache": rk.RowCache(0.5)},
    {"optimizer": rk.SGD(lr=0.1), "compression": rk.QuotientRemainder(4)},
]
IDS = torch.tensor([[1, 2], [3, 4]])


class Scaled(rk.EmbeddingBag):
    """A layer whose sums are scaled, shifted and projected."""

    def __init__(self, **options) -> None:
        super().__init__(10, 4, mode="sum", **options)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("mean", torch.ones(4))
        self.proj = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.proj(super().forward(ids) * self.scale + self.mean)


class ScaledBags(rk.EmbeddingBagCollection):
    """A collection with an added parameter, buffer and module."""

    def __init__(self, optimizer: rk.SGD | None) -> None:
        table = rk.EmbeddingBagConfig(10, 4, name="t", feature_names=["f"])
        super().__init__([table], optimizer=optimizer)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("mean", torch.ones(4))
        self.proj = nn.Linear(4, 4)


@pytest.fixture(params=OPTIONS, ids=lambda options: ",".join(options) or "none")
def layer(request: pytest.FixtureRequest) -> Scaled:
    return Scaled(**request.param)


def _changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with other values of what the subclass added."""
    return {name: t + 1 if name in ADDED else t for name, t in state.items()}


def test_states_have_what_was_added(layer: Scaled) -> None:
    state = _changed(layer.state_dict())
    assert set(ADDED) < set(state)
    layer.load_state_dict(state)
    assert all(torch.equal(layer.state_dict()[name], state[name]) for name in ADDED)


def test_what_a_state_lacks_or_has_too_much_is_told(layer: Scaled) -> None:
    state = layer.state_dict()
    more = {**state, "other": torch.ones(1), "proj.other": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other", "proj.other"'):
        layer.load_state_dict(more)
    assert layer.load_state_dict(more, strict=False).unexpected_keys == ["other", "proj.other"]
    del state["scale"], state["proj.bias"]
    assert layer.load_state_dict(state, strict=False).missing_keys == ["scale", "proj.bias"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_have_what_was_added(layer: Scaled, copied) -> None:
    other = copied(layer)
    assert torch.equal(other(IDS), layer(IDS))
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in layer.named_parameters()]
    assert all(a is not b for a, b in zip(other.parameters(), layer.parameters(), strict=True))


def test_moves_and_freezing_reach_what_was_added(layer: Scaled) -> None:
    names = [name for name, _ in layer.named_parameters()]
    assert layer.double() is layer
    assert {layer.scale.dtype, layer.mean.dtype, layer.proj.weight.dtype} == {torch.float64}
    assert layer.requires_grad_(False) is layer
    assert not any(p.requires_grad for p in (layer.scale, layer.proj.weight, layer.proj.bias))
    assert [name for name, _ in layer.named_parameters()] == names


def test_distributed_checkpoints_of_torch(layer: Scaled) -> None:
    """torch accesses each name of a state as attributes."""
    model = nn.Sequential(layer, nn.Linear(4, 1))
    state = get_model_state_dict(model)
    assert {name.removeprefix("0.") for name in state} > set(ADDED)
    set_model_state_dict(model, {name: t + 1 if name.endswith("scale") else t for name, t in state.items()})
    assert layer.scale.tolist() == [3.0] * 4
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'other'"):
        _ = layer.other


def test_a_name_of_the_tables_state_is_refused() -> None:
    layer = rk.Embedding(4, 2, optimizer=rk.RowwiseAdagrad())
    with pytest.raises(KeyError, match="attribute 'sum' already exists"):
        layer.register_buffer("sum", torch.zeros(2))
    with pytest.raises(KeyError, match="attribute 'step' already exists"):
        layer.step = nn.Parameter(torch.zeros(2))


def test_compiled_subclasses(layer: Scaled) -> None:
    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(IDS)
    torch.testing.assert_close(found, layer(IDS))


@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.1)])
def test_collections(optimizer: rk.SGD | None) -> None:
    collection = ScaledBags(optimizer)
    collection.load_state_dict(_changed(collection.state_dict()))
    assert collection.scale.tolist() == [3.0] * 4
    collection.double()
    assert {collection.scale.dtype, collection.mean.dtype, collection.proj.weight.dtype} == {torch.float64}
    collection.requires_grad_(False)
    assert not any(p.requires_grad for p in collection.parameters())
    other = copy.deepcopy(collection)
    assert torch.equal(other.proj.weight, collection.proj.weight)


def test_collections_that_serve_other_formats() -> None:
    """Added modules are not served, even if their names end as tables' do."""
    collection = ScaledBags(rk.SGD(lr=0.1))
    served = collection.for_serving("int8")
    expected = rk.dequantize_rows(rk.quantize_rows(collection.embedding_bags["t"].weight, "int8"), "int8", 4)
    assert torch.equal(served({"f": IDS[0]}).values(), expected[IDS[0]])
