"""Ops that mutate arguments increment version counters and raise errors as torch's ops do."""

from __future__ import annotations

import copy
import functools
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from test_opcheck import registered, samples
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables.layout import tensors_of
from rec_kernels.ops.autograd import overload_of, signature_of


def changed_by(op: str) -> dict[int, str]:
    """Index -> name of the arguments that an op mutates, from its schema."""
    arguments = overload_of(op)._schema.arguments
    return {i: a.name for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write}


IN_PLACE = [op for op in registered() if changed_by(op)]


def calls_of(op: str) -> Iterator[dict[str, object]]:
    """The samples of an op by argument name, with cloned tensors."""
    names = list(signature_of(op))
    for args, kwargs in samples(op):
        given = dict(zip(names, args, strict=False)) | kwargs
        yield {name: a.detach().clone() if isinstance(a, Tensor) else a for name, a in given.items()}


def each_changed(op: str) -> Iterator[tuple[dict[str, object], str]]:
    """Every sample with the name of every tensor that it mutates."""
    for given in calls_of(op):
        for name in changed_by(op).values():
            if given.get(name) is not None:
                yield dict(given), name


def versions(given: dict[str, object]) -> dict[str, int]:
    return {name: a._version for name, a in given.items() if isinstance(a, Tensor)}


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


def test_which_ops() -> None:
    """An op's name ends in an underscore exactly if it mutates an argument."""
    assert [op for op in registered() if op.partition(".")[0].endswith("_")] == IN_PLACE
    assert len(IN_PLACE) >= 3


@pytest.mark.parametrize("op", IN_PLACE)
def test_counts_once(op: str) -> None:
    """A call increments the counters of mutated arguments by one, and no others; overloads and no_grad included."""
    packet = getattr(torch.ops.rec_kernels, op.partition(".")[0])
    for call in (packet, overload_of(op), torch.no_grad()(packet)):
        for given in calls_of(op):
            before = versions(given)
            call(**given)
            assert difference(before, versions(given)) == {
                name: 1 for name in changed_by(op).values() if given.get(name) is not None
            }


@pytest.mark.parametrize("op", IN_PLACE)
def test_saved_tensors(op: str) -> None:
    """A backward that uses a saved tensor raises after a call has mutated it."""
    for given, name in each_changed(op):
        x = torch.ones(given[name].shape, requires_grad=True)
        loss = (x * given[name]).sum()
        overload_of(op)(**given)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


def _unchanged(given: dict[str, object], error: type[Exception], message: str, call: Callable) -> None:
    tensors = {name: a for name, a in given.items() if isinstance(a, Tensor)}
    before = {name: a.detach().clone() for name, a in tensors.items()}
    counters = {name: None if a.is_inference() else a._version for name, a in tensors.items()}
    with pytest.raises(error, match=message):
        call(**given)
    assert counters == {name: None if a.is_inference() else a._version for name, a in tensors.items()}
    for name, a in tensors.items():
        assert torch.equal(a.detach(), before[name]), name


@pytest.mark.parametrize("op", IN_PLACE)
def test_tensors_that_require_grad(op: str) -> None:
    """Leaves that require gradients, their views and results are rejected, except under no_grad."""
    kinds = {
        "^a leaf Variable that requires grad": lambda leaf: leaf,
        "^a view of a leaf Variable that requires grad": lambda leaf: leaf.view_as(leaf),
        "^a tensor that requires grad": lambda leaf: leaf * 1,
    }
    for given, name in each_changed(op):
        if not given[name].is_floating_point():
            continue
        for what, make in kinds.items():
            given[name] = make(given[name].detach().requires_grad_())
            message = f"{what} is being used in an in-place operation: rec_kernels::{op} changes {name}, .*no_grad"
            _unchanged(given, RuntimeError, message, overload_of(op))
        with torch.no_grad():
            overload_of(op)(**given)


@pytest.mark.parametrize("op", IN_PLACE)
def test_inference_tensors(op: str) -> None:
    """Inference tensors may be mutated in InferenceMode only, where counters of other tensors still increase."""
    for given, name in each_changed(op):
        with torch.inference_mode():
            made_there = given[name].clone()
        mixed = given | {name: made_there}
        message = f"^Inplace update to inference tensor .*: rec_kernels::{op} changes {name};"
        _unchanged(mixed, RuntimeError, message, overload_of(op))
        with torch.no_grad():
            _unchanged(mixed, RuntimeError, message, overload_of(op))
        normal = {n: a for n, a in mixed.items() if n != name}
        before = versions(normal)
        with torch.inference_mode():
            overload_of(op)(**mixed)
            overload_of(op)(**{n: a.clone() if isinstance(a, Tensor) else a for n, a in given.items()})
        counted = {n: 1 for n in changed_by(op).values() if normal.get(n) is not None}
        assert difference(before, versions(normal)) == counted


