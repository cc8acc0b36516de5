"""A rank of bench.studies.distributed, started by torch.distributed.run; rank 0 writes the result."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_torchrec
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from train_dlrm import Purchases

import rec_kernels as rk

STEPS, ROUNDS, BATCH, DIM = 20, 30, 2048, 64
ROWS = (200_000, 200_000, 50_000, 50_000, 1000, 1000, 100, 100)  # of the tables of step and memory
IDS = 8  # ids of a bag, on average


class CollectiveCounter:
    """Bytes sent to other ranks by kind of collective, and seconds spent in collectives."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        self.seconds = 0.0
        self._is_inside = False  # nested collectives are timed once

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Counts the collectives of torch.distributed in the block; DDP's, in C++, are not counted."""
        own = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather", "all_reduce")}
        for name, function in own.items():
            setattr(dist, name, self._counted(name, function))
        wait = dist.Work.wait
        dist.Work.wait = self._waited(wait)
        try:
            yield
        finally:
            dist.Work.wait = wait
            for name, function in own.items():
                setattr(dist, name, function)

    def _counted(self, name: str, function: Callable) -> Callable:
        world, rank = dist.get_world_size(), dist.get_rank()

        def call(*args: Any, **options: Any) -> Any:
            sent = args[0] if name == "all_reduce" else args[1] if len(args) > 1 else options["input"]
            count = sent.numel()
            if name == "all_to_all_single":
                splits = options.get("input_split_sizes", args[3] if len(args) > 3 else None)
                row = count // max(sent.shape[0], 1) if sent.dim() else 1
                count -= splits[rank] * row if splits else count // world
                kind = "ids and lengths" if sent.dtype == torch.int64 else "columns and gradients"
            else:
                count, kind = count * (world - 1), "agreement"
            self.bytes[kind] += count * sent.element_size()
            return self._timed(function, *args, **options)

        return call

    def _waited(self, wait: Callable) -> Callable:
        return lambda *args: wait(*args) if self._is_inside else self._timed(wait, *args)

    def _timed(self, function: Callable, *args: Any, **options: Any) -> Any:
        self._is_inside, began = True, time.perf_counter()
        result = function(*args, **options)
        self.seconds += time.perf_counter() - began
        self._is_inside = False
        return result


def auc(weeks: int, seeds: int) -> dict:
    """Test AUCs of the example, one per seed."""
    data = Purchases(weeks)
    return {"auc": [train_torchrec.train(data, seed=seed) for seed in range(seeds)]}


def sent_bytes(weeks: int, seeds: int) -> dict:
    """Mean bytes sent per process and step of the example's model."""
    data, found = Purchases(weeks), {}
    planned = {kind: {"sharding_types": (kind,)} for kind in ("table_wise", "row_wise", "column_wise", "data_parallel")}
    wires = {
        "table_wise, bf16": ("bf16", "bf16"),
        "table_wise, int8": ("int8", "int8"),
        "table_wise, mx6": ("mx6", "mx6"),
    }
    coded = {n: planned["table_wise"] | {"wire": rk.distributed.Wire(*formats)} for n, formats in wires.items()}
    for name, options in {"planner": {}, "torchrec_planner": {}, **planned, **coded}.items():
        torch.manual_seed(0)
        model = train_torchrec.DLRM(data.sizes, "fp32")
        if name == "column_wise":  # row-wise Adagrad needs all columns of a row
            model.tables = rk.EmbeddingBagCollection(model.tables.tables, optimizer=rk.Adagrad(lr=0.05))
        sharder = rk.distributed.EmbeddingBagCollectionSharder(**options)
        constraints = sharder.constraints(model.tables) if name == "torchrec_planner" else None
        parallel = _parallel(model, sharder, BATCH, constraints)
        counted = CollectiveCounter()
        with counted.patched():
            for step in range(STEPS):
                start = step * BATCH
                dense, features, label = data.batch(*train_torchrec.own(start, start + BATCH))
                binary_cross_entropy_with_logits(parallel(dense, features), label).backward()
        dense = sum(p.numel() * 4 for p in parallel.parameters())
        found[name] = _mean({k: v / STEPS for k, v in counted.bytes.items()}) | {"gradients of MLPs": dense}
    return found


