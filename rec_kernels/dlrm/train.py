"""Train DLRM once through Complete Journey in time order and score it on the weeks after."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

import rec_kernels as rk
from rec_kernels.dlrm import report
from rec_kernels.dlrm.batches import Batches
from rec_kernels.dlrm.completejourney import LAST_WEEK, Dataset
from rec_kernels.dlrm.model import DLRM
from rec_kernels.dlrm.prepared import load_completejourney

TEST_BATCH_SIZE = 8192
WINDOWS = 40  # points of the training curves


class TrainingError(RuntimeError):
    """The training cannot go on."""


def _option(default, kind: type, help: str, allowed: str):
    return field(default=default, metadata={"type": kind, "help": help, "allowed": allowed})


@dataclass(frozen=True)
class TrainConfig:
    """All that decides a run: the same config on the same machine gives the same bits.

    Raises:
        ValueError: names the option, its value and what is allowed.
    """

    epochs: int = _option(1, int, "passes over the training weeks", "1 or more")
    batch_size: int = _option(2048, int, "rows per step", "1 or more")
    embedding_dim: int = _option(16, int, "columns of every embedding table", "1 or more")
    lr: float = _option(0.05, float, "learning rate of the tables (row-wise Adagrad)", "a finite number above 0")
    dense_lr: float = _option(0.001, float, "learning rate of the MLPs (Adam)", "a finite number above 0")
    seed: int = _option(0, int, "fixes the initial weights", "0 or more")
    threads: int | None = _option(None, int, "CPU threads (default: torch's choice)", "1 or more")
    weeks: int | None = _option(
        None,
        int,
        "use only the first weeks, test on their last quarter (default: train on weeks 1-46, test on 47-53)",
        f"1 to {LAST_WEEK - 1}",
    )
    data_dir: str | None = _option(None, str, "folder of the prepared data (default: ~/.cache/rec_kernels)", "a folder")
    run: str | None = _option(None, str, "name of the run (default: derived, numbered if taken)", report.RUN_NAMES)
    runs_dir: str = _option("runs", str, "folder that gets one folder per run", "a folder")

    def __post_init__(self):
        at_least = {"epochs": 1, "batch_size": 1, "embedding_dim": 1, "seed": 0, "threads": 1, "weeks": 1}
        for name, least in at_least.items():
            value = getattr(self, name)
            self._require(name, value is None or value >= least)
        self._require("weeks", self.weeks is None or self.weeks < LAST_WEEK)
        for name in ("lr", "dense_lr"):
            self._require(name, 0 < getattr(self, name) < math.inf)
        self._require("run", self.run is None or report.is_run_name(self.run))

    def _require(self, name: str, allowed: bool) -> None:
        if not allowed:
            text = next(option.metadata["allowed"] for option in dataclasses.fields(self) if option.name == name)
            raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is {text}")

    def run_name(self) -> str:
        """Name of the run where none was given."""
        data = "completejourney" if self.weeks is None else f"completejourney-weeks{self.weeks}"
        return f"{data}-d{self.embedding_dim}-b{self.batch_size}-seed{self.seed}"


def train(config: TrainConfig) -> dict:
    """Train, test, and write ``config.json``, ``metrics.jsonl`` and ``report.png`` of the run.

    Returns:
        The test record, which is the last line of ``metrics.jsonl``, and "directory", the folder of the run.

    Raises:
        DataError: the data package is missing or not the supported version.
        RunExistsError: a run named ``config.run`` exists.
        TrainingError: the loss is not finite.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.run is not None:
        report.refuse_existing(config.runs_dir, config.run)
    data = load_completejourney(config.weeks, config.data_dir, progress=True)
    model = DLRM(
        data.num_embeddings,
        config.embedding_dim,
        optimizer=rk.RowwiseAdagrad(lr=config.lr, eps=1e-8),
        seed=config.seed,
    )
    optimizer = torch.optim.Adam(model.dense_parameters(), lr=config.dense_lr, fused=True)
    directory = report.create_run(config.runs_dir, config.run, config.run_name())
    report.write_config(directory, dataclasses.asdict(config) | {"threads": torch.get_num_threads()})

    started = time.perf_counter()
    curve = fit(model, optimizer, data, config, on_window=lambda record: report.append(directory, record))
    seconds = time.perf_counter() - started
    examples = data.train_rows * config.epochs
    test = {
        "kind": "test",
        **report.score(data.label[data.train_rows :], predict(model, data)),
        "train_examples": examples,
        "train_seconds": seconds,
        "examples_per_second": examples / seconds,
        "peak_memory_bytes": report.peak_memory_bytes(),
        "tables": model.memory_report(),
    }
    report.append(directory, test)
    report.draw(directory / "report.png", curve, test)
    return test | {"directory": str(directory)}


def fit(model: DLRM, optimizer: torch.optim.Optimizer, data: Dataset, config: TrainConfig, *, on_window) -> list[dict]:
    """Train for ``config.epochs``; returns the records of the curves, each also given to ``on_window``.

    A row is scored before the model learns from it, so the first epoch's curves are of unseen rows.
    """
    batches = Batches(data, config.batch_size)
    steps = len(batches) * config.epochs
    window = _Window(-(-steps // WINDOWS))
    curve, step = [], 0
    with tqdm(total=data.train_rows * config.epochs, desc="training", unit="ex", unit_scale=True) as bar:
        for epoch in range(config.epochs):
            for batch in batches:
                logits = model(batch)
                loss = binary_cross_entropy_with_logits(logits, batch.label)
                value = loss.item()
                if not math.isfinite(value):
                    raise TrainingError(
                        f"loss is {value} at step {step + 1} of {steps} (epoch {epoch}), must be finite: "
                        f"try a smaller lr (now {config.lr}) or dense_lr (now {config.dense_lr})"
                    )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                bar.update(len(logits))
                window.add(logits.detach(), batch.label)
                if window.is_full() or step == steps:
                    record = {"kind": "train", "epoch": epoch, "step": step} | window.close()
                    bar.set_postfix(loss=f"{record['loss']:.4f}", refresh=False)
                    curve.append(record)
                    on_window(record)
    return curve


def predict(model: DLRM, data: Dataset) -> np.ndarray:
    """Logits of the test rows in time order, float32 [test rows]."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in Batches(data, TEST_BATCH_SIZE, split="test")]).numpy()


class _Window:
    """Logits and labels of the steps since the last record."""

    def __init__(self, steps: int):
        self.steps = steps
        self._reset()

    def _reset(self) -> None:
        self.logits, self.labels = [], []
        self.started = time.perf_counter()

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.logits.append(logits)
        self.labels.append(labels)

    def is_full(self) -> bool:
        return len(self.logits) == self.steps

    def close(self) -> dict:
        logits, labels = torch.cat(self.logits), torch.cat(self.labels)
        record = {
            "loss": binary_cross_entropy_with_logits(logits, labels).item(),
            "auc": report.auc(labels.numpy(), logits.numpy()),
            "examples": len(labels),
            "examples_per_second": len(labels) / (time.perf_counter() - self.started),
        }
        self._reset()
        return record