@pytest.mark.parametrize("op", IN_PLACE)
def test_failures_do_not_count(op: str) -> None:
    """A call that raises changes neither data nor counters."""
    for given in calls_of(op):
        given["rounding"] = "median"
        _unchanged(given, ValueError, "rounding", overload_of(op))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    """Compiled calls increment counters and raise as eager ones do."""
    op = "embedding_bag_backward_fused_.layout"
    given = next(calls_of(op))
    torch._dynamo.reset()
    step: Callable = torch.compile(functools.partial(overload_of(op), **given), backend=backend, fullgraph=True)
    x = torch.ones(given["weights"].shape, requires_grad=True)
    loss = (x * given["weights"]).sum()
    step()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()
    given["weights"].requires_grad_()
    step = torch.compile(functools.partial(overload_of(op), **given), backend=backend, fullgraph=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        step()


OPTIMIZERS = {
    "sgd": (rk.SGD(lr=0.1), {"_weights", "step"}),
    "rowwise_adagrad": (rk.RowwiseAdagrad(lr=0.1), {"_weights", "step", "_sum"}),
    "adam": (rk.Adam(lr=0.1), {"_weights", "step", "_exp_avg", "_exp_avg_sq", "beta_powers"}),
}


def collection(optimizer: object, **options: object) -> rk.EmbeddingBagCollection:
    tables = [
        rk.EmbeddingBagConfig(20, 4, name="a", feature_names=["f"], **options),
        rk.EmbeddingBagConfig(30, 6, name="b", feature_names=["g"], **options),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer)


def batch(weights: Tensor | None = None) -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor(["f", "g"], torch.arange(6), offsets=torch.tensor([0, 1, 3, 4, 6]), weights=weights)


def loss_of(tables: rk.EmbeddingBagCollection, weights: Tensor | None = None) -> Tensor:
    return tables(batch(weights)).values().square().sum()


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_steps_count_once(name: str, accumulates: bool) -> None:
    """A step, also of several micro-batches, increments the counters of tables and optimizer state by one."""
    optimizer, changed = OPTIMIZERS[name]
    tables = collection(optimizer)
    for _ in range(3):
        before = versions(tensors_of(tables))
        if accumulates:
            with tables.accumulate():
                for _ in range(2):
                    loss_of(tables).backward()
        else:
            loss_of(tables).backward()
        after = versions(tensors_of(tables))
        assert difference(before, after) == dict.fromkeys(changed, 1)


def cached_collection() -> tuple[rk.EmbeddingBagCollection, rk.KeyedJaggedTensor, rk.KeyedJaggedTensor]:
    """A row cache with fewer slots than rows, and two weighted batches without common rows."""
    table = rk.EmbeddingBagConfig(50, 4, name="a", feature_names=["f"], format="int8")
    tables = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=0.1), cache=rk.RowCache(0.2, ways=2))
    ids, factors = torch.arange(50).split(12), torch.ones(12, requires_grad=True)
    first, second = (rk.KeyedJaggedTensor(["f"], i, offsets=torch.arange(0, 13, 4), weights=factors) for i in ids[:2])
    return tables, first, second


def test_a_row_cache_counts_updates() -> None:
    """Inserting and evicting rows does not invalidate earlier lookups' backward."""
    tables, first, second = cached_collection()
    tables(second).values().sum().backward()
    before = tables._weights._version
    output = tables(first)
    tables(second)
    tables.flush()
    assert tables._weights._version == before
    output.values().sum().backward()
    assert tables._weights._version == before + 1


def _updated(tables: rk.EmbeddingBagCollection, batch: rk.KeyedJaggedTensor) -> None:
    tables(batch).values().sum().backward()


def _written(tables: rk.EmbeddingBagCollection, _: rk.KeyedJaggedTensor) -> None:
    tables.flush()
    tables.embedding_bags["a"].weight.fill_(0)
    tables.reset_cache_states()


