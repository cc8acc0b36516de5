"""Freezing and unfreezing tables, and warnings of optimizers and lookups that train nothing."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from tied_weights_cases import D, E, batch, loss_of, make
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import rec_kernels as rk


def test_a_table_that_is_trained_again() -> None:
    """After unfreezing, changes are tracked as before, also of the original of a shallow copy."""
    found, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
    found.embedding_bags["item"].weight.requires_grad_(False)
    found(batch(3)).values().sum().backward()
    expected.freeze("a", "b")
    expected(batch(3)).values().sum().backward()
    expected.unfreeze("a", "b")
    found.embedding_bags["item"].weight.requires_grad_(True)
    other = copy.copy(found)
    assert other.embedding_bags["item"].weight.data_ptr() == found.embedding_bags["item"].weight.data_ptr()
    for one in (found, expected):
        loss_of(one(batch(0)).to_dict(), one.embedding_bags["item"].weight, 0).backward()
    assert found.step == expected.step
    assert torch.equal(found.embedding_bags["item"].weight, expected.embedding_bags["item"].weight)


def test_torch_optimizers_find_no_gradient() -> None:
    """A torch optimizer with fused weights changes nothing: gradients are removed at the end of the backward."""
    found, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
    dense = torch.optim.Adam(found.parameters(), lr=1.0, weight_decay=0.1)
    for one in (found, expected):
        loss_of(one(batch(0)).to_dict(), one.embedding_bags["item"].weight, 0).backward()
    with pytest.warns(UserWarning, match="was given tables"):
        dense.step()
    assert torch.equal(found.embedding_bags["item"].weight, expected.embedding_bags["item"].weight)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
def test_weights_that_are_not_to_be_trained(format: str) -> None:
    """requires_grad = False freezes a table; lookups go on, and so do other tables."""
    collection = make(rk.SGD(lr=1.0), format=format)
    item, other = (collection.embedding_bags[name].weight for name in ("item", "other"))
    before = item.detach().clone()

    def step() -> tuple[bool, bool]:
        kept, rest = item.detach().clone(), other.detach().clone()
        collection(batch(1)).values().sum().backward()
        return not torch.equal(kept, item.detach()), not torch.equal(rest, other.detach())

    item.requires_grad_(False)
    assert step() == (False, True)
    assert torch.equal(before, item)
    for alone in (item, pickle.loads(pickle.dumps(item))):
        assert bool(getattr(alone, "_rec_kernels_mark", False)) is (alone is item)
    copied = copy.deepcopy(collection)
    copied(batch(1)).values().sum().backward()
    assert torch.equal(before, copied.embedding_bags["item"].weight)
    nn.Sequential(collection).requires_grad_(False)
    assert step() == (False, False)
    collection.requires_grad_(True)
    assert step() == (True, True)
    if item.is_floating_point():
        item.requires_grad = False
        assert step() == (False, True)
    item.requires_grad_(False)
    before = item.detach().clone()
    with collection.accumulate():
        collection(batch(2)).values().sum().backward()
    assert torch.equal(before, item)


def test_parts_are_trained_together() -> None:
    """A compressed table with only one part frozen is rejected."""
    compression = rk.QuotientRemainder(4, combine="add")
    collection = rk.EmbeddingBagCollection(
        [rk.EmbeddingBagConfig(E, D, name="item", feature_names=["a"], compression=compression)], optimizer=rk.SGD()
    )
    collection.embedding_bags["item_1"].weight.requires_grad_(False)
    features = rk.KeyedJaggedTensor(["a"], torch.tensor([13]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"parts \['item_0', 'item_1'\] of table 'item' must be equal"):
        collection(features)


def test_torch_optimizers_are_told_once() -> None:
    """A torch optimizer with fused tables warns at its first step; one with dense parameters does not."""
    collection, top = make(rk.SGD(lr=0.1)), nn.Linear(28, 1)
    model = nn.ModuleList([collection, top])
    assert [p.shape for p in rk.dense_parameters(model)] == [p.shape for p in top.parameters()]
    assert len(rk.dense_parameters(make(None))) == 2
    both, dense = torch.optim.Adam(model.parameters()), torch.optim.Adam(rk.dense_parameters(model))
    with pytest.warns(UserWarning, match=r"Adam was given tables .*rk\.dense_parameters\(model\)"):
        both.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (both, dense, collection.fused_optimizer):
            optimizer.step()


def test_optimizers_applied_in_the_backward_are_told_once() -> None:
    """Optimizers applied in the backward warn: they run on accumulated gradients, which fused tables lack."""
    collection = make(rk.SGD(lr=0.5))
    _apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.5})
    with pytest.warns(UserWarning, match="Adagrad was applied in the backward to tables that a fused optimizer"):
        collection(batch(0)).values().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collection(batch(1)).values().sum().backward()


def test_torch_optimizers_are_told_of_tables_that_nothing_trains() -> None:
    """A collection without an optimizer, with a format that torch cannot train, warns unless it is frozen."""
    collection, top = make(None, format="int8"), nn.Linear(28, 1)
    model = copy.deepcopy(nn.ModuleList([collection, top])).to("cpu")
    assert [p.shape for p in rk.dense_parameters(model)] == [p.shape for p in top.parameters()]
    with pytest.warns(UserWarning, match=r"SGD was given tables of a collection that nothing trains.*RowwiseAdagrad"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen = copy.deepcopy(model[0]).requires_grad_(False)
        for parameters in (rk.dense_parameters(model), [*make(None).parameters()], [*frozen.parameters()]):
            torch.optim.SGD(parameters, lr=0.1).step()


def untrained(format: str, pools: bool) -> nn.Module:
    """A collection without optimizer, with a table in ``format`` and one in fp32, which torch cannot train either."""
    config = rk.EmbeddingBagConfig if pools else rk.EmbeddingConfig
    tables = [config(9, 4, name=n, feature_names=[n], format=f) for n, f in (("a", format), ("b", "fp32"))]
    return (rk.EmbeddingBagCollection if pools else rk.EmbeddingCollection)(tables)


UNTRAINED = r"a collection whose tables nothing trains.*{'%s': '%s'} here.*RowwiseAdagrad.*requires_grad_\(False\)"


@pytest.mark.parametrize("format", ["mx4", "int8"])
@pytest.mark.parametrize("pools", [True, False])
def test_lookups_of_training_that_train_nothing_are_told_once(format: str, pools: bool) -> None:
    """Training lookups without an effect warn once, also over moves and copies; frozen and eval() ones do not."""
    ids = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}
    collection = untrained(format, pools)
    with pytest.warns(UserWarning, match=UNTRAINED % ("a", format)):
        collection(ids)
    fine = [collection, copy.deepcopy(collection).to("cpu"), untrained(format, pools).eval()]
    for frozen in (untrained(format, pools), nn.Sequential(untrained(format, pools))):
        frozen.requires_grad_(False)
        fine += [frozen, copy.copy(frozen), copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)).to("cpu")]
    by_hand = untrained(format, pools)
    for weight in by_hand.parameters():
        weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (*fine, by_hand, untrained(format, pools).for_serving()):
            module(ids)
        with torch.no_grad():
            untrained(format, pools)(ids)
    fine[-1].requires_grad_(True)
    with pytest.warns(UserWarning, match=UNTRAINED % ("a", format)):
        fine[-1](ids)


@pytest.mark.parametrize("make_layer", [rk.Embedding, rk.EmbeddingBag])
def test_layers_of_training_that_train_nothing_are_told_once(make_layer: type[rk.Embedding]) -> None:
    """Layers of rows that torch cannot train warn unless frozen."""
    ids = torch.tensor([[1, 2]])
    layer = make_layer(9, 4, format="int4")
    with pytest.warns(UserWarning, match=UNTRAINED % ("weight", "int4")):
        layer(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fine in (layer, make_layer.from_pretrained(torch.randn(9, 4), format="int8"), make_layer(9, 4)):
            fine(ids)


def test_compiled_lookups_that_train_nothing_are_told() -> None:
    """The warning is given while tracing, without breaking the graph, and not by calls of the graph."""
    batch = rk.KeyedJaggedTensor.from_dict({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])})
    collection = untrained("int8", True)
    compiled = torch.compile(lambda given: collection(given).values(), fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match=UNTRAINED % ("a", "int8")):
        compiled(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(batch)
    with warnings.catch_warnings(record=True) as warned:
        torch.export.export(collection, (batch,))
    assert not [warning for warning in warned if "nothing trains" in str(warning.message)]


def named_tables(order: str, adam: bool = True, **rates: float) -> rk.EmbeddingBagCollection:
    """Tables by the letters of ``order``, "u" and "q" with separate Adam optimizers."""
    torch.manual_seed(0)
    own = {"u": rk.Adam(lr=0.1), "q": rk.Adam(lr=1e-3, betas=(0.5, 0.6))} if adam else {}
    tables = [
        rk.EmbeddingBagConfig(10, 4, name=n, feature_names=[n], optimizer=own.get(n), lr=rates.get(n)) for n in order
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5))


def train_named(collection: rk.EmbeddingBagCollection, first: int, steps: int) -> None:
    """Steps with gradients that depend on the table's name and the step."""
    for step in range(first, first + steps):
        output = collection({name: torch.tensor([1, 2]) for name in collection.feature_names})
        sum((output[n] * torch.sin(torch.arange(8.0).view(2, 4) + step + ord(n))).sum() for n in "uqs").backward()


