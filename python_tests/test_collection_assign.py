"""load_state_dict(assign=True) of collections, on the meta device or not, keeps shared memory shared."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import rec_kernels as rk
from rec_kernels.testing import same_bits

OPTIMIZERS = [None, rk.RowwiseAdagrad(lr=0.5), rk.Adam(lr=0.5, state_dtype=torch.bfloat16)]


def make(optimizer=None, device=None, seed=0, **options) -> rk.EmbeddingBagCollection:
    """One narrow table with a projection, one of two parts; in the row format ``format``."""
    torch.manual_seed(seed)
    cache = options.pop("cache", None)
    tables = [
        rk.EmbeddingBagConfig(10, 4, name="t", feature_names=["a"], compression=rk.MixedDimension(2), **options),
        rk.EmbeddingBagConfig(
            12, 4, name="u", feature_names=["b"], compression=rk.QuotientRemainder(3), pooling="mean", **options
        ),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, device=device, cache=cache)


def batch() -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 9, 11]), lengths=torch.tensor([1, 2, 1, 1]))


def step(module: torch.nn.Module) -> torch.Tensor:
    """Trains on a batch; returns the output."""
    output = module(batch()).values()
    output.square().sum().backward()
    return output.detach()


def assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Asserts equal states, before and after two steps."""
    for _ in range(2):
        states = found.state_dict(), expected.state_dict()
        assert states[0].keys() == states[1].keys()
        for name, tensor in states[1].items():
            assert same_bits(states[0][name], tensor), name
        assert same_bits(step(found), step(expected))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
def test_meta(optimizer, nested) -> None:
    """A collection on the meta device takes a state as if loaded in place, also as a submodule."""
    trained, late = make(optimizer), make(optimizer, device="meta", seed=1)
    step(trained)
    if nested:
        trained, late = torch.nn.Sequential(trained), torch.nn.Sequential(late)
    late.load_state_dict(trained.state_dict(), assign=True)
    assert not any(t.is_meta for t in (*late.parameters(), *late.buffers()))
    assert_same(late, trained)


@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("other", ["lru", "lfu", None])
def test_meta_with_a_row_cache(format, other) -> None:
    """Slots come with a state of the same policy; otherwise the cache is empty."""

    def plain(cache, device=None) -> rk.EmbeddingBagCollection:
        tables = [rk.EmbeddingBagConfig(10, 4, name=n, feature_names=[n], format=format) for n in "ab"]
        return rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad(), device=device, cache=cache)

    def few() -> rk.KeyedJaggedTensor:
        return rk.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 9, 8]), lengths=torch.tensor([1, 2, 1, 1]))

    cache = None if other is None else rk.RowCache(0.5, policy=other, ways=4)
    trained = plain(cache)
    trained(few()).values().sum().backward()
    late = plain(rk.RowCache(0.5, policy="lru", ways=4), device="meta")
    late.load_state_dict(trained.state_dict(), assign=True)
    if other != "lru":
        assert all(table["cached_rows"] == 0 for table in late.memory_report())
    for table, expected in zip(late.memory_report(), trained.memory_report(), strict=True):
        assert table["hits"] == 0
        assert other != "lru" or table["cached_rows"] == expected["cached_rows"]
    for name in "ab":
        assert same_bits(late.embedding_bags[name].weight, trained.embedding_bags[name].weight)
    if other == "lru":
        assert same_bits(late(few()).values(), trained(few()).values())


def test_meta_in_mixed_dimensions() -> None:
    """MixedDimensionEmbeddingBag takes a state on the meta device."""
    arguments = ([3, 7], [4, 2], 4)
    torch.manual_seed(0)
    ranks = torch.randperm(10)
    trained = rk.MixedDimensionEmbeddingBag(*arguments, ranks=ranks)
    late = rk.MixedDimensionEmbeddingBag(*arguments, ranks=ranks.to("meta"), device="meta")
    late.load_state_dict(trained.state_dict(), assign=True)
    bags = rk.JaggedTensor(torch.tensor([1, 9, 4]), offsets=torch.tensor([0, 1, 3]))
    assert same_bits(late(bags), trained(bags))


def test_meta_and_a_state_with_gaps() -> None:
    """An incomplete state is rejected with and without ``strict``; an empty one leaves the collection on meta."""
    for strict in (True, False):
        late = make(rk.RowwiseAdagrad(), device="meta")
        state = make(rk.RowwiseAdagrad()).state_dict()
        del state["embedding_bags.t.sum"], state["embedding_bags.u_0.weight"]
        with pytest.raises(RuntimeError, match=r"embedding_bags\.t\.sum, .*u_0\.weight: not in the state"):
            late.load_state_dict(state, strict=strict, assign=True)
        assert all(t.is_meta for t in (*late.parameters(), *late.buffers()))
    for state in ({}, make(rk.RowwiseAdagrad(), device="meta").state_dict()):
        late.load_state_dict(state, strict=False, assign=True)
        assert all(t.is_meta for t in (*late.parameters(), *late.buffers()))


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_what_serves_follows(format) -> None:
    """Tables and projections shared by for_serving() take a state together, or not at all."""
    collection, other = make(rk.SGD(), format=format), make(rk.SGD(), format=format, seed=1)
    served = collection.for_serving()
    collection.load_state_dict(other.state_dict(), assign=True)
    for module in (collection, served):
        assert same_bits(module(batch()).values(), other(batch()).values())


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_parameters_stay(optimizer, swap) -> None:
    """Parameters keep their identity for optimizers; the state's tensors stay the caller's."""
    model, other = torch.nn.Sequential(make(optimizer)), torch.nn.Sequential(make(optimizer, seed=1))
    parameters, before = dict(model.named_parameters()), {n: t.clone() for n, t in other.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.load_state_dict(other.state_dict(), assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    if optimizer is not None:
        found = get_optimizer_state_dict(model, model[0].fused_optimizer)
        assert found["param_groups"][0]["params"] == [n for n in parameters if n.endswith("weight")]
    step(model)
    assert all(same_bits(t, before[n]) for n, t in other.state_dict().items())


def test_meta_and_the_fused_optimizer() -> None:
    """The fused optimizer has the new parameters, and keeps the learning rate that was set."""
    model = torch.nn.Sequential(make(rk.RowwiseAdagrad(lr=0.25), device="meta"))
    model.load_state_dict(torch.nn.Sequential(make(rk.RowwiseAdagrad())).state_dict(), assign=True)
    assert model[0].lr.item() == 0.25
    found = get_optimizer_state_dict(model, model[0].fused_optimizer)
    assert found["param_groups"][0]["params"][0] == "0.embedding_bags.t.weight"
