"""EmbeddingBagCollection's state: learning rate, copies, devices, moved gradients, keys."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from collection_cases import pooled as make

import rec_kernels as rk
from rec_kernels.testing import same_bits

OPTIMIZERS = [rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5)]


def batch(weights: torch.Tensor | None = None) -> rk.KeyedJaggedTensor:
    values, lengths = torch.tensor([4, 0, 4, 3, 3, 1, 0]), torch.tensor([2, 1, 0, 1, 2, 1])
    return rk.KeyedJaggedTensor(["f", "g", "h"], values, lengths=lengths, weights=weights)


def step(collection: rk.EmbeddingBagCollection) -> None:
    """One backward of a nonlinear loss."""
    collection(batch()).values().square().sum().backward()


def set_directly(collection: rk.EmbeddingBagCollection) -> None:
    """Sets the learning rate in param_groups."""
    for group in collection.fused_optimizer.param_groups:
        group["lr"] = 0.125


def load(collection: rk.EmbeddingBagCollection) -> None:
    """Sets the learning rate by loading another collection's checkpoint."""
    other = make(type(collection.optimizer)(lr=0.125))
    collection.fused_optimizer.load_state_dict(copy.deepcopy(other.fused_optimizer.state_dict()))


def schedule(collection: rk.EmbeddingBagCollection) -> None:
    """Sets the learning rate by a scheduler, after loading."""
    load(collection)
    decay = torch.optim.lr_scheduler.LambdaLR(collection.fused_optimizer, lambda epoch: 1.0 if epoch else 4.0)
    assert collection.lr.item() == 0.5
    collection.fused_optimizer.step()
    decay.step()


def scale(collection: rk.EmbeddingBagCollection) -> None:
    """Scales the learning rate in place."""
    for group in collection.fused_optimizer.param_groups:
        group["lr"] *= 0.25


@pytest.mark.parametrize("change", [set_directly, load, schedule, scale])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, rk.Adam(lr=0.5)], ids=str)
def test_learning_rate(optimizer, change) -> None:
    """The next update uses the learning rate, however it was set."""
    collection = make(optimizer)
    lr = collection.lr
    change(collection)
    assert collection.lr is lr
    assert collection.fused_optimizer.param_groups[0]["lr"] == lr.item() == 0.125
    expected = make(type(optimizer)(lr=0.125))
    step(collection)
    step(expected)
    assert same_bits(collection._weights, expected._weights)


def _saved(what: object) -> int:
    file = io.BytesIO()
    torch.save(what, file)
    return file.tell()


@pytest.mark.parametrize("formats", [["fp32"] * 8, ["int8"] * 8, rk.BAG_FORMATS], ids=["fp32", "int8", "every format"])
def test_rows_are_written_once(formats, monkeypatch) -> None:
    """pickle and torch.save write a module's, a state's or a table's rows once; deepcopy copies no view."""
    tables = [
        rk.EmbeddingBagConfig(500, 16, name=name, feature_names=[name], format=format)
        for name, format in zip("abcdefgh", formats, strict=True)
    ]
    collection = rk.EmbeddingBagCollection(tables, optimizer=rk.Adam())
    rows = sum(table["weight_bytes"] + table["state_bytes"] for table in collection.memory_report())
    state = dict(collection.state_dict())
    for size in (_saved(collection), _saved(state), len(pickle.dumps(collection)), len(pickle.dumps(state))):
        assert rows <= size < rows + 40_000
    for name in ("embedding_bags.b.weight", "embedding_bags.b.exp_avg"):
        assert max(_saved(state[name]), len(pickle.dumps(state[name]))) < state[name].nbytes + 4000
        held = getattr(collection.embedding_bags["b"], name.rpartition(".")[2])
        assert state[name].data_ptr() == held.data_ptr()
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", None)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", _of_no_view(torch.Tensor.__deepcopy__))
    copies = copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))
    monkeypatch.undo()
    for copied in copies:
        assert list(copied.state_dict()) == list(state)
        assert all(same_bits(t, state[name]) for name, t in copied.state_dict().items())


def _of_no_view(original):
    def deepcopied(t: torch.Tensor, memo: dict) -> torch.Tensor:
        assert t.untyped_storage().nbytes() == t.nbytes
        return original(t, memo)

    return deepcopied


def _loaded(what: object) -> object:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ANOTHER = [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), _loaded]


