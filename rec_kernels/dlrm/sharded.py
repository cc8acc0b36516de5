"""A run on several ranks: tables sharded by a TorchRec plan, dense parameters in DDP, TorchRec's training pipeline."""

from __future__ import annotations

import itertools
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
from rec_kernels.dlrm.data import Batch, prefetch
from rec_kernels.dlrm.model import DLRM
from rec_kernels.dlrm.ranks import Ranks
from rec_kernels.dlrm.scores import Clock
from rec_kernels.dlrm.train import Run


def shard_tables(model: DLRM, config: TrainConfig, ranks: Ranks, device: torch.device) -> None:
    """Replaces the model's tables, which are on the meta device, by this rank's shards; a collective."""
    # Gradients are averaged over ranks ("torchrec"), as in DDP; ``_loss`` multiplies by the world size.
    sharder, world = rk.distributed.EmbeddingBagCollectionSharder(gradient="torchrec"), ranks.world_size
    topology = Topology(world, device.type, local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    planner = rk.distributed.planner(
        model,
        [sharder],
        topology,
        batch_size=max(config.batch_size // world, 1),
        storage_reservation=FixedPercentageStorageReservation(0.15),  # for MLPs and batches
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD).plan["embeddings"]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model.embeddings = sharder.shard(model.embeddings, plan, env, device, "embeddings")


Pipelineable.register(Batch)


class Step(nn.Module):
    """Forward and loss for TorchRec's pipeline, which traces ``forward``; ``loss`` is a module to avoid tracing."""

    def __init__(self, model: DLRM, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Computes (loss, (logits, labels))."""
        logits = self.model.logits(batch.dense, self.model.embeddings(batch.features).values())
        return self.loss(logits, batch), (logits.detach(), batch.label)


class ShardedRun(Run):
    """A training run on several ranks; every method is a collective. Recorded times are those of rank 0."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        loss = nn.Module()
        loss.forward = self._loss
        step = DistributedModelParallel(
            Step(self.model, loss), plan=ShardingPlan({}), sharders=[], device=self.model.device
        )
        # ``Run._step`` calls the optimizer itself, because a step may have several batches.
        no_optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
        self._pipeline = TrainPipelineSparseDist(step, no_optimizer, self.model.device)

    def _batches(self) -> Generator[Batch]:
        """Yields the batches from step ``self.step`` on; the pipeline reads two batches ahead."""
        first = self._first_batch()
        for _ in range(self.step // self.steps_per_epoch, self.config.epochs):
            yield from prefetch(self.data.batches("train", self.config.batch_size, first))
            first = 0

    def _learn(self, batches: Any, rows: int, clock: Clock) -> None:
        self._clock, self._rows = clock, rows
        self.window.add(*self._pipeline.progress(batches))
        clock.lap("backward")

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss, of which the step's is the mean over ranks; NotFiniteError on all ranks if any is not finite."""
        loss = binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        value, ranks = loss.item(), self.data.ranks
        if ranks.any_true(not math.isfinite(value)):
            values = ranks.all_gather(value)
            worst = next(rank for rank, value in enumerate(values) if not math.isfinite(value))
            raise self._not_finite(values[worst])
        self._clock.lap("forward")
        return loss * (ranks.world_size / self._rows)

    def _scores(self, split: str) -> dict:
        self._pipeline.detach()
        return super()._scores(split)

    def _sizes(self) -> dict:
        """Sizes of all ranks' tables, and the memory of each rank."""
        report: list[dict] = self.model.local_tables.memory_report()
        own = sum(t["weight_bytes"] + t["state_bytes"] for t in report)
        found: list[dict] = self.data.ranks.all_gather(
            {"table_bytes": own, "peak_memory_bytes": runs.peak_memory_bytes()}
        )
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
        folders = (self.directory / f"shards-{self.step}-{number}" for number in itertools.count())
        folder = self.data.ranks.on_rank_0(lambda: next(path for path in folders if not os.path.lexists(path)))
        try:
            checkpoint.save_shards(folder, shards)
        except OSError:
            if self.writes:
                shutil.rmtree(folder, ignore_errors=True)  # free the space on a full disk
            raise
        self.data.ranks.on_rank_0(
            lambda: super(ShardedRun, self)._write(state | {"model": rest, "shards": folder.name})
        )
