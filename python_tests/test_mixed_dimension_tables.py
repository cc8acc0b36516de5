"""Collections with tables of mixed dimensions: narrow rows are pooled, then projected."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiers import full
from torch.nn import functional

import rec_kernels as rk
from rec_kernels.testing import same_bits

DIMS = {"a": 8, "b": 3, "c": 1}


def _collection(optimizer=None, **options) -> rk.EmbeddingBagCollection:
    """Three tables, one with two features; table a has the model's width."""
    torch.manual_seed(0)
    names = {"a": ["p"], "b": ["q", "r"], "c": ["s"]}
    tables = [
        rk.EmbeddingBagConfig(
            20, 8, name=name, feature_names=features, pooling="mean", compression=rk.MixedDimension(DIMS[name])
        )
        for name, features in names.items()
    ]
    tables.append(rk.EmbeddingBagConfig(20, 4, name="d", feature_names=["t"]))
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def _batch() -> rk.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (15,), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    return rk.KeyedJaggedTensor(["p", "q", "r", "s", "t"], values, lengths=lengths)


def _by_hand(collection: rk.EmbeddingBagCollection, batch: rk.KeyedJaggedTensor) -> torch.Tensor:
    blocks = []
    for key, name in zip("pqrst", "abbcd", strict=True):
        table, mode = collection.embedding_bags[name], "sum" if name == "d" else "mean"
        offsets = batch[key].offsets()[:-1] - batch[key].offsets()[0]
        pooled = functional.embedding_bag(batch[key].values(), table.weight, offsets, mode=mode)
        blocks.append(functional.linear(pooled, table.projection) if hasattr(table, "projection") else pooled)
    return torch.cat(blocks, dim=1)


def test_as_by_hand() -> None:
    """Outputs, widths, names, and gradients of tables and matrices equal a computation by hand."""
    collection = _collection()
    output = collection(_batch())
    assert output.length_per_key() == [8, 8, 8, 8, 4]
    names = dict(collection.named_parameters())
    assert list(names) == [
        "embedding_bags.a.weight",
        "embedding_bags.b.weight",
        "embedding_bags.b.projection",
        "embedding_bags.c.weight",
        "embedding_bags.c.projection",
        "embedding_bags.d.weight",
    ]
    assert names["embedding_bags.b.projection"].shape == (8, 3)
    torch.testing.assert_close(output.values(), _by_hand(collection, _batch()))
    for key, block in collection.by_feature(_batch()).items():
        torch.testing.assert_close(block, output[key])
    grad = torch.randn(3, 36)
    output.values().backward(grad)
    found = {name: p.grad.clone() for name, p in names.items()}
    collection.zero_grad()
    _by_hand(collection, _batch()).backward(grad)
    for name, p in names.items():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5)


def test_training() -> None:
    """Fused optimizers train tables, the dense optimizer matrices."""
    collection = _collection(rk.RowwiseAdagrad(lr=0.1))
    dense = rk.dense_parameters(collection)
    assert [tuple(p.shape) for p in dense] == [(8, 3), (8, 1)]
    optimizer, target, losses = torch.optim.Adam(dense, lr=0.05), torch.randn(3, 36), []
    before = copy.deepcopy(collection.state_dict())
    for _ in range(30):
        loss = (collection(_batch()).values() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    changed = [name for name, t in collection.state_dict().items() if not torch.equal(t, before[name])]
    assert {f"embedding_bags.{name}" for name in ("b.weight", "b.projection", "c.projection", "d.weight")} <= set(
        changed
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_outputs(dtype: torch.dtype) -> None:
    """Outputs are projected in float32, then rounded once."""
    half, whole = _collection(output_dtype=dtype), _collection()
    assert same_bits(half(_batch()).values(), whole(_batch()).values().to(dtype))
    assert {t.dtype for t in half.by_feature(_batch()).values()} == {dtype}


def test_moves_and_copies() -> None:
    """State, copies, casts, meta tensors and serving copies work."""
    collection = _collection(rk.SGD(lr=0.1))
    expected = collection(_batch()).values()
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection)), collection.for_serving()):
        assert same_bits(other(_batch()).values(), expected)
    fresh = _collection(rk.SGD(lr=0.1))
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1)
    fresh.load_state_dict(collection.state_dict())
    assert same_bits(fresh.half()(_batch()).values(), expected)
    assert fresh.embedding_bags["b"].projection.dtype == torch.float32
    meta = _collection(rk.SGD(lr=0.1), device="meta").to_empty(device="cpu")
    meta.load_state_dict(collection.state_dict())
    assert same_bits(meta(_batch()).values(), expected)


def test_gradients_move_along() -> None:
    """Gradients move with the parameters, as in any module."""
    collection = _collection(rk.SGD(lr=0.1))
    collection(_batch()).values().sum().backward()
    grad = collection.embedding_bags["b"].projection.grad.clone()
    collection.half()
    assert same_bits(collection.embedding_bags["b"].projection.grad, grad)
    assert collection.to("meta").embedding_bags["b"].projection.grad.is_meta


def test_accumulated() -> None:
    """In a block, the tables' update is at the end, and the matrices' gradients accumulate."""
    together, apart = _collection(rk.SGD(lr=0.1)), _collection(rk.SGD(lr=0.1))
    (2 * together(_batch()).values()).sum().backward()
    with apart.accumulate():
        for _ in range(2):
            apart(_batch()).values().sum().backward()
    for name, parameter in together.named_parameters():
        other = apart.get_parameter(name)
        torch.testing.assert_close(parameter, other)
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, other.grad)


def test_batch_sizes_of_their_own() -> None:
    """Each distinct bag is pooled and projected once."""
    values, lengths = torch.tensor([1, 2, 19, 3, 8, 0]), torch.tensor([1, 1, 2, 0, 1, 1])
    keys, strides = ["p", "q", "r", "s", "t"], [1, 2, 1, 1, 1]
    inverse = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0], [0, 0]])
    batch = rk.KeyedJaggedTensor(keys, values, lengths=lengths, stride_per_key=strides, inverse_indices=(keys, inverse))
    collection = _collection(rk.SGD(lr=0.1))
    output, blocks = collection(batch), collection.by_feature(batch)
    assert [t.shape for t in blocks.values()] == [(1, 8), (2, 8), (1, 8), (1, 8), (1, 4)]
    torch.testing.assert_close(output["q"], blocks["q"][[1, 0]])
    output.values().sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiled(backend: str) -> None:
    """One graph serves any batch size."""
    collection = _collection(rk.SGD(lr=0.1))
    compiled = torch.compile(lambda batch: collection(batch).values(), backend=backend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(_batch()), collection(_batch()).values())
