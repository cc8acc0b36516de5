"""Modules under torch's transforms: compile() and copies, torch.func, fake and meta tensors."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, stack_module_state
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import rec_kernels as rk

KEYS = ["x", "y", "z"]


def pooled(optimizer: Any = None, **options: Any) -> rk.EmbeddingBagCollection:
    """Two features of a table, and one of another."""
    tables = [
        rk.EmbeddingBagConfig(20, 8, name="a", feature_names=["x", "y"], **options),
        rk.EmbeddingBagConfig(10, 8, name="b", feature_names=["z"], **options),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer)


def batch() -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor(KEYS, torch.arange(8), lengths=torch.tensor([2, 1, 0, 2, 1, 2]))


def halves(optimizer: Any = None) -> rk.EmbeddingBagCollection:
    return pooled(optimizer, format="bf16")


def layer(optimizer: Any = None) -> rk.Embedding:
    return rk.Embedding(10, 8, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.1)])
@pytest.mark.parametrize(("make", "given"), [(pooled, batch()), (layer, torch.tensor([1, 2]))])
def test_compiled_in_place_and_copied(make: Any, given: Any, optimizer: Any) -> None:
    """Copies and pickles of a compiled module look up and train their own rows; torch compiles them again."""
    module = make(optimizer)
    module.compile(backend="eager")
    before = copy.deepcopy(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for weight in other.parameters():
            nn.init.zeros_(weight)
        found = other(given)
        found = found.values() if isinstance(found, rk.KeyedTensor) else found
        assert found.count_nonzero() == 0
        (found + 1).square().sum().backward()
        trained = [weight if optimizer else weight.grad for weight in other.parameters()]
        assert all(t.count_nonzero() > 0 for t in trained)
        assert all(weight.grad is None for weight in module.parameters())
        assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.1)])
def test_stacked_weights_are_refused(optimizer: Any) -> None:
    """vmap over the weights of several collections is rejected: lookups would read those of the first."""
    parameters, buffers = stack_module_state([pooled(optimizer) for _ in range(2)])
    base = pooled(optimizer)

    def look_up(own: Any) -> Any:
        return functional_call(base, own, (batch(),)).values()

    for given in (parameters, parameters | buffers):
        with pytest.raises(RuntimeError, match="weight of table 'a' has been replaced"):
            torch.vmap(look_up)(given)


def test_fused_updates_are_not_transformed() -> None:
    """vmap and grad of fused updates are rejected: they would update per slice or never; lookups alone work."""
    module, ids = layer(rk.Adam(lr=0.1)), torch.tensor([[1, 2], [1, 4]])
    before = module.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"cannot be trained inside torch\.func's transforms"):
        torch.vmap(module)(ids)
    with pytest.raises(RuntimeError, match=r"cannot be trained inside torch\.func's transforms"):
        torch.func.grad(lambda scale: (module(ids) * scale).sum())(torch.ones(()))
    with torch.no_grad():
        assert torch.equal(torch.vmap(module)(ids), module(ids))
    assert torch.equal(module.weight, before)
    assert module.collection.step == 0


def test_gradients_per_sample() -> None:
    """vmap of a gradient has the bits of consecutive ones, and the gradient of a vmap those of their sum."""
    weight, ids, factors = torch.randn(9, 4), torch.randint(9, (3, 2, 5)), torch.rand(3, 2, 5)

    def loss(weight: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        return rk.embedding_bag(ids, weight, mode="sum", per_sample_weights=factors).square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 2))
    found = torch.vmap(gradient, in_dims=(None, 0, 0))(weight, ids, factors)
    one_by_one = [gradient(weight, *each) for each in zip(ids, factors, strict=True)]
    for own, each in zip(found, zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(own, torch.stack(each))
    summed = torch.func.grad(lambda w: torch.vmap(loss, in_dims=(None, 0, 0))(w, ids, factors).sum())(weight)
    torch.testing.assert_close(summed, found[0].sum(0))


def test_compiled_dicts() -> None:
    """Graphs do not depend on the number of samples; ids outside of bags raise, as graphs cannot remove them."""
    module, graphs = pooled(), 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(lambda given: module(given).values(), backend=count, fullgraph=True)
    for samples in range(3, 9):
        given = {key: torch.arange(2 * samples).view(samples, 2) % 10 for key in KEYS}
        assert torch.equal(compiled(given), module(given).values())
    assert graphs == 2
    bags = {key: rk.JaggedTensor(torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 2])) for key in KEYS}
    assert torch.equal(compiled(bags), module(bags).values())
    spare = {key: rk.JaggedTensor(torch.tensor([1, 2, 3, 4, 9]), lengths=torch.tensor([2, 2])) for key in KEYS}
    assert torch.equal(module(spare).values(), module(bags).values())
    with pytest.raises(ValueError, match=r"offsets\[1\] = -1 "):
        compiled(spare)


def test_fake_tensors() -> None:
    """Sequences have data-dependent sizes; states of fake tensors load."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        tables = [rk.EmbeddingConfig(20, 8, name="a", feature_names=KEYS)]
        found = rk.EmbeddingCollection(tables, optimizer=rk.SGD(lr=0.1))(batch())
        assert [x.values().shape[1] for x in found.values()] == [8, 8, 8]
        sum(x.values().sum() for x in found.values()).backward()
        for format, optimizer in (("int8", None), ("fp32", rk.Adam(lr=0.1)), ("int8", rk.SGD(lr=0.1))):
            module = pooled(optimizer, format=format)
            module.load_state_dict(pooled(optimizer, format=format).state_dict())