@pytest.mark.parametrize("another", ANOTHER, ids=["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("cache", [None, rk.RowCache(0.5, ways=2)], ids=str)
def test_an_init_that_pickle_refuses(cache, another) -> None:
    """Pickled collections drop an ``init`` that cannot be pickled; configs and deep copies keep theirs."""
    options = {"compression": rk.MixedDimension(2), "init": lambda rows: rows.fill_(0.5)}
    table = rk.EmbeddingBagConfig(6, 4, name="t", feature_names=["f", "g"], **options)
    collection = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(), cache=cache)
    for module in (collection, collection.for_serving()):
        copied = another(module)
        assert same_bits(copied(batch()).values(), module(batch()).values())
        if another is not copy.deepcopy:
            assert copied.tables[0] == dataclasses.replace(table, init=None)
    assert collection.tables[0].init is table.init
    again = rk.EmbeddingBagCollection([copy.deepcopy(table)])
    assert (again.embedding_bags["t"].weight == 0.5).all()
    named = dataclasses.replace(table, init=torch.nn.init.zeros_)
    assert another(named).init is another(named).stored[0].init is torch.nn.init.zeros_
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(table)


@pytest.mark.parametrize("another", ANOTHER, ids=["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("first", ["collection", "optimizer"])
def test_optimizers_of_torch_are_copied_with_their_tables(first, another) -> None:
    """A collection and an optimizer of torch, copied together in either order, remain connected."""
    collection = make()
    optimizer = torch.optim.Adagrad(collection.parameters(), lr=0.5)
    step(collection)
    optimizer.step()
    if first == "collection":
        copied, other = another((collection, optimizer))
    else:
        other, copied = another((optimizer, collection))
    assert all(a is b for a, b in zip(other.param_groups[0]["params"], copied.parameters(), strict=True))
    before = collection._weights.clone()
    step(copied)
    other.step()
    assert same_bits(collection._weights, before)
    optimizer.zero_grad()
    step(collection)
    optimizer.step()
    assert same_bits(copied._weights, collection._weights)
    assert not same_bits(collection._weights, before)


def test_conversions_keep_the_optimizer() -> None:
    """Moves and casts that change nothing keep scheduler and collection connected."""
    collection = make(rk.SGD(lr=0.5))
    collection.to("cpu").half().bfloat16().double()
    assert collection.lr.dtype == torch.float32
    collection.fused_optimizer.param_groups[0]["lr"] = 0.25
    assert collection.lr.item() == 0.25
    params = collection.fused_optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(params, collection.parameters(), strict=True))


def test_gradients_move_with_their_tables() -> None:
    """Gradients move as those of torch's own modules do."""
    collection = make()
    step(collection)
    collection.to("meta")
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in collection.parameters())


@pytest.mark.parametrize("table_optimizer", [None, rk.Adam(lr=0.5)], ids=str)
def test_a_move_between_a_lookup_and_its_backward(table_optimizer: rk.Adam | None) -> None:
    """A move between a lookup and its backward raises, as the update would be lost; one that moves nothing does not."""
    tables = [
        rk.EmbeddingBagConfig(6, 4, name=name, feature_names=[name], optimizer=own)
        for name, own in (("a", None), ("b", table_optimizer))
    ]
    collection = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5))
    ids = {"a": torch.arange(3), "b": torch.arange(3)}
    loss = collection(ids).values().sum()
    collection.to("cpu").half().share_memory()
    loss.backward()
    assert collection.step == 1
    loss, before = collection(ids).values().sum(), collection._weights.clone()
    collection._apply(torch.clone)
    with pytest.raises(RuntimeError, match="moved to other memory between a lookup and its backward"):
        loss.backward()
    assert collection.step == 1
    assert same_bits(collection._weights, before)
    collection(ids).values().sum().backward()
    assert collection.step == 2
    assert not same_bits(collection._weights, before)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, rk.Adam(lr=0.5)], ids=str)
@pytest.mark.parametrize("device", [None, "meta"])
def test_state_without_a_step(optimizer, device) -> None:
    """A state without a step loads as step 0; one that lacks more is rejected with every name, and the step stays."""
    state = make(optimizer).state_dict()
    del state["step"]
    other = make(optimizer, device=device)
    if device is None:
        step(other)
        assert other.step == 1
    other.load_state_dict(state, assign=device == "meta")
    assert other.step == 0
    assert same_bits(other.state_dict()["embedding_bags.a.weight"], state["embedding_bags.a.weight"])
    if device is None:
        step(other)
        del state["embedding_bags.a.weight"]
        with pytest.raises(RuntimeError, match=r"Missing key\(s\).*step.*embedding_bags\.a\.weight"):
            other.load_state_dict(state)
        assert other.step == 1


def test_assigned_weights_are_cast_and_tied() -> None:
    """load_state_dict(assign=True) of another dtype: the tables stay float32 views of the flat tensor."""
    collection, state = make(), {k: v.double() * 2 for k, v in make().state_dict().items()}
    collection.load_state_dict(state, assign=True)
    for name in ("a", "b"):
        weight = collection.embedding_bags[name].weight
        assert weight.dtype == torch.float32
        assert weight.requires_grad
        assert same_bits(weight.detach(), state[f"embedding_bags.{name}.weight"].float())
        assert weight.untyped_storage().data_ptr() == collection._weights.untyped_storage().data_ptr()


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS], ids=str)
def test_gradient_of_weights_in_the_batch(optimizer) -> None:
    """Per-sample weights of a batch may be learned; their gradient uses the rows before the update."""
    factors = [torch.rand(7).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        factors[1].copy_(factors[0])
    for collection, mine in ((make(), factors[0]), (make(optimizer), factors[1])):
        collection(batch(mine)).values().square().sum().backward()
    assert factors[0].grad.abs().min() > 0
    assert same_bits(factors[1].grad, factors[0].grad)


def test_changed_tables_are_noticed() -> None:
    """Changing a table before a backward that needs its rows raises."""
    collection, factors = make(), torch.rand(7, requires_grad=True)
    output = collection(batch(factors)).values()
    with torch.no_grad():
        collection.embedding_bags["a"].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS], ids=str)
def test_no_tables(optimizer) -> None:
    """A collection without tables has an empty output for any batch."""
    none = rk.KeyedJaggedTensor([], torch.zeros(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64))
    collection = rk.EmbeddingBagCollection([], optimizer=optimizer)
    assert collection(none).values().shape == (0, 0)
    assert collection(batch()).values().shape == (0, 0)
    assert collection.memory_report() == []


def test_unknown_keys() -> None:
    """KeyError lists the existing keys, from every keyed container."""
    for keyed in (batch(), make()(batch())):
        with pytest.raises(KeyError, match=r"'x' is not among the keys \['f', 'g', 'h'\]"):
            keyed["x"]
