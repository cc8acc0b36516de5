"""prefetch() of collections with tables in host memory inserts rows early, without a change of results."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from row_cache_collections import OPTIMIZERS, SMALL, batch, differing, everything, make, train
from row_cache_host_cases import in_host, step, train_ahead
from torch._subclasses.fake_tensor import FakeTensorMode

import rec_kernels as rk
from rec_kernels.nn.tables.prefetch import PrefetchedBatch, TableCall
from rec_kernels.testing import same_bits

LFU = rk.RowCache(0.4, ways=4, policy="lfu", decay_every=3)
ALREADY = "cannot run after prefetch..: the prefetched rows are already in the cache"


def pair(cache: rk.RowCache = SMALL, **options) -> list:
    """Two collections with equal rows, in device memory and in host memory."""
    return [make(cache=c, **options) for c in (cache, in_host(cache))]


def clock(collection) -> int:
    return int(collection.row_cache.clock)


@pytest.mark.parametrize("where", ["", "before", "after"])
@pytest.mark.parametrize("cache", [SMALL, LFU], ids=["lru", "lfu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_bits_are_those_without(optimizer, cache: rk.RowCache, where: str) -> None:
    """Outputs, tables, slots, history, optimizer state and statistics equal those without prefetch()."""
    plain, ahead = pair(cache, optimizer=optimizer)
    outputs = [train_ahead(c, 7, where=where, factors=True) for c in (plain, ahead)]
    assert all(same_bits(a, b) for a, b in zip(*outputs, strict=True))
    assert not differing(everything(plain), everything(ahead))
    assert not differing(plain.state_dict(), ahead.state_dict())


@pytest.mark.parametrize("where", ["before", "after"])
def test_rows_come_in_early(where: str) -> None:
    """Rows are inserted after the update, and not before it."""
    c = make(cache=in_host(SMALL))
    pooled = c(batch(c, 0)).values()
    assert clock(c) == 1
    if where == "before":
        c.prefetch(batch(c, 1))
        assert clock(c) == 1
    pooled.sum().backward()
    if where == "after":
        c.prefetch(batch(c, 1))
    assert clock(c) == 2
    c(batch(c, 1))
    assert clock(c) == 2


def test_every_update_comes_first() -> None:
    """Rows are inserted after the updates of two lookups; a deleted output is not waited for."""
    plain, ahead = pair()
    for c in (plain, ahead):
        outputs = [c(batch(c, i)).values().square().sum() for i in range(3)]
        c.prefetch(batch(c, 3))
        outputs.pop(1)
        outputs.pop(0).backward()
        assert clock(c) == 3
        outputs.pop().backward()
        assert clock(c) == 3 + (c is ahead)
        step(c, batch(c, 3))
    assert not differing(everything(plain), everything(ahead))


def test_accumulate() -> None:
    """In a block rows are inserted at lookups; for the next batch, after the block's update."""
    plain, ahead = pair(LFU)
    for c in (plain, ahead):
        for first in (0, 3):
            with c.accumulate():
                for i in range(first, first + 3):
                    step(c, batch(c, i), batch(c, i + 1), where="before")
                    assert clock(c) == i + 1
            assert clock(c) == first + 3 + (c is ahead)
        step(c, batch(c, 6))
    assert not differing(everything(plain), everything(ahead))


