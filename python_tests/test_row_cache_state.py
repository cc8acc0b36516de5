"""State of collections with a row cache: flushed, saved, loaded, copied, moved, served, exported."""

from __future__ import annotations

import copy
import dataclasses
import io

import collection_cases
import pytest
import torch
from collection_cases import sequences
from collection_format_cases import numbers
from row_cache_collections import (
    OPTIMIZERS,
    SMALL,
    batch,
    copied,
    differing,
    everything,
    make,
    read,
    train,
    with_floats,
)
from torch import nn

import rec_kernels as rk
from rec_kernels.reference import row_formats as reference
from rec_kernels.testing import same_bits

LFU = dataclasses.replace(SMALL, policy="lfu", decay_every=3)
ADAM = OPTIMIZERS[2]
#: Another cache of the same tables.
OTHERS = {
    "ways": rk.RowCache(1.0, ways=23),
    "by name": rk.RowCache({"t0": 1.0, "t1": 1.0, "t2": 1.0, "t3": 1.0}, ways=23),
    "shared": rk.RowCache(0.999, ways=4),
    "fewer": rk.RowCache(0.1, ways=4),
    "policy": LFU,
    "without": None,
}


def cached(collection, name: str, dirty: bool = False) -> torch.Tensor:
    """[k]: cached rows of a table, or the dirty ones."""
    names, cache = [t.name for t in collection.tables], collection.row_cache
    first = sum(t.num_embeddings for t in collection.tables[: names.index(name)])
    rows = cache.tags[(cache.tags >= 0) & ((cache.dirty != 0) | (not dirty))] - first
    return rows[(rows >= 0) & (rows < collection.tables[names.index(name)].num_embeddings)]


def looked_up(collection, name: str) -> torch.Tensor:
    """Values that lookups read from a table's bytes: sums of one row, in which -0 is 0."""
    return numbers(collection, name) + 0.0


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("cache", [SMALL, LFU, rk.RowCache(1.0)], ids=["lru", "lfu", "all"])
def test_flush(cache: rk.RowCache, rounding: str) -> None:
    """A flush writes dirty rows to tables with the clock's noise, and nothing else; repeating it changes nothing."""
    collection = make(ADAM, cache, rounding=rounding, seed=-5)
    train(collection)
    before, rows = everything(collection), read(collection)
    collection.flush()
    after = everything(collection)
    names = differing(after, before)
    assert names
    assert all(n == "_weights" or n.endswith(".weight") for n in names)
    for i, t in enumerate(collection.tables):
        weight, dirty = before[f"embedding_bags.{t.name}.weight"], cached(collection, t.name, dirty=True)
        expected = weight.view(torch.uint8).clone()
        for row in dirty.tolist():
            noise = {"seed": -5, "step": int(collection.row_cache.clock), "table": i, "first_row": row, "stream": 3}
            expected[row] = reference.quantize_rows(rows[t.name][row][None], t.format, rounding=rounding, **noise)[0]
        assert len(dirty)
        assert torch.equal(collection.embedding_bags[t.name].weight.view(torch.uint8), expected), t.name
    collection.flush()
    assert not differing(everything(collection), after)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("cache", [SMALL, LFU], ids=["lru", "lfu"])
def test_training_goes_on_after_a_flush(cache: rk.RowCache, optimizer) -> None:
    """Training after a flush is as without it."""
    pair = [make(optimizer, cache) for _ in range(2)]
    for step in range(6):
        outputs = [train(c, step, steps=1)[0] for c in pair]
        assert same_bits(*outputs)
        pair[0].flush()
    assert differing(everything(pair[0]), everything(pair[1])), "there was nothing to flush"
    pair[1].flush()
    assert not differing(*map(everything, pair))