def test_gradients_on_the_meta_device() -> None:
    """to_empty() allocates gradients with the tables."""
    with torch.device("meta"):
        module = pooled()
        module(batch().to("meta")).values().sum().backward()
    module.to_empty(device="cpu")
    assert {weight.grad.device.type for weight in module.parameters()} == {"cpu"}


def _compiled_backward(loss: Tensor) -> None:
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager")):
        loss.backward()


def test_compiled_backwards_read_version_counters() -> None:
    """Compiled backward passes detect unchanged rows, and have eager's bits."""
    found = []
    for backward in (Tensor.backward, _compiled_backward):
        torch.manual_seed(0)
        collection = pooled(rk.SGD(lr=0.1))
        for _ in range(2):
            given, factors = batch(), torch.full((8,), 2.0, requires_grad=True)
            weighted = rk.KeyedJaggedTensor(KEYS, given.values(), factors, lengths=given.lengths())
            backward(collection(weighted).values().square().sum())
            found.append(factors.grad)
        found += collection.state_dict().values()
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))


@pytest.mark.parametrize("beside", ["lookup", "weight"])
def test_compiled_backwards_refuse_one_update_of_several_uses(beside: str) -> None:
    """One update of several uses would follow the backward, where compiled autograd runs nothing: it raises."""
    collection, expected = pooled(rk.SGD(lr=0.1)), pooled(rk.SGD(lr=0.1))
    expected.load_state_dict(collection.state_dict())
    other = collection(batch()).values() if beside == "lookup" else collection.embedding_bags["a"].weight
    with pytest.raises(RuntimeError, match="compiled autograd runs no callbacks there"):
        _compiled_backward(collection(batch()).values().sum() + other.square().sum())
    for each in (collection, expected):
        each(batch()).values().square().sum().backward()
    assert collection.step == 1
    for name, t in collection.state_dict().items():
        assert torch.equal(t, expected.state_dict()[name])


@pytest.mark.parametrize("scales", [False, True])
def test_compiled_steps(scales: bool) -> None:
    """A whole training step is compiled, including the fused optimizer's remaining work."""
    found, expected = pooled(rk.SGD(lr=0.1)), pooled(rk.SGD(lr=0.1))
    expected.load_state_dict(found.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
    for each in (found, expected):
        each.set_grad_scaler(scaler)

    def step(collection: rk.EmbeddingBagCollection, given: rk.KeyedJaggedTensor) -> None:
        collection.fused_optimizer.zero_grad()
        loss = collection(given).values().square().sum()
        (loss * 8 if scales else loss).backward()
        collection.fused_optimizer.step()

    scaler.scale(torch.ones(()))
    for run, collection in ((torch.compile(step, backend="aot_eager"), found), (step, expected)):
        for _ in range(2):
            run(collection, batch())
    for name, t in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], t), name


