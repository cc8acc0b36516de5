"""Sharded collections on ranks, and one process with all their samples, which the tests of rk.distributed compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import rec_kernels as rk

#: Rows of the tables; two features share the last table.
ROWS = (100, 57, 1030)
DIM = 16
KEYS = ["f0", "f1", "f2", "g2"]
OPTIMIZERS = {
    "torch": None,
    "sgd": rk.SGD(lr=0.1),
    "adagrad": rk.Adagrad(lr=0.1),
    "rowwise_adagrad": rk.RowwiseAdagrad(lr=0.1),
    "adam": rk.Adam(lr=0.01),
    "adam_bf16": rk.Adam(lr=0.01, state_dtype=torch.bfloat16),
    "lamb": rk.LAMB(lr=0.01),
    "clipped": rk.SGD(lr=0.1, clip_grad_norm=0.5),
}
#: Sharding type of each of the three tables.
PLANS = {
    "table_wise": ("table_wise",) * 3,
    "one_rank": ("first_rank",) * 3,
    "row_wise": ("row_wise",) * 3,
    "rows_of_one_rank": ("first_rank_rows",) * 3,
    "rows_back": ("rows_back",) * 3,  # the last rank has the first rows
    "column_wise": ("column_wise",) * 3,
    "grid_shard": ("grid_shard",) * 3,
    "data_parallel": ("data_parallel",) * 3,
    "mixed": ("column_wise", "data_parallel", "row_wise"),
    "hashed_apart": ("row_wise", "data_parallel", "table_wise"),
    "hashed_replica": ("table_wise", "row_wise", "data_parallel"),
    "hashed_rows": ("table_wise", "data_parallel", "row_wise"),
}


@dataclass(frozen=True)
class Case:
    """A collection to train, and its sharding.

    Args:
        plan: key of ``PLANS``. format, optimizer, rounding, pooling: of all tables; format may name one for each.
        sizes: batch size of each rank.
        one_id: whether each bag has exactly one id instead of 0 to 8. weighted: whether the last rank's batch has
            weights.
        steps: of training. gradient: the sharder's; the loss is a sum over samples with "sum", otherwise their mean.
        output_dtype, compression: the collection's and its tables'. padding: each table's ``padding_idx``.
        bad_ids: whether some ids are out of range, which the collection ignores. every_id: whether the last table
            hashes ids, which may be any int64. row_wise: the sharder's.
        rates, optimizers: each table's ``lr``, and its optimizer, a key of ``OPTIMIZERS``. cache: the collection's.
        wire: the sharder's. is_weighted: the collection's.
    """

    plan: str = "table_wise"
    format: str = "fp32"
    optimizer: str = "adam"
    rounding: str = "stochastic"
    pooling: str = "sum"
    sizes: tuple[int, ...] = (8, 8)
    one_id: bool = False
    weighted: bool = False
    steps: int = 3
    gradient: str = "sum"
    output_dtype: torch.dtype = torch.float32
    compression: Any = None
    padding: tuple[int | None, ...] = (None, None, None)
    bad_ids: bool = False
    every_id: bool = False
    row_wise: str = "ordered"
    rates: tuple[float | None, ...] = (None, None, None)
    optimizers: tuple[str | None, ...] = (None, None, None)
    cache: Any = None
    wire: Any = None
    is_weighted: bool | None = None


class Model(nn.Module):
    """A collection and a dense parameter."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.dense = nn.Linear(2, 1)

    def forward(self, features: Any) -> Tensor:
        """Returns [B, sum of D], in the order of the keys."""
        pooled = self.ebc(features)
        return torch.cat([pooled[key] for key in KEYS], dim=1)


