"""Compressed tables with rows that change between a lookup and its backward, and tables with shared parts."""

from __future__ import annotations

import pytest
import torch

import rec_kernels as rk
from rec_kernels.testing import same_bits

MULTIPLIED = [rk.QuotientRemainder(4), rk.Partitions.chinese_remainder([3, 4, 5])]
OTHERS = [
    rk.Hash(11),
    rk.QuotientRemainder(4, "add"),
    rk.QuotientRemainder(4, "concat"),
    rk.QuotientRemainder(4, "mult", compose="pooled"),
    None,
]


def _collection(compression, optimizer=None, **options) -> rk.EmbeddingBagCollection:
    torch.manual_seed(1)
    table = rk.EmbeddingBagConfig(50, 6, name="big", feature_names=["a", "b"], compression=compression, **options)
    return rk.EmbeddingBagCollection([table], optimizer=optimizer)


def _batch(seed: int = 0) -> rk.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(50, (12,), generator=generator)
    return rk.KeyedJaggedTensor(["a", "b"], values, lengths=torch.tensor([2, 4, 1, 5]))


def _loss(collection: rk.EmbeddingBagCollection, batch: rk.KeyedJaggedTensor) -> torch.Tensor:
    return (collection(batch).values() ** 2).sum()


def _tables(collection: rk.EmbeddingBagCollection) -> list[torch.Tensor]:
    return [collection.embedding_bags[name].weight.detach().clone() for name in collection.embedding_bags]


@pytest.mark.parametrize("compression", MULTIPLIED)
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_two_lookups_of_products(compression, format: str) -> None:
    """The second backward, which would use rows updated by the first, raises and changes nothing."""
    collection = _collection(compression, rk.SGD(lr=0.1), format=format)
    first, second = _loss(collection, _batch(1)), _loss(collection, _batch(2))
    first.backward()
    before, steps = _tables(collection), int(collection.step)
    with pytest.raises(RuntimeError, match=r"the tables have changed since this lookup.*inside accumulate\(\)"):
        second.backward()
    assert all(map(same_bits, _tables(collection), before))
    assert collection.step == steps
    _loss(collection, _batch(2)).backward()


@pytest.mark.parametrize("compression", MULTIPLIED)
def test_two_lookups_of_products_in_one_loss(compression) -> None:
    """In one loss both lookups use the rows that they read, because the update follows both."""
    found, expected = (_collection(compression, rk.SGD(lr=0.1)) for _ in range(2))
    (_loss(found, _batch(1)) + _loss(found, _batch(2))).backward()
    with expected.accumulate():
        (_loss(expected, _batch(1)) + _loss(expected, _batch(2))).backward()
    assert all(map(same_bits, _tables(found), _tables(expected)))
    assert found.step == expected.step == 1


@pytest.mark.parametrize("compression", MULTIPLIED)
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_two_lookups_in_one_block(compression, format: str) -> None:
    """accumulate() updates once, with gradients of the rows that both lookups read: the bits of one batch."""
    collection, one = (_collection(compression, rk.SGD(lr=0.1), format=format) for _ in range(2))
    with collection.accumulate():
        losses = [_loss(collection, _batch(1)), _loss(collection, _batch(2))]
        for loss in losses:
            loss.backward()
    values = torch.stack([_batch(1).values(), _batch(2).values()])
    both = torch.cat([values[:, :6].reshape(-1), values[:, 6:].reshape(-1)])  # per feature, one batch after the other
    _loss(one, rk.KeyedJaggedTensor(["a", "b"], both, lengths=torch.tensor([2, 4, 2, 4, 1, 5, 1, 5]))).backward()
    assert all(map(same_bits, _tables(collection), _tables(one)))


@pytest.mark.parametrize("change", ["accumulate", "copy", "retain_graph"])
def test_what_else_changes_products(change: str) -> None:
    """The update of a block, loading a state, and a retained graph's first backward also invalidate a lookup."""
    collection = _collection(rk.QuotientRemainder(4), rk.RowwiseAdagrad(lr=0.1))
    loss = _loss(collection, _batch(1))
    if change == "accumulate":
        with collection.accumulate():
            _loss(collection, _batch(2)).backward()
    elif change == "copy":
        collection.load_state_dict(collection.state_dict())
    else:
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the tables have changed since this lookup"):
        loss.backward()


@pytest.mark.parametrize("compression", OTHERS)
def test_two_lookups_of_others(compression) -> None:
    """If gradients need no rows, two backward passes make two updates, whenever the lookups were."""
    early, late = (_collection(compression, rk.SGD(lr=0.1)) for _ in range(2))
    outputs = [early(_batch(seed)).values() for seed in (1, 2)]
    for seed, output in zip((1, 2), outputs, strict=True):
        output.sum().backward()
        late(_batch(seed)).values().sum().backward()
    if getattr(compression, "compose", None) != "pooled":  # torch saved the sums that it multiplies
        assert all(map(same_bits, _tables(early), _tables(late)))
    assert early.step == 2


@pytest.mark.parametrize("compression", [*OTHERS, *MULTIPLIED])
def test_writes_between_forward_and_backward(compression) -> None:
    """With torch's gradients, writing to tables before the backward is an error for products only."""
    collection = _collection(compression)
    loss = collection(_batch()).values().sum()
    with torch.no_grad():
        for name in collection.embedding_bags:
            collection.embedding_bags[name].weight.mul_(1.5)
    if compression in MULTIPLIED:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
        assert all(p.grad is not None for p in collection.parameters())


def test_compiled() -> None:
    """One lookup compiles; tracing rejects two in one graph. Compiled code does not check for changed rows."""
    collection, eager = (_collection(rk.QuotientRemainder(4), rk.SGD(lr=0.1)) for _ in range(2))
    compiled = torch.compile(_loss, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        compiled(collection, _batch(seed)).backward()
        _loss(eager, _batch(seed)).backward()
        assert all(map(same_bits, _tables(collection), _tables(eager)))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def twice(one, other):
        return _loss(collection, one) + _loss(collection, other)

    with pytest.raises(Exception, match="the tables have changed since this lookup"):
        twice(_batch(1), _batch(2)).backward()
