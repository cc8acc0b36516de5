"""Compressed tables: complementary partitions, and collections over them."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import full

import rec_kernels as rk
from rec_kernels.nn.tables.compression import check_complementary, known_modulus
from rec_kernels.testing import same_bits


def _rows(pairs, num_ids: int) -> np.ndarray:
    ids = np.arange(num_ids)
    return np.stack([ids // a % m for a, m in pairs])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4), st.integers(1, 300))
def test_complementary(pairs: list[tuple[int, int]], num_ids: int) -> None:
    """Partitions are rejected exactly if two ids share all rows, and the error names such ids."""
    rows = _rows(pairs, num_ids)
    unique = len(np.unique(rows, axis=1).T) == num_ids
    assert len(np.unique(_rows(pairs, known_modulus(pairs)), axis=1).T) == known_modulus(pairs)
    if unique:
        check_complementary(pairs, num_ids)
        return
    with pytest.raises(ValueError, match=r"ids \d+ and \d+ both have rows") as error:
        check_complementary(pairs, num_ids)
    words = str(error.value).split()
    first, second = int(words[words.index("and") - 1]), int(words[words.index("and") + 1])
    assert first < second < num_ids
    assert (rows[:, first] == rows[:, second]).all()


@settings(max_examples=100)
@given(st.integers(1, 2000), st.integers(1, 70))
def test_quotient_remainder_is_unique(num_ids: int, collisions: int) -> None:
    """For every size, ids are distinct, rows are in range, and about E / collisions rows exist."""
    parts = rk.QuotientRemainder(collisions).parts(num_ids, 8)
    rows = _rows([(p.divisor, p.modulus) for p in parts], num_ids)
    assert len(np.unique(rows, axis=1).T) == num_ids
    assert (rows.max(axis=1) < [p.num_embeddings for p in parts]).all()
    assert sum(p.num_embeddings for p in parts) <= -(-num_ids // collisions) + collisions


@pytest.mark.parametrize(
    "compression",
    [
        rk.Partitions.mixed_radix([5, 4, 3]),
        rk.Partitions.mixed_radix([60]),
        rk.Partitions.chinese_remainder([3, 4, 5]),
        rk.Partitions.chinese_remainder([7, 9]),
        rk.Partitions([(1, 8), (8, 8)]),
        rk.Partitions([(1, 4), (2, 6), (12, 5)]),
    ],
)
def test_constructors_are_unique(compression: rk.Partitions) -> None:
    """Every id below 60 has a unique combination of rows."""
    rows = _rows([(p.divisor, p.modulus) for p in compression.parts(60, 4)], 60)
    assert len(np.unique(rows, axis=1).T) == 60


def test_many_ids() -> None:
    """Partitions that are provably complementary are not enumerated; others are rejected."""
    check_complementary([(1, 2**31), (2**31, 2**31)], 2**62)
    check_complementary([(1, 999983), (1, 1000003)], 10**11)
    with pytest.raises(ValueError, match=r"ids 0 and 1000 both have rows \(0, 0\)"):
        check_complementary([(1, 1000), (1, 500)], 10**10)
    with pytest.raises(ValueError, match=r"cannot be shown to distinguish 10000000000 ids"):
        check_complementary([(3, 10**8), (1, 2**23)], 10**10)


def _collection(compression, *, dim: int = 6, optimizer=None, pooling: str = "sum", rows: int = 50, **options):
    tables = [
        rk.EmbeddingBagConfig(7, 3, name="plain", feature_names=["a"]),
        rk.EmbeddingBagConfig(
            rows, dim, name="big", feature_names=["b", "c"], pooling=pooling, compression=compression, **options
        ),
    ]
    torch.manual_seed(1)
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer)


def _batch(rows: int = 50, one_each: bool = False) -> rk.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.ones(12, dtype=torch.int64) if one_each else torch.tensor([2, 0, 3, 1, 4, 1, 0, 2, 70, 1, 1, 3])
    limits = torch.tensor([7] * 4 + [rows] * 8).repeat_interleave(lengths)
    values = torch.randint(2**40, (int(lengths.sum()),), generator=generator) % limits
    return rk.KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths)


def _composed(collection: rk.EmbeddingBagCollection, compression, rows: int, dim: int) -> torch.Tensor:
    """Composes the whole table from its parts."""
    parts, ids = compression.parts(rows, dim), torch.arange(rows)
    names = [f"big_{p}" for p in range(len(parts))] if len(parts) > 1 else ["big"]
    of_parts = [
        collection.embedding_bags[name].weight[ids // part.divisor % part.modulus]
        for name, part in zip(names, parts, strict=True)
    ]
    if compression.combine == "concat":
        return torch.cat(of_parts, dim=1)
    first, *others = of_parts
    for other in others:
        first = first * other if compression.combine == "mult" else first + other
    return first


COMPRESSIONS = [
    rk.Hash(11),
    rk.QuotientRemainder(4),
    rk.QuotientRemainder(9, "add"),
    rk.QuotientRemainder(4, "concat"),
    rk.Partitions.chinese_remainder([3, 4, 5]),
    rk.Partitions.mixed_radix([5, 5, 2], combine="concat"),
    rk.Partitions([(1, 10), (10, 5)], combine="concat", columns=[4, 2]),
]


def _name(compression) -> str:
    return f"{type(compression).__name__}-{compression.combine}-{compression.compose}"


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=_name)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_same_bits_as_the_whole_table(compression, pooling: str) -> None:
    """A collection with the composed table has the same output."""
    found = _collection(compression, pooling=pooling)
    whole = _collection(None, pooling=pooling)
    with torch.no_grad():
        whole.embedding_bags["plain"].weight.copy_(found.embedding_bags["plain"].weight)
        whole.embedding_bags["big"].weight.copy_(_composed(found, compression, 50, 6))
    batch = _batch()
    assert same_bits(found(batch).values(), whole(batch).values())
    assert found(batch).length_per_key() == [3, 6, 6]
    for key, block in found.by_feature(batch).items():
        assert same_bits(block, whole.by_feature(batch)[key])


@pytest.mark.parametrize("combine", ["mult", "add", "concat"])
def test_pooled(combine: str) -> None:
    """Parts are pooled per bag, then combined; for bags of one id, that equals composing per id."""
    pooled, each = (rk.QuotientRemainder(4, combine, compose) for compose in ("pooled", "per_id"))
    a, b = _collection(pooled), _collection(each)
    b.load_state_dict(a.state_dict())
    torch.testing.assert_close(a(_batch(one_each=True)).values(), b(_batch(one_each=True)).values())
    batch = _batch()
    values, lengths = batch["c"].values(), batch["c"].lengths()
    bags = torch.repeat_interleave(torch.arange(4), lengths)
    sums = [
        torch.zeros(4, weight.shape[1]).index_add(0, bags, weight[row])
        for weight, row in (
            (a.embedding_bags["big_0"].weight, values % 13),
            (a.embedding_bags["big_1"].weight, values // 13),
        )
    ]
    expected = {
        "mult": lambda: sums[0] * sums[1],
        "add": lambda: sums[0] + sums[1],
        "concat": lambda: torch.cat(sums, 1),
    }
    torch.testing.assert_close(a(batch)["c"], expected[combine]())
    torch.testing.assert_close(a.by_feature(batch)["c"], expected[combine]())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_outputs_are_rounded_once(dtype: torch.dtype) -> None:
    """Half-precision outputs are rounded once, also if pooled parts are multiplied."""
    for compose in ("per_id", "pooled"):
        tables = [
            rk.EmbeddingBagConfig(
                50, 6, name="t", feature_names=["b"], compression=rk.QuotientRemainder(4, "mult", compose)
            )
        ]
        torch.manual_seed(1)
        whole = rk.EmbeddingBagCollection(tables)
        half = rk.EmbeddingBagCollection(tables, output_dtype=dtype)
        half.load_state_dict(whole.state_dict())
        assert same_bits(half(_batch()).values(), whole(_batch()).values().to(dtype))
        assert same_bits(half.by_feature(_batch())["b"], whole(_batch()).values().to(dtype))


@pytest.mark.parametrize("compression", [*COMPRESSIONS, rk.QuotientRemainder(4, "mult", "pooled")], ids=_name)
def test_training_as_torch_does(compression) -> None:
    """A fused SGD step equals torch's SGD with dense gradients of the parts."""
    fused, plain = _collection(compression, optimizer=rk.SGD(lr=0.5)), _collection(compression)
    plain.load_state_dict({k: v for k, v in fused.state_dict().items() if k != "step"})
    grad = torch.randn(4, 15)
    fused(_batch()).values().backward(grad)
    plain(_batch()).values().backward(grad)
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(fused.get_parameter(name), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", rk.BAG_FORMATS)
def test_formats(format: str) -> None:
    """Parts have the table's format, and train in it."""
    collection = _collection(rk.QuotientRemainder(4), dim=32, format=format, optimizer=rk.RowwiseAdagrad(lr=0.1))
    before = {name: t.clone() for name, t in collection.state_dict().items()}
    target, losses = torch.randn(4, 67), []
    for _ in range(20):
        loss = (collection(_batch()).values() - target).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(
        not torch.equal(
            collection.state_dict()[f"embedding_bags.big_{p}.weight"].view(torch.uint8),
            before[f"embedding_bags.big_{p}.weight"].view(torch.uint8),
        )
        for p in range(2)
    )


def test_names_and_sizes() -> None:
    """Parts are separate tables in state, reports and copies."""
    collection = _collection(rk.QuotientRemainder(4), optimizer=rk.Adam(lr=0.1))
    assert [name for name, _ in collection.named_parameters()] == [
        "embedding_bags.plain.weight",
        "embedding_bags.big_0.weight",
        "embedding_bags.big_1.weight",
    ]
    assert [(r["name"], r["num_embeddings"], r["weight_bytes"]) for r in collection.memory_report()] == [
        ("plain", 7, 84),
        ("big_0", 13, 312),
        ("big_1", 4, 96),
    ]
    assert collection.state_dict()["embedding_bags.big_1.exp_avg"].shape == (4, 6)
    assert "QuotientRemainder(collisions=4" in repr(collection)
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))):
        assert same_bits(other(_batch()).values(), collection(_batch()).values())
    served = collection.for_serving()
    assert same_bits(served(_batch()).values(), collection(_batch()).values())