def collection(case: Case, device: str | None = None) -> rk.EmbeddingBagCollection:
    """The whole collection, with the same random rows in every process."""
    torch.manual_seed(7)
    features = [["f0"], ["f1"], ["f2", "g2"]]
    tables = [
        rk.EmbeddingBagConfig(
            *(None if case.every_id and i == 2 else rows, DIM),
            name=f"t{i}",
            feature_names=features[i],
            format=(case.format.split() * len(ROWS))[i],
            pooling=case.pooling,
            compression=rk.Hash(rows) if case.every_id and i == 2 else case.compression,
            padding_idx=case.padding[i],
            lr=case.rates[i],
            optimizer=OPTIMIZERS[case.optimizers[i] or "torch"],
        )
        for i, rows in enumerate(ROWS)
    ]
    return rk.EmbeddingBagCollection(
        tables,
        optimizer=OPTIMIZERS[case.optimizer],
        rounding=case.rounding,
        seed=5,
        output_dtype=case.output_dtype,
        bounds_check="ignore" if case.bad_ids else "error",
        device=device,
        cache=case.cache,
        is_weighted=case.is_weighted,
    )


def batch(case: Case, step: int, ranks: list[int]) -> rk.KeyedJaggedTensor:
    """The samples of some ranks, concatenated."""
    parts = [_samples(case, step, rank) for rank in ranks]
    lengths = torch.cat([torch.cat([p[0][f] for p in parts]) for f in range(len(KEYS))])
    values = torch.cat([torch.cat([p[1][f] for p in parts]) for f in range(len(KEYS))])
    weights = None
    if case.weighted and len(case.sizes) - 1 in ranks:
        weights = torch.cat([torch.cat([p[2][f] for p in parts]) for f in range(len(KEYS))])
    return rk.KeyedJaggedTensor(KEYS, values, lengths=lengths, weights=weights)


