"""rk.RowCache in collections: errors, numbers of slots, training, reading, reports."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import pytest
import torch
from collection_cases import deduplicated, sequences
from row_cache_collections import (
    OPTIMIZERS,
    ROWS,
    SMALL,
    batch,
    differing,
    everything,
    make,
    read,
    train,
    whole,
    with_floats,
)

import rec_kernels as rk
from rec_kernels.nn.tables.layout import tensors_of
from rec_kernels.nn.training.fused_update import state_of
from rec_kernels.testing import same_bits

ADAM = OPTIMIZERS[2]
ALL = rk.RowCache(1.0, ways=3)

WRONG = [
    ({"fraction": -0.1}, r"fraction must be a number in \[0, 1\], got -0\.1"),
    ({"fraction": 1.5}, r"fraction must be a number in \[0, 1\], got 1\.5"),
    ({"fraction": float("nan")}, r"fraction must be a number in \[0, 1\], got nan"),
    ({"fraction": True}, r"fraction must be a number in \[0, 1\], got True"),
    ({"fraction": "0.1"}, r"fraction must be a number in \[0, 1\], got '0\.1'"),
    ({"fraction": {"t0": 0.5, "t1": 2}}, r"fraction of table 't1' must be a number in \[0, 1\], got 2"),
    ({"ways": 0}, "ways must be .* got 0"),
    ({"ways": 1025}, "ways must be at most 1024, got 1025"),
    ({"ways": 2.0}, r"ways must be .* got 2\.0"),
    ({"policy": "fifo"}, "policy must be 'lru' or 'lfu', got 'fifo'"),
    ({"policy": "lfu", "decay_every": -1}, "decay_every must be an integer, at least 0 and below 2\\^63, got -1"),
    ({"policy": "lfu", "decay_every": 1.5}, r"decay_every must be an integer, at least 0 and below 2\^63, got 1\.5"),
    ({"decay_every": 3}, "decay_every = 3 requires policy 'lfu', got 'lru'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    """Each error has the argument and its value."""
    with pytest.raises(ValueError, match=message):
        rk.RowCache(**arguments)


def test_collections_that_have_no_cache() -> None:
    """A cache without a fused optimizer, of another class than rk.RowCache, or with unknown table names is rejected."""
    with pytest.raises(ValueError, match=r"cache must be None, or an rk.RowCache in .* optimizer None"):
        make(None, SMALL)
    with pytest.raises(ValueError, match=r"cache must be None, or an rk.RowCache.* got 0\.5"):
        make(cache=0.5)
    with pytest.raises(ValueError, match=r"fraction names \['store'\], which are not tables with a single part"):
        make(cache=rk.RowCache({"store": 0.5, "t0": 0.1}))
    assert make(cache=None).row_cache is None


def test_fractions_by_name() -> None:
    """Tables without a fraction, or with 0, are not cached."""
    collection = make(cache=rk.RowCache({"t0": 0.5, "t1": 0.0, "t2": 1.0}, ways=2))
    train(collection)
    report = {t["name"]: t for t in collection.memory_report()}
    assert collection.row_cache.rows.numel() == 10 * 6 + 22 * 16
    assert 0 < report["t0"]["cached_rows"] <= 10 < report["t2"]["cached_rows"]
    for name in ("t1", "t3"):
        assert not any(report[name][n] for n in ("cached_rows", "cache_bytes", "lookups", "left_out")), name
        assert report[name]["hit_rate"] is None


def test_tables_of_parts_are_not_cached() -> None:
    """Tables of several parts are not cached and may not be named; hashed tables are."""
    tables = [
        rk.EmbeddingBagConfig(40, 6, name="a", feature_names=["a"], compression=rk.QuotientRemainder(4), format="int8"),
        rk.EmbeddingBagConfig(400, 6, name="b", feature_names=["b"], compression=rk.Hash(7), format="int8"),
    ]
    collection = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5), cache=ALL)
    for seed in range(3):
        ids = torch.randint(0, 40, (12,), generator=torch.Generator().manual_seed(seed)) * torch.tensor([1, 9])[:, None]
        given = rk.KeyedJaggedTensor(["a", "b"], ids.flatten(), lengths=torch.ones(24, dtype=int))
        collection(given).values().square().sum().backward()
    report = {t["name"]: t for t in collection.memory_report()}
    assert [report[n]["cached_rows"] for n in ("a_0", "a_1", "b")] == [0, 0, 7]
    assert (report["b"]["lookups"], report["b"]["left_out"]) == (36, 0)
    for name in ("a", "a_0"):
        with pytest.raises(ValueError, match=rf"fraction names \['{name}'\], .*: those are \['b'\]"):
            rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(), cache=rk.RowCache({name: 0.5}))


@pytest.mark.parametrize("ways", [1, 3, 7, 32, 1024])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_fraction_1_has_room_for_every_row(ways: int, policy: str) -> None:
    """One batch of all rows fits, for any ways; the cache has less than one set too many per table."""
    collection = make(cache=rk.RowCache(1.0, ways=ways, policy=policy))
    for _ in range(2):
        collection(whole(collection)).values().sum().backward()
    for i, t in enumerate(collection.memory_report()):
        assert (t["cached_rows"], t["inserted"], t["left_out"], t["evicted"]) == (ROWS + i, ROWS + i, 0, 0)
        assert t["cache_bytes"] < (ROWS + i + ways) * (4 * t["embedding_dim"] + 19) + ROWS + i


def test_tables_of_a_width_share_slots() -> None:
    """Tables of a width share unused slots; other widths have their own."""
    collection = make(cache=rk.RowCache(0.5, ways=10))
    report = {t["name"]: t for t in collection.memory_report()}
    slots = {6: 20, 16: 20, 33: 20}
    assert collection.row_cache.rows.numel() == sum(dim * n for dim, n in slots.items())
    assert report["t0"]["cache_bytes"] + report["t1"]["cache_bytes"] == 20 * (4 * 6 + 18)
    lengths = torch.tensor([ROWS] + [0] * 4)
    alone = rk.KeyedJaggedTensor(collection.feature_names, torch.arange(ROWS), lengths=lengths)
    collection(alone).values().sum().backward()
    assert [t["cached_rows"] for t in collection.memory_report()] == [20, 0, 0, 0]


def test_small_tables_are_cached_whole() -> None:
    """A table that fits into a set is cached completely, for any fraction except 0."""
    fractions = {"t0": 0.01, "t1": 0.01, "t2": 0.0, "t3": 0.01}
    collection = make(cache=rk.RowCache(fractions, ways=ROWS, policy="lfu"))
    train(collection, steps=20)
    report = {t["name"]: t for t in collection.memory_report()}
    assert report["t0"]["evicted"] == report["t0"]["left_out"] == 0 < report["t0"]["inserted"]
    assert report["t0"]["num_embeddings"] == ROWS < report["t1"]["num_embeddings"]
    assert report["t0"]["cache_bytes"] == ROWS * (4 * 6 + 19) + ROWS
    assert report["t2"]["cached_rows"] == 0


@pytest.mark.parametrize("factors", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_all_rows_cached_is_float32(optimizer, policy: str, factors: bool) -> None:
    """With all rows cached, outputs, gradients of weights, rows and state have the bits of fp32 tables."""
    collection = make(optimizer, dataclasses.replace(ALL, policy=policy))
    floats = with_floats(collection)
    for a, b in zip(train(collection, factors=factors), train(floats, factors=factors), strict=True):
        assert same_bits(a, b)
    assert not differing(read(collection), read(floats))
    state = floats.state_dict()
    for name, t in collection.state_dict().items():
        if name in state and not name.endswith((".weight", ".format")):
            assert same_bits(t, state[name]), name


@pytest.mark.parametrize("factors", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_no_row_cached_is_no_cache(optimizer, rounding: str, factors: bool) -> None:
    """With fraction 0, outputs, tables and state are those without a cache."""
    pair = [make(optimizer, cache, rounding=rounding) for cache in (rk.RowCache(0.0), None)]
    for a, b in zip(*(train(c, factors=factors) for c in pair), strict=True):
        assert same_bits(a, b)
    states = [c.state_dict() for c in pair]
    assert not differing({n: t for n, t in states[0].items() if "row_cache" not in n}, dict(states[1]))


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_lookups_that_change_nothing(how: str) -> None:
    """Lookups outside of training read cached rows, but neither insert nor count."""
    collection = make(ADAM)
    train(collection)
    before, given = everything(collection), batch(collection, seed=77)
    context = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[how]
    collection.train(how != "eval")
    with context():
        found = collection(given).values()
    assert not differing(everything(collection), before)
    rows = read(collection)
    bags = [(t, f) for t in collection.tables for f in t.feature_names]
    for (t, f), block in zip(bags, found.detach().split([t.embedding_dim for t, _ in bags], 1), strict=True):
        ids = given[f].to_dense()
        sums = [rows[t.name][i].sum(0) / (max(len(i), 1) if t.pooling == "mean" else 1) for i in ids]
        torch.testing.assert_close(block, torch.stack(sums))
    collection.row_cache.clear()
    assert differing(read(collection), rows), "no cached row differed from its table's"
    assert differing(everything(collection), before)


def test_training_in_eval_mode() -> None:
    """In eval(), updates also reach cached rows, but no row is inserted."""
    collection = make()
    train(collection)
    collection.eval()
    before = everything(collection)
    train(collection, first=9, steps=1)
    changed = differing(everything(collection), before)
    assert {"row_cache.rows", "_weights", "step"} <= set(changed)
    assert not {"row_cache.tags", "row_cache.stamps", "row_cache.clock", "row_cache.stats"} & set(changed)


def test_two_lookups_before_their_backwards() -> None:
    """If the second lookup evicts rows of the first, the first's update goes to the tables, as in the ops."""
    collection = make(rk.RowwiseAdagrad(lr=0.5), rk.RowCache(0.1, ways=2))
    train(collection)
    ops, twin = torch.ops.rec_kernels, copy.deepcopy(collection)
    batches = [batch(collection, seed) for seed in (20, 21)]
    outputs = [collection(given).values() for given in batches]
    layout, options, grads, slots = twin._layout.arguments(), twin._update_options(tensors_of(twin)), [], []
    for given in batches:
        bags = given.values(), given.offsets()
        slots.append(twin.row_cache.insert(twin._call(*twin._select_bags(given))))
        cached = twin.row_cache.arguments(slots[-1])
        grads.append(ops.embedding_bag(twin._weights, *bags, **layout, **cached)[0])
    now = twin.row_cache.lookup(twin._call(*twin._select_bags(batches[0])))
    assert ((slots[0] >= 0) & (now < 0)).any()
    for given, grad in zip(batches, grads, strict=True):
        ops.embedding_bag_backward_fused_(
            *state_of(tensors_of(twin)),
            grad,
            given.values(),
            given.offsets(),
            **layout,
            **options,
            **twin.row_cache.update_arguments(),
        )
    for output, grad in zip(outputs, grads, strict=True):
        assert same_bits(output.detach(), grad)
        output.backward(grad)
    assert not differing(everything(collection), everything(twin))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_accumulate(optimizer) -> None:
    """A block makes one update at its end; with all rows cached, it has the bits of fp32 tables."""
    collection = make(optimizer, ALL)
    floats = with_floats(collection)
    for c in (collection, floats):
        train(c, steps=1)
        before = read(c)
        with c.accumulate():
            train(c, first=5, steps=3, factors=True)
            assert not differing(read(c), before)
        assert c.step.item() == 2
    assert not differing(read(collection), read(floats))