@pytest.mark.parametrize("way", ["in place", "state"])
@pytest.mark.parametrize("cache", [SMALL, LFU], ids=["lru", "lfu"])
def test_tables_that_are_written(cache: rk.RowCache, way: str) -> None:
    """Lookups read values written to tables, also of cached rows, and no flush overwrites them."""
    collection = make(ADAM, cache)
    train(collection)
    expected = read(collection) | {"t0": torch.full((20, 6), 9.0)}
    assert len(cached(collection, "t0"))
    rows = rk.quantize_rows(expected["t0"], "int8")
    if way == "state":
        state = {n: t for n, t in copied(collection.state_dict()).items() if not n.startswith("row_cache.")}
        collection.load_state_dict(state | {"embedding_bags.t0.weight": rows})
    else:
        collection.flush()
        with torch.no_grad():
            collection.embedding_bags["t0"].weight.copy_(rows)
        clock = int(collection.row_cache.clock)
        collection.reset_cache_states()
        assert collection.row_cache.clock == clock > 0
    assert all(t["cached_rows"] == t["lookups"] == 0 for t in collection.memory_report())
    assert not differing(read(collection), {name: looked_up(collection, name) for name in expected})
    assert same_bits(read(collection)["t0"], expected["t0"])
    before = everything(collection)
    collection.flush()
    assert not differing(everything(collection), before)
    train(collection, first=5)
    assert len(cached(collection, "t0"))


def test_what_was_not_flushed_stays() -> None:
    """RuntimeError has the step since which rows are unflushed, and nothing changes."""
    collection = make(ADAM)
    collection.reset_cache_states()
    for when in ("there was no flush", "the last flush.. was at 4"):
        train(collection)
        before = everything(collection)
        with pytest.raises(RuntimeError, match=rf"step is [48], and {when}.*nothing was changed"):
            collection.reset_cache_states()
        assert not differing(everything(collection), before)
        collection.flush()
    collection.reset_cache_states()
    assert (collection.row_cache.tags == -1).all()


def test_flush_without_a_cache() -> None:
    make(device="meta").reset_cache_states()
    collection = make(cache=None)
    before = everything(collection)
    collection.flush()
    collection.reset_cache_states()
    assert not differing(everything(collection), before)


WAYS = ["state_dict", "assign", "file", "deepcopy", "pickle", "meta", "inside a parent"]


def _another(original, way: str):
    def new(device: str | None = None):
        other = make(original.optimizer, original.row_cache.cache, device=device)
        if device is None:
            train(other, first=50, steps=2)  # other rows and state, to be replaced
        else:
            assert all(t.is_meta for t in other.buffers())
            assert other.memory_report()[0]["cached_rows"] == 0
        return other

    if way != "inside a parent":
        return collection_cases.copied(original, new, way)
    parent = nn.ModuleDict({"tables": new()})
    parent.load_state_dict({f"tables.{n}": t for n, t in original.state_dict().items()})
    return parent["tables"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("cache", [SMALL, LFU], ids=["lru", "lfu"])
def test_copies_go_on_alike(cache: rk.RowCache, optimizer, way: str) -> None:
    """A copy, however made, trains independently to equal bits."""
    original = make(optimizer, cache)
    train(original)
    other = _another(original, way)
    assert original.row_cache.dirty.any()
    for a, b in zip(train(original, first=5), train(other, first=5), strict=True):
        assert same_bits(a, b)
    assert not differing(original.state_dict(), other.state_dict())
    before = everything(original)
    train(other, first=11, steps=1)
    assert not differing(everything(original), before)


@pytest.mark.parametrize("name", OTHERS)
def test_into_another_cache(name: str) -> None:
    """A state loads into another cache: flushed tables, other state as usual, and empty slots."""
    original = make(ADAM, rk.RowCache(1.0, ways=4))
    train(original)
    state = copied(original.state_dict())
    other = make(ADAM, OTHERS[name])
    train(other, first=50)
    keys = list(other.state_dict())
    other.load_state_dict(state)
    assert list(other.state_dict()) == keys
    if other.row_cache is not None:
        assert (other.row_cache.tags == -1).all()
        assert not any(other.row_cache._buffers[n].any() for n in ("dirty", "stamps", "clock", "stats"))
        assert all(t["cached_rows"] == 0 and t["lookups"] == 0 for t in other.memory_report())
    for table, rows in read(other).items():
        assert same_bits(rows, looked_up(original, table)), table
    for key, t in other.state_dict().items():
        if not key.startswith("row_cache."):
            assert same_bits(t, state[key]), key
    fresh = make(ADAM, OTHERS[name])
    fresh.load_state_dict({n: t for n, t in state.items() if not n.startswith("row_cache.")})
    for c in (other, fresh):
        train(c, first=5)
    assert not differing(other.state_dict(), fresh.state_dict())


@pytest.mark.parametrize(
    "cache", [rk.RowCache({"b": 0.5}, ways=5), rk.RowCache({"a": 0.5}, ways=10)], ids=["b", "ways"]
)
def test_slots_of_one_shape_for_other_rows(cache: rk.RowCache) -> None:
    """Slots of equal shape but of another table's rows or other sets are not loaded."""
    pair = []
    for each in (rk.RowCache({"a": 0.5}, ways=5), cache):
        tables = [rk.EmbeddingBagConfig(20, 6, name=n, feature_names=[n], format="int8") for n in ("a", "b")]
        pair.append(rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5), cache=each))
    train(pair[0])
    state = copied(pair[0].state_dict())
    shapes = [{n: t.shape for n, t in c.state_dict().items()} for c in pair]
    assert shapes[0] == shapes[1]
    pair[1].load_state_dict(state)
    assert (pair[1].row_cache.tags == -1).all()
    for name, rows in read(pair[1]).items():
        assert same_bits(rows, looked_up(pair[0], name))


