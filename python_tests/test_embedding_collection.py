"""EmbeddingCollection, features with batch sizes of their own, frozen features and output dtypes, in modules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from test_embedding_bag_bounds import late, message
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.jagged import SelectedKeys
from rec_kernels.testing import same_bits

OPTIMIZERS = [None, rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5), rk.Adam(lr=0.1)]


def make(optimizer=None, formats=("fp32", "fp32"), **options) -> rk.EmbeddingCollection:
    """Two tables of different dimensions, the first shared by f and g, g in both."""
    torch.manual_seed(0)
    tables = [
        rk.EmbeddingConfig(50, 6, name="a", feature_names=["f", "g"], format=formats[0]),
        rk.EmbeddingConfig(70, 20, name="b", feature_names=["g", "h"], format=formats[1]),
    ]
    return rk.EmbeddingCollection(tables, optimizer=optimizer, **options)


def batch(keys=("f", "g", "h"), seed: int = 0, size: int = 4, weights: bool = False) -> rk.KeyedJaggedTensor:
    """Bags of 0 to 3 ids below 50; a key's bags are the same wherever it stands."""
    parts = []
    for key in keys:
        g = torch.Generator().manual_seed(seed * 100 + ord(key))
        lengths = torch.randint(0, 4, (size,), generator=g)
        parts.append((torch.randint(0, 50, (int(lengths.sum()),), generator=g), lengths))
    values = torch.cat([v for v, _ in parts])
    factors = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) if weights else None
    return rk.KeyedJaggedTensor(list(keys), values, lengths=torch.cat([n for _, n in parts]), weights=factors)


KEYS = ["f", "g@a", "g@b", "h"]
TABLE_OF = {"f": "a", "g@a": "a", "g@b": "b", "h": "b"}


def assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Same weights and state, bit for bit."""
    for (name, x), (other, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(x, y), name


@pytest.mark.parametrize("keys", ["fgh", "hxfg"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_rows_are_the_tables(optimizer, keys: str) -> None:
    """A row for each id, in the order of the ids, whatever the order of the keys."""
    collection, given = make(optimizer), batch(tuple(keys))
    output = collection(given)
    assert list(output) == KEYS
    for key, jagged in output.items():
        ids, weight = given[key[0]], collection.embedding_bags[TABLE_OF[key]].weight
        assert torch.equal(jagged.values(), weight[ids.values()])
        assert torch.equal(jagged.offsets(), ids.offsets())
        assert torch.equal(jagged.lengths(), ids.lengths())


def test_weights_multiply() -> None:
    """Per-sample weights are factors of the rows, with a gradient."""
    collection, given = make(rk.SGD(lr=0.5)), batch(weights=True)
    given._weights.requires_grad_(True)
    plain = {k: t.values() for k, t in collection(batch()).items()}
    output = collection(given)
    assert torch.equal(output["f"].values(), plain["f"] * given["f"].weights_or_none()[:, None])
    output["f"].values().sum().backward()
    expected = torch.zeros(len(given.values()))
    expected[: len(plain["f"])] = plain["f"].sum(1)
    torch.testing.assert_close(given._weights.grad, expected)


@pytest.mark.parametrize("format", ["fp16", "int8", "mx6"])
def test_formats(format: str) -> None:
    """Encoded rows are looked up decoded, side by side with floats, and trained."""
    collection = make(rk.RowwiseAdagrad(lr=0.5), (format, "fp32"))
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
    """Fused SGD, and torch gradients, against torch's embedding."""
    fused, plain = make(rk.SGD(lr=0.1)), make()
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
    """Micro-batches are the bits of one batch."""
    one, several = make(optimizer), make(optimizer)
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
    """rows(): one tensor, the largest D wide, zeros behind the others; compiled in one graph for any batch."""
    collection, given = make(rk.SGD(lr=0.5)), batch(("f", "g", "h"))
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
        b = batch(("f", "g", "h", "k"), seed)
        expected = straight.rows(rk.KeyedJaggedTensor(list("abcd"), b.values(), offsets=b.offsets()))
        assert torch.equal(compiled(b.values(), b.offsets()), expected)


def _four_features() -> rk.EmbeddingCollection:
    tables = [rk.EmbeddingConfig(50, 8, name=f"t{key}", feature_names=[key]) for key in "abcd"]
    return rk.EmbeddingCollection(tables, optimizer=rk.SGD(lr=0.5))