@pytest.mark.parametrize("change", [_updated, _written, lambda tables, _: tables.load_state_dict(tables.state_dict())])
def test_cached_rows_that_have_changed(change: Callable) -> None:
    """The gradient of per-sample weights raises if a row of the lookup has changed, cached or not."""
    tables, first, second = cached_collection()
    output = tables(first).values().sum()
    change(tables, second)
    with pytest.raises(RuntimeError, match="the tables have changed since this lookup"):
        output.backward()


def _moved(tables: rk.EmbeddingBagCollection) -> rk.EmbeddingBagCollection:
    return tables._apply(torch.clone)


MADE: dict[str, Callable] = {
    "new": lambda tables: tables,
    "moved": _moved,
    "copied": copy.deepcopy,
    "copied and moved": lambda tables: _moved(copy.deepcopy(tables)),
    "unpickled": lambda tables: pickle.loads(pickle.dumps(tables)),
    "unpickled, moved and used": lambda tables: _used(_moved(pickle.loads(pickle.dumps(tables)))),
}


def _used(tables: rk.EmbeddingBagCollection) -> rk.EmbeddingBagCollection:
    loss_of(tables).backward()
    return tables


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("made", MADE)
def test_saved_parameters(made: str, accumulates: bool) -> None:
    """An op that saved a table between a lookup and its backward raises instead of using updated rows."""
    tables = MADE[made](collection(rk.SGD(lr=0.1)))
    weight = tables.embedding_bags["b"].weight
    x = torch.ones(weight.shape, requires_grad=True)
    kept = [(x * weight).sum(), (x * weight.detach()).sum(), (x[:2] * weight[:2]).sum(), (x * weight.clone()).sum()]
    if accumulates:
        with tables.accumulate():
            loss_of(tables).backward()
    else:
        loss_of(tables).backward()
    for loss in kept[:-1]:
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
    kept[-1].backward()


@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.1)], ids=str)
def test_moves_keep_parameters(optimizer: object) -> None:
    """Moves keep the parameter objects and their attributes."""
    tables = collection(optimizer)
    weight = tables.embedding_bags["a"].weight
    weight.note = "mine"
    seen = weakref.ref(tables.embedding_bags["b"].weight)
    old = weight.detach().clone()
    assert _moved(tables).embedding_bags["a"].weight is weight
    assert seen() is tables.embedding_bags["b"].weight
    assert weight.note == "mine"
    assert torch.equal(weight, old)
    loss_of(tables).backward()
    assert torch.equal(weight, old) == (optimizer is None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_lookups_of_one_graph(name: str) -> None:
    """Lookups in one backward make one update, in separate backward passes one each."""
    tables = collection(OPTIMIZERS[name][0])
    before = tables._weights._version
    first, second = loss_of(tables), loss_of(tables)
    (loss_of(tables) + loss_of(tables)).backward()
    assert tables._weights._version == before + 1
    first.backward()
    second.backward()
    assert tables._weights._version == before + 3


def test_weights_with_gradients() -> None:
    """The gradient of per-sample weights raises after an update of the looked-up rows."""
    tables = collection(rk.SGD(lr=0.1))
    factors = torch.ones(6, requires_grad=True)
    loss = loss_of(tables, factors)
    loss_of(tables).backward()
    with pytest.raises(RuntimeError, match="the tables have changed since this lookup"):
        loss.backward()


@pytest.mark.parametrize("name", ["values", "offsets", "bag_starts"])
@pytest.mark.parametrize("op", ["embedding_bag", "embedding_bag_tables", "embedding_bag_fused"])
def test_bags_that_change_before_the_backward(op: str, name: str) -> None:
    """Changing bags before the backward raises: gradients would go to other rows."""
    bags = {"values": torch.tensor([1, 2, 3, 4]), "offsets": torch.arange(5), "bag_starts": torch.tensor([0, 2, 4])}
    weights, layout = torch.zeros(48), rk.table_layout([7, 5], [3, 3], weight_offsets=[0, 32])._asdict()
    if op == "embedding_bag":
        before = (weights.requires_grad_(),)
    elif op == "embedding_bag_tables":
        before = weights, [torch.zeros(7, 3, requires_grad=True), torch.zeros(5, 3)]
    else:
        before = weights, None, torch.tensor(0), torch.tensor(0.1), torch.zeros(0, requires_grad=True)
    options = {"optimizer": "sgd"} if op == "embedding_bag_fused" else {}
    output, _ = getattr(torch.ops.rec_kernels, op).layout(*before, **bags, **layout, **options)
    bags[name].copy_(bags[name].clone())
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        output.sum().backward()
    assert not weights.any()
