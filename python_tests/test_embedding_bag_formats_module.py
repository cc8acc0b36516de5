"""EmbeddingBagCollection with tables in row formats: initialized, trained, accumulated, compiled, read."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from collection_cases import assert_same, is_tied
from collection_format_cases import DIMS, DTYPES, OPTIMIZERS, ROWS, WITH_MOMENTS, batch, make, numbers, train
from row_cache_collections import differing, everything
from tiers import full
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import rec_kernels as rk
from rec_kernels.nn.tables.rows import initialize
from rec_kernels.testing import same_bits


def test_rows_are_what_the_format_says() -> None:
    """Dtypes and shapes of parameters, names in the state, bytes in the report, and the repr follow the format."""
    collection, state = make(rk.RowwiseAdagrad()), make(rk.RowwiseAdagrad()).state_dict()
    report = collection.memory_report()
    for i, format in enumerate(rk.BAG_FORMATS):
        weight, dim = collection.embedding_bags[f"t{i}"].weight, DIMS[format]
        rows, size = ROWS + i, rk.row_bytes(format, dim)
        assert weight.dtype == DTYPES.get(format, torch.uint8)
        assert weight.shape == (rows, dim if format in DTYPES else size)
        assert weight.requires_grad == weight.is_floating_point()
        name = state.get(f"embedding_bags.t{i}.format")
        assert (None if name is None else bytes(name.tolist()).decode()) == (None if format in DTYPES else format)
        assert state[f"embedding_bags.t{i}.sum"].dtype == torch.float32
        assert (report[i]["format"], report[i]["weight_bytes"]) == (format, rows * size)
        assert report[i]["state_bytes"] == 4 * rows
        assert f"t{i}: {rows} x {dim}{'' if format == 'fp32' else ' ' + format} " in repr(collection)
    assert sum(r["weight_bytes"] for r in report) <= collection._weights.numel()
    assert is_tied(collection)


def test_requires_grad() -> None:
    """requires_grad_() freezes and unfreezes a model, whatever its tables' formats."""
    tables = [
        rk.EmbeddingBagConfig(9, 8, name=f, feature_names=[f], format=f, compression=rk.MixedDimension(4))
        for f in rk.BAG_FORMATS
    ]
    collection = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD())
    first = [p.requires_grad for p in collection.parameters()]
    assert first == [p.is_floating_point() for p in collection.parameters()]
    assert collection.requires_grad_(False) is collection
    assert not any(p.requires_grad for p in collection.parameters())
    assert [p.requires_grad for p in collection.requires_grad_().parameters()] == first
    model = nn.Sequential(collection)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to("meta")):
        for value in (False, True):
            one.requires_grad_(value)
            assert all(p.requires_grad == value for p in one.parameters() if p.is_floating_point())
    dense = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(9, 8, name="t", feature_names=["f"])])
    assert [p.requires_grad for v in (False, True) for p in dense.requires_grad_(v).parameters()] == [False, True]


@pytest.mark.parametrize("format", rk.BAG_FORMATS)
def test_initial_rows(format: str) -> None:
    """``init`` writes floats, which are rounded to nearest; the default is uniform in +-1/sqrt(E)."""
    floats = torch.randn(300, 20)

    def init(weight: Tensor) -> None:
        assert (weight.dtype, weight.shape) == (torch.float32, (300, 20))
        weight.copy_(floats)

    for given in (init, None):
        table = rk.EmbeddingBagConfig(300, 20, name="t", feature_names=["f"], format=format, init=given)
        found = numbers(rk.EmbeddingBagCollection([table]), "t")
        if given is None:
            assert 0.01 < found.abs().mean() / 300**-0.5 - 0.4 < 0.2
            assert found.abs().max() <= 1.07 * 300**-0.5
        else:
            assert same_bits(found, rk.dequantize_rows(rk.quantize_rows(floats, format), format, 20))


def test_initial_rows_of_a_long_table() -> None:
    """All parts of a table that is initialized in parts are written."""
    table = rk.EmbeddingBagConfig(2**18 + 5, 2, name="t", feature_names=["f"], format="int4")
    found = numbers(rk.EmbeddingBagCollection([table]), "t")
    assert (found != 0).any(1).float().mean() > 0.99
    assert (found[-5:] != 0).any()


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_made_of_fake_tensors(format: str) -> None:
    """Fake tensors work for a table large enough for huge pages, which they cannot request."""
    with FakeTensorMode():
        table = rk.EmbeddingBagConfig(1_000_000, 16, name="t", feature_names=["f"], format=format)
        collection = rk.EmbeddingBagCollection([table], optimizer=rk.SGD())
    assert collection.embedding_bags["t"].weight.shape == (1_000_000, 16 if format == "fp32" else 24)


