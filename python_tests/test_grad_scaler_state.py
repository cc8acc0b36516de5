"""Collections with a GradScaler: saved, scheduled, copied, moved, compiled, captured."""

from __future__ import annotations

import copy
import pickle
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collection_cases import assert_same, snapshot
from test_embedding_bag_module import batch
from test_grad_scaler import COLUMNS, Model, grad_of, loss_of, make, scaled
from tiers import full
from torch._dynamo.testing import CompileCounterWithBackend
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import rec_kernels as rk


@pytest.mark.parametrize("pending", [False, True], ids=["after a step", "before a step"])
def test_nothing_of_it_is_saved(pending: bool) -> None:
    """States with and without a scaler are interchangeable, and have the learning rate."""
    plain, (found, scaler) = make(), scaled(make())
    loss_of(plain, 0).backward()
    scaler.scale(loss_of(found, 0)).backward()
    if not pending:
        scaler.step(found.fused_optimizer)
        scaler.update()
    assert found.fused_optimizer.state_dict() == plain.fused_optimizer.state_dict()
    assert_same(found, plain)
    for a, b in ((plain, found), (found, plain)):
        a.fused_optimizer.param_groups[0]["lr"] /= 2
        b.fused_optimizer.load_state_dict(a.fused_optimizer.state_dict())
        assert a.lr == b.lr
    assert found.lr == 0.025
    if pending:  # an overflow that the scaler has not read yet stays
        assert len(found.fused_optimizer.param_groups[0]["params"]) == 3
        scaler.step(found.fused_optimizer)
    assert len(found.fused_optimizer.param_groups[0]["params"]) == 2


def test_schedulers() -> None:
    """Schedulers keep their parameter group, and detect that the optimizer has stepped."""
    found = make()
    schedule = torch.optim.lr_scheduler.StepLR(found.fused_optimizer, 1, gamma=0.5)
    _, scaler = scaled(found)
    for step in range(3):
        scaler.scale(loss_of(found, step, bad=torch.inf if step == 0 else None)).backward()
        scaler.step(found.fused_optimizer)
        scaler.update()
        schedule.step()
    assert found.lr.item() == pytest.approx(0.0125)