@pytest.mark.parametrize("names", [("b", "a"), ("a", "c")])
def test_tables_of_one_shape_in_another_order(names: tuple[str, str]) -> None:
    """If tables with equal slots and places have another order, the cache starts empty."""
    pair = []
    for each in (("a", "b"), names):
        tables = [rk.EmbeddingBagConfig(20, 6, name=n, feature_names=[n], format="int8") for n in each]
        pair.append(rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5), cache=SMALL))
    original, other = pair
    train(original)
    state = copied(original.state_dict())
    renamed = {n.replace("_bags.b.", f"_bags.{names[1 - names.index('a')]}."): t for n, t in state.items()}
    train(other, first=50)
    other.load_state_dict(renamed)
    assert (other.row_cache.tags == -1).all()
    for mine, theirs in (("a", "a"), ("b", names[1 - names.index("a")])):
        assert same_bits(read(other)[theirs], looked_up(original, mine)), mine
    again = copied(other.state_dict())
    assert all(same_bits(again[n], t) for n, t in renamed.items() if "_bags." in n)
    assert not differing({n: again[n] for n in ("row_cache.tags", "row_cache.rows")}, _empty(other))


def _empty(collection) -> dict[str, torch.Tensor]:
    cache = collection.row_cache
    tags, rows = torch.full_like(cache.tags, -1), torch.zeros_like(cache.rows)
    return {"row_cache.tags": tags, "row_cache.rows": rows}


def test_a_state_without_names_of_tables() -> None:
    """An older state without the slots' tables leaves the cache empty."""
    original, other = make(ADAM), make(ADAM)
    train(original)
    state = copied(original.state_dict())
    state["row_cache.geometry"][0, 2] = 0
    other.load_state_dict(state)
    assert (other.row_cache.tags == -1).all()
    for name, rows in read(other).items():
        assert same_bits(rows, looked_up(original, name)), name


def test_a_state_without_some_of_the_tables() -> None:
    """With strict=False, missing tables keep their rows, also cached ones; others are loaded."""
    original, other = make(ADAM), make(ADAM)
    train(original)
    train(other, first=50)
    before = everything(other)
    other.load_state_dict({}, strict=False)
    assert not differing(everything(other), before)
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.t0\.weight"):
        other.load_state_dict({"step": torch.tensor(4)})
    kept = copy.deepcopy(other)
    kept.flush()
    state = {n: t for n, t in original.state_dict().items() if ".t1." not in n}
    other.load_state_dict(state, strict=False)
    rows = read(other)
    for name in ("t0", "t1", "t2", "t3"):
        assert same_bits(rows[name], looked_up(kept if name == "t1" else original, name)), name
    assert not same_bits(rows["t1"], looked_up(original, "t1"))


def test_a_state_that_is_refused_changes_nothing() -> None:
    """A table's wrong shape, detected after the cache's state, changes nothing."""
    collection = make(ADAM)
    train(collection)
    state = copied(collection.state_dict())
    train(collection, first=5)
    collection.flush()
    before = everything(collection)
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding_bags\.t3\.weight"):
        collection.load_state_dict(state | {"embedding_bags.t3.weight": torch.zeros(3, 24, dtype=torch.uint8)})
    assert not differing(everything(collection), before)


