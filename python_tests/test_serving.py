"""Modules for lookups only: torch.export, saved programs, autocast."""

from __future__ import annotations

import dataclasses
import functools
import io

import pytest
import torch
from torch import nn
from torch.fx.experimental import _config
from torch.utils import _pytree

import rec_kernels as rk
from rec_kernels.nn.tables.rows import decode, encode

KEYS = ["f", "g", "h", "k"]
TABLES = [
    rk.EmbeddingBagConfig(500, 8, name="a", feature_names=["f", "g"]),
    rk.EmbeddingBagConfig(300, 16, name="b", feature_names=["h"], format="int8", pooling="mean"),
    rk.EmbeddingBagConfig(300, 16, name="c", feature_names=["k"], format="bf16"),
]
SEQUENCES = [
    rk.EmbeddingConfig(t.num_embeddings, 8, name=t.name, feature_names=t.feature_names, format=t.format) for t in TABLES
]
#: Dynamic sizes that include 0 and 1, which torch specializes by default.
ANY_SIZE = functools.partial(_config.patch, backed_size_oblivious=True)


def batch(size: int, seed: int = 0) -> rk.KeyedJaggedTensor:
    """Bags of 0 to 3 ids."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=g)
    return rk.KeyedJaggedTensor(KEYS, torch.randint(0, 300, (int(lengths.sum()),), generator=g), lengths=lengths)


class Model(nn.Module):
    """Tables and one layer."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Linear(48, 2)

    def forward(self, batch: rk.KeyedJaggedTensor) -> tuple[torch.Tensor, rk.KeyedTensor]:
        """Returns the scores, and the pooled embeddings."""
        embedded = self.tables(batch)
        return self.top(embedded.values()), embedded


def collection() -> rk.EmbeddingBagCollection:
    torch.manual_seed(0)
    return rk.EmbeddingBagCollection(TABLES, optimizer=rk.Adam(lr=0.1))


def test_for_serving() -> None:
    """The serving module has equal lookups in the same memory, and nothing else."""
    trained = collection()
    served, given = trained.for_serving(), batch(5)
    assert torch.equal(served(given).values(), trained(given).values())
    trained(given).values().square().sum().backward()
    assert torch.equal(served(given).values(), trained(given).values())
    assert served._weights.data_ptr() == trained._weights.data_ptr()
    assert not list(served.parameters())
    assert list(served.state_dict()) == ["_weights"]
    assert all(torch.equal(t, trained.by_feature(given)[k]) for k, t in served.by_feature(given).items())
    sequences = rk.EmbeddingCollection(SEQUENCES, optimizer=rk.SGD(lr=0.1))
    for key, t in sequences.for_serving()(given).items():
        assert torch.equal(t.values(), sequences(given)[key].values())
    assert torch.equal(sequences.for_serving().rows(given), sequences.rows(given))


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4", "mx6"])
def test_for_serving_in_a_format(format: str) -> None:
    """Rows are the trained ones, rounded once, in separate memory; sizes before and after are reported."""
    trained, given = collection(), batch(5)
    numbers = torch.get_rng_state()
    served = trained.for_serving(format)
    assert torch.equal(torch.get_rng_state(), numbers)
    rows = {
        t.name: decode(encode(decode(w, t.format, t.embedding_dim), format), format, t.embedding_dim)
        for t, w in zip(TABLES, trained._tables.weights(), strict=True)
    }
    plain = [dataclasses.replace(t, format="fp32", init=lambda w, t=t: w.copy_(rows[t.name])) for t in TABLES]
    expected = rk.EmbeddingBagCollection(plain)(given).values()
    assert torch.equal(served(given).values(), expected)
    trained(given).values().square().sum().backward()
    assert torch.equal(served(given).values(), expected)
    for entry, table, before in zip(served.memory_report(), TABLES, trained.memory_report(), strict=True):
        assert (entry["format"], entry["trained_format"]) == (format, table.format)
        assert entry["weight_bytes"] == dataclasses.replace(table, format=format).stored[0].num_bytes
        assert [entry[f"trained_{n}"] for n in ("weight_bytes", "state_bytes")] == [
            before["weight_bytes"],
            before["state_bytes"],
        ]
    now, before = (sum(t["weight_bytes"] for t in m.memory_report()) for m in (served, trained))
    assert f"{now:,} bytes of rows; in training {before:,}" in repr(served)
    file = io.BytesIO()
    torch.save(served, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(given).values(), expected)