def test_first_rows_have_the_variance_of_a_whole_table() -> None:
    """Products and sums of initial parts have the variance of a plain table."""
    for compression in (None, rk.Hash(3000), *(rk.QuotientRemainder(40, c) for c in ("mult", "add", "concat"))):
        collection = _collection(compression, rows=12_000, dim=16)
        ids = rk.KeyedJaggedTensor(
            ["a", "b", "c"],
            torch.cat([torch.zeros(12_000).long(), torch.arange(12_000).repeat(2)]),
            lengths=torch.ones(36_000, dtype=torch.int64),
        )
        rows = collection(ids)["b"]
        assert abs(rows.std().item() * (3 * 12_000) ** 0.5 - 1) < 0.15, compression


def test_sequences() -> None:
    """rk.EmbeddingCollection returns a composed row for each id."""
    compression = rk.QuotientRemainder(4)
    tables = [rk.EmbeddingConfig(50, 6, name="big", feature_names=["b"], compression=compression)]
    torch.manual_seed(1)
    collection = rk.EmbeddingCollection(tables, optimizer=rk.SGD(lr=0.1))
    batch = rk.KeyedJaggedTensor(["b"], torch.tensor([3, 49, 3, 17]), lengths=torch.tensor([2, 0, 2]))
    found = collection(batch)["b"]
    assert same_bits(found.values(), _composed(collection, compression, 50, 6)[[3, 49, 3, 17]])
    found.values().sum().backward()
    with pytest.raises(ValueError, match=r"'big'.*compose='pooled'\) must be None .* not pooled"):
        rk.EmbeddingConfig(
            50, 6, name="big", feature_names=["b"], compression=rk.QuotientRemainder(4, compose="pooled")
        )


