"""Tables in host memory: with a GPU they are pinned and stay; on the CPU nothing differs."""

from __future__ import annotations

import copy
import gc
import mmap

import pytest
import torch
from backends import emulated
from row_cache_cases import argument_names, call
from row_cache_collections import FORMATS, OPTIMIZERS, SMALL, batch, differing, everything, make, read, train
from row_cache_host_cases import in_host, train_ahead
from row_cache_samples import arguments, cached_calls
from torch._subclasses.fake_tensor import FakeTensorMode

import rec_kernels as rk
from rec_kernels.nn.tables import host_memory
from rec_kernels.ops.autograd import overload_of
from rec_kernels.testing import same_bits

HOST = in_host(SMALL)
GPU_0 = torch.device("cuda")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_on_the_cpu_nothing_differs() -> None:
    """States, copies, conversions, casts and reports are equal."""
    found = []
    for cache in (SMALL, HOST):
        c = make(cache=cache)
        train(c)
        c.half().to("cpu")
        other = copy.deepcopy(c)
        train(other, 4)
        wide = make(cache=cache, formats=["fp32"] * len(FORMATS))
        wide.load_state_dict(c.state_dict(), convert=True)
        found.append(everything(c) | {f"copy.{n}": t for n, t in everything(other).items()} | read(wide))
        with torch.no_grad():
            found[-1]["served"] = c.for_serving()(batch(c, 9)).values()
        report = c.tier_report()
        assert report.pop("host_bytes") == (report["row_bytes"] if cache is HOST else 0)
        assert report == make_report(c)
    assert not differing(*found)


def make_report(c) -> dict[str, int]:
    return {name: number for name, number in c.tier_report().items() if name != "host_bytes"}


def test_to_meta_and_back() -> None:
    """A collection moved to the meta device and back takes a state."""
    c, other = make(cache=HOST), make(cache=HOST, device="meta")
    train(c)
    other.to_empty(device="cpu").load_state_dict(c.state_dict())
    assert not differing(c.state_dict(), other.state_dict())
    assert not differing(read(c), read(other))
    assert c.to("meta")._weights.is_meta


class Runtime:
    """Imitates the functions of CUDA's runtime that pin memory."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.pinned = error, {}
        self.waited_for: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert address % 4096 == num_bytes % 4096 == 0
        assert flags == 3
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.waited_for
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", found.waited_for.append)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() in found.pinned)
    return found


@pytest.mark.parametrize("page", [4096, 65536])
def test_memory_is_pinned_where_it_is(page: int, runtime, monkeypatch) -> None:
    """Whole pages are pinned in place, without other data; freeing the last tensor unpins them."""
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    flat = host_memory.host_zeros(5_000, torch.float32)
    assert not flat.any()
    assert flat.data_ptr() % page == 0
    assert host_memory.pin(flat, GPU_0) is flat is host_memory.pin(flat, GPU_0)
    assert runtime.pinned == {flat.data_ptr(): max(page, 20_480)}
    row, flat = flat[7:9], None
    gc.collect()
    assert runtime.pinned
    assert not row.any()
    row = None
    gc.collect()
    assert not runtime.pinned


def test_every_gpu_is_waited_for(runtime) -> None:
    """Tables that moved between GPUs are freed after the kernels of both have finished."""
    flat = host_memory.host_zeros(5_000, torch.float32)
    for device in (GPU_0, torch.device("cuda", 3), torch.device("cuda", 3)):
        assert host_memory.pin(flat, device) is flat
    assert not runtime.waited_for
    flat = None
    gc.collect()
    assert not runtime.pinned
    assert sorted(runtime.waited_for) == [0, 3]


def test_other_memory_is_copied(runtime) -> None:
    """Memory allocated by torch, which need not start at a page, is copied."""
    given = torch.arange(3_000, dtype=torch.uint8)
    found = host_memory.pin(given, GPU_0)
    assert found is not given
    assert same_bits(found, given)
    assert list(runtime.pinned) == [found.data_ptr()]
    assert host_memory.pin(torch.empty(0), GPU_0).numel() == host_memory.host_zeros(0, torch.uint8).numel() == 0


def test_memory_that_cannot_be_pinned(runtime, monkeypatch) -> None:
    """RuntimeError has the size; no later launch reports the error."""
    runtime.error, launched = 2, []

    def launch(*_: object, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    flat = host_memory.host_zeros(1_000, torch.float32)
    monkeypatch.setattr(torch, "ones", launch)
    with pytest.raises(RuntimeError, match="4000 bytes of tables in host memory cannot be page-locked: CUDA error 2"):
        host_memory.pin(flat, GPU_0)
    assert launched == [GPU_0]


def test_collections_that_move(runtime, monkeypatch) -> None:
    """Tables stay in host memory when the collection moves to a GPU (a fake tensor here). Meta tables get memory."""
    with FakeTensorMode():
        like = torch.empty(0, device="cuda")
    for device in ("cpu", "meta"):
        c = make(cache=HOST, device=device)
        weights = c._weights
        move = host_memory.pin_instead_of_moving(weights, lambda t, like=like: t if t.numel() else like)
        assert move(c.step) is c.step
        moved = move(weights)
        assert moved.is_pinned()
        assert not moved.is_meta
        assert (moved is weights) == (device == "cpu")
        assert host_memory.pin_instead_of_moving(weights, torch.clone) is torch.clone


def test_fake_collections() -> None:
    """Fake collections have tables in host memory, and everything else on a fake GPU."""
    with FakeTensorMode():
        c = make(optimizer=rk.SGD(lr=0.1), cache=HOST, device="cuda")
        assert c._weights.device.type == "cpu"
        assert c.embedding_bags["t0"].weight.device.type == "cpu"
        assert {t.device.type for n, t in c.named_buffers() if n != "_weights" and "format" not in n} == {"cuda"}
        assert c.row_cache.rows.is_cuda
        assert c._update.token.is_cuda
        served = c.for_serving()
        assert served._weights.device.type == "cpu"
        assert served._layout.seed.is_cuda


def test_fake_ops() -> None:
    """Fake outputs are on the ids' device; only weights may be in host memory."""
    for name, calls in cached_calls().items():
        op = overload_of(name)
        for _, given in calls:
            if "weights" not in given:
                continue
            with FakeTensorMode():
                there = {n: _fake(t, "cpu" if n == "weights" else "cuda") for n, t in given.items()}
                found = op(**there)
                outputs = found if isinstance(found, (tuple, list)) else (found,)
                assert all(t.is_cuda for t in outputs if t is not None), name
                with pytest.raises(ValueError, match="same device"):
                    op(**there | {"layout": _fake(given["layout"], "cpu")})