def test_for_serving_in_formats() -> None:
    """Formats may be given per table; cached rows are encoded first; sequences and composed tables work."""
    tables = [*TABLES, rk.EmbeddingBagConfig(300, 16, name="d", feature_names=["g"], compression=rk.MixedDimension(4))]
    cached = rk.EmbeddingBagCollection(TABLES, optimizer=rk.SGD(lr=0.5), cache=rk.RowCache(0.2, backing="host"))
    cached(batch(5)).values().square().sum().backward()
    served = cached.for_serving({"a": "mx9"})
    assert [reported["format"] for reported in served.memory_report()] == ["mx9", "int8", "bf16"]
    assert served.row_cache is None
    one = rk.EmbeddingBagConfig(300, 16, name="b", feature_names=["h"], format="int8", pooling="mean")
    assert torch.equal(served(batch(9))["h"], cached.for_serving({"b": "int8"})(batch(9))["h"])
    loaded = rk.EmbeddingBagCollection([one])
    loaded.load_state_dict({n: t for n, t in cached.state_dict().items() if n.startswith("embedding_bags.b.")}, False)
    assert torch.equal(served(batch(9))["h"], loaded(batch(9))["h"])
    mixed = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5))
    assert torch.equal(mixed.for_serving({})(batch(5)).values(), mixed(batch(5)).values())
    sequences = rk.EmbeddingCollection(SEQUENCES, optimizer=rk.SGD(lr=0.1))
    assert sequences.for_serving("fp16").rows(batch(5)).shape == sequences.rows(batch(5)).shape
    with pytest.raises(KeyError, match=r"format: tables \['z'\] are not among"):
        mixed.for_serving({"z": "int8"})
    with pytest.raises(ValueError, match=r"table 'a': format must be one of .* got 'int3'"):
        mixed.for_serving("int3")


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """A program for any batch, saved and loaded, has the module's bits, and contains the tables once."""
    model = Model(collection().for_serving()).eval()
    dim = torch.export.Dim.DYNAMIC
    shapes = {"batch": [{0: dim}, {0: dim}, None, None]}
    with torch.no_grad(), ANY_SIZE():
        program = torch.export.export(model, (batch(5),), dynamic_shapes=shapes, strict=strict)
        file = io.BytesIO()
        torch.export.save(program, file)
        assert file.tell() < model.tables._weights.numel() + 40_000
        file.seek(0)
        loaded = torch.export.load(file).module()
        for size in (5, 9, 2, 1, 0):
            (scores, embedded), (expected, other) = loaded(batch(size, size)), model(batch(size, size))
            assert torch.equal(scores, expected)
            assert torch.equal(embedded["k"], other["k"])
            assert embedded.keys() == other.keys()


def test_export_of_rows_of_ids() -> None:
    """Programs of sequences accept any batch with equal batch sizes of features."""
    model, dim = nn.Sequential(rk.EmbeddingCollection(SEQUENCES).for_serving()).eval(), torch.export.Dim.DYNAMIC
    with torch.no_grad(), ANY_SIZE():
        program = torch.export.export(model, (batch(5),), dynamic_shapes=[[{0: dim}, {0: dim}, None, None]]).module()
        for size in (5, 9, 1, 0):
            expected = model(batch(size, size))
            for key, found in program(batch(size, size)).items():
                assert torch.equal(found.values(), expected[key].values())
                assert torch.equal(found.offsets(), expected[key].offsets())


@pytest.mark.parametrize(("optimizer", "first", "last"), [(None, 0, 1), (rk.SGD(lr=0.1), 0, 3), (rk.SGD(lr=0.1), 1, 2)])
@pytest.mark.parametrize("strict", [False, True])
def test_a_program_that_would_not_train(optimizer: object, first: int, last: int, strict: bool) -> None:
    """Exporting with trainable tables is rejected: the program would separate rows from parameters, also in int8."""
    model = nn.Sequential(rk.EmbeddingBagCollection(TABLES[first:last], optimizer=optimizer))
    error = torch._dynamo.exc.UserError if strict else RuntimeError
    with pytest.raises((error, torch._dynamo.exc.Unsupported), match=r"export the collection's for_serving\(\)"):
        torch.export.export(model, (batch(5),), strict=strict)
    with torch.no_grad():
        program = torch.export.export(model, (batch(5),), strict=strict).module()
    assert torch.equal(program(batch(5)).values(), model(batch(5)).values())
    # An optimizer of torch trains no rows in int8, and none that require no gradient.
    for still in (nn.Sequential(rk.EmbeddingBagCollection(TABLES)), model.requires_grad_(False)):
        program = torch.export.export(still, (batch(5),), strict=strict)
        assert torch.equal(program.module()(batch(5)).values(), still(batch(5)).values())
        constants = [t for t in program.constants.values() if isinstance(t, torch.Tensor)]
        assert sum(t.numel() == still[0]._weights.numel() for t in constants) == 1


