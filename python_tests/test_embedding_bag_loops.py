"""EmbeddingBagCollection in training loops: schedulers, checkpoints, casts, processes, DDP."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from collection_cases import snapshot
from distributed_pool import pool
from row_cache_collections import differing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import rec_kernels as rk
from rec_kernels.testing import same_bits

OPTIMIZERS = [rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5)]
ADAGRAD = OPTIMIZERS[1]
PAGE = Path(__file__).resolve().parents[1] / "docs" / "modules.md"
# torch warns about every checkpoint without a process group.
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Model(nn.Module):
    """Two tables, the first padded in the flat tensor, followed by a linear layer."""

    def __init__(self, optimizer=None, seed: int = 1, **options) -> None:
        super().__init__()
        torch.manual_seed(seed)
        tables = [
            rk.EmbeddingBagConfig(5, 3, name="a", feature_names=["f"]),
            rk.EmbeddingBagConfig(4, 20, name="b", feature_names=["g", "h"], pooling="mean"),
        ]
        self.tables = rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)
        self.top = nn.Linear(43, 1)

    def forward(self, batch: rk.KeyedJaggedTensor) -> torch.Tensor:
        return self.top(self.tables(batch).values())


def batch(seed: int = 0, size: int = 6) -> rk.KeyedJaggedTensor:
    """Bags of two ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, (3 * size * 2,), generator=generator)
    return rk.KeyedJaggedTensor(["f", "g", "h"], ids, lengths=torch.full((3 * size,), 2))


def train(model: nn.Module, first: int = 0, steps: int = 2) -> None:
    """A few updates of the tables alone."""
    for step in range(first, first + steps):
        model(batch(step)).square().sum().backward()


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.7, total_steps=8, cycle_momentum=False),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)], milestones=[3]
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(name: str, optimizer) -> None:
    """Schedulers set a torch optimizer's learning rate; every update has the bits of that rate."""
    model, torch_optimizer = Model(optimizer), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule, reference = SCHEDULES[name](model.tables.fused_optimizer), SCHEDULES[name](torch_optimizer)
    rates = []
    for step in range(6):
        rate = torch_optimizer.param_groups[0]["lr"]
        rates.append(rate)
        assert model.tables.fused_optimizer.param_groups[0]["lr"] == rate
        assert same_bits(model.tables.lr, torch.tensor(rate))
        expected = Model(type(optimizer)(lr=rate))
        expected.load_state_dict(model.state_dict())
        for either in (model, expected):
            train(either, first=step, steps=1)
        assert not differing(model.state_dict(), expected.state_dict())
        for either in (model.tables.fused_optimizer, torch_optimizer, schedule, reference):
            either.step()
    assert len(set(rates)) > 2


def test_learning_rate_put_back() -> None:
    """A saved learning rate may be restored by assignment and by update."""
    tables = Model(ADAGRAD).tables
    group = tables.fused_optimizer.param_groups[0]
    before = group["lr"]
    group["lr"] = 0.0
    assert tables.lr.item() == 0
    group.update(lr=torch.tensor(0.25))
    assert tables.lr.item() == 0.25
    group["lr"] = before
    assert tables.lr.item() == before == 0.5


def test_learning_rate_of_a_copy() -> None:
    """A copy made during a schedule, by deepcopy or from files, continues with the current learning rate."""
    model = Model(ADAGRAD)
    schedule = lr_scheduler.StepLR(model.tables.fused_optimizer, 1, 0.5)
    schedule.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), model.tables.fused_optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    weights, rate, progress = torch.load(file, weights_only=True)
    loaded = Model(rk.RowwiseAdagrad(lr=9.0))
    loaded.load_state_dict(weights)
    loaded.tables.fused_optimizer.load_state_dict(rate)
    resumed = lr_scheduler.StepLR(loaded.tables.fused_optimizer, 1, 0.5)
    resumed.load_state_dict(progress)
    loaded.tables.fused_optimizer.load_state_dict(rate)
    copied = copy.deepcopy(model)
    for either in (schedule, resumed):
        either.step()
    assert (model.tables.lr.item(), copied.tables.lr.item(), loaded.tables.lr.item()) == (0.125, 0.25, 0.125)


@pytest.mark.parametrize("optimizer", [ADAGRAD, rk.Adam(lr=0.5)], ids=str)
def test_through_the_meta_device(optimizer) -> None:
    """On the way through the meta device, the learning rate and the scheduler stay; weights come from the state."""
    model, expected = Model(optimizer), Model(optimizer)
    schedule = lr_scheduler.StepLR(model.tables.fused_optimizer, 1, 0.5)
    schedule.step()
    state = snapshot(model)
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    assert model.tables.lr.item() == 0.25
    schedule.step()
    expected.tables.fused_optimizer.param_groups[0]["lr"] = 0.125
    for either in (model, expected):
        train(either)
    assert not differing(model.state_dict(), expected.state_dict())


