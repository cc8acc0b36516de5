"""EmbeddingCollection: sequence embeddings."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from collection_cases import OPTIMIZERS, assert_same, deduplicated, sequences
from jagged_cases import unchecked
from test_embedding_bag_bounds import late, message
from test_embedding_bag_module import batch, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rec_kernels as rk

KEYS = ["f", "g@a", "g@b", "h"]
TABLE_OF = {"f": "a", "g@a": "a", "g@b": "b", "h": "b"}


@pytest.mark.parametrize("keys", ["fgh", "hxfg"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_rows_are_the_tables(optimizer, keys: str) -> None:
    """A row per id, in the order of the ids, whatever the order of the keys."""
    collection, given = sequences(optimizer), batch(list(keys))
    output = collection(given)
    assert list(output) == KEYS
    for key, jagged in output.items():
        ids, weight = given[key[0]], collection.embedding_bags[TABLE_OF[key]].weight
        assert torch.equal(jagged.values(), weight[ids.values()])
        assert torch.equal(jagged.offsets(), ids.offsets())
        assert torch.equal(jagged.lengths(), ids.lengths())


def test_torchrecs_names() -> None:
    """Methods and attributes have TorchRec's names; embedding_dim raises if dimensions differ."""
    modules = pytest.importorskip("torchrec.modules.embedding_modules")
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    sizes = {"num_embeddings": 5, "embedding_dim": 8}
    tables = [
        configs.EmbeddingConfig(name="a", feature_names=["f", "g"], **sizes),
        configs.EmbeddingConfig(name="b", feature_names=["g", "h"], **sizes),
    ]
    theirs, ours = modules.EmbeddingCollection(tables=tables), rk.EmbeddingCollection(tables)
    for name in ("embedding_dim", "embedding_names_by_table", "need_indices"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    assert list(ours.embeddings.keys()) == list(theirs.embeddings.keys()) == list(ours.embeddings)
    assert [t.weight.shape for t in ours.embeddings.values()] == [t.weight.shape for t in theirs.embeddings.values()]
    assert dict(ours.embeddings.items()) == {name: ours.embeddings[name] for name in ("a", "b")}
    assert len(ours.embeddings) == 2
    assert ["b" in ours.embeddings, "c" in ours.embeddings] == [True, False]
    with pytest.raises(ValueError, match=r"embedding_dim\(\) requires tables of equal dimensions, got \[6, 20\]"):
        sequences(None).embedding_dim()


def test_tables_by_any_name() -> None:
    """A table may have the name of a method, also in states."""
    tables = [rk.EmbeddingBagConfig(5, 4, name=n, feature_names=[n]) for n in ("keys", "values", "items")]
    collection = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5))
    assert list(collection.embedding_bags.keys()) == ["keys", "values", "items"]
    weights = {f"embedding_bags.{name}.weight": t.weight for name, t in collection.embedding_bags.items()}
    assert dict(collection.named_parameters()).keys() == weights.keys() <= collection.state_dict().keys()
    other = copy.deepcopy(collection)
    other.load_state_dict(collection.state_dict())
    collection({n: torch.tensor([1]) for n in ("keys", "values", "items")}).values().sum().backward()
    for name, held in other.embedding_bags.items():
        assert not torch.equal(held.weight, collection.embedding_bags[name].weight)


def test_weights_multiply() -> None:
    """Per-sample weights multiply rows, with a gradient."""
    collection, given = sequences(rk.SGD(lr=0.5)), batch()
    factors = torch.rand(len(given.values()), requires_grad=True)
    given = rk.KeyedJaggedTensor(given.keys(), given.values(), offsets=given.offsets(), weights=factors)
    plain = {k: t.values() for k, t in collection(batch()).items()}
    output = collection(given)
    assert torch.equal(output["f"].values(), plain["f"] * given["f"].weights_or_none()[:, None])
    output["f"].values().sum().backward()
    expected = torch.zeros(len(given.values()))
    expected[: len(plain["f"])] = plain["f"].sum(1)
    torch.testing.assert_close(factors.grad, expected)


