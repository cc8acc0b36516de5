"""Compressed tables in training: micro-batches, frozen features, compiled models with torch's gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from collection_cases import assert_same
from tiers import full

import rec_kernels as rk
from rec_kernels.testing import same_bits

BAGS = {"a": [[2, 6], [], [0, 0, 1], [3]], "b": [[49, 3, 3], [12], [], [0, 49]], "c": [[7] * 70, [30], [31, 2], []]}
COMPRESSIONS = [
    rk.Hash(11),
    rk.QuotientRemainder(4),
    rk.QuotientRemainder(4, compose="pooled"),
    rk.Partitions.chinese_remainder([3, 4, 5], combine="add"),
    rk.MixedDimension(2),
]


def collection(compression, optimizer=None) -> rk.EmbeddingBagCollection:
    """A plain table and a compressed one of 50 ids with two features."""
    tables = [
        rk.EmbeddingBagConfig(7, 3, name="plain", feature_names=["a"]),
        rk.EmbeddingBagConfig(50, 6, name="big", feature_names=["b", "c"], pooling="mean", compression=compression),
    ]
    torch.manual_seed(1)
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer)


def batch(bags: dict[str, list[list[int]]] = BAGS) -> rk.KeyedJaggedTensor:
    every = [bag for of_feature in bags.values() for bag in of_feature]
    values = torch.tensor([i for bag in every for i in bag], dtype=torch.int64)
    return rk.KeyedJaggedTensor(list(bags), values, lengths=torch.tensor([len(bag) for bag in every]))


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("optimizer", [rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5), rk.Adam(lr=0.1)], ids=str)
def test_accumulate(compression, optimizer) -> None:
    """Micro-batches in accumulate() give the bits of one batch: parts change only at the end."""
    whole = collection(compression, optimizer)
    parts, before = copy.deepcopy(whole), copy.deepcopy(whole)
    grad = torch.randn(4, 15, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        whole(batch()).values().backward(grad)
        with parts.accumulate():
            for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
                piece = batch({name: bags[rows] for name, bags in BAGS.items()})
                parts(piece).values().backward(grad[rows])
            assert before is None or same_bits(parts._weights, before._weights)
        before = None
    for name, weight in parts.named_parameters():
        if name.endswith("projection"):  # torch accumulates these in another order
            torch.testing.assert_close(weight.grad, whole.get_parameter(name).grad)
    assert_same(parts, whole)
    assert not same_bits(parts._weights, collection(compression, optimizer)._weights)


@pytest.mark.parametrize("compression", COMPRESSIONS[:-1], ids=str)
def test_freeze(compression) -> None:
    """A frozen feature trains no part; unfreezing restores training."""
    frozen = collection(compression, rk.RowwiseAdagrad(lr=0.5))
    without = copy.deepcopy(frozen)
    frozen.freeze("b")
    grad = torch.randn(4, 15, generator=torch.Generator().manual_seed(2))
    frozen(batch()).values().backward(grad)
    without(batch(BAGS | {"b": [[]] * 4})).values().backward(grad)
    assert_same(frozen, without)
    frozen.freeze("c")
    parts = [name for name in frozen.embedding_bags if name != "plain"]
    before = [frozen.embedding_bags[name].weight.clone() for name in parts]
    frozen(batch()).values().backward(grad)
    assert all(same_bits(frozen.embedding_bags[name].weight, old) for name, old in zip(parts, before, strict=True))
    frozen.unfreeze("b", "c")
    frozen(batch()).values().backward(grad)
    assert all(
        not torch.equal(frozen.embedding_bags[name].weight, old) for name, old in zip(parts, before, strict=True)
    )


@pytest.mark.parametrize(
    ("backend", "compose"), [("aot_eager", "per_id"), *full(("inductor", "per_id"), ("inductor", "pooled"))]
)
def test_compiled_with_torch_gradients(backend: str, compose: str) -> None:
    """One graph has forward and backward for any batch size; the parts' gradients have eager's bits."""
    eager = collection(rk.QuotientRemainder(4, compose=compose))
    model = copy.deepcopy(eager)
    compiled = torch.compile(lambda given: model(given).values(), backend=backend, fullgraph=True, dynamic=True)
    for size in (4, 3):
        given = batch({name: bags[:size] for name, bags in BAGS.items()})
        out, expected = compiled(given), eager(given).values()
        assert same_bits(out, expected)
        grad = torch.randn(size, 15, generator=torch.Generator().manual_seed(size))
        model.zero_grad(), eager.zero_grad()
        out.backward(grad), expected.backward(grad)
        for name, weight in eager.named_parameters():
            assert weight.grad.abs().sum() > 0
            assert same_bits(model.get_parameter(name).grad, weight.grad)