@pytest.mark.parametrize("optimizer", [None, rk.Adam(lr=0.1)])
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("make", [pooled, layer, halves])
def test_averages_of_weights(make: Any, use_buffers: bool, optimizer: Any) -> None:
    """Tables are averaged once, and lookups read the average: flat tensors, which contain them, are no buffers."""
    module = make(optimizer)
    if make is halves and optimizer is not None:
        pytest.skip("bytes of a fused optimizer keep the latest rows")
    average = torch.optim.swa_utils.AveragedModel(module, use_buffers=use_buffers)
    given, weights = torch.tensor([1, 2]) if make is layer else batch(), []
    for step in range(3):
        with torch.no_grad():
            for weight in module.parameters():
                weight.fill_(float(step * step))
        average.update_parameters(module)
    rounds = 0.01 if make is halves else None
    weights = [weight.unique().item() for weight in average.module.parameters()]
    assert weights == pytest.approx([5 / 3] * len(weights), rel=rounds)
    with torch.no_grad():
        found = average.module(given)
    found = found if make is layer else found.values()
    assert found.unique().tolist() == pytest.approx([5 / 3] if make is layer else [0.0, 5 / 3, 10 / 3], rel=rounds)
    flat = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    assert not flat & {t.untyped_storage().data_ptr() for t in module.buffers()}


def test_flat_tensors_stay_in_place() -> None:
    """torch's compiler treats flat tensors as static inputs: a CUDA graph would copy others before each replay."""

    def backend(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            for name in flat:
                if node.op == "placeholder" and node.name.rstrip("_").endswith(name):
                    found[name] = node.meta["tensor_dict"].get("_dynamo_static_input_type")
        return graph.forward

    original, flat = pooled(rk.Adam(lr=0.1)), ("_weights", "_exp_avg", "_exp_avg_sq")
    for module in (original, copy.deepcopy(original), pickle.loads(pickle.dumps(original)), original.to("cpu")):
        found: dict[str, Any] = {}
        torch._dynamo.reset()
        torch.compile(module, backend=backend)(batch())
        assert found == dict.fromkeys(flat, "unguarded")


class _NoGradient(torch.autograd.Function):
    """A sum whose backward returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        return None


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("make", [pooled, layer])
def test_outputs_without_a_gradient(make: Any, accumulates: bool) -> None:
    """A missing gradient is no gradient of zeros, whose update would apply weight decay and moments."""
    fused, plain = make(rk.Adam(lr=0.1, weight_decay=0.5)), make()
    collection = fused if make is pooled else fused.collection
    given = batch() if make is pooled else torch.tensor([1, 2])
    before = copy.deepcopy(fused.state_dict())
    for module in (fused, plain):
        with collection.accumulate() if accumulates else contextlib.nullcontext():
            output = module(given)
            _NoGradient.apply(output.values() if make is pooled else output).backward()
    for name, t in before.items():
        assert torch.equal(fused.state_dict()[name], t), name
    assert all(weight.grad is None for weight in plain.parameters())


class _Ids(Tensor):
    """A subclass of Tensor."""


@pytest.mark.parametrize("accumulates", [False, True])
def test_ids_of_a_subclass(accumulates: bool) -> None:
    """The output has the subclass, as in torch, and trains the tables once."""
    found, expected = pooled(rk.SGD(lr=0.1)), pooled(rk.SGD(lr=0.1))
    expected.load_state_dict(found.state_dict())
    given = batch()
    ids = rk.KeyedJaggedTensor(KEYS, given.values().as_subclass(_Ids), lengths=given.lengths())
    for collection, batches in ((found, [ids, ids]), (expected, [given, given])):
        with collection.accumulate() if accumulates else contextlib.nullcontext():
            outputs = [collection(each).values() for each in batches]
            (outputs[0] + outputs[1]).square().sum().backward()
        assert type(outputs[0]) is type(batches[0].values())
        assert collection.step == 1
    for name, t in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], t), name