def test_an_exception_inside_accumulate() -> None:
    """Neither cached nor other rows are updated."""
    collection = make(ADAM, ALL)
    train(collection)
    before = read(collection)
    with contextlib.suppress(KeyError), collection.accumulate():
        train(collection, first=5, steps=1)
        raise KeyError
    assert not differing(read(collection), before)
    assert collection.step.item() == 4


def test_freeze() -> None:
    """Rows of frozen features are inserted, and not trained."""
    collection = make(cache=ALL)
    collection.freeze("f1", "f2")
    before = read(collection)
    train(collection)
    report, after = {t["name"]: t for t in collection.memory_report()}, read(collection)
    for name, frozen in (("t0", False), ("t1", True), ("t2", True), ("t3", False)):
        assert report[name]["cached_rows"] > 0, name
        assert (report[name]["dirty_rows"] == 0) == frozen, name
        assert same_bits(before[name], after[name]) == frozen, name


def test_batches_of_their_own_size() -> None:
    """Distinct bags with inverse indices, and by_feature(), train as fp32 tables do."""
    tables = [
        rk.EmbeddingBagConfig(50, 6, name="a", feature_names=["f", "g"], format="int8"),
        rk.EmbeddingBagConfig(70, 20, name="b", feature_names=["h"], format="int4", pooling="mean"),
    ]
    collection = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5), cache=ALL)
    floats = with_floats(collection)
    for seed in range(3):
        few, _ = deduplicated(seed=seed)
        outputs = [c(few).values() for c in (collection, floats)]
        named = [c.by_feature(few) for c in (collection, floats)]
        assert same_bits(*(o.detach() for o in outputs))
        for key in named[0]:
            assert same_bits(*(blocks[key].detach() for blocks in named)), key
        for output, blocks in zip(outputs, named, strict=True):
            (output.square().sum() + sum(block.square().sum() for block in blocks.values())).backward()
    assert not differing(read(collection), read(floats))
    assert all(t["dirty_rows"] and t["hits"] for t in collection.memory_report())