def test_other_kinds_of_batches() -> None:
    """Prefetch accepts features in another order, batch sizes per feature, and sequence lookups."""
    plain, ahead = pair()
    keys = plain.feature_names[::-1]
    strides = rk.KeyedJaggedTensor(
        keys, torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 0, 0, 1]), stride_per_key=[1, 2, 1, 1, 1]
    )
    for c in (plain, ahead):
        c.prefetch(rk.KeyedJaggedTensor(keys, torch.arange(5), lengths=torch.ones(5, dtype=torch.int64)))
        step(c, rk.KeyedJaggedTensor(keys, torch.arange(5), lengths=torch.ones(5, dtype=torch.int64)), strides)
        sum(t.sum() for t in c.by_feature(strides).values()).backward()
    assert not differing(everything(plain), everything(ahead))
    table = rk.EmbeddingConfig(30, 4, name="t", feature_names=["f", "g"], format="int8")
    c = rk.EmbeddingCollection([table], optimizer=rk.SGD(lr=0.1), cache=in_host(rk.RowCache(0.3, ways=2)))
    c.prefetch(batch(c, 0))
    assert clock(c) == 1
    c.rows(batch(c, 0)).sum().backward()
    assert clock(c) == 1


def uses(c) -> dict[str, object]:
    """Actions that are not allowed between prefetch and lookup."""
    return {
        "a lookup of another batch": lambda: c(batch(c, 9)),
        "prefetch.. of another batch": lambda: c.prefetch(batch(c, 9)),
        "a lookup in eval.. mode or without gradients": lambda: torch.no_grad()(c)(batch(c, 1)),
        "flush.. or state_dict..": c.state_dict,
        "reset_cache_states": c.reset_cache_states,
        "moving the collection": lambda: c.to("cpu"),
        "copying or pickling the collection": lambda: copy.deepcopy(c),
    }


@pytest.mark.parametrize("what", range(7))
def test_what_must_not_come_between(what: int) -> None:
    """A disallowed action raises RuntimeError; nothing changes, and training goes on."""
    plain, ahead = pair(LFU)
    batches = [batch(plain, i) for i in range(4)]
    for c in (plain, ahead):
        step(c, batches[0], batches[1])
    before = everything(ahead)
    message, use = list(uses(ahead).items())[what]
    with pytest.raises(RuntimeError, match=f"{message}.* {ALREADY}"):
        use()
    assert not differing(before, everything(ahead))
    ahead.prefetch(batches[1])  # repeating it changes nothing
    assert not differing(before, everything(ahead))
    for c in (plain, ahead):
        step(c, batches[1])
    assert not differing(plain.state_dict(), ahead.state_dict())
    copy.deepcopy(ahead), pickle.loads(pickle.dumps(ahead))


def test_an_update_must_not_come_between() -> None:
    """A second backward of one lookup between prefetch and lookup raises."""
    c = make(cache=in_host(SMALL))
    loss = c(batch(c, 0)).values().square().sum()
    loss.backward(retain_graph=True)
    c.prefetch(batch(c, 1))
    before = everything(c)
    with pytest.raises(RuntimeError, match=f"an update {ALREADY}"):
        loss.backward()
    assert not differing(before, everything(c))