def test_batch_sizes_of_their_own() -> None:
    """Features may have different batch sizes, with concatenated, multiplied and pooled parts."""
    values, lengths = torch.tensor([1, 2, 49, 30, 30, 8, 0]), torch.tensor([1, 1, 2, 0, 1, 1, 1])
    batch = rk.KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths, stride_per_key=[2, 2, 3])
    for compression in (rk.QuotientRemainder(4, c, p) for c in ("mult", "concat") for p in ("per_id", "pooled")):
        collection = _collection(compression, optimizer=rk.SGD(lr=0.1))
        table = _composed(collection, compression, 50, 6)
        found = collection.by_feature(batch)
        assert [t.shape for t in found.values()] == [(2, 3), (2, 6), (3, 6)]
        torch.testing.assert_close(found["c"], table[[30, 8, 0]])
        if compression.compose == "per_id":
            torch.testing.assert_close(found["b"], torch.stack([table[49] + table[30], torch.zeros(6)]))
        torch.cat([t.flatten() for t in found.values()]).sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiled(backend: str) -> None:
    """Lookup and update compile to one graph for any batch size."""
    collection = _collection(rk.QuotientRemainder(4), optimizer=rk.SGD(lr=0.1))
    other = copy.deepcopy(collection)
    compiled = torch.compile(lambda batch: collection(batch).values(), backend=backend, fullgraph=True, dynamic=True)
    compiled(_batch()).sum().backward()
    other(_batch()).values().sum().backward()
    for name, weight in collection.named_parameters():
        assert same_bits(weight, other.get_parameter(name))