@pytest.mark.parametrize("format", ["fp16", "int8", "mx6"])
def test_formats(format: str) -> None:
    """Quantized rows are decoded, concatenated with floats, and trained."""
    collection = sequences(rk.RowwiseAdagrad(lr=0.5), (format, "fp32"))
    output, rows = collection(batch()), collection.embedding_bags["a"].weight
    table = rows.float() if rows.dtype != torch.uint8 else rk.dequantize_rows(rows, format, 6)
    assert torch.equal(output["f"].values(), table[batch()["f"].values()])
    before = rows.clone()
    sum(t.values().square().sum() for t in output.values()).backward()
    assert not torch.equal(rows, before)


def _loss(output: dict[str, rk.JaggedTensor]) -> Tensor:
    return sum((t.values() ** 2).sum() for t in output.values())


def _sgd_by_torch(tables: dict[str, Tensor], given: rk.KeyedJaggedTensor, lr: float) -> dict[str, Tensor]:
    parameters = {name: t.clone().requires_grad_(True) for name, t in tables.items()}
    loss = sum((F.embedding(given[k[0]].values(), parameters[t]) ** 2).sum() for k, t in TABLE_OF.items())
    loss.backward()
    return {name: (t - lr * t.grad).detach() for name, t in parameters.items()}


def test_trains_as_torch() -> None:
    """Fused SGD and torch's gradients equal torch's embedding."""
    fused, plain = sequences(rk.SGD(lr=0.1)), sequences()
    tables = {name: plain.embedding_bags[name].weight.detach().clone() for name in "ab"}
    for step in range(3):
        tables = _sgd_by_torch(tables, batch(seed=step), 0.1)
        _loss(fused(batch(seed=step))).backward()
        plain.zero_grad()
        _loss(plain(batch(seed=step))).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, expected in tables.items():
        torch.testing.assert_close(fused.embedding_bags[name].weight, expected)
        torch.testing.assert_close(plain.embedding_bags[name].weight.detach(), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:], ids=str)
def test_accumulate(optimizer) -> None:
    """Micro-batches have the bits of one batch."""
    one, several = sequences(optimizer), sequences(optimizer)
    given = [batch(seed=s) for s in (1, 2, 3)]
    keys = ["f", "g", "h"]
    values = torch.cat([b[k].values() for k in keys for b in given])
    lengths = torch.cat([b[k].lengths() for k in keys for b in given])
    _loss(one(rk.KeyedJaggedTensor(keys, values, lengths=lengths))).backward()
    with several.accumulate():
        for b in given:
            _loss(several(b)).backward()
    assert_same(one, several)


