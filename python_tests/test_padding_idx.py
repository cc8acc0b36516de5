"""``padding_idx`` of tables: the id is left out of sums, counts and gradients of its own feature only."""

from __future__ import annotations

import re

import pytest
import torch
from backends import device_backends
from layout_calls import OPS
from torch import Tensor, nn

import rec_kernels as rk

ROWS, DIM = 12, 4
PADDING = {"a": 3, "b": None, "c": 0}
POOLING = {"a": "mean", "b": "mean", "c": "sum"}
IDS = torch.tensor([[3, 3, 1], [0, 5, 3], [7, 2, 3]])


def _tables(**options: object) -> list[rk.EmbeddingBagConfig]:
    return [
        rk.EmbeddingBagConfig(
            ROWS, DIM, name=name, feature_names=[name], pooling=POOLING[name], padding_idx=padding, **options
        )
        for name, padding in PADDING.items()
    ]


def _batch() -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor.from_dict(dict.fromkeys(PADDING, IDS))


def _torch_bags(weights: dict[str, Tensor]) -> dict[str, nn.EmbeddingBag]:
    return {
        name: nn.EmbeddingBag.from_pretrained(
            weights[name].detach().clone(), freeze=False, mode=POOLING[name], padding_idx=PADDING[name]
        )
        for name in PADDING
    }


@pytest.mark.parametrize("cache", [None, rk.RowCache(0.5)])
def test_training_is_that_of_torch(cache: rk.RowCache | None) -> None:
    """Lookups and three steps of SGD equal torch's, with one padding id per table or none; its row never changes."""
    torch.manual_seed(0)
    ours = rk.EmbeddingBagCollection(_tables(), optimizer=rk.SGD(lr=0.1), cache=cache)
    bags = _torch_bags({name: ours.embedding_bags[name].weight for name in PADDING})
    optimizer = torch.optim.SGD([p for bag in bags.values() for p in bag.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        expected = torch.cat([bags[name](IDS) for name in PADDING], dim=1)
        output = ours(_batch()).values()
        torch.testing.assert_close(output, expected)
        expected.square().sum().backward()
        output.square().sum().backward()
        optimizer.step()
    ours.flush()
    for name, bag in bags.items():
        torch.testing.assert_close(ours.embedding_bags[name].weight, bag.weight)


def test_dense_gradients_are_those_of_torch() -> None:
    """Without a fused optimizer, the padding row has a zero gradient."""
    ours = rk.EmbeddingBagCollection(_tables())
    bags = _torch_bags({name: ours.embedding_bags[name].weight for name in PADDING})
    ours(_batch()).values().square().sum().backward()
    torch.cat([bags[name](IDS) for name in PADDING], dim=1).square().sum().backward()
    for name, bag in bags.items():
        torch.testing.assert_close(ours.embedding_bags[name].weight.grad, bag.weight.grad)


@pytest.mark.parametrize("format", rk.BAG_FORMATS)
def test_rows_begin_as_zeros(format: str) -> None:
    """The padding row is zeros in every format; without padding, or with an ``init``, all rows are initialized."""
    collection = rk.EmbeddingBagCollection(_tables(format=format), optimizer=rk.SGD(lr=0.1))
    for name, padding in PADDING.items():
        rows = collection.embedding_bags[name].weight.detach()
        floats = rows.float() if rows.is_floating_point() else rk.dequantize_rows(rows, format, DIM)
        zeros = [i for i in range(ROWS) if not floats[i].any()]
        assert zeros == ([] if padding is None else [padding])
    filled = rk.EmbeddingBagCollection(_tables(init=nn.init.ones_), optimizer=rk.SGD(lr=0.1))
    assert bool((filled.embedding_bags["a"].weight == 1).all())


def test_rows_of_ids() -> None:
    """Sequence lookups return zeros for padding, and train other rows."""
    table = rk.EmbeddingConfig(ROWS, DIM, name="a", feature_names=["a"], padding_idx=-1, init=nn.init.ones_)
    assert table.padding_idx == ROWS - 1
    collection = rk.EmbeddingCollection([table], optimizer=rk.SGD(lr=1.0))
    rows = collection({"a": torch.tensor([[1, ROWS - 1]])})["a"].values()
    assert rows.tolist() == [[1.0] * DIM, [0.0] * DIM]
    rows.sum().backward()
    weight = collection.embedding_bags["a"].weight
    assert (weight[:, 0] == 0).nonzero().flatten().tolist() == [1]
    assert bool((weight[ROWS - 1] == 1).all())


def test_compressed_tables() -> None:
    """Padding of a hashed table is an id, not a row: other ids of its row are looked up and trained."""
    hashed = rk.EmbeddingBagConfig(
        100, DIM, name="a", feature_names=["a"], compression=rk.Hash(10), padding_idx=3, init=nn.init.ones_
    )
    collection = rk.EmbeddingBagCollection([hashed], optimizer=rk.SGD(lr=1.0))
    output = collection({"a": torch.tensor([[3, 13], [3, 3]])}).values()
    assert output.tolist() == [[1.0] * DIM, [0.0] * DIM]
    output.sum().backward()
    weight = collection.embedding_bags["a"].weight
    assert bool((weight == 1).all(1).sum() == 9)
    assert weight.min() == 0


def test_dense_use_of_the_weight_reaches_the_row() -> None:
    """A penalty on the weight also trains the padding row, as in torch: only lookups leave the id out."""
    table = rk.EmbeddingBagConfig(ROWS, DIM, name="a", feature_names=["a"], padding_idx=0, init=nn.init.ones_)
    collection = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=0.5))
    pooled = collection({"a": torch.tensor([[0, 1]])}).values()
    (pooled.sum() + collection.embedding_bags["a"].weight.sum()).backward()
    assert collection.embedding_bags["a"].weight[:3, 0].tolist() == [0.5, 0.0, 0.5]