def test_empty() -> None:
    """No ids, no bags, no tables."""
    collection = make(rk.SGD(lr=0.5))
    for size in (0, 3):
        empty = rk.KeyedJaggedTensor(list("fgh"), torch.empty(0).long(), lengths=torch.zeros(3 * size).long())
        output = collection(empty)
        assert all(t.values().shape[0] == 0 and len(t.offsets()) == size + 1 for t in output.values())
        assert output["h"].values().shape[1] == 20
    nothing = rk.KeyedJaggedTensor([], torch.empty(0).long(), lengths=torch.empty(0).long())
    assert rk.EmbeddingCollection([])(nothing) == {}


def test_bad_input() -> None:
    """Ids and offsets, on the CPU."""
    collection, given = make(rk.SGD(lr=0.5)), batch()
    before = copy.deepcopy(collection.state_dict())
    given.values()[2] = 77
    with pytest.raises(IndexError, match=r"values\[2\] = 77 \(feature 0, bag 2\).*\[0, 50\)"):
        collection(given)
    offsets = batch().offsets().clone()
    offsets[3] = 0
    straight = _four_features()
    with pytest.raises(ValueError, match=r"offsets\[3\] = 0 is below the offset before it"):
        straight(rk.KeyedJaggedTensor(list("abcd"), batch().values(), offsets=offsets))
    with pytest.raises(ValueError, match="offsets must start at 0 and end at 3, the number of values"):
        straight(rk.KeyedJaggedTensor(list("abcd"), torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 1, 1, 1, 2])))
    assert all(torch.equal(t, before[k]) for k, t in collection.state_dict().items())


def test_late_reports() -> None:
    """On a GPU, the words of an earlier bad id, and of features that begin in the wrong place."""
    collection = make(rk.SGD(lr=0.5))
    before = copy.deepcopy(collection.state_dict())
    with late():
        given = batch()
        given.values()[2] = 77
        _loss(collection(given)).backward()
        assert message(collection.check).startswith("values[2] = 77 (feature 0, bag 2) is out of range")
        collection.check()
        few = deduplicated()[0]
        few.values()[-1] = 99
        pooled = bags(rk.SGD(lr=0.5))
        pooled.by_feature(few)
        last = int(few.lengths()[5:].nonzero().max())
        assert f"= 99 (feature 2, bag {last}) is out of range" in message(pooled.check)
    assert all(torch.equal(t, before[k]) for k, t in collection.state_dict().items())


def test_padded() -> None:
    """to_padded_dense: cut, padded, or as long as the longest."""
    jagged = rk.JaggedTensor(torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 1, 4, 6]))
    longest = jagged.to_padded_dense()
    assert longest.shape == (4, 3, 2)
    assert longest[2].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert not longest[1].any()
    short = jagged.to_padded_dense(2, padding_value=-1)
    assert short[:, :, 0].tolist() == [[0, -1], [-1, -1], [2, 4], [8, 10]]
    assert rk.JaggedTensor(torch.arange(3), torch.tensor([0, 1, 3])).to_padded_dense().tolist() == [[0, 0], [1, 2]]