def test_rows_without_the_host() -> None:
    """rows() returns a tensor of the largest D, padded with zeros, in one graph for any batch."""
    collection, given = sequences(rk.SGD(lr=0.5)), batch()
    rows, output = collection.rows(given), collection(given)
    assert rows.shape == (sum(len(t.values()) for t in output.values()), 20)
    first = 0
    for t in output.values():
        block = rows[first : first + len(t.values())]
        assert torch.equal(block[:, : t.values().shape[1]], t.values())
        assert not block[:, t.values().shape[1] :].any()
        first += len(block)
    compiled = torch.compile(
        lambda values, offsets: straight.rows(rk.KeyedJaggedTensor(list("abcd"), values, offsets=offsets)),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    straight = _four_features()
    for seed in (1, 2):
        b = batch(list("fghk"), seed)
        expected = straight.rows(rk.KeyedJaggedTensor(list("abcd"), b.values(), offsets=b.offsets()))
        assert torch.equal(compiled(b.values(), b.offsets()), expected)


class _Lists(TorchDispatchMode):
    """Counts index tensors made from lists, which would be copied to a GPU synchronously."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index.Tensor:
            self.count += sum(all(index is not t for t in self.made) for index in args[1])
        self.made.append(function(*args, **(kwargs or {})))
        return self.made[-1]


def test_sizes_of_features_are_no_list() -> None:
    """Batch sizes per feature reach the device, here meta, without a synchronous copy."""
    tables = [rk.EmbeddingConfig(50, 8, name=f"t{key}", feature_names=[key]) for key in "ab"]
    collection = rk.EmbeddingCollection(tables, optimizer=rk.SGD(lr=0.5), device="meta")
    given = rk.KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=torch.arange(4), stride_per_key=[1, 3])
    given = given.to("meta")
    with _Lists() as seen:
        given.offsets()[[0, 1, 3]]
        assert seen.count == 1
        assert collection.rows(given).shape == (6, 8)
        assert seen.count == 1


def _four_features() -> rk.EmbeddingCollection:
    tables = [rk.EmbeddingConfig(50, 8, name=f"t{key}", feature_names=[key]) for key in "abcd"]
    return rk.EmbeddingCollection(tables, optimizer=rk.SGD(lr=0.5))


def test_empty() -> None:
    """No ids, no bags, no tables."""
    collection = sequences(rk.SGD(lr=0.5))
    for size in (0, 3):
        empty = rk.KeyedJaggedTensor(list("fgh"), torch.empty(0).long(), lengths=torch.zeros(3 * size).long())
        output = collection(empty)
        assert all(t.values().shape[0] == 0 and len(t.offsets()) == size + 1 for t in output.values())
        assert output["h"].values().shape[1] == 20
    nothing = rk.KeyedJaggedTensor([], torch.empty(0).long(), lengths=torch.empty(0).long())
    assert rk.EmbeddingCollection([])(nothing) == {}


def test_bad_input() -> None:
    """Bad ids and offsets raise on the CPU."""
    collection, given = sequences(rk.SGD(lr=0.5)), batch()
    before = copy.deepcopy(collection.state_dict())
    given.values()[2] = 77
    with pytest.raises(IndexError, match=r"values\[2\] = 77 \(feature 'f', bag 2\).*\[0, 50\)"):
        collection(given)
    four = batch(list("fghk"))
    offsets = four.offsets().clone()
    offsets[3] = 0
    straight = _four_features()
    with pytest.raises(ValueError, match=r"offsets\[3\] = 0 is below the offset before it"):
        straight(unchecked(list("abcd"), four.values(), offsets.tolist()))
    with pytest.raises(ValueError, match="offsets must start at 0 and end at 3, the number of values"):
        straight(rk.KeyedJaggedTensor(list("abcd"), torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 1, 1, 1, 2])))
    assert all(torch.equal(t, before[k]) for k, t in collection.state_dict().items())


def test_late_reports() -> None:
    """On a GPU, late errors name an earlier bad id, or a feature that begins at a wrong offset."""
    collection = sequences(rk.SGD(lr=0.5))
    before = copy.deepcopy(collection.state_dict())
    with late():
        given = batch()
        given.values()[2] = 77
        _loss(collection(given)).backward()
        assert message(collection.check).startswith("values[2] = 77 (feature 'f', bag 2) is out of range")
        collection.check()
        few = deduplicated()[0]
        few.values()[-1] = 99
        pooled = make(rk.SGD(lr=0.5))
        pooled.by_feature(few)
        last = int(few.lengths()[5:].nonzero().max())
        assert f"= 99 (feature 'h', bag {last}) is out of range" in message(pooled.check)
    assert all(torch.equal(t, before[k]) for k, t in collection.state_dict().items())


def test_padded() -> None:
    """to_padded_dense truncates, pads, or defaults to the longest length."""
    jagged = rk.JaggedTensor(torch.arange(12.0).view(6, 2), offsets=torch.tensor([0, 1, 1, 4, 6]))
    longest = jagged.to_padded_dense()
    assert longest.shape == (4, 3, 2)
    assert longest[2].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert not longest[1].any()
    short = jagged.to_padded_dense(2, padding_value=-1)
    assert short[:, :, 0].tolist() == [[0, -1], [-1, -1], [2, 4], [8, 10]]
    assert rk.JaggedTensor(torch.arange(3), offsets=torch.tensor([0, 1, 3])).to_padded_dense().tolist() == [
        [0, 0],
        [1, 2],
    ]


@pytest.mark.parametrize("offsets", [[0, 1, 2], [1, 2, 3], [1, 1, 1], [1, 2, 2]])
@pytest.mark.parametrize("known", [False, True], ids=["", "offsets known"])
def test_ids_in_no_bag(offsets: list[int], known: bool) -> None:
    """Ids outside of all bags are ignored by pooled lookups and rejected by rows(), whatever the order of keys."""
    torch.manual_seed(0)
    tables = [rk.EmbeddingBagConfig(9, 4, name=name, feature_names=[name]) for name in "ab"]
    pooled = rk.EmbeddingBagCollection(tables)
    with torch.no_grad():
        for name in "ab":
            pooled.embedding_bags[name].weight.copy_(torch.arange(9.0)[:, None].expand(-1, 4))
    ids, weights = torch.tensor([3, 5, 7]), torch.tensor([1.0, 10.0, 100.0])
    right = [float((ids * weights)[a:b].sum()) for a, b in itertools.pairwise(offsets)]
    for keys in ("ab", "ba"):
        sums = dict(zip(keys, right, strict=True))
        kjt = rk.KeyedJaggedTensor(list(keys), ids, offsets=torch.tensor(offsets), weights=weights)
        if known:
            kjt.offset_per_key()
        output = pooled(kjt).to_dict()
        assert [output[key][0].tolist() for key in "ab"] == [[sums[key]] * 4 for key in "ab"]
        refusal = f"offsets must start at 0 and end at 3, the number of values, got {offsets[0]} and {offsets[-1]}"
        with pytest.raises(ValueError, match=refusal):
            rk.EmbeddingCollection(tables)(kjt)


def test_batches_in_one_memory() -> None:
    """Overwritten offsets, as of a captured graph, are read again."""
    collection, given = _four_features(), batch(list("fghk"), 1)
    kjt = rk.KeyedJaggedTensor(list("abcd"), given.values().clone(), offsets=given.offsets().clone())
    collection(kjt)
    moved = given.offsets().clone()
    moved[1:-1] = 0  # every id in the last bag
    kjt.offsets().copy_(moved)
    assert [len(t.values()) for t in collection(kjt).values()] == [0, 0, 0, len(given.values())]
    assert [len(kjt[k].values()) for k in "abcd"] == [0, 0, 0, len(given.values())]


@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.5)], ids=str)
def test_a_batch_whose_size_depends_on_data(optimizer) -> None:
    """rows() of distinct ids compiles to one graph for any number of them, including none."""
    torch._dynamo.reset()
    table = rk.EmbeddingConfig(9, 4, name="a", feature_names=["a"])
    collection = rk.EmbeddingCollection([table], optimizer=optimizer)
    expected = copy.deepcopy(collection)

    def distinct(module: rk.EmbeddingCollection, ids: torch.Tensor) -> torch.Tensor:
        found = torch.unique(ids)
        return module.rows(rk.KeyedJaggedTensor(["a"], found, offsets=torch.arange(found.shape[0] + 1)))

    compiled = torch.compile(distinct, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for ids in ([1, 1, 2], [3, 1, 2, 7], []):
            outputs = [f(m, torch.tensor(ids).long()) for f, m in ((compiled, collection), (distinct, expected))]
            assert torch.equal(*outputs)
            for output in outputs:
                output.square().sum().backward()
    assert torch.equal(collection._weights, expected._weights)
    if optimizer is None:
        assert torch.equal(*(m.embedding_bags["a"].weight.grad for m in (collection, expected)))
