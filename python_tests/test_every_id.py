"""Hashed tables accept every int64 as an id: ``id % buckets`` as in Python and torch, in ops and modules."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import OPTIMIZERS, make_case
from embedding_bag_checks import check_gradients, check_lookups, check_update
from embedding_bag_format_cases import EncodedCase
from tiers import full
from torch import Tensor

import rec_kernels as rk
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.reference.row_cache import fmix64
from rec_kernels.testing import same_bits

INT64 = torch.iinfo(torch.int64)
INT32 = torch.iinfo(torch.int32)
BUCKETS = 37


def _hash(table: int, buckets: int) -> Parts:
    return Parts([table], [(1, buckets)], None, "concat")


# Ops.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("buckets", [1, 2, 3, 64, 1000, 65537])
def test_row_is_the_remainder(buckets: int, dtype: torch.dtype) -> None:
    """Rows are those of Python's ``%``, at the ends of the type, around 0 and around multiples of the size."""
    ends, middle = torch.iinfo(dtype), [k * buckets + d for k in (-3, -1, 0, 1, 2) for d in (-1, 0, 1)]
    ids = [*range(ends.min, ends.min + 3), *range(ends.max - 2, ends.max + 1), *range(-5, 5), *middle]
    rows = torch.arange(float(buckets))
    case = make_case([(buckets, 1)], [_hash(0, buckets)], [1] * len(ids), ids_dtype=dtype)
    case.values[:] = torch.tensor(ids, dtype=dtype)
    for backend in every_backend():
        output, status = backend.ops.embedding_bag(rows, *case.jagged, **case.layout)
        assert output.flatten().tolist() == [i % buckets for i in ids], backend.name
        assert status.tolist() == [INT64.max, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding", [-1, 3, INT32.min, INT64.min])
def test_padding_is_any_integer(padding: int, dtype: torch.dtype) -> None:
    """The padding id is left out of its own feature only; otherwise ignored ids are rows here."""
    features = [_hash(0, 5), _hash(0, 5), _hash(1, 3), 1]
    given = [padding, None, None, 3]
    mean = [True, True, False, True]
    case = make_case(
        [(6, 3), (4, 7)], features, [4, 3, 2, 5] * 2, padding_idx=given, mean=mean, weighted=True, ids_dtype=dtype
    )
    special = torch.tensor([padding, -1, 3, 5, INT32.min, INT64.min, INT64.max, 0])
    last = int(case.offsets[6])
    case.values[:last] = special.repeat(3)[:last].to(dtype)
    encoded = EncodedCase(case, ["fp32", "int8"])
    check_lookups(encoded, every_backend)
    check_gradients(case, every_backend)
    for optimizer in OPTIMIZERS:
        check_update(encoded, optimizer, "nearest", every_backend)


@pytest.mark.parametrize("buckets", [2**31 - 1, 2**31 + 1, 2**33, 2**44 - 17])
def test_rows_of_large_tables(buckets: int) -> None:
    """Rows beyond int32, also of int32 ids, are found in a cache, without memory for the table."""
    ids = [-1, -2, -buckets, INT32.min, INT32.max, 0, 12345, INT64.min, INT64.min + 1, INT64.max, 3 * buckets - 5]
    rows = list(dict.fromkeys(i % buckets for i in ids))
    partitions = rk.IdPartitions([0, 1], [1], [buckets], [None], ["concat"])
    cache = rk.CachePlaces(ways=len(rows), sets=[1], first_sets=[0], row_offsets=[0])
    made = rk.table_layout([buckets], [1], partitions=partitions, cache=cache)
    marks = torch.tensor([fmix64(row) % 256 for row in rows], dtype=torch.uint8)
    for dtype in (torch.int64, torch.int32):
        given = [i for i in ids if torch.iinfo(dtype).min <= i <= torch.iinfo(dtype).max]
        bags = torch.tensor(given, dtype=dtype), torch.tensor([0, len(given)])
        for backend in every_backend():
            slots = backend.ops.ops.row_cache_lookup(torch.tensor(rows), marks, *bags, *made)
            assert [rows[slot] for slot in slots.tolist()] == [i % buckets for i in given], backend.name
            assert slots.min() >= 0


def test_bad_ids_of_other_features() -> None:
    """Bad ids of other features are named with their own limits, or ignored."""
    case = make_case([(6, 3), (4, 7)], [_hash(0, 5), 1, _hash(1, 4)], [3, 2, 3], seed=1)
    case.values[3] = -1
    encoded = EncodedCase(case, ["fp32", "fp32"])
    check_lookups(encoded, every_backend, bounds_check="ignore")
    for backend in every_backend():
        call = (encoded.flat, *case.jagged)
        if backend.kind == "cpu":
            with pytest.raises(IndexError, match=r"values\[3\] = -1 \(feature 1, bag 0\).* must be in \[0, 4\)"):
                backend.ops.embedding_bag(*call, **encoded.layout)
        else:
            assert backend.ops.embedding_bag(*call, **encoded.layout)[1].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        (
            ([0, 1], [2], [7], [None], ["concat"]),
            "id_limits[0] = None: feature 0, which accepts every integer, must",
        ),
        (([0, 2], [1, 1], [7, 7], [None], ["concat"]), "must have one part with divisor 1"),
        (([0, 1], [1], [8], [None], ["concat"]), "num_embeddings[0] = 7 must be at least 8, the rows that"),
        (([0, 1], [1], [7], [-1], ["concat"]), "id_limits[0] = -1 must not be negative"),
    ],
)
def test_layouts_that_are_refused(partitions: tuple, message: str) -> None:
    """Hashing requires divisor 1 and a table with all rows of the modulus."""
    rows = [7] * len(partitions[1])
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.table_layout(rows, [4] * len(rows), partitions=rk.IdPartitions(*partitions))