def bags(optimizer=None, **options) -> rk.EmbeddingBagCollection:
    """Two tables, the first shared, the second averaged."""
    torch.manual_seed(0)
    tables = [
        rk.EmbeddingBagConfig(50, 6, name="a", feature_names=["f", "g"]),
        rk.EmbeddingBagConfig(70, 20, name="b", feature_names=["h"], pooling="mean"),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def deduplicated(keys="fgh", seed: int = 1) -> tuple[rk.KeyedJaggedTensor, rk.KeyedJaggedTensor]:
    """Features of 2, 3 and 4 distinct bags in a batch of 7, and the same batch written out."""
    g = torch.Generator().manual_seed(seed)
    strides = [2, 3, 4]
    places = torch.stack([torch.randint(0, s, (7,), generator=g) for s in strides])
    lengths = torch.randint(0, 4, (sum(strides),), generator=g)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=g)
    few = rk.KeyedJaggedTensor(
        list("fgh"), values, lengths=lengths, stride_per_key=strides, inverse_indices=(list("fgh"), places)
    )
    parts = {}
    for key, row in zip("fgh", places, strict=True):
        dense = few[key].to_dense()
        parts[key] = [dense[i] for i in row]
    whole = [bag for key in keys for bag in parts[key]]
    return few, rk.KeyedJaggedTensor(list(keys), torch.cat(whole), lengths=torch.tensor([len(bag) for bag in whole]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_inverse_indices(optimizer) -> None:
    """Distinct bags looked up once give the output of the whole batch, and its gradients."""
    few, whole = deduplicated()
    one, other = bags(optimizer), bags(optimizer)
    found, expected = one(few), other(whole)
    assert torch.equal(found.values(), expected.values())
    assert found.keys() == expected.keys()
    (found.values() ** 2).sum().backward()
    (expected.values() ** 2).sum().backward()
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_by_feature() -> None:
    """One tensor a feature, with batch sizes of their own or without."""
    few, whole = deduplicated()
    collection = bags()
    found = collection.by_feature(few)
    assert {k: t.shape for k, t in found.items()} == {"f": (2, 6), "g": (3, 6), "h": (4, 20)}
    places = few.inverse_indices_or_none()[1]
    expected = collection(whole).to_dict()
    for row, (key, t) in zip(places, found.items(), strict=True):
        assert torch.equal(t[row], expected[key])
    assert all(torch.equal(t, expected[k]) for k, t in collection.by_feature(whole).items())
    bare = rk.KeyedJaggedTensor(few.keys(), few.values(), offsets=few.offsets(), stride_per_key=[2, 3, 4])
    with pytest.raises(ValueError, match=r"no inverse indices.*by_feature"):
        collection(bare)
    assert torch.equal(collection.by_feature(bare)["g"], found["g"])


def test_strides_in_another_order() -> None:
    """Keys in any order, some not asked for."""
    few, _ = deduplicated()
    order = [2, 0, 1]
    parts = [few["fgh"[i]] for i in order]
    names, places = few.inverse_indices_or_none()
    moved = rk.KeyedJaggedTensor(
        ["h", "f", "g"],
        torch.cat([p.values() for p in parts]),
        lengths=torch.cat([p.lengths() for p in parts]),
        stride_per_key=[4, 2, 3],
        inverse_indices=(names, places),
    )
    assert torch.equal(bags()(moved).values(), bags()(few).values())
    assert moved.stride() == 7
    assert moved.offset_per_key() == [0, *torch.tensor([len(p.values()) for p in parts]).cumsum(0).tolist()]


def test_strides_accumulate() -> None:
    """Micro-batches of features with batch sizes of their own; not mixed with others."""
    one, several = bags(rk.SGD(lr=0.5)), bags(rk.SGD(lr=0.5))
    pairs = [deduplicated(seed=s)[0] for s in (1, 2)]
    parts = [b[k] for k in "fgh" for b in pairs]
    joined = rk.KeyedJaggedTensor(
        list("fgh"),
        torch.cat([p.values() for p in parts]),
        lengths=torch.cat([p.lengths() for p in parts]),
        stride_per_key=[4, 6, 8],
    )
    sum((t**2).sum() for t in one.by_feature(joined).values()).backward()
    with several.accumulate():
        for b in pairs:
            sum((t**2).sum() for t in several.by_feature(b).values()).backward()
    assert_same(one, several)
    with pytest.raises(RuntimeError, match="must be of one kind"):
        _mixed(several)
    assert_same(one, several)


def _mixed(collection: rk.EmbeddingBagCollection) -> None:
    few, whole = deduplicated()
    with collection.accumulate():
        collection.by_feature(few)["f"].sum().backward()
        collection(whole).values().sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride_per_key": [2, 3]}, "stride_per_key must have a batch size for each of the 3 keys"),
        ({"stride_per_key": [2, 3, 3]}, "lengths describe 9 bags, and stride_per_key 8"),
        ({"inverse_indices": (["f"], torch.zeros(1, 2).long())}, "give stride_per_key"),
        (
            {"stride_per_key": [2, 3, 4], "inverse_indices": (["f"], torch.zeros(1, 2).long())},
            r"inverse_indices lack the keys \['g', 'h'\]",
        ),
        (
            {"stride_per_key": [2, 3, 4], "inverse_indices": (list("fgh"), torch.zeros(3, 2))},
            r"inverse_indices must be int64 \[3, B\]",
        ),
    ],
)
def test_bad_strides(options: dict, message: str) -> None:
    """Sizes that do not fit are told at once."""
    with pytest.raises(ValueError, match=message):
        rk.KeyedJaggedTensor(list("fgh"), torch.arange(9), lengths=torch.ones(9).long(), **options)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_freeze(optimizer) -> None:
    """A frozen feature teaches its table nothing; others of the table do; unfreeze ends it."""
    whole = deduplicated()[1]
    few, all_of_it = bags(optimizer), bags(optimizer)
    few.freeze("g", "h")
    emptied = rk.KeyedJaggedTensor(
        list("fgh"),
        whole["f"].values(),
        lengths=torch.cat([whole["f"].lengths(), torch.zeros(14).long()]),
    )
    assert torch.equal(few(whole).values(), all_of_it(whole).values())
    few(whole).values().sum().backward()
    all_of_it(emptied).values().sum().backward()
    assert_same(few, all_of_it)
    if optimizer is None:
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(few.parameters(), all_of_it.parameters(), strict=True))
    few.unfreeze("g", "h")
    few(whole).values().sum().backward()
    all_of_it(whole).values().sum().backward()
    assert_same(few, all_of_it)
    with pytest.raises(KeyError, match="'x'"):
        few.freeze("x")