@pytest.mark.parametrize("adam", [True, False])
def test_states_of_tables_in_another_order(adam: bool) -> None:
    """Rows, state, beta powers and learning rates load by the tables' names."""
    rates = {} if adam else {"u": 1.0, "q": 1e-3}
    old, new = named_tables("uqs", adam, **rates), named_tables("squ", adam, **rates)
    train_named(old, 0, 5)
    old.fused_optimizer.param_groups[-1]["lr"] *= 0.5
    new.load_state_dict(old.state_dict())
    new.fused_optimizer.load_state_dict(old.fused_optimizer.state_dict())
    for c in (old, new):
        train_named(c, 5, 3)
    for name in "uqs":
        assert torch.equal(old.embedding_bags[name].weight, new.embedding_bags[name].weight), name


def test_states_of_other_tables() -> None:
    """A removed or added table leaves the beta powers of the others unchanged; other betas have their own."""
    both = named_tables("qus")
    train_named(both, 0, 5)
    one = named_tables("us")
    one.load_state_dict(both.state_dict(), strict=False)
    assert torch.equal(one.beta_powers, both.beta_powers_1)
    again = named_tables("qus")
    again.load_state_dict(one.state_dict(), strict=False)
    assert torch.equal(again.beta_powers_1, both.beta_powers_1)
    assert torch.equal(again.beta_powers, both.beta_powers)
    for c, message in (
        (both, "parameter groups for tables"),
        (named_tables("us", adam=False, u=0.1), "is of optimizer SGD for"),
    ):
        state = c.fused_optimizer.state_dict()
        state["param_groups"][-1].setdefault("optimizer", "SGD")
        with pytest.raises(ValueError, match=message):
            one.fused_optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"eps = 1e-40 must be 0 or at least 2\^-126"):
        rk.RowwiseAdagrad(lr=0.1, eps=1e-40)