@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_sequences(fraction: float) -> None:
    """rk.EmbeddingCollection; with every row cached it trains as fp32 tables do."""
    collection = sequences(ADAM, ("int8", "mx6"), cache=rk.RowCache(fraction, ways=2))
    floats = with_floats(collection)
    for seed in range(4):
        _, given = deduplicated(seed=seed)
        outputs = [c.rows(given) for c in (collection, floats)]
        if fraction == 1:
            assert same_bits(*(o.detach() for o in outputs))
        for output in outputs:
            output.square().sum().backward()
    report = collection.memory_report()
    assert all(t["hits"] and t["dirty_rows"] for t in report)
    assert all((t["evicted"] > 0) == (fraction < 1) for t in report)
    rows = [c.eval().rows(given).detach() for c in (collection, floats)]
    assert same_bits(*rows) == (fraction == 1)


@pytest.mark.parametrize(
    "cache", [SMALL, rk.RowCache({"t0": 0.3, "t1": 0.8, "t3": 1.0}, ways=8, policy="lfu")], ids=str
)
def test_memory_report(cache: rk.RowCache) -> None:
    """Bytes equal the memory of slots and counts; numbers of rows and ids match the lookups."""
    collection, ids = make(cache=cache), dict.fromkeys(["t0", "t1", "t2", "t3"], 0)
    for seed in range(4):
        given = batch(collection, seed)
        for t in collection.tables:
            ids[t.name] += sum(given[f].values().numel() for f in t.feature_names)
        collection(given).values().sum().backward()
    report, own = collection.memory_report(), collection.row_cache
    buffers = ["rows", "tags", "marks", "stamps", "dirty"] + (["counts", "row_counts"] if cache.policy == "lfu" else [])
    assert sum(t["cache_bytes"] for t in report) == sum(own._buffers[b].nbytes for b in buffers)
    assert sum(t["cached_rows"] for t in report) == (own.tags >= 0).sum()
    assert sum(t["dirty_rows"] for t in report) == own.dirty.sum()
    for t in report:
        if cache.of(t["name"]):
            assert t["lookups"] == ids[t["name"]]
            assert t["hit_rate"] == t["hits"] / t["lookups"]
            assert 0 < t["hits"] < t["lookups"]
        assert t["cached_rows"] == t["inserted"] - t["evicted"]
        assert t["written"] <= t["evicted"]
    assert set(report[0]) - set(make(cache=None).memory_report()[0]) == {
        "cached_rows",
        "dirty_rows",
        "cache_bytes",
        "lookups",
        "hits",
        "hit_rate",
        "inserted",
        "evicted",
        "written",
        "left_out",
    }


def test_hit_rate() -> None:
    """The hit rate counts ids, over all features of a table; it is None before the first batch."""
    collection = make(cache=ALL, formats=["int8"])
    assert collection.memory_report()[0]["hit_rate"] is None
    given = rk.KeyedJaggedTensor(["f0", "g0"], torch.tensor([1, 1, 2, 3]), lengths=torch.tensor([2, 2]))
    for rate in (0.0, 0.5, 2 / 3):
        collection(given)
        assert collection.memory_report()[0]["hit_rate"] == rate