def test_freeze_in_compiled_code() -> None:
    """Once freeze() has been called, what is frozen changes without compiling again."""
    collection, expected = bags(rk.SGD(lr=0.5)), bags(rk.SGD(lr=0.5))
    collection.freeze()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda kjt: collection(kjt).values().sum(), backend=counter, fullgraph=True)
    whole = deduplicated()[1]
    for names in ((), ("f",), ("g", "h")):
        collection.freeze(*names)
        expected.freeze(*names)
        compiled(whole).backward()
        expected(whole).values().sum().backward()
        assert_same(collection, expected)
        collection.unfreeze(*names)
        expected.unfreeze(*names)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_output_dtype(optimizer, dtype: torch.dtype) -> None:
    """Outputs are the float32 ones, rounded; training goes on with their gradients."""
    half, whole = bags(optimizer, output_dtype=dtype), bags(optimizer)
    given = deduplicated()[1]
    output = half(given).values()
    assert output.dtype == dtype
    assert torch.equal(output, whole(given).values().to(dtype))
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    output.backward(grad)
    whole(given).values().backward(grad.float())
    assert_same(half, whole)
    few = deduplicated()[0]
    assert torch.equal(half(few).values(), half(given).values())
    sequence = make(optimizer, output_dtype=dtype)(batch())
    assert torch.equal(sequence["h"].values(), make(optimizer)(batch())["h"].values().to(dtype))


def test_output_dtype_is_checked() -> None:
    """At construction."""
    with pytest.raises(ValueError, match=r"output_dtype must be torch\.float32, float16 or bfloat16"):
        bags(output_dtype=torch.float64)


def test_weight_decay_and_clipping_in_a_module() -> None:
    """The optimizer's numbers reach the op: SGD by hand."""
    table = [rk.EmbeddingBagConfig(4, 3, name="t", feature_names=["f"], init=lambda w: w.fill_(2.0))]
    given = rk.KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    for optimizer, expected in [
        (rk.SGD(lr=0.5, weight_decay=0.1), 2.0 - 0.5 * (4.0 + 0.2)),
        (rk.SGD(lr=0.5, weight_decay=0.1, weight_decay_mode="decoupled"), 2.0 * (1 - 0.05) - 0.5 * 4.0),
        (rk.SGD(lr=0.5, clip_grad_value=0.25), 2.0 - 0.5 * 0.25),
        (rk.SGD(lr=0.5, clip_grad_norm=3.0), 2.0 - 0.5 * 3.0 / 3**0.5),
    ]:
        collection = rk.EmbeddingBagCollection(table, optimizer=optimizer)
        (collection(given).values() ** 2).sum().backward()
        weight = collection.embedding_bags["t"].weight
        torch.testing.assert_close(weight[1], torch.full((3,), expected))
        assert same_bits(weight[0], torch.full((3,), 2.0))