def test_integers_of_other_kinds() -> None:
    """Sizes of numpy and torch are stored as ints."""
    assert rk.Hash(np.int64(7)) == rk.Hash(7)
    assert type(rk.QuotientRemainder(torch.tensor(3)).collisions) is int
    pairs = rk.Partitions([(np.uint8(1), 10), (10, 5)], combine="concat", columns=np.array([2, 4]))
    assert repr(pairs) == repr(rk.Partitions([(1, 10), (10, 5)], combine="concat", columns=[2, 4]))
    assert rk.Hash(2**63 - 1).buckets == 2**63 - 1


def test_names_of_parts_must_differ_from_tables() -> None:
    """A part's name may not equal another table's name."""
    tables = [
        rk.EmbeddingBagConfig(9, 4, name="t", feature_names=["a"], compression=rk.QuotientRemainder(3)),
        rk.EmbeddingBagConfig(9, 4, name="t_1", feature_names=["b"]),
    ]
    with pytest.raises(
        ValueError, match=r"names, including those of parts, must be unique, got \['t_0', 't_1', 't_1'\]"
    ):
        rk.EmbeddingBagCollection(tables)


def test_ids_out_of_range() -> None:
    """Bounds are those of the compressed table's ids, not of the parts' rows."""
    collection = _collection(rk.QuotientRemainder(4))
    batch = rk.KeyedJaggedTensor(["a", "b", "c"], torch.tensor([1, 49, 50]), lengths=torch.ones(3, dtype=torch.int64))
    with pytest.raises(IndexError, match=r"= 50 .*\[0, 50\)"):
        collection(batch)


def test_shared_parts() -> None:
    """Two features of one compressed table train the same parts, once per step."""
    collection = _collection(rk.QuotientRemainder(4), optimizer=rk.RowwiseAdagrad(lr=0.1))
    collection(_batch()).values().sum().backward()
    touched = {row for key, row in itertools.product("bc", range(13)) if (_batch()[key].values() % 13 == row).any()}
    assert set(collection.state_dict()["embedding_bags.big_0.sum"].nonzero().flatten().tolist()) == touched