def _parallel(
    model: nn.Module, sharder: Any, batch: int, constraints: dict | None = None, promised: dict | None = None
) -> nn.Module:
    """The model sharded by this package's planner, or by TorchRec's with ``constraints``."""
    world = dist.get_world_size()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    if constraints is None:
        lengths = {f"f{i}": IDS for i in range(len(ROWS))} if isinstance(model, Tables) else None
        planner = rk.distributed.planner(model, [sharder], topology, batch_size=batch // world, lengths=lengths)
    else:
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch // world, constraints=constraints)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    if promised is not None and dist.get_rank() == 0:
        for option in planner._best_plan:
            for shard in option.shards:
                promised[shard.rank] = promised.get(shard.rank, 0) + shard.storage.ddr
    return DistributedModelParallel(model, plan=plan, sharders=[sharder], device=torch.device("cpu"))


def _mean(numbers: dict[str, float]) -> dict[str, float]:
    """The mean over ranks."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, numbers)
    return {key: sum(f.get(key, 0) for f in found) / len(found) for key in sorted({k for f in found for k in f})}


class Tables(nn.Module):
    """A sharded collection and a data-parallel layer."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Linear(DIM, 1)

    def forward(self, features: Any) -> Tensor:
        pooled = self.tables(features).values()
        return self.top(pooled.view(len(pooled), -1, DIM).sum(1)).squeeze(1)


def _ours(device: str | None = "meta") -> rk.EmbeddingBagCollection:
    tables = [rk.EmbeddingBagConfig(n, DIM, name=f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate(ROWS)]
    return rk.EmbeddingBagCollection(tables, device=device, optimizer=rk.RowwiseAdagrad(lr=0.05))


def _batch(step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(step * 64 + dist.get_rank())
    lengths = torch.randint(0, 2 * IDS + 1, (len(ROWS), BATCH // 2), generator=generator)
    ids = [torch.randint(0, n, (int(own.sum()),), generator=generator) for n, own in zip(ROWS, lengths, strict=True)]
    return KeyedJaggedTensor([f"f{i}" for i in range(len(ROWS))], torch.cat(ids), lengths=lengths.flatten())


def step_times(weeks: int, seeds: int) -> dict:
    """Milliseconds of forward, backward and collectives of a step for both packages, measured alternately."""
    theirs = [
        EmbeddingBagConfig(num_embeddings=n, embedding_dim=DIM, name=f"t{i}", feature_names=[f"f{i}"])
        for i, n in enumerate(ROWS)
    ]
    sharder = rk.distributed.EmbeddingBagCollectionSharder(sharding_types=("table_wise",))
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    whole = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(len(ROWS))}
    model = Tables(EmbeddingBagCollection(tables=theirs, device=torch.device("meta")))
    models = {
        "rec_kernels": _parallel(Tables(_ours()), sharder, BATCH, whole),
        "torchrec": _parallel(model, TorchRecSharder(fused_params=fused), BATCH, whole),
    }
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in models}
    for step in range(ROUNDS + 3):
        features = _batch(step)
        for name in sorted(models, reverse=step % 2 == 1):
            counted = CollectiveCounter()
            dist.barrier()
            with counted.patched():
                ticks = [time.perf_counter()]
                loss = models[name](features).sum()
                ticks.append(time.perf_counter())
                loss.backward()
                ticks.append(time.perf_counter())
            if step >= 3:
                forward, backward = ticks[1] - ticks[0], ticks[2] - ticks[1]
                shares = {"step": forward + backward, "forward": forward, "backward": backward}
                for key, seconds in (shares | {"collectives": counted.seconds}).items():
                    found[name][f"{key}_ms"].append(1000 * seconds)
                found[name]["bytes_sent"].append(sum(counted.bytes.values()))
    return found


def memory(weeks: int, seeds: int) -> dict:
    """Bytes per process: the planner's estimate, tables and state, and the growth of the process."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, promised = _resident("VmRSS"), dict[int, int]()
    sharder = rk.distributed.EmbeddingBagCollectionSharder()
    model = _parallel(Tables(_ours()), sharder, BATCH, promised=promised)
    for step in range(STEPS):
        model(_batch(step)).sum().backward()
    report = model.module.tables.shards.memory_report()
    own = {key: sum(t[key] for t in report) for key in ("weight_bytes", "state_bytes")}
    own["peak_growth"] = _resident("VmHWM") - before
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {str(rank): {"promised": promised.get(rank)} | numbers for rank, numbers in enumerate(found)}


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    part, out, weeks, seeds = sys.argv[1:]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    made = {"auc": auc, "bytes": sent_bytes, "step": step_times, "memory": memory}[part](int(weeks), int(seeds))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(made))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