def test_deduplicated_batches_and_serving() -> None:
    """Shared bags and serving copies leave out the same ids."""
    collection = rk.EmbeddingBagCollection(_tables(), optimizer=rk.SGD(lr=0.1))
    expected = collection(_batch()).values()
    assert torch.equal(collection.for_serving()(_batch()).values(), expected)
    wrapped = rk.deduplicated(collection)
    assert torch.equal(wrapped(_batch()).values(), expected)


def test_devices_agree() -> None:
    """Two features of one table each have their padding id on every backend."""
    one = {"num_embeddings": [5, 5], "embedding_dims": [4, 4], "weight_offsets": [0, 0], "row_offsets": [0, 0]}
    values, offsets = torch.tensor([1, 2, 1, 2, 4, 1]), torch.tensor([0, 3, 6])
    weights = torch.arange(20.0)
    for ops in (OPS, *(backend.ops for backend in device_backends())):
        output, _ = ops.embedding_bag(weights, values, offsets, **one, padding_idx=[1, 2])
        assert output.tolist() == [[8.0, 9.0, 10.0, 11.0, 20.0, 22.0, 24.0, 26.0]]


def test_errors_of_the_ops_for_one_table() -> None:
    """The ops of one table reject padding ids below -1: these are not counted from the end."""
    table, values, offsets = torch.ones(ROWS, DIM), torch.tensor([1, ROWS - 2]), torch.tensor([0, 2])
    grad = torch.ones(1, DIM)
    message = re.escape("padding_idx = -2 must be an id of the table, or -1: none")
    for ops in (OPS, *(backend.ops for backend in device_backends())):
        with pytest.raises(ValueError, match=message):
            ops.embedding_bag(table, values, offsets, padding_idx=-2)
        with pytest.raises(ValueError, match=message):
            ops.embedding_bag_backward_dense(grad, [ROWS, DIM], values, offsets, padding_idx=-2)
        with pytest.raises(ValueError, match=message):
            ops.embedding_bag_backward_sparse(grad, [ROWS, DIM], values, offsets, padding_idx=-2)
        with pytest.raises(ValueError, match=message):
            ops.embedding_bag_backward_per_sample_weights(grad, table, values, offsets, padding_idx=-2)