def _samples(case: Case, step: int, rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    size, lengths, values, weights = case.sizes[rank], [], [], []
    for f, rows in enumerate((*ROWS, ROWS[-1])):
        own = torch.randint(0, 9, (size,), generator=generator)
        lengths.append(torch.ones_like(own) if case.one_id else own)
        low, high = (-rows // 3, rows + rows // 3) if case.bad_ids else (0, rows)
        if case.every_id and f >= 2:
            low, high = (-(2**63), 2**63 - 1) if f == 2 else (-20, 20)
        values.append(torch.randint(low, high, (int(lengths[-1].sum()),), generator=generator))
        drawn = torch.rand(len(values[-1]), generator=generator)
        weights.append(drawn if rank == len(case.sizes) - 1 else torch.ones_like(drawn))
    return lengths, values, weights


def coefficients(case: Case, step: int, ranks: list[int]) -> Tensor:
    """Returns [B, sum of D]: the gradient of the outputs, independent of their values."""
    generators = [torch.Generator().manual_seed(9000 + 100 * step + rank) for rank in ranks]
    shapes = [(case.sizes[rank], len(KEYS) * DIM) for rank in ranks]
    return torch.cat([torch.randn(s, generator=g) for s, g in zip(shapes, generators, strict=True)])


def train(case: Case, model: nn.Module, ranks: list[int]) -> list[Tensor]:
    """Trains with the samples of some ranks; returns the outputs."""
    outputs = []
    for step in range(case.steps):
        out = model(batch(case, step, ranks))
        outputs.append(out.detach().clone())
        loss = (out.float() * coefficients(case, step, ranks)).sum()
        (loss / max(len(out), 1) if case.gradient != "sum" else loss).backward()
    return outputs


def plan_of(case: Any, world: int, dims: tuple[int, ...] = (DIM,) * 3) -> dict[str, Any]:
    """TorchRec's plan, written by hand: table name -> ParameterSharding."""
    from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardMetadata

    plan = {}
    for i, (rows, dim, kind) in enumerate(zip(ROWS, dims, PLANS[case.plan], strict=True)):
        half, row_half = dim // 2, -(-rows // world)
        bands = [(r * row_half, max(min(row_half, rows - r * row_half), 0)) for r in range(world)]
        blocks = {
            "table_wise": [(0, 0, rows, dim, (i + 1) % world)],
            "first_rank": [(0, 0, rows, dim, 0)],
            "row_wise": [(first, 0, count, dim, r) for r, (first, count) in enumerate(bands)],
            "rows_back": [(first, 0, count, dim, world - 1 - r) for r, (first, count) in enumerate(bands)],
            "first_rank_rows": [(first, 0, count, dim, 0) for first, count in bands],
            "column_wise": [(0, 0, rows, half, 0), (0, half, rows, half, world - 1)],
            "grid_shard": [(f, c, n, half, (r + c) % world) for r, (f, n) in enumerate(bands) for c in (0, half)],
        }.get(kind)
        spec = None
        if blocks is not None:
            spec = EnumerableShardingSpec([ShardMetadata([f, c], [n, d], f"rank:{r}/cpu") for f, c, n, d, r in blocks])
        name = {"first_rank": "table_wise", "first_rank_rows": "row_wise", "rows_back": "row_wise"}.get(kind, kind)
        plan[f"t{i}"] = ParameterSharding(sharding_type=name, compute_kernel="fused", ranks=None, sharding_spec=spec)
    return plan


def sharded(
    case: Case,
    ebc: rk.EmbeddingBagCollection,
    kind: type[nn.Module] = Model,
    *,
    replicates: bool = True,
    group: Any = None,
) -> nn.Module:
    """This rank's model of class ``kind``, sharded by TorchRec.

    Args:
        replicates: whether dense parameters are under DDP. group: the ranks; None: all.
    """
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    from rec_kernels.distributed import EmbeddingBagCollectionSharder

    return DistributedModelParallel(
        kind(ebc),
        env=ShardingEnv.from_process_group(group or dist.group.WORLD),
        plan=ShardingPlan(plan={"ebc": plan_of(case, dist.get_world_size(group))}),
        sharders=[EmbeddingBagCollectionSharder(gradient=case.gradient, row_wise=case.row_wise, wire=case.wire)],
        device=torch.device("cpu"),
        init_data_parallel=replicates,
    )


def blocks(state: dict[str, Any]) -> dict[str, list[tuple[list[int], Tensor]]]:
    """Returns a rank's blocks of a state: name -> offsets and values of each block."""
    out = {}
    for name, value in state.items():
        if hasattr(value, "local_shards"):
            out[name] = [(list(s.metadata.shard_offsets), s.tensor.clone()) for s in value.local_shards()]
        else:
            out[name] = [([0] * value.dim(), value.clone())]
    return out


def restore(model: nn.Module, folder: str) -> None:
    """Loads a checkpoint of torch.distributed.checkpoint into a sharded model."""
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])