def test_convert() -> None:
    """Cached rows are float32 in every format and stay; the tables' are rounded to nearest."""
    original, other = make(ADAM), make(ADAM, formats=["mx6", "int8", "fp32", "mx9"])
    train(original)
    state, rows = copied(original.state_dict()), read(original)
    with pytest.raises(RuntimeError, match="has rows of format"):
        other.load_state_dict(state)
    other.load_state_dict(state, convert=True)
    assert not differing(dict(other.row_cache.state_dict()), dict(original.row_cache.state_dict()))
    found = read(other)
    for t in other.tables:
        is_cached = torch.zeros(t.num_embeddings, dtype=torch.bool)
        is_cached[cached(original, t.name)] = True
        assert 0 < is_cached.sum() < len(is_cached)
        expected = rk.dequantize_rows(rk.quantize_rows(numbers(original, t.name), t.format), t.format, t.embedding_dim)
        assert same_bits(found[t.name], torch.where(is_cached[:, None], rows[t.name], expected + 0.0)), t.name


def test_made_without_memory() -> None:
    """A cache on the meta device has shapes; after to_empty() its slots are empty, and it trains."""
    collection = make(ADAM, device="meta")
    assert collection.state_dict()["row_cache.rows"].is_meta
    collection.to_empty(device="cpu")
    assert (collection.row_cache.tags == -1).all()
    full = make(ADAM)
    collection.load_state_dict({n: t for n, t in full.state_dict().items() if "row_cache" not in n})
    for c in (collection, full):
        train(c)
    assert not differing(collection.state_dict(), full.state_dict())


def test_for_serving() -> None:
    """A serving copy looks up as eval() does, also rows that change afterwards, without changing the cache."""
    collection = make(ADAM)
    train(collection)
    served, given = collection.for_serving(), batch(collection, seed=9)
    for step in range(3):
        train(collection, first=step, steps=1)
        before = everything(collection)
        found = served(given).values()
        assert not differing(everything(collection), before)
        assert same_bits(found, collection.eval()(given).values().detach())
        collection.train()
    assert not list(served.parameters())
    collection.load_state_dict(make(ADAM).state_dict(), assign=True)
    assert same_bits(served(given).values(), collection.eval()(given).values().detach())
    model = sequences(ADAM, ("int8", "mx6"), cache=SMALL)
    ids = rk.KeyedJaggedTensor(["f", "g", "h"], torch.arange(12), lengths=torch.ones(12, dtype=int))
    model.rows(ids).square().sum().backward()
    assert same_bits(model.for_serving().rows(ids), model.eval().rows(ids).detach())


def test_served_tables_move_by_themselves() -> None:
    """A serving copy and its original move to the meta device and back independently."""
    collection = make(ADAM)
    train(collection)
    served, given = collection.for_serving(), batch(collection, seed=9)
    expected = served(given).values()
    moved = collection.for_serving().to("meta")
    assert all(t.is_meta for t in moved.buffers())
    assert same_bits(collection.eval()(given).values().detach(), expected)
    collection.to("meta")
    assert same_bits(served(given).values(), expected)
    moved.to_empty(device="cpu").load_state_dict(served.state_dict())
    assert same_bits(moved(given).values(), expected)


def test_export() -> None:
    """An exported program, saved and loaded, reads cached rows for any batch."""
    collection = make(ADAM)
    train(collection)
    served = nn.Sequential(collection.for_serving()).eval()
    dim = torch.export.Dim.DYNAMIC
    shapes = [[{0: dim}, {0: dim}, None, None]]
    with torch.no_grad():
        program = torch.export.export(served, (batch(collection),), dynamic_shapes=shapes)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for size in (5, 9, 2):
            given = batch(collection, size, size)
            assert same_bits(loaded(given).values(), collection.eval()(given).values())


def test_all_cached_survives_a_file() -> None:
    """Interrupted fp32 training continues to the bit: the state has cached rows in full precision."""
    collection = make(ADAM, rk.RowCache(1.0))
    floats = with_floats(collection)
    for c in (collection, floats):
        train(c)
    resumed = _another(collection, "file")
    for c in (resumed, floats):
        train(c, first=5)
    assert not differing(read(resumed), read(floats))