def _fake(value: object, device: str) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=device)


@pytest.mark.parametrize("op", ["embedding_bag", "row_cache_insert_", "row_cache_flush_"])
def test_memory_that_is_not_pinned(op: str) -> None:
    """CUDA kernels raise ValueError before they write."""
    ops, given = emulated(), arguments("lru")
    given = {name: given[name] for name in argument_names(op) if name in given}
    before = copy.deepcopy(given)
    ops._set_pinned(False)
    try:
        with pytest.raises(ValueError, match=r"weights is on cpu and not pinned: with values on cuda:.*"):
            getattr(ops, op)(**given)
    finally:
        ops._set_pinned(True)
    assert all(same_bits(t, given[n]) for n, t in before.items() if isinstance(t, torch.Tensor))
    getattr(ops, op)(**given)


@GPU
@pytest.mark.parametrize("where", ["", "before", "after"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_gpu_has_the_bits_of_the_cpu(optimizer, where: str) -> None:
    """Outputs, tables, slots and state equal the CPU's, with and without insertion on a side stream."""
    cache = in_host(rk.RowCache(0.4, ways=4, policy="lfu", decay_every=3))
    here, there = make(optimizer=optimizer, cache=cache), make(optimizer=optimizer, cache=cache).cuda()
    assert there._weights.is_pinned()
    assert there.row_cache.rows.is_cuda
    outputs = [train_ahead(c, 12, where=where, device=d, size=64) for c, d in ((here, "cpu"), (there, "cuda"))]
    assert all(same_bits(a, b) for a, b in zip(*outputs, strict=True))
    assert not differing(here.state_dict(), {n: t.cpu() for n, t in there.state_dict().items()})
    assert not differing(read(here), read(there.cpu()))


@GPU
def test_gpu_round_trips() -> None:
    """States, copies and moves are correct right after asynchronous updates."""
    here, there = make(cache=HOST), make(cache=HOST, device="cuda")
    there.load_state_dict(here.state_dict())
    for c, device in ((here, "cpu"), (there, "cuda")):
        train_ahead(c, 5, where="before", device=device)
    other = copy.deepcopy(there)
    assert other._weights.is_pinned()
    assert other._weights.data_ptr() != there._weights.data_ptr()
    assert not differing(here.state_dict(), {n: t.cpu() for n, t in other.state_dict().items()})
    with torch.no_grad():
        served = there.for_serving()(batch(there, 9).to("cuda")).values()
        assert same_bits(served.cpu(), here(batch(here, 9)).values())


@GPU
def test_gpu_refuses_pageable_memory() -> None:
    given = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in arguments("lru").items()}
    given["weights"] = given["weights"].cpu()
    with pytest.raises(ValueError, match="weights is on cpu and not pinned: with values on cuda:0 it must be there"):
        call("row_cache_insert_", given)