def run(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """Outputs of this rank, and blocks of its state."""
    model = sharded(case, collection(case))
    outputs = train(case, model, [dist.get_rank()])
    return outputs, blocks(model.module.ebc.state_dict())


def run_elsewhere(case: Case, device: str | None) -> tuple[list[Tensor], dict[str, Any]]:
    """Outputs and blocks of a collection sharded and trained with default dtype float64 on a default device.

    Args:
        device: default device; None: default dtype float32 on the CPU.
    """
    from test_default_device import elsewhere
    from torchrec.distributed.types import ShardingEnv

    rank, env = dist.get_rank(), ShardingEnv.from_process_group(dist.group.WORLD)
    samples = [(batch(case, step, [rank]), coefficients(case, step, [rank])) for step in range(case.steps)]
    sharder = rk.distributed.EmbeddingBagCollectionSharder(gradient="sum", row_wise=case.row_wise, wire=case.wire)
    ebc, plan, outputs = collection(case), plan_of(case, env.world_size), []
    with contextlib.nullcontext() if device is None else elsewhere(), torch.device(device or "cpu"):
        tables = sharder.shard(ebc, plan, env)
        for features, expected in samples:
            outputs.append(tables(features).values())
            (outputs[-1].float() * expected).sum().backward()
            rk.distributed.clip_grad_norm_(tables, 1.0)
        tables.load_state_dict(tables.state_dict())
        outputs += [] if ebc.optimizer is None else [tables.lr]
    outputs += [p.grad for p in tables.parameters() if p.grad is not None]
    return [out.detach() for out in outputs], blocks(tables.state_dict())


def run_compiled(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """``run`` of a model compiled as TorchRec's TrainPipelinePT2 does."""
    model = sharded(case, collection(case))
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        outputs = train(case, torch.compile(model, backend="aot_eager", dynamic=True), [dist.get_rank()])
    return outputs, blocks(model.module.ebc.state_dict())


def run_reduced(case: Case) -> tuple[list[Tensor], dict[str, Any], list[list[int]]]:
    """Outputs and blocks of this rank, and the shapes that it received from each reduction."""
    from rec_kernels.distributed import pooled_output_dist

    shapes, reduce_scatter = [], pooled_output_dist.reduce_scatter

    def recorded(*arguments: Any) -> Any:
        awaitable = reduce_scatter(*arguments)
        shapes.append(list(awaitable.wait().shape))
        return awaitable

    pooled_output_dist.reduce_scatter = recorded
    try:
        return *run(case), shapes
    finally:
        pooled_output_dist.reduce_scatter = reduce_scatter


def one_process(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and state of one process with the samples of all ranks."""
    model = Model(collection(case))
    outputs = train(case, model, list(range(len(case.sizes))))
    return outputs, dict(model.ebc.state_dict())


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def check_found(
    found: list[tuple], outputs: list[Tensor], state: dict[str, Tensor], *, same_outputs: bool = True
) -> None:
    """Asserts that the ranks' state has one process's bits, and outputs have them or differ by the rounding of sums."""
    assert differences(state, [blocks for _, blocks in found]) == []
    for step, whole in enumerate(outputs):
        got = torch.cat([out[step] for out, _ in found])
        if same_outputs:
            assert same_bits(got, whole)
        else:
            torch.testing.assert_close(got, whole, rtol=1e-6, atol=2e-6)


def loop_and_pipeline(made: Callable[[], tuple[nn.Module, Any]], data: list) -> tuple[list[bool], list[str]]:
    """Trains in a loop and in TorchRec's pipeline; returns whether outputs are equal per batch, and pipelined classes.

    Args:
        made: returns a model, which returns a loss and outputs, and its optimizer. data: the batches.
    """
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model, optimizer = made()
    expected = []
    for features in data:
        optimizer.zero_grad()
        loss, out = model(features)
        loss.backward()
        optimizer.step()
        expected.append(out.detach().clone())
    model, optimizer = made()
    pipeline, batches = TrainPipelineSparseDist(model, optimizer, torch.device("cpu")), iter(data)
    got = [pipeline.progress(batches).detach().clone() for _ in data]
    equal = [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]
    return equal, [type(module).__name__ for module in pipeline._pipelined_modules]


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Yields a list that receives the bytes of rows that this rank sends to others, per all-to-all."""
    from rec_kernels.distributed import messages

    rank, sent, all_to_all = dist.get_rank(), [], messages.all_to_all

    def counted(flat: Tensor, sizes: list[int], received: list[int], group: Any) -> Any:
        sent.append(sum(size for to, size in enumerate(sizes) if to != rank))
        return all_to_all(flat, sizes, received, group)

    messages.all_to_all = counted
    try:
        yield sent
    finally:
        messages.all_to_all = all_to_all


def differences(whole: dict[str, Tensor], ranks: list[dict[str, Any]]) -> list[str]:
    """Returns names of a state whose blocks on the ranks do not cover it or have different bits."""
    wrong = set()
    for name, tensor in whole.items():
        seen = torch.zeros(tensor.shape, dtype=torch.bool)
        for found in ranks:
            for offsets, block in found[name]:
                place = tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
                seen[place] = True
                if not same_bits(tensor[place], block):
                    wrong.add(name)
        if not bool(seen.all()):
            wrong.add(f"{name} (not all of it)")
    return sorted(wrong | {name for found in ranks for name in found if name not in whole})
