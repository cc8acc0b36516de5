"""A run on several processes: TorchRec's planner shards the tables, its pipeline trains, DDP has all but the tables."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.streamable import Pipelineable

import rec_kernels as rk
from rec_kernels.dlrm import checkpoint, runs
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import Batch, ahead
from rec_kernels.dlrm.model import DLRM
from rec_kernels.dlrm.ranks import Ranks
from rec_kernels.dlrm.scores import Clock
from rec_kernels.dlrm.train import Run


def shard_tables(model: DLRM, config: TrainConfig, ranks: Ranks, device: torch.device) -> None:
    """Puts this process's shards in the place of the model's tables, which are on the meta device; a collective."""
    # Losses are divided by the rows of all processes: "torchrec" takes the mean over processes, as DDP does.
    sharder, world = rk.distributed.EmbeddingBagCollectionSharder(gradient="torchrec"), ranks.world_size
    topology = Topology(world, device.type, local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    planner = rk.distributed.planner(
        model,
        [sharder],
        topology,
        batch_size=max(config.batch_size // world, 1),
        storage_reservation=FixedPercentageStorageReservation(0.15),  # beside tables, for MLPs and batches
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD).plan["embeddings"]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model.embeddings = sharder.shard(model.embeddings, plan, env, device, "embeddings")


Pipelineable.register(Batch)


class Step(nn.Module):
    """The loss of a batch as TorchRec's pipeline trains it: it finds the tables' argument by tracing ``forward``.

    Args:
        model: with sharded tables. loss: makes the loss of logits and a batch; a module, so that it is not traced.
    """

    def __init__(self, model: DLRM, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss, and with it logits and labels."""
        logits = self.model.logits(batch.dense, self.model.embeddings(batch.features).values())
        return self.loss(logits, batch), (logits.detach(), batch.label)


class ShardedRun(Run):
    """A training run on several processes, each of which calls every method.

    Logits, labels and scores are of all processes; times of the parts of a step are the first one's.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        loss = nn.Module()
        loss.forward = self._loss
        step = DistributedModelParallel(
            Step(self.model, loss), plan=ShardingPlan({}), sharders=[], device=self.model.device
        )
        later = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)  # a step may have several batches
        self._pipeline = TrainPipelineSparseDist(step, later, self.model.device)

    def _batches(self) -> Generator[Batch]:
        """The batches from step ``self.step`` on; the pipeline is two ahead of the step."""
        first = self._first_batch()
        for _ in range(self.step // self.steps_per_epoch, self.config.epochs):
            yield from ahead(self.data.batches("train", self.config.batch_size, first))
            first = 0

    def _learn(self, batches: Any, rows: int, clock: Clock) -> None:
        self._clock, self._rows = clock, rows
        self.window.add(*self._pipeline.progress(batches))
        clock.lap("backward")

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss whose mean over processes is the step's; NotFiniteError on all processes if one's is not finite."""
        loss = binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        value, ranks = loss.item(), self.data.ranks
        if ranks.any(not math.isfinite(value)):
            values = ranks.all(value)
            worst = next(rank for rank, value in enumerate(values) if not math.isfinite(value))
            raise self._refuse(values[worst])
        self._clock.lap("forward")
        return loss * (ranks.world_size / self._rows)

    def _scores(self, split: str) -> dict:
        self._pipeline.detach()
        return super()._scores(split)

    def _sizes(self) -> dict:
        """Tables of all processes, and the memory of each."""
        report: list[dict] = self.model.own_tables.memory_report()
        own = sum(t["weight_bytes"] + t["state_bytes"] for t in report)
        found: list[dict] = self.data.ranks.all({"table_bytes": own, "peak_memory_bytes": runs.peak_memory_bytes()})
        return {
            "tables": self.model.embeddings.memory_report(),
            "tiers": self.model.embeddings.tier_report(),
            "ranks": found,
            "peak_memory_bytes": max(f["peak_memory_bytes"] for f in found),
        }

    def _write(self, state: dict) -> None:
        model = state["model"]
        shards = {name: t for name, t in model.items() if isinstance(t, ShardedTensor)}
        rest = {name: t for name, t in model.items() if name not in shards}
        folder = self.data.ranks.once(lambda: checkpoint.new_folder(self.directory, self.step))
        try:
            checkpoint.save_shards(folder, shards)
        except OSError:
            if self.writes:
                shutil.rmtree(folder, ignore_errors=True)  # a full disk gets back what it took
            raise
        self.data.ranks.once(lambda: super(ShardedRun, self)._write(state | {"model": rest, "shards": folder.name}))