def test_zero_grad() -> None:
    """zero_grad() drops unreported overflows; the memory of a captured graph stays in place."""
    found, scaler = scaled(make())
    optimizer = found.fused_optimizer
    for set_to_none in (True, False):
        scaler.scale(loss_of(found, 0, bad=torch.inf)).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(loss_of(found, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**16
    optimizer.is_captured = True
    scaler.scale(loss_of(found, 0, bad=torch.inf)).backward()
    written = optimizer.param_groups[0]["params"][-1].grad
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][-1].grad is written
    assert written.item() == 0


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_ask_for_theirs(way) -> None:
    """Copies can look up at once, and train once they have their own scaler, also if copied during a step."""
    found, scaler = scaled(make())
    scaler.scale(loss_of(found, 0)).backward()
    scaler.unscale_(found.fused_optimizer)  # a scaler cannot be pickled now
    other = way(way(found))
    with torch.no_grad():
        other(batch())
    refused = pytest.raises(RuntimeError, match="a copy of a collection with a GradScaler, which copies do not inherit")
    with refused:
        other(batch())
    with refused, other.accumulate():
        pass
    before = snapshot(found)
    for given in (GradScaler("cpu", init_scale=4.0), None):
        other.set_grad_scaler(given)
        loss = loss_of(other, 1)
        (loss if given is None else given.scale(loss)).backward()
    assert other.step.item() == 3
    if way is not copy.copy:  # which shares the memory
        assert_same(found, before)
        for step in (1, 1):
            scaler.scale(loss_of(found, step)).backward()
        assert_same(found, other)


def test_moves() -> None:
    """Casts keep the scaler and its state; so does a move from the meta device."""
    plain, (found, scaler) = make(), scaled(make().half())
    found.bfloat16()
    scaler.scale(loss_of(found, 0)).backward()
    loss_of(plain, 0).backward()
    assert_same(found, plain)
    scaler.scale(loss_of(found, 0, bad=torch.inf)).backward()
    scaler.step(found.fused_optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    meta, scaler = scaled(make(device="meta"))
    meta.to_empty(device="cpu").load_state_dict(plain.state_dict())
    scaler.scale(loss_of(meta, 1)).backward()
    loss_of(plain, 1).backward()
    assert_same(meta, plain)


def test_nobody_is_kept() -> None:
    """A scaler keeps no reference to a deleted collection."""
    found, scaler = scaled(make())
    scaler.scale(loss_of(found, 0)).backward()
    scaler.step(found.fused_optimizer)
    scaler.update()
    gone = weakref.ref(found)
    del found
    assert gone() is None


def test_distributed_checkpoint(tmp_path: Path) -> None:
    """get_state_dict and set_state_dict contain tables only."""
    models = [Model(rk.RowwiseAdagrad(lr=rate)) for rate in (0.5, 9.0)]
    for model in models:
        _, scaler = scaled(model.tables)
        scaler.scale(model(batch()).sum()).backward()
        scaler.step(model.tables.fused_optimizer)
        scaler.update()
    states = [get_state_dict(model, [model.tables.fused_optimizer]) for model in models]
    saved, loaded = ({"model": weights, "optimizers": learning} for weights, learning in states)
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    dcp.load(loaded, checkpoint_id=tmp_path / "saved", no_dist=True)
    other = models[1]
    options = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizers"]}
    set_state_dict(other, [other.tables.fused_optimizer], **options)
    assert other.tables.lr == 0.5
    assert_same(other.tables, models[0].tables)


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiled(backend: str) -> None:
    """Full graphs read each step's scale; they compile once for a new scaler, and once for a used one."""
    torch._dynamo.reset()
    plain, (found, scaler) = make(), scaled(make(), growth_interval=2)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(found, fullgraph=True, backend=counter)
    for step in range(6):
        grad = grad_of(step, bad=torch.inf if step == 3 else None)
        scaler.scale((compiled(batch(seed=0)).values() * grad).sum()).backward()
        scaler.step(found.fused_optimizer)
        scaler.update()
        if step != 3:
            (plain(batch(seed=0)).values() * grad).sum().backward()
        assert_same(found, plain)
    assert found.step.item() == 5
    assert scaler.get_scale() == 2.0**17  # grown after two, halved, grown after two
    assert counter.frame_count == 2
    with found.accumulate():  # breaks the graph, as always
        scaler.scale(torch.compile(found, backend="eager")(batch()).values().sum()).backward()
    assert found.step.item() == 6


def test_compiled_sequences() -> None:
    """Sequences compile with a data-dependent number of ids, including 0."""
    torch._dynamo.reset()
    tables = [rk.EmbeddingConfig(9, size, name=f"t{size}", feature_names=["a", "b"]) for size in (2, 3)]
    torch.manual_seed(0)
    found = rk.EmbeddingCollection(tables, optimizer=rk.SGD(lr=0.5))
    plain, scaler = copy.deepcopy(found), GradScaler("cpu", init_scale=4.0)
    found.set_grad_scaler(scaler)
    compiled = torch.compile(found, fullgraph=True, backend="aot_eager")
    for size, factor in ((4, 1.0), (3, 1.0), (4, torch.inf), (0, 1.0), (2, torch.nan), (4, 1.0)):
        features = rk.KeyedJaggedTensor(["a", "b"], torch.arange(size), lengths=torch.tensor([size, 0, 0, 0]))
        losses = [sum((rows.values() * factor).sum() for rows in look(features).values()) for look in (compiled, plain)]
        scaler.scale(losses[0]).backward()
        scaler.step(found.fused_optimizer)
        scaler.update()
        if factor == 1.0:
            losses[1].backward()
        assert_same(found, plain)
    assert scaler.get_scale() == 1.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_captured() -> None:
    """Replays read each step's scale, and report overflows to the scaler."""
    found, plain = make().cuda(), make().cuda()
    scaler, given = GradScaler("cuda"), batch().to("cuda")
    found.set_grad_scaler(scaler)
    grad = torch.zeros(5, COLUMNS, device="cuda")

    def step() -> None:
        scaler.scale((found(given).values() * grad).sum()).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    found.fused_optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found.load_state_dict(plain.state_dict())
    for number in range(5):
        bad = number in (1, 2)
        grad.copy_(grad_of(number, bad=torch.inf if bad else None))
        scale = scaler.get_scale()
        graph.replay()
        scaler.step(found.fused_optimizer)
        scaler.update()
        if not bad:
            (plain(given).values() * grad).sum().backward()
        assert scaler.get_scale() == (scale / 2 if bad else scale)
        assert_same(found, plain)
    assert found.step.item() == 3