def test_groups_refuse_rates_that_climb() -> None:
    """A schedule past its end raises; the rate stays, in the group and in the kernels' tensor."""
    collection = make(rk.SGD(lr=0.5))
    face = collection.fused_optimizer
    for rate, shown in ((-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf")):
        with pytest.raises(ValueError, match=rf"lr = {shown} must be at least 0, and finite as float32"):
            face.param_groups[0]["lr"] = rate
        assert face.param_groups[0]["lr"] == 0.5
        assert collection.lr == 0.5


def test_groups_refuse_options_that_nothing_reads() -> None:
    """An option of another optimizer raises, and is ignored in states; schedulers' options are accepted."""
    face = make(rk.RowwiseAdagrad(lr=0.1)).fused_optimizer
    group, before = face.param_groups[0], face.state_dict()
    for name in ("momentum", "learning_rate"):
        with pytest.raises(
            ValueError, match=rf"{name} = 0\.5 is not an option of RowwiseAdagrad: of a fused optimizer only lr"
        ):
            group[name] = 0.5
        with pytest.raises(ValueError, match="is not an option of RowwiseAdagrad"):
            group.setdefault(name, 0.5)
    assert group.setdefault("lr", 0.5) == 0.1
    group["initial_lr"] = 0.25
    face.load_state_dict({"state": {}, "param_groups": [{**before["param_groups"][0], "momentum": 0.5, "max_lr": 1.0}]})
    assert group.keys() == {"params", "lr", "initial_lr", "max_lr"}