def test_decoupled_decay_is_torchs() -> None:
    """AdamW of torch, on a table whose rows are all in every batch."""
    torch.manual_seed(1)
    start = torch.randn(4, 5)
    table = [rk.EmbeddingBagConfig(4, 5, name="t", feature_names=["f"], init=lambda w: w.copy_(start))]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.3}
    ours = rk.EmbeddingBagCollection(table, optimizer=rk.Adam(**options, weight_decay_mode="decoupled"))
    theirs = start.clone().requires_grad_(True)
    optimizer = torch.optim.AdamW([theirs], **options)
    given = rk.KeyedJaggedTensor(["f"], torch.arange(4), lengths=torch.ones(4).long())
    for _ in range(5):
        (ours(given).values() ** 3).sum().backward()
        optimizer.zero_grad()
        (theirs**3).sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours.embedding_bags["t"].weight, theirs.detach())


@pytest.mark.parametrize(
    "bad",
    [
        {"weight_decay": -1.0},
        {"weight_decay": float("inf")},
        {"weight_decay_mode": "both"},
        {"clip_grad_value": 0.0},
        {"clip_grad_norm": float("nan")},
    ],
)
def test_bad_optimizer_numbers(bad: dict) -> None:
    """Refused when the optimizer is made, by name."""
    for kind in (rk.SGD, rk.RowwiseAdagrad, rk.LAMB):
        with pytest.raises(ValueError, match=next(iter(bad))):
            kind(lr=0.1, **bad)


def test_optimizers_in_words() -> None:
    """What is not the default is shown."""
    assert repr(rk.SGD(lr=0.5)) == "SGD(lr=0.5)"
    shown = repr(rk.Adam(weight_decay=0.1, clip_grad_norm=2.0))
    assert shown == "Adam(lr=0.001, weight_decay=0.1, clip_grad_norm=2.0)"


def test_inverse_indices_are_checked() -> None:
    """A bag that the feature does not have is an error, never a neighbour's bag; a GPU tells later."""
    few, _ = deduplicated()
    for bad in (2, -1, 2**40):
        few.inverse_indices_or_none()[1][0, 3] = bad
        with pytest.raises(IndexError, match=rf"inverse_indices of 'f' have {bad} at row 3: .* \[0, 2\)"):
            bags(rk.SGD(lr=0.5))(few)
    few.inverse_indices_or_none()[1][0, 3] = 2
    collection = bags(rk.SGD(lr=0.5))
    collection.check()
    with late():
        ids = torch.tensor([0, -1])
        collection._note(torch.tensor([1, 1]), SelectedKeys(ids, torch.arange(3), None, None), None)
        assert "values[1] = -1 (feature 1, bag 0)" in _two_features_of(collection)


def _two_features_of(collection: rk.EmbeddingBagCollection) -> str:
    collection._reports._num_embeddings = [50, 50]
    return message(collection.check)


def test_empty_full_batch() -> None:
    """A batch of no rows, of features that have bags."""
    few, _ = deduplicated()
    none = rk.KeyedJaggedTensor(
        few.keys(),
        few.values(),
        offsets=few.offsets(),
        stride_per_key=[2, 3, 4],
        inverse_indices=(few.keys(), torch.zeros(3, 0).long()),
    )
    assert bags()(none).values().shape == (0, 32)


def test_batches_in_one_memory() -> None:
    """Offsets that are overwritten, as a captured graph's are, are read anew."""
    collection, given = _four_features(), batch(("f", "g", "h", "k"), 1)
    kjt = rk.KeyedJaggedTensor(list("abcd"), given.values().clone(), offsets=given.offsets().clone())
    collection(kjt)
    moved = given.offsets().clone()
    moved[1:-1] = 0  # every id in the last bag
    kjt.offsets().copy_(moved)
    assert [len(t.values()) for t in collection(kjt).values()] == [0, 0, 0, len(given.values())]
    assert [len(kjt[k].values()) for k in "abcd"] == [0, 0, 0, len(given.values())]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_accumulate_with_half_outputs(dtype: torch.dtype) -> None:
    """Gradients of half-precision outputs, collected: the bits of one batch."""
    one, several = (bags(rk.Adam(lr=0.1), output_dtype=dtype) for _ in range(2))
    given = deduplicated()[1]
    one(given).values().sum().backward()
    with several.accumulate():
        several(given).values().sum().backward()
    assert_same(one, several)


def test_freeze_inside_accumulate() -> None:
    """The one update of a block has one set of frozen features."""
    collection = bags(rk.SGD(lr=0.5))
    with collection.accumulate(), pytest.raises(RuntimeError, match="inside accumulate"):
        collection.freeze("f")
    assert not collection._passes_frozen