def test_layouts_of_triton() -> None:
    """The Triton kernels reject hashed tables."""
    triton = pytest.importorskip("rec_kernels.triton.inputs")
    made = rk.table_layout([7], [4], partitions=rk.IdPartitions([0, 1], [1], [7], [None], ["concat"]))
    call = type("Call", (), {"layout": made.layout, "layout_sizes": made.layout_sizes})
    with pytest.raises(ValueError, match="ids that are not their rows: it needs the compiled CUDA library"):
        triton.check_offered(call)


# Modules: a hashed table has the bits of a plain one with the remainders as ids.


def _tables(kind: type[rk.EmbeddingConfig], *, every: bool, **options: object) -> list[rk.EmbeddingConfig]:
    rows, compression = (None, rk.Hash(BUCKETS)) if every else (BUCKETS, None)
    return [
        kind(rows, 8, name="hashed", feature_names=["a", "b"], compression=compression, **options),
        kind(50, 8, name="plain", feature_names=["c"], padding_idx=7, **options),
    ]


def _ids(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(INT64.min, INT64.max, (6, 4), generator=generator)
    near = torch.randint(-100, 100, (6, 3), generator=generator)
    near[0, 0], wide[0, 0] = -1, INT64.min
    return {"a": wide, "b": near, "c": torch.randint(50, (6, 2), generator=generator)}


def _remainders(ids: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t if name == "c" else t % BUCKETS for name, t in ids.items()}


def _pooled(collection: rk.EmbeddingBagCollection, ids: dict[str, Tensor]) -> Tensor:
    return collection(ids).values()


def _sequences(collection: rk.EmbeddingCollection, ids: dict[str, Tensor]) -> Tensor:
    return torch.cat([rows.values() for rows in collection(ids).values()])


def _deduplicated(collection: rk.EmbeddingBagCollection, ids: dict[str, Tensor]) -> Tensor:
    batch = rk.KeyedJaggedTensor.from_dict({name: t.repeat_interleave(2, dim=0) for name, t in ids.items()})
    return collection(rk.InverseKeyedJaggedTensor.from_kjt(batch, [["a", "c"], ["b"]])).values()


def _compiled(collection: rk.EmbeddingBagCollection, ids: dict[str, Tensor]) -> Tensor:
    return torch.compile(lambda batch: collection(batch).values(), fullgraph=True, backend="aot_eager")(ids)


@pytest.mark.parametrize(
    ("look_up", "options"),
    [
        (_pooled, {}),
        (_pooled, {"optimizer": rk.RowwiseAdagrad(lr=0.1)}),
        (_pooled, {"optimizer": rk.Adam(lr=0.1), "cache": rk.RowCache(0.2, ways=2)}),
        (_sequences, {"optimizer": rk.Adam(lr=0.1)}),
        (_deduplicated, {"optimizer": rk.RowwiseAdagrad(lr=0.1)}),
        (_compiled, {"optimizer": rk.RowwiseAdagrad(lr=0.1)}),
        *full((_sequences, {}), (_compiled, {}), (_pooled, {"optimizer": rk.SGD(lr=0.1), "bounds_check": "none"})),
    ],
)
def test_bits_of_the_remainders(look_up: Callable, options: dict) -> None:
    """Outputs and state over three steps, also of a copy, a loaded state and a serving copy."""
    kind = rk.EmbeddingConfig if look_up is _sequences else rk.EmbeddingBagConfig
    made = rk.EmbeddingCollection if look_up is _sequences else rk.EmbeddingBagCollection
    format = "int8" if options else "fp32"
    collections = []
    for every in (True, False):
        torch.manual_seed(3)
        collections.append(made(_tables(kind, every=every, format=format), **options))
    hashed, plain = collections
    for seed in range(3):
        outputs = [look_up(hashed, _ids(seed)), look_up(plain, _remainders(_ids(seed)))]
        assert same_bits(*outputs)
        for out in outputs:
            out.square().sum().backward()
    states = [{name: t.clone() for name, t in c.state_dict().items()} for c in collections]
    assert all(same_bits(t, states[1][name]) for name, t in states[0].items())
    if look_up is _compiled:
        return
    expected = look_up(plain, _remainders(_ids(9)))
    for other in (copy.deepcopy(hashed), pickle.loads(pickle.dumps(hashed)), hashed.for_serving()):
        if look_up is not _deduplicated or isinstance(other, made):
            assert same_bits(look_up(other, _ids(9)), expected)


def test_rows_of_bounded_tables_stay() -> None:
    """Ids from 0 on have the rows of a table with 2^40 ids, and int32 ids those of int64."""
    tables = [
        rk.EmbeddingBagConfig(
            rows, 4, name="t", feature_names=["a"], compression=rk.Hash(11), init=torch.nn.init.normal_
        )
        for rows in (None, 2**40)
    ]
    every, bounded = (rk.EmbeddingBagCollection([table]) for table in tables)
    bounded.load_state_dict(every.state_dict())
    ids = torch.randint(2**40, (300, 100))  # for several threads
    assert same_bits(every({"a": ids}).values(), bounded({"a": ids}).values())
    small = ids % 2**20 - 2**19
    assert same_bits(every({"a": small}).values(), every({"a": small.int()}).values())


def test_on_disk(tmp_path) -> None:
    """Rows of a batch's remainders are read from a file, and written to it."""
    pytest.importorskip("rec_kernels._host")
    cache = rk.RowCache(0.1, backing="disk", path=str(tmp_path / "rows"), memory_budget=10**6)
    torch.manual_seed(3)
    disk = rk.EmbeddingBagCollection(_tables(rk.EmbeddingBagConfig, every=True), optimizer=rk.SGD(lr=0.1), cache=cache)
    torch.manual_seed(3)
    plain = rk.EmbeddingBagCollection(_tables(rk.EmbeddingBagConfig, every=False), optimizer=rk.SGD(lr=0.1))
    for seed in range(2):
        outputs = [_pooled(disk, _ids(seed)), _pooled(plain, _remainders(_ids(seed)))]
        assert same_bits(*outputs)
        for out in outputs:
            out.sum().backward()
    disk.close()


def test_export() -> None:
    """An exported program accepts negative ids."""
    collection = rk.EmbeddingBagCollection(_tables(rk.EmbeddingBagConfig, every=True))
    served = collection.for_serving()
    batch = rk.KeyedJaggedTensor.from_dict(_ids(0))
    program = torch.export.export(served, (batch,), strict=False)
    assert same_bits(program.module()(batch).values(), served(batch).values())


@pytest.mark.parametrize("options", [{}, {"optimizer": rk.SGD(lr=0.1)}])
def test_layers(options: dict) -> None:
    """Layers accept None as the number of ids; the padding id's row is zeros."""
    ids = torch.tensor([[-1, -2, INT64.min], [5, 35, -38]])
    layer = rk.Embedding(None, 4, padding_idx=-1, compression=rk.Hash(BUCKETS), **options)
    expected = layer.weight[ids % BUCKETS] * (ids != -1)[..., None]
    assert torch.equal(layer(ids), expected)
    assert repr(layer).startswith("Embedding(None, 4, padding_idx=-1, compression=Hash(buckets=37), optimizer=")
    bag = rk.EmbeddingBag(None, 4, mode="max", compression=rk.Hash(BUCKETS), **options)
    assert torch.equal(bag(ids), bag.weight[ids % BUCKETS].amax(1))


@pytest.mark.parametrize("compression", [rk.Hash(5), rk.MixedDimension(2), rk.QuotientRemainder(4)])
def test_padding_of_compressed_layers(compression: rk.Compression) -> None:
    """A padding id's output is zeros, and it uses no row of the parts."""
    layer = rk.Embedding(20, 4, padding_idx=12, compression=compression)
    rows = layer(torch.tensor([12, 7]))
    assert not rows[0].any()
    assert rows[1].all()


def test_configurations() -> None:
    """None is allowed for hashed tables only; initial values are those of a table with as many rows."""
    table = rk.EmbeddingBagConfig(
        None, 16, name="t", feature_names=["a"], compression=rk.Hash(400), padding_idx=-(2**63)
    )
    collection = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=0.1))
    weight = collection.embedding_bags["t"].weight
    assert weight.shape == (400, 16)
    assert 0.04 < weight.abs().max().item() <= 0.05
    assert "t: every id x 16 Hash(buckets=400) sum" in repr(collection)
    assert [report["num_embeddings"] for report in collection.memory_report()] == [400]
    for rows, compression in (
        (None, None),
        (None, rk.QuotientRemainder(4)),
        (None, rk.MixedDimension(2)),
        (2**64, rk.Hash(4)),
    ):
        with pytest.raises(ValueError, match=rf"table 't': num_embeddings must be .*, got {rows}; with compression=rk"):
            rk.EmbeddingBagConfig(rows, 16, name="t", feature_names=["a"], compression=compression)
    with pytest.raises(ValueError, match=rf"padding_idx = {2**63} must be below 2\^63"):
        rk.EmbeddingBagConfig(None, 16, name="t", feature_names=["a"], compression=rk.Hash(4), padding_idx=2**63)


def test_advice_of_sharded_lookups() -> None:
    """A bad batch is rejected before its ids are sent; the error suggests a hashed table."""
    pytest.importorskip("torchrec.distributed")
    from rec_kernels.distributed.batch_checks import checked_batch

    ids = {"a": torch.tensor([[-1]]), "b": torch.tensor([[-1]])}
    with pytest.raises(IndexError, match=r"'b', bag 0: id -1 must be in \[0, 5\); nothing was .*=rk\.Hash\(buckets\)$"):
        checked_batch(ids, ["a", "b"], [None, 5], "error")
    assert checked_batch(ids, ["a", "b"], [None, 5], "ignore").bags.values.tolist() == [-1, -1]
