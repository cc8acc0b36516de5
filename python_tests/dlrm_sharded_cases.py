"""Runs of the trainer on several processes: functions that test_dlrm_sharded.py runs in each process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dlrm_stops import told_to_stop
from dlrm_tiny import TinyData

import rec_kernels as rk
from rec_kernels.dlrm import Batch, Feature, RunInterruptedError, TrainConfig, evaluate, train


class Bags(TinyData):
    """TinyData with a second feature, with weighted bags that rows share."""

    features = (*TinyData.features, Feature("bag", 9, pooling="mean", shared=True))

    def batches(self, split, batch_size, start=0):
        for batch in super().batches(split, batch_size, start):
            lengths = batch.label.long() + 1
            values = torch.arange(int(lengths.sum())) % 9
            weights = torch.linspace(0.5, 1.5, len(values))
            yield batch._replace(shared=rk.KeyedJaggedTensor(["bag"], values, weights, lengths=lengths))


class Broken(Bags):
    """Bags whose third batch ends with a row with an infinite dot product."""

    def batches(self, split, batch_size, start=0):
        for number, batch in enumerate(super().batches(split, batch_size, start), start):
            ids, bags = batch.features, batch.shared
            weights = torch.ones(len(ids.values())), bags.weights()
            if number == 2 and split == "train":
                for of_ids in weights:
                    of_ids[-1] = 3e38
            features = rk.KeyedJaggedTensor(["id"], ids.values(), weights[0], offsets=ids.offsets())
            yield Batch(batch.dense, features, batch.label, bags)


class Unknown(TinyData):
    """TinyData whose third batch ends with an id out of range."""

    def batches(self, split, batch_size, start=0):
        for number, batch in enumerate(super().batches(split, batch_size, start), start):
            if number == 2 and split == "train":
                batch.features.values()[-1] = 10**6
            yield batch


class Absent(TinyData):
    """TinyData that is missing on the first process."""

    def num_rows(self, split):
        if dist.get_rank() == 0:
            raise ValueError("no such file")
        return super().num_rows(split)


DATA = {"absent": Absent, "tiny": TinyData, "bags": Bags, "broken": Broken, "unknown": Unknown}


def options(folder: str, **more: Any) -> TrainConfig:
    """A run of a tenth of a second, whose last batch is smaller and uneven."""
    given: dict[str, Any] = {"batch_size": 60, "embedding_dim": 4, "bottom": (5,), "top": (6,), "runs_dir": folder}
    return TrainConfig(**given | {"threads": 1, "run": "run"} | more)


def run(folder: str, data: str = "tiny", stop_after: int = 0, resume: bool = False, more: Any = ()) -> dict | str:
    """Trains; returns the test record, or the error's type and text.

    Args:
        stop_after: the step after which the last process receives the stop event; 0: none.
    """
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    directory = Path(folder) / "run" if resume else None
    try:
        config = TrainConfig.read(directory) if directory else options(folder, **dict(more))
        with told_to_stop(stop_after) if stop_after and last else contextlib.nullcontext():
            return train(config, DATA[data](), resume=directory, progress=False)
    except (RunInterruptedError, RuntimeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def scores(folder: str, data: str = "tiny") -> dict:
    return evaluate(Path(folder) / "run", DATA[data]())


def different_seeds(folder: str) -> dict | str:
    """A run whose processes have different seeds."""
    return run(folder, more={"seed": dist.get_rank()})