def test_names_are_copies() -> None:
    """Sorting a returned list of names changes no lookup and no other output."""
    trained, sequences, given = collection(), rk.EmbeddingCollection(SEQUENCES), batch(5)
    before, rows = trained(given).to_dict(), sequences(given)["f"].values()
    for served in (trained, trained.for_serving(), sequences):
        served.feature_names.reverse()
    pooled = trained(given)
    sizes, keys = given.offset_per_key(), given.keys()
    named = given.offset_per_key(), given.offset_per_key_or_none(), given.stride_per_key(), given.keys()
    for names in (*named, pooled.keys(), pooled.length_per_key()):
        names.reverse()
    assert (given.offset_per_key(), given.keys()) == (sizes, keys)
    assert {key: t.shape for key, t in pooled.to_dict().items()} == {key: t.shape for key, t in before.items()}
    assert all(torch.equal(t, before[key]) for key, t in trained(given).to_dict().items())
    assert torch.equal(sequences(given)["f"].values(), rows)


def test_containers_are_trees() -> None:
    """Every tensor is a leaf, and is restored to its position."""
    full = rk.KeyedJaggedTensor(
        ["f", "g"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        weights=torch.ones(3),
        stride_per_key=[1, 2],
        inverse_indices=(["f", "g"], torch.zeros(2, 4).long()),
    )
    for container in (full, batch(2), full["g"], rk.KeyedTensor(["a"], [2], torch.zeros(3, 2))):
        leaves, spec = _pytree.tree_flatten(container)
        assert all(x is None or isinstance(x, torch.Tensor) for x in leaves)
        doubled = _pytree.tree_map_only(torch.Tensor, lambda t: t * 2, container)
        assert type(doubled) is type(container)
        again = _pytree.tree_unflatten(leaves, spec)
        assert torch.equal(again.values(), container.values())
        assert torch.equal(doubled.values(), container.values() * 2)
    assert again.keys() == ["a"]
    assert _pytree.tree_map(lambda t: t, full).stride_per_key() == [1, 2]
    none = rk.KeyedJaggedTensor([], torch.zeros(0).long(), lengths=torch.zeros(0).long(), stride=4)
    assert _pytree.tree_map(lambda t: t, none).stride() == 4


@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.5)], ids=str)
def test_autocast(optimizer) -> None:
    """Half-precision weights are widened, and have a gradient; sums are float32 as without autocast."""
    tables = [rk.EmbeddingBagConfig(50, 8, name="a", feature_names=["f", "g"])]
    torch.manual_seed(0)
    ours = rk.EmbeddingBagCollection(tables, optimizer=optimizer)
    weights = torch.rand(4).bfloat16().requires_grad_(True)
    given = {"lengths": torch.tensor([2, 0, 1, 1])}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ours(rk.KeyedJaggedTensor(["f", "g"], torch.arange(4), weights=weights, **given)).values()
        score = nn.Linear(16, 1)(output)
    wide = rk.KeyedJaggedTensor(["f", "g"], torch.arange(4), weights=weights.detach().float(), **given)
    assert score.dtype == torch.bfloat16
    assert output.dtype == torch.float32
    assert torch.equal(output, ours(wide).values())
    score.float().sum().backward()
    assert weights.grad.dtype == torch.bfloat16
    assert weights.grad.any()


@pytest.mark.parametrize("kind", [rk.Adagrad, rk.Adam, rk.RowwiseAdam])
def test_autocast_leaves_state_alone(kind) -> None:
    """bfloat16 state is updated as without autocast."""
    tables = [rk.EmbeddingBagConfig(50, 8, name="a", feature_names=["f", "g"], init=lambda w: w.fill_(1.0))]
    found, expected = (
        rk.EmbeddingBagCollection(tables, optimizer=kind(lr=0.1, state_dtype=torch.bfloat16)) for _ in range(2)
    )
    given = rk.KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=torch.tensor([2, 0, 1, 1]))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = found(given).values().square().sum()
        loss.backward()
        expected(given).values().square().sum().backward()
    for (name, a), b in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
        assert a.any()


def test_served_tables_are_moved_never_cast() -> None:
    """half() and bfloat16() leave tables of a serving module unchanged; moving from meta makes a new layout."""
    served, given = collection().for_serving(), batch(3)
    expected = served(given).values()
    for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.double):
        assert torch.equal(cast(served)(given).values(), expected)
    rows = served._weights.clone()
    empty = served.to("meta").to_empty(device="cpu")
    empty._weights.copy_(rows)
    assert torch.equal(empty(given).values(), expected)
