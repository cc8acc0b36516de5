"""Sharded collections with sequence embeddings, on ranks and in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_cases import KEYS, OPTIMIZERS, ROWS, blocks, counted_bytes, loop_and_pipeline, plan_of, restore
from torch import Tensor, nn

import rec_kernels as rk

#: Columns of the tables, and of the features.
DIMS = (16, 24, 8)
FEATURE_DIMS = (16, 24, 8, 8)


@dataclass(frozen=True)
class Sequences:
    """A collection to train, and its sharding.

    Args:
        plan: key of ``PLANS``. format, optimizer, compression: of all tables. sizes: batch size of each rank.
        weighted: whether the last rank's batch has weights. steps: of training.
        gradient: the sharder's; the loss is a sum over samples with "sum", otherwise their mean.
        output_dtype: the collection's. padding: each table's ``padding_idx``.
        bad_ids: whether some ids are out of range, which the collection ignores.
        own_sizes: whether a rank's feature f has f more samples than its first feature. cache: the collection's.
        wire: the sharder's.
    """

    plan: str = "table_wise"
    format: str = "fp32"
    optimizer: str = "adam"
    sizes: tuple[int, ...] = (8, 5)
    weighted: bool = False
    steps: int = 3
    gradient: str = "sum"
    output_dtype: torch.dtype = torch.float32
    compression: Any = None
    padding: tuple[int | None, ...] = (None, None, None)
    bad_ids: bool = False
    own_sizes: bool = False
    cache: Any = None
    wire: Any = None


class Model(nn.Module):
    """A collection and a dense parameter."""

    def __init__(self, sequences: nn.Module) -> None:
        super().__init__()
        self.sequences = sequences
        self.dense = nn.Linear(2, 1)

    def forward(self, features: Any) -> dict[str, rk.JaggedTensor]:
        return self.sequences(features)


def collection(case: Sequences, device: str | None = None) -> rk.EmbeddingCollection:
    """The whole collection, with the same random rows in every process."""
    torch.manual_seed(7)
    features = [["f0"], ["f1"], ["f2", "g2"]]
    tables = [
        rk.EmbeddingConfig(
            rows,
            dim,
            name=f"t{i}",
            feature_names=features[i],
            format=case.format,
            compression=case.compression,
            padding_idx=case.padding[i],
        )
        for i, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True))
    ]
    return rk.EmbeddingCollection(
        tables,
        optimizer=OPTIMIZERS[case.optimizer],
        seed=5,
        output_dtype=case.output_dtype,
        bounds_check="ignore" if case.bad_ids else "error",
        device=device,
        cache=case.cache,
    )


def sharded(case: Sequences, sequences: rk.EmbeddingCollection, kind: type[nn.Module] = Model) -> nn.Module:
    """This rank's model of class ``kind``, sharded by TorchRec."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    from rec_kernels.distributed import EmbeddingCollectionSharder

    return DistributedModelParallel(
        kind(sequences),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan(plan={"sequences": plan_of(case, dist.get_world_size(), DIMS)}),
        sharders=[EmbeddingCollectionSharder(gradient=case.gradient, wire=case.wire)],
        device=torch.device("cpu"),
    )


def batch(case: Sequences, step: int, ranks: list[int]) -> rk.KeyedJaggedTensor:
    """The samples of some ranks, concatenated."""
    parts = [[_ids(case, step, rank, f) for rank in ranks] for f in range(len(KEYS))]
    lengths, values, weights = (torch.cat([p[i] for own in parts for p in own]) for i in range(3))
    strides = [sum(len(p[0]) for p in own) for own in parts] if case.own_sizes else None
    has_weights = case.weighted and len(case.sizes) - 1 in ranks
    return rk.KeyedJaggedTensor(KEYS, values, weights if has_weights else None, lengths=lengths, stride_per_key=strides)