@pytest.mark.parametrize("optimizer", [rk.SGD(lr=1.0), rk.RowwiseAdagrad(lr=0.05)], ids=str)
def test_training(optimizer) -> None:
    """All formats in one collection learn target embeddings, up to a quantization step."""
    collection, teacher = make(optimizer), make()
    torch.manual_seed(9)
    for table in teacher.tables:
        initialize(teacher.embedding_bags[table.name].weight, table.stored[0])
    given = batch(collection, size=20)
    goal, dims = teacher(given).values(), [t.embedding_dim for t in collection.tables for _ in t.feature_names]
    losses = []
    for _ in range(150):
        error = (collection(given).values() - goal).square()
        losses.append(torch.stack([e.mean() for e in error.detach().split(dims, 1)]))
        (error.sum() / 20).backward()
    assert collection.step.item() == 150
    assert (torch.stack(losses[-10:]).mean(0) < 0.15 * losses[0]).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_updates_are_of_table_row_and_step(rounding: str) -> None:
    """Noise depends on the table's number in the collection, the row in its table, and the step count."""
    collection = make(rk.SGD(lr=0.5), rounding=rounding, seed=-9)
    keys, size = collection.feature_names, 5
    for step in range(3):
        ids = torch.stack([torch.randperm(ROWS)[:size] for _ in keys])
        ids[1] = (ids[0] + 1) % ROWS  # in the same table, hence summed where they meet
        before = [numbers(collection, t.name) for t in collection.tables]
        pooled = collection(rk.KeyedJaggedTensor(keys, ids.flatten(), lengths=torch.ones(size * len(keys), dtype=int)))
        grad = torch.randn(pooled.values().shape)
        pooled.values().backward(grad)
        parts = grad.split([t.embedding_dim for t in collection.tables for _ in t.feature_names], 1)
        for i, table in enumerate(collection.tables[1:], 1):
            expected, rows = before[i][ids[i + 1]] - 0.5 * parts[i + 1], collection.embedding_bags[table.name].weight
            for n, row in enumerate(ids[i + 1].tolist()):
                noise = {"rounding": rounding, "seed": -9, "step": step, "table": i, "first_row": row}
                encoded = rk.quantize_rows(expected[n : n + 1], table.format, **noise)
                assert torch.equal(rows[row].view(torch.uint8), encoded[0]), (table.format, step, row)


def test_rounding_and_seed() -> None:
    """The default is stochastic with seed 0; another seed gives other bytes; rounding to nearest ignores the seed."""
    found = {}
    for rounding, seed in (("stochastic", 0), ("stochastic", 1), ("nearest", 0), ("nearest", 1)):
        found[rounding, seed] = make(rk.SGD(lr=0.5), rounding=rounding, seed=seed)
        train(found[rounding, seed])
    default = make(rk.SGD(lr=0.5))
    train(default)
    assert_same(default, found["stochastic", 0])
    assert_same(found["nearest", 0], found["nearest", 1])
    for other in (found["stochastic", 1], found["nearest", 0]):
        for i, format in enumerate(rk.BAG_FORMATS):
            rows = [c.embedding_bags[f"t{i}"].weight for c in (default, other)]
            assert torch.equal(*rows) == (format == "fp32"), format
    with pytest.raises(ValueError, match="rounding must be 'stochastic' or 'nearest', got 'up'"):
        make(rounding="up")
    for seed in (1.5, None, 2**63, torch.tensor(3)):
        with pytest.raises(ValueError, match=r"seed must be an int in \[-2\^63, 2\^63\), got "):
            make(seed=seed)


@pytest.mark.parametrize("format", ["int2", "mxfp8_e4m3", "mxint8", "fp8"])
def test_formats_that_tables_cannot_have(format: str) -> None:
    """The error lists the allowed formats."""
    expected = f"table 't0': format must be one of {', '.join(rk.BAG_FORMATS)}, got '{format}'"
    with pytest.raises(ValueError, match=expected):
        make(formats=[format], dims={format: 4})


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *WITH_MOMENTS], ids=str)
def test_accumulate(optimizer, rounding: str) -> None:
    """Micro-batches have the bits of one batch: one step, one rounding of each row."""
    whole = make(optimizer, rounding=rounding)
    parts, keys = copy.deepcopy(whole), whole.feature_names
    micro = [batch(whole, seed, size=4, factors=True) for seed in (1, 2, 3)]
    bags = [(kjt[key].values(), kjt[key].weights_or_none(), kjt[key].lengths()) for key in keys for kjt in micro]
    values, factors, lengths = (torch.cat(part) for part in zip(*bags, strict=True))
    grad = torch.randn(12, whole(micro[0]).values().shape[1])
    whole(rk.KeyedJaggedTensor(keys, values, lengths=lengths, weights=factors)).values().backward(grad)
    with parts.accumulate():
        for kjt, g in zip(micro, grad.split(4), strict=True):
            parts(kjt).values().backward(g)
    assert parts.step.item() == 1
    assert_same(parts, whole)