def test_partial_states() -> None:
    """strict=False loads existing keys and reports the rest."""
    model, other = Model(ADAGRAD), Model(ADAGRAD, seed=2)
    train(other)
    before, state = snapshot(model.tables), snapshot(other.tables)
    del state["embedding_bags.a.weight"], state["embedding_bags.a.sum"]
    result = model.tables.load_state_dict(state | {"nothing": torch.zeros(1)}, strict=False)
    assert set(result.missing_keys) == {"embedding_bags.a.weight", "embedding_bags.a.sum"}
    assert result.unexpected_keys == ["nothing"]
    assert not differing(model.tables.state_dict(), before | state)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("name", ["step", "embedding_bags.a.sum", "embedding_bags.b.weight", "embedding_bags.b.sum"])
def test_wrong_shapes_change_nothing(name: str, assign: bool) -> None:
    """A state of a wrong shape changes no table, not even fitting ones, also within a larger model."""
    model, state = Model(ADAGRAD), {k: v + 1 for k, v in Model(ADAGRAD, seed=2).tables.state_dict().items()}
    before = snapshot(model.tables)
    for wrong in (torch.zeros(3, 3), 5):
        with pytest.raises(RuntimeError, match=rf"size mismatch for {re.escape(name)}: the state has (\[3, 3\]|int)"):
            model.tables.load_state_dict(state | {name: wrong}, assign=assign)
        inner = {f"tables.{k}": v for k, v in (state | {name: wrong}).items()}
        with pytest.raises(RuntimeError, match=rf"size mismatch for tables\.{re.escape(name)}"):
            model.load_state_dict(inner, strict=False, assign=assign)
        assert not differing(model.tables.state_dict(), before)
    train(model)