class Stream:
    """Imitates a GPU's stream with pending work."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waited_for: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)

    def wait_stream(self, other: object) -> None:
        self.waited_for.append(other)

    def record_event(self) -> object:
        return object()


def fail() -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_beside_keeps_what_it_uses(fails: bool, monkeypatch) -> None:
    """The side stream keeps every GPU tensor of the call and of the insertion alive until it has used it.

    An insertion that runs out of memory has already launched kernels.
    """
    kept: list[torch.Tensor] = []
    main, beside = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: beside)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: kept.append(t))
    with FakeTensorMode():  # tensors on a GPU, without one
        values, offsets, records, seed, tags = (torch.empty(3, device="cuda") for _ in range(5))
        weights = torch.empty(3, device="cpu")
        call = TableCall(weights, (values, offsets, None), {"layout": records, "layout_sizes": [3]}, {"seed": seed})
        ahead = PrefetchedBatch()
        ahead.announce(call)
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            ahead.insert(lambda given: fail() if fails else given.bags[0], [tags])
    assert beside.waited_for == [main]
    assert {id(t) for t in kept} == {id(t) for t in (values, offsets, records, seed, tags)}


@pytest.mark.parametrize("what", ["lookup", "memory_report", "tier_report", "compiled lookup"])
def test_what_others_read_waits(what: str, monkeypatch) -> None:
    """Serving lookups and reports are allowed between, and their stream waits for the side stream."""
    plain, ahead = pair(LFU)
    for c in (plain, ahead):
        step(c, batch(c, 0))
    served = ahead.for_serving()
    if what == "compiled lookup":
        served = torch.compile(served, backend="aot_eager")
    stream, event = Stream(), object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for waits in (False, True):
        if waits:
            ahead.prefetch(batch(ahead, 1))
            ahead._store._prefetched._stream, ahead._store._prefetched._event = stream, event  # those of a GPU
        if "lookup" in what:
            served(batch(ahead, 9))
        else:
            getattr(ahead, what)()
        assert stream.waited_for == [event] * waits
    ahead._store._prefetched._event = None
    for c in (plain, ahead):
        step(c, batch(c, 1))
    assert not differing(everything(plain), everything(ahead))


def test_a_batch_that_was_written_to() -> None:
    """A batch that was written to gets the slots of its new ids."""
    c = make(cache=in_host(SMALL))
    given = batch(c, 1)
    c.prefetch(given)
    given.values()[0] ^= 1
    with pytest.raises(RuntimeError, match=f"a lookup of another batch {ALREADY}"):
        c(given)


def test_announced_alone_promises_nothing() -> None:
    """While an update is pending, another batch may be looked up, and states may be saved."""
    plain, ahead = pair()
    for c in (plain, ahead):
        pooled = c(batch(c, 0)).values()
        c.prefetch(batch(c, 1))
        c.prefetch(batch(c, 2))
        c.state_dict()
        c.eval()(batch(c, 7))
        more = c.train()(batch(c, 3)).values()
        (pooled.sum() + more.square().sum()).backward()
        step(c, batch(c, 1))
    assert not differing(everything(plain), everything(ahead))


def test_loading_a_state() -> None:
    """After loading, the cache is that of the state, and the batch's rows are inserted again."""
    plain, ahead = pair(LFU)
    state = None
    for c in (plain, ahead):
        train(c)
        state = state or copy.deepcopy(c.state_dict())
        step(c, batch(c, 5), batch(c, 6))
        c.load_state_dict(state)
        step(c, batch(c, 6), batch(c, 7))
        c.load_state_dict({}, strict=False)  # no cache state
        step(c, batch(c, 7))
    assert not differing(plain.state_dict(), ahead.state_dict())


def test_a_bad_id() -> None:
    """A bad id raises IndexError in prefetch, or in the lookup if rows were not inserted yet; nothing changes."""
    plain, ahead = pair()
    bad = batch(ahead, 1)
    bad.values()[-1] = 4_000
    step(plain, batch(plain, 0))
    step(ahead, batch(ahead, 0), bad, where="before")
    for call in (ahead, ahead.prefetch):
        with pytest.raises(IndexError, match=r" = 4000 \(feature '"):
            call(bad)
    assert not differing(everything(plain), everything(ahead))
    step(plain, batch(plain, 2)), step(ahead, batch(ahead, 2))
    assert not differing(everything(plain), everything(ahead))


def test_where_nothing_is_to_do() -> None:
    """Prefetch does nothing in eval() mode and with tables in device memory."""
    for c in (make(), make(cache=in_host(SMALL)).eval()):
        before = everything(c)
        c.prefetch(batch(c, 1))
        assert not differing(before, everything(c))


def test_compiled_lookups() -> None:
    """Compiled updates cannot be detected: no row is inserted early."""
    plain, ahead = pair()
    compiled = torch.compile(ahead, backend="aot_eager")
    for i in range(4):
        ahead.prefetch(batch(ahead, i))
        for c in (plain, compiled):
            c(batch(plain, i)).values().square().sum().backward()
        ahead.prefetch(batch(ahead, i + 1))
        assert clock(ahead) == clock(plain)
    assert not differing(everything(plain), everything(ahead))