@pytest.mark.parametrize("formats", [rk.BAG_FORMATS, ["int8"], ["bf16", "mx6"]])
def test_lookups_without_optimizer(formats: list[str]) -> None:
    """Without an optimizer, quantized tables have no state, and only weights in the batch have gradients."""
    collection, trained = make(formats=formats), make(rk.SGD(), formats)
    assert not any(p.requires_grad for p in collection.parameters())
    assert not collection(batch(collection)).values().requires_grad
    assert {k for k in trained.state_dict() if k not in collection.state_dict()} == {"step"}
    grads = []
    for c in (collection, trained):
        kjt = batch(c, factors=True)
        kjt.weights_or_none().requires_grad_()
        with torch.no_grad():
            pooled = c(kjt).values()
        assert not pooled.requires_grad
        assert same_bits(pooled, c(kjt).values().detach())
        c(kjt).values().square().sum().backward()
        grads.append(kjt.weights_or_none().grad)
    assert grads[0].abs().min() > 0
    assert same_bits(*grads)


def test_float_tables_alone_train_as_before() -> None:
    """Collections of float tables have float parameters and gradients, and neither rounding nor seed."""
    collection = make(formats=["fp32"])
    assert collection._weights.dtype == torch.float32
    assert all(p.requires_grad for p in collection.parameters())
    others = [make(rk.SGD(lr=0.1), ["fp32"], rounding=r, seed=s) for r, s in (("stochastic", 3), ("nearest", 4))]
    beside = make(rk.SGD(lr=0.1), ["fp32", "int8"])
    for other in (*others, beside):
        kjt = batch(others[0])
        values = [kjt[key].values() for key in ("f0", "g0")]
        lengths = [kjt[key].lengths() for key in ("f0", "g0")]
        keys = other.feature_names[:2]
        if other is beside:
            keys, lengths = [*keys, "f1"], [*lengths, torch.zeros(6, dtype=torch.int64)]
        pooled = other(rk.KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))).values()
        pooled.square().sum().backward()
    weights = [numbers(c, "t0") for c in (*others, beside)]
    assert same_bits(weights[0], weights[1])
    # Drawn with the same seed, in the same order, and trained by the same kernel, also in a tensor of bytes.
    assert same_bits(weights[0], weights[2])


@pytest.mark.parametrize("cache", [None, rk.RowCache(0.4, ways=4, policy="lfu", decay_every=1)], ids=str)
def test_bad_ids_change_nothing(cache: rk.RowCache | None) -> None:
    """The lookup raises IndexError before a row changes."""
    collection = make(rk.RowwiseAdagrad(lr=0.1), cache=cache)
    train(collection)
    before, kjt = everything(collection), batch(collection)
    kjt.values()[-1] = 99
    with pytest.raises(IndexError, match=r"= 99 \(feature '\w+', bag \d\) is out of range"):
        collection(kjt)
    assert not differing(everything(collection), before)


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiled_training(backend: str) -> None:
    """One graph, compiled once, has the eager collection's bits, with different noise in each step."""
    eager = make(rk.RowwiseAdagrad(lr=0.02))
    compiled_one, steps = copy.deepcopy(eager), 50 if backend == "aot_eager" else 5

    def loss(collection, values: Tensor, lengths: Tensor) -> Tensor:
        kjt = rk.KeyedJaggedTensor(collection.feature_names, values, lengths=lengths)
        return collection(kjt).values()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    lengths = torch.full((54,), 2)
    for _ in range(steps):
        values = torch.randint(ROWS, (108,))
        outputs = [loss(eager, values, lengths), compiled(compiled_one, values, lengths)]
        assert same_bits(*(o.detach() for o in outputs))
        grad = torch.randn(outputs[0].shape)
        for output in outputs:
            output.backward(grad)
    assert counter.frame_count == 1
    assert compiled_one.step.item() == steps
    assert_same(compiled_one, eager)


def test_compiled_noise_advances() -> None:
    """A repeated update of equal rows is rounded differently in the next step, and equally in the same step."""
    collection = make(rk.SGD(lr=0.01), formats=["bf16"])
    start, kjt = copy.deepcopy(collection.state_dict()), batch(collection)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda values: collection(_with(kjt, values)).values(), backend="aot_eager", fullgraph=True
    )
    found = []
    for step in (0, 1, 0):
        collection.load_state_dict(start | {"step": torch.tensor(step)})
        pooled = compiled(kjt.values())
        pooled.backward(torch.ones_like(pooled))
        found.append(collection._weights.clone())
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def _with(kjt: rk.KeyedJaggedTensor, values: Tensor) -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor(kjt.keys(), values, lengths=kjt.lengths())


@pytest.mark.parametrize("format", ["fp32", "fp16", "int8"])
def test_init_that_writes_a_part(format: str) -> None:
    """Rows that ``init`` does not write are zeros, and its return value is ignored."""

    def made(init) -> rk.EmbeddingBagCollection:
        table = rk.EmbeddingBagConfig(20, 8, name="t", feature_names=["f"], format=format, init=init)
        return rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=0.1))

    every = rk.KeyedJaggedTensor(["f"], torch.arange(20), lengths=torch.ones(20, dtype=torch.int64))
    expected = torch.cat([torch.ones(10, 8), torch.zeros(10, 8)])
    assert torch.equal(made(lambda weight: weight[:10].fill_(1.0))(every).values(), expected)
    with pytest.raises(ValueError, match=r"table 't': init returned a tensor other than its argument.* in place"):
        made(torch.ones_like)