@ALONE
def test_distributed_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of a collection alone loads in place, into the tables that the kernels read."""
    model, other = Model(ADAGRAD), Model(ADAGRAD, seed=2)
    train(model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    dcp.load(other.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    for either in (model, other):
        train(either, first=5)
    assert not differing(model.state_dict(), other.state_dict())
    assert other.tables.step.item() == 4


@ALONE
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_distributed_checkpoint_with_optimizers(tmp_path: Path, optimizer) -> None:
    """get_state_dict and set_state_dict with a dense optimizer keep the learning rate."""

    def parts(model: Model) -> list[torch.optim.Optimizer]:
        model.zero_grad()  # get_state_dict initializes a dense optimizer's state only without gradients
        return [torch.optim.Adam(model.top.parameters(), lr=0.01), model.tables.fused_optimizer]

    model, other = Model(optimizer), Model(type(optimizer)(lr=9.0), seed=2)
    train(model)
    model.tables.fused_optimizer.param_groups[0]["lr"] = 0.125
    states = []
    for either in (model, other):
        weights, learning = get_state_dict(either, parts(either))
        states.append({"model": weights, "optimizers": learning})
    assert (model.tables.lr.item(), other.tables.lr.item()) == (0.125, 9.0)
    dcp.save(states[0], checkpoint_id=tmp_path / "saved", no_dist=True)
    dcp.load(states[1], checkpoint_id=tmp_path / "saved", no_dist=True)
    weights, learning = states[1]["model"], states[1]["optimizers"]
    set_state_dict(other, parts(other), model_state_dict=weights, optim_state_dict=learning)
    assert other.tables.lr.item() == other.tables.fused_optimizer.param_groups[0]["lr"] == 0.125
    for either in (model, other):
        train(either, first=5)
    assert not differing(model.state_dict(), other.state_dict())


def test_gradients_and_freezing() -> None:
    """All forms of zero_grad and requires_grad_(True) leave tables and their training unchanged."""
    model, expected = Model(ADAGRAD), Model(ADAGRAD)
    train(expected)
    before = snapshot(model)
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        model.tables.fused_optimizer.zero_grad(set_to_none=set_to_none)
    with torch.no_grad():
        frozen = model.tables(batch()).values()
    model.eval()
    model.top(frozen).square().sum().backward()
    assert not differing(model.state_dict(), before)
    assert model.top.weight.grad is not None
    for first, module in enumerate((model.tables, model)):
        module.requires_grad_()
        train(model, first=first, steps=1)
        assert all(p.grad is None for p in model.tables.parameters())
    assert not differing(model.tables.state_dict(), expected.tables.state_dict())


def test_inference_mode() -> None:
    """A lookup in inference mode never trains; a collection built inside it trains afterwards."""
    model, expected = Model(ADAGRAD), Model(ADAGRAD)
    before = snapshot(model)
    with torch.inference_mode():
        loss = model(batch()).sum()
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()
        built = Model(ADAGRAD).tables
    assert not differing(model.state_dict(), before)
    for tables in (built, expected.tables):
        tables(batch()).values().square().sum().backward()
    assert not differing(built.state_dict(), expected.tables.state_dict())


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS], ids=str)
def test_activation_checkpointing(optimizer) -> None:
    """A recomputed forward gives one update, and equal gradients, also of per-sample weights."""
    results = []
    for recomputed in (False, True):
        model, given = Model(optimizer), batch()
        factors = torch.linspace(-1, 1, 36).requires_grad_()
        weighted = rk.KeyedJaggedTensor(given.keys(), given.values(), offsets=given.offsets(), weights=factors)
        output = checkpoint(model, weighted, use_reentrant=False) if recomputed else model(weighted)
        output.square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append(snapshot(model) | {f"grad {n}": g for n, g in grads.items()} | {"factors": factors.grad})
    assert not differing(*results)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_ddp_refuses_fused_tables(compiled: bool) -> None:
    """DDP raises with the reason before anything changes, and allows evaluation."""
    torch._dynamo.reset()
    model = Model(ADAGRAD)
    before, parallel = snapshot(model), DistributedDataParallel(model)
    forward = torch.compile(parallel, backend="aot_eager") if compiled else parallel
    for block in (contextlib.nullcontext(), model.tables.accumulate()):
        with block, pytest.raises(RuntimeError, match=r"inside DistributedDataParallel.*silently diverge.*=None"):
            forward(batch())
    with torch.no_grad():
        forward(batch())
    assert not differing(model.state_dict(), before)
    train(model)
    assert model.tables.step.item() == 2


def test_data_parallel_refuses_fused_tables() -> None:
    """A DataParallel replica raises instead of not training; it may look up."""
    model = Model(ADAGRAD)
    before, replica = snapshot(model), model.tables._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match=r"inside torch.nn.DataParallel.*=None"):
        replica(batch())
    with torch.no_grad():
        replica(batch())
    assert not differing(model.state_dict(), before)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two processes, with a fake second one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_several_processes_are_warned(compiled: bool) -> None:
    """Training fused tables on several processes warns once, unless separate replicas are declared."""
    torch._dynamo.reset()
    dense, fused, local = Model(), Model(ADAGRAD), Model(ADAGRAD)
    local.tables.process_local = True
    for model, expected in ((dense, 0), (fused, 1), (local, 0)):
        forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                forward(batch())
            assert not caught
            for _ in range(2):
                forward(batch()).sum().backward()
        assert sum("process_local = True" in str(w.message) for w in caught) == expected


def trained_by_ddp() -> list[dict[str, torch.Tensor]]:
    """Initial and final state of this rank's model after training on its half of the rows."""
    rank = dist.get_rank()
    model = Model(seed=rank)
    start = snapshot(model)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(2 * step + rank)).square().sum().backward()
        optimizer.step()
    return [start, snapshot(model)]


@pytest.fixture(scope="module")
def two_processes() -> list[list[dict[str, torch.Tensor]]]:
    """Results of ``trained_by_ddp``, by rank."""
    return pool(2).run("test_embedding_bag_loops", "trained_by_ddp")


def test_seeds_decide_the_weights(two_processes) -> None:
    """Equal seeds give equal bits in any process; another seed changes every table."""
    starts = [start for start, _ in two_processes]
    for rank, start in enumerate(starts):
        assert not differing(start, Model(seed=rank).state_dict())
    assert set(differing(*starts)) == set(starts[0])


def test_ddp_trains_tables_with_torch_gradients(two_processes) -> None:
    """Both ranks end with equal bits: those of both halves' averaged gradients, from rank 0's weights."""
    (_, first), (_, second) = two_processes
    assert not differing(first, second)
    model = Model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(batch(2 * step + rank)).square().sum() / 2).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(first[name], value)


@ALONE
def test_page_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The python blocks of docs/modules.md run as one program."""
    text = PAGE.read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert 0 < len(examples) == text.count("```python")
    torch.manual_seed(0)
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # the Dynamo of torch 2.11 imports traced modules
    for number, example in enumerate(examples):
        if 'backing="disk"' in example and rk.build_info()["host_library"] is None:
            continue  # tables on disk, which this build lacks
        exec(compile(example, f"{PAGE.name}, example {number + 1}", "exec"), vars(module))
