"""Table parameters that no longer alias the memory of lookups are rejected by name."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.nn.utils import parametrize, vector_to_parameters

import rec_kernels as rk
from rec_kernels.testing import same_bits


def make(optimizer=None, formats=("fp32", "fp32"), **options) -> rk.EmbeddingBagCollection:
    torch.manual_seed(0)
    named = zip("ab", formats, strict=True)
    tables = [rk.EmbeddingBagConfig(10, 4, name=n, feature_names=[n], format=format) for n, format in named]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def batch() -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 0, 1]))


def pooled(module: nn.Module) -> torch.Tensor:
    return module(batch()).values()


def _data(collection) -> None:
    collection.embedding_bags["b"].weight.data = torch.ones(10, 4)


def _parameter(collection) -> None:
    collection.embedding_bags["b"].weight = nn.Parameter(torch.ones(10, 4), requires_grad=False)


def _none(collection) -> None:
    collection.embedding_bags["b"].weight = None


def _parametrized(collection) -> None:
    parametrize.register_parametrization(collection.embedding_bags["b"], "weight", nn.Identity())


CHANGES = [_data, _parameter, _none, _parametrized]


@pytest.mark.parametrize("optimizer", [None, rk.RowwiseAdagrad()], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_replaced(change, optimizer) -> None:
    """Lookups, moves and copies raise instead of using the old rows."""
    collection = make(optimizer)
    change(collection)
    for use in (pooled, copy.deepcopy, pickle.dumps, nn.Module.half, lambda c: c.to("cpu")):
        with pytest.raises(RuntimeError, match="the weight of table 'b' has been replaced"):
            use(collection)


@pytest.mark.parametrize("kind", [rk.EmbeddingBagCollection, rk.EmbeddingCollection])
def test_replaced_modules(kind) -> None:
    """Lookups of a replaced table module raise instead of training the old rows."""
    collection = kind([rk.EmbeddingBagConfig(10, 4, name="a", feature_names=["a"])], optimizer=rk.SGD())
    name = "embeddings" if kind is rk.EmbeddingCollection else "embedding_bags"
    tables, other = getattr(collection, name), nn.EmbeddingBag(10, 4)
    changes: list[Callable[[], object]] = [
        lambda: setattr(collection, name, nn.ModuleDict({"a": other})),
        lambda: collection.add_module(name, nn.ModuleDict({"a": other})),
        lambda: collection.register_module(name, nn.ModuleDict({"a": other})),
        lambda: setattr(tables, "a", other),
        lambda: setattr(tables, "a", None),
        lambda: tables.add_module("b", None),
        lambda: tables.register_module("a", other),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match="cannot be replaced by another module: lookups read the"):
            change()
    tables.a = tables["a"]  # as DistributedModelParallel assigns tables that it does not shard
    setattr(collection, name, tables)
    assert isinstance(copy.deepcopy(collection)._tables, type(tables))


def test_replaced_by_functions_of_torch() -> None:
    """torch.func's parameter replacement is detected."""
    collection = make()
    expected, zeros = pooled(collection), {n: torch.zeros_like(p) for n, p in collection.named_parameters()}
    with pytest.raises(RuntimeError, match="the weight of table 'a' has been replaced"):
        functional_call(collection, zeros, (batch(),))
    assert same_bits(pooled(collection), expected)  # the collection's parameters are restored
    vector_to_parameters(torch.ones(80), collection.parameters())
    with pytest.raises(RuntimeError, match="the weight of table 'a' has been replaced"):
        pooled(collection)


def test_numbers_replaced_by_functions_of_torch() -> None:
    """Replaced buffers of an optimizer are read and written by the update."""
    collection, replaced = make(rk.Adam(lr=0.1)), torch.tensor(0.0)
    before = {n: t.clone() for n, t in collection.state_dict().items()}
    counted = {"lr": replaced, "step": torch.tensor(0), "beta_powers": torch.ones(2)}
    functional_call(collection, counted, (batch(),)).values().sum().backward()
    assert counted["step"] == 1
    assert counted["beta_powers"].tolist() == pytest.approx([0.9, 0.999])
    after = collection.state_dict()
    assert all(same_bits(after[n], t) for n, t in before.items() if not n.endswith(("exp_avg", "exp_avg_sq")))


def test_served_tables_have_no_parameters() -> None:
    """Tables of for_serving() read the flat tensor, and have no parameters."""
    collection = make()
    served, expected = collection.for_serving(), pooled(collection)
    _data(collection)
    assert same_bits(pooled(served), expected)


def test_written_in_place() -> None:
    """In-place writes keep the parameters valid."""
    collection = make()
    with torch.no_grad():
        collection.embedding_bags["a"].weight.copy_(torch.ones(10, 4))
        nn.init.constant_(collection.embedding_bags["b"].weight, 2.0)
    assert pooled(collection).tolist() == [[1.0] * 4 + [0.0] * 4, [1.0] * 4 + [2.0] * 4]
    collection.load_state_dict({n: t * 2 for n, t in collection.state_dict().items()}, assign=True)
    copies = (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection)), collection.to("cpu"))
    for module in copies:
        assert pooled(module).tolist() == [[2.0] * 4 + [0.0] * 4, [2.0] * 4 + [4.0] * 4]
    torch.optim.SGD(collection.parameters(), lr=1.0).step()


@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "fp32")], ids=str)
@pytest.mark.parametrize("optimizer", [None, rk.SGD()], ids=str)
def test_shared_memory(optimizer, formats) -> None:
    """torch.multiprocessing moves the memory of all tables when it sends a collection; both processes write it."""
    collection = make(optimizer, formats)
    expected, before = pooled(collection), collection._weights.data_ptr()
    received = pickle.loads(ForkingPickler.dumps(collection))
    assert collection._weights.data_ptr() != before
    assert same_bits(pooled(collection), expected)
    with torch.no_grad():
        received.embedding_bags["b"].weight.fill_(2.0)
    assert pooled(collection)[:, 4:].unique().tolist() == [0.0, 2.0]
    assert same_bits(pooled(received), pooled(collection))
    _data(collection)
    with pytest.raises(RuntimeError, match="the weight of table 'b' has been replaced"):
        pooled(collection)


def test_tensors_without_memory() -> None:
    """Tracers substitute fake tensors for parameters; these are not rejected."""
    collection = make()
    expected, own = pooled(collection), dict(collection.named_parameters())
    assert same_bits(functional_call(collection, own, (batch(),)).values(), expected)
    found = functionalize(lambda p: functional_call(collection, p, (batch(),)).values())(own)
    assert same_bits(found, expected)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = {n: mode.from_tensor(p) for n, p in own.items()}
    with mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert functional_call(collection, fake, (batch(),)).values().shape == expected.shape
        assert pooled(make(optimizer=rk.Adam(lr=0.1))).shape == expected.shape
    with torch.no_grad():
        program = torch.export.export(collection, (batch(),), strict=False)
    assert same_bits(program.module()(batch()).values(), expected)
    compiled = torch.compile(collection, backend="aot_eager", fullgraph=True)
    assert same_bits(pooled(compiled), expected)
    late = make(device="meta")
    assert pooled(late.to_empty(device="cpu")).shape == make(device="meta")(batch().to("meta")).values().shape