def _ids(case: Sequences, step: int, rank: int, f: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + f)
    rows = (*ROWS, ROWS[-1])[f]
    lengths = torch.randint(0, 9, (case.sizes[rank] + f * case.own_sizes,), generator=generator)
    low, high = (-rows // 3, rows + rows // 3) if case.bad_ids else (0, rows)
    values = torch.randint(low, high, (int(lengths.sum()),), generator=generator)
    drawn = torch.rand(len(values), generator=generator)
    return lengths, values, drawn if rank == len(case.sizes) - 1 else torch.ones_like(drawn)


def coefficients(case: Sequences, step: int, ranks: list[int]) -> list[Tensor]:
    """The gradient of each feature's rows, [N, D], independent of their values."""
    found = []
    for f, dim in enumerate(FEATURE_DIMS):
        generators = [torch.Generator().manual_seed(9000 + 100 * step + 10 * rank + f) for rank in ranks]
        counts = [len(_ids(case, step, rank, f)[1]) for rank in ranks]
        found.append(torch.cat([torch.randn(n, dim, generator=g) for n, g in zip(counts, generators, strict=True)]))
    return found


def train(case: Sequences, model: nn.Module, ranks: list[int]) -> list[list[tuple[Tensor, Tensor]]]:
    """Trains with the samples of some ranks; returns lengths and rows for each step and feature."""
    outputs = []
    for step in range(case.steps):
        features = batch(case, step, ranks)
        out = model(features)
        assert list(out) == KEYS
        outputs.append([(out[key].lengths(), out[key].values().detach().clone()) for key in KEYS])
        factors = coefficients(case, step, ranks)
        loss = sum((out[key].values().float() * c).sum() for key, c in zip(KEYS, factors, strict=True))
        (loss / max(features.stride(), 1) if case.gradient != "sum" else loss).backward()
    return outputs


def run(case: Sequences) -> tuple[list, dict[str, Any]]:
    """Outputs of this rank, and blocks of its state."""
    model = sharded(case, collection(case))
    outputs = train(case, model, [dist.get_rank()])
    return outputs, blocks(model.module.sequences.state_dict())


def one_process(case: Sequences) -> tuple[list, dict[str, Tensor]]:
    """Outputs and state of one process with the samples of all ranks."""
    model = Model(collection(case))
    outputs = train(case, model, list(range(len(case.sizes))))
    return outputs, dict(model.sequences.state_dict())


def train_weighted(case: Sequences, model: nn.Module, tables: Any, ranks: list[int]) -> list[list[Tensor]]:
    """Trains with weights that require gradients; returns these gradients for each step and feature.

    Rank 0's require none in the second step. The last two steps are one update.
    """
    found = []
    for step in range(case.steps):
        features, weights = batch(case, step, ranks), []
        for f in range(len(KEYS)):
            for rank in ranks:
                generator = torch.Generator().manual_seed(31 * step + 7 * rank + f)
                weights.append(0.5 + torch.rand(len(_ids(case, step, rank, f)[1]), generator=generator))
        factors = torch.cat(weights).requires_grad_(step != 1 or ranks != [0])
        own = {"lengths": features.lengths(), "stride_per_key": features.stride_per_key()}
        with tables.accumulate() if step >= case.steps - 2 else torch.enable_grad():
            out = model(rk.KeyedJaggedTensor(KEYS, features.values(), factors, **own))
            losses = zip(KEYS, coefficients(case, step, ranks), strict=True)
            sum((out[key].values().float() * c).sum() for key, c in losses).backward()
        if factors.grad is None:
            found.append([torch.zeros(0)] * len(KEYS))
        else:
            found.append([own.clone() for own in factors.grad.split(features.length_per_key())])
    return found


def weighted(case: Sequences) -> tuple[list[list[Tensor]], dict[str, Any]]:
    model = sharded(case, collection(case))
    tables = model.module.sequences
    return train_weighted(case, model, tables, [dist.get_rank()]), blocks(tables.state_dict())


def options(case: Sequences) -> dict[str, Any]:
    """Blocks of the state after ``use_options``."""
    model = sharded(case, collection(case))
    return blocks(use_options(case, model, model.module.sequences, model.fused_optimizer, [dist.get_rank()]))


def use_options(case: Sequences, model: nn.Module, tables: Any, optimizer: Any, ranks: list[int]) -> Any:
    """Trains with micro-batches, two lookups per backward, a frozen feature, another rate; returns the state."""
    with tables.accumulate():
        train(replace(case, steps=2), model, ranks)
    tables.freeze("f2")
    optimizer.param_groups[0]["lr"] = 0.5
    losses = []
    for step in range(2):
        out = model(batch(case, step, ranks))
        factors = coefficients(case, step, ranks)
        losses.append(sum((out[key].values() * c).sum() for key, c in zip(KEYS, factors, strict=True)))
    sum(losses).backward()
    tables.unfreeze("f2")
    for name, table in tables.embeddings.items():
        table.weight.requires_grad_(not name.startswith(tables.embedding_configs()[0].name))
    train(case, model, ranks)
    return tables.state_dict()


def save_and_load(case: Sequences, other: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains, saves, and loads into a model with another plan and other rows; returns the blocks of both."""
    model = sharded(case, collection(case))
    train(case, model, [dist.get_rank()])
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    loaded = sharded(replace(case, plan=other), collection(case, device="meta"))
    restore(loaded, folder)
    return blocks(model.module.sequences.state_dict()), blocks(loaded.module.sequences.state_dict())


def different_backwards(case: Sequences) -> tuple[str, bool]:
    """Each rank runs the backward of a different lookup; returns the error, and whether the state is unchanged."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    before, error = blocks(model.module.sequences.state_dict()), ""
    outputs = [model(batch(case, step, [rank])) for step in range(2)]
    try:
        sum(rows.values().sum() for rows in outputs[rank].values()).backward()
    except RuntimeError as raised:
        error = str(raised)
    after = blocks(model.module.sequences.state_dict())
    return error, all(torch.equal(a[1], b[1]) for n in before for a, b in zip(before[n], after[n], strict=True))


def scaled(case: Sequences) -> tuple[list[float], dict[str, Any]]:
    model = sharded(case, collection(case))
    tables = model.module.sequences
    return train_scaled(case, model, tables, tables.optimizer, [dist.get_rank()]), blocks(tables.state_dict())


def train_scaled(case: Sequences, model: nn.Module, tables: Any, face: Any, ranks: list[int]) -> list[float]:
    """Trains with a GradScaler; the last rank's gradient overflows in the second step. Returns the scales."""
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
    tables.set_grad_scaler(scaler)
    for step in range(case.steps):
        factors = coefficients(case, step, ranks)
        if step == 1 and len(case.sizes) - 1 in ranks:
            factors[1][-1, 3] = torch.inf
        out = model(batch(case, step, ranks))
        scaler.scale(sum((out[key].values() * c).sum() for key, c in zip(KEYS, factors, strict=True))).backward()
        scaler.step(face)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def load_whole(case: Sequences, state: dict[str, Tensor]) -> dict[str, Any]:
    """Blocks after loading a state of one process."""
    model = sharded(case, collection(case, device="meta"))
    model.module.sequences.load_state_dict(state)
    return blocks(model.module.sequences.state_dict())


def bad_batches(case: Sequences) -> tuple[list[str], bool, list]:
    """Rank 1 alone feeds bad batches; returns this rank's errors, whether the state is unchanged, and later outputs."""
    model, rank = sharded(case, collection(case)), dist.get_rank()
    before = blocks(model.module.sequences.state_dict())
    errors = []
    for mistake in ("id", "key"):
        given: Any = batch(case, 0, [rank])
        strides = given.stride_per_key()
        if rank == 1 and mistake == "id":
            values = given.values().clone()
            bag = sum(strides[:2]) + 3
            values[int(given.offsets()[bag])] = 1030
            given = rk.KeyedJaggedTensor(KEYS, values, lengths=given.lengths(), stride_per_key=strides)
        elif rank == 1 and mistake == "key":
            keys = ["x", *KEYS[1:]]
            given = rk.KeyedJaggedTensor(keys, given.values(), lengths=given.lengths(), stride_per_key=strides)
        try:
            model(given)
        except (IndexError, KeyError, ValueError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    after = blocks(model.module.sequences.state_dict())
    same = all(torch.equal(a[1], b[1]) for n in before for a, b in zip(before[n], after[n], strict=True))
    return errors, same, train(case, model, [rank])


class Loss(nn.Module):
    """A model with both kinds of collections, as TorchRec's pipelines train it: returns a loss and its output."""

    def __init__(self, sequences: nn.Module) -> None:
        super().__init__()
        self.sequences = sequences
        bag = rk.EmbeddingBagConfig(50, 8, name="bag", feature_names=["f1"])
        self.bags = rk.EmbeddingBagCollection([bag], optimizer=rk.SGD(lr=0.1), seed=6)
        self.dense = nn.Linear(24, 1)

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        """The mean square of a linear layer over rows that are padded and summed."""
        rows = self.sequences(features)
        summed = [rows[key].to_padded_dense(9).sum(1) for key in ("f0",)]
        out = self.dense(torch.cat([*summed, self.bags(features)["f1"]], dim=1))
        return out.square().mean(), out


def pipelined(case: Sequences) -> list[bool]:
    """Compares TrainPipelineSparseDist with a loop, under a plan of TorchRec's planner; returns the comparisons."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    rank, world = dist.get_rank(), dist.get_world_size()
    given = [batch(case, step, [rank]) for step in range(4)]
    data = [KeyedJaggedTensor(KEYS, k.values() % 50, lengths=k.lengths()) for k in given]
    sharders = [rk.distributed.EmbeddingBagCollectionSharder(), rk.distributed.EmbeddingCollectionSharder()]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Loss(collection(case))
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=world, compute_device="cpu", local_world_size=world),
            batch_size=8,
            constraints=sharders[0].constraints(model.bags) | sharders[1].constraints(model.sequences),
        )
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        model = DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))
        names = {name for name, _ in model.named_parameters()}
        assert names == {"bags.all_tables", "sequences.all_tables", "dense.weight", "dense.bias"}, names
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    equal, names = loop_and_pipeline(made, data)
    assert sorted(names) == ["ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"]
    return equal


def values_sent(case: Sequences) -> list[int]:
    """Float32 values that this rank sends to others in a step: rows, gradients and control values."""
    model = sharded(case, collection(case))
    with counted_bytes() as sent:
        train(replace(case, steps=1), model, [dist.get_rank()])
    return [count // 4 for count in sent]
