"""Predictions and scores of a model, and the metrics that a training collects between two records."""

from __future__ import annotations

import time

import numpy as np
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits

from rec_kernels.dlrm import devices
from rec_kernels.dlrm.data import prefetch
from rec_kernels.dlrm.model import DLRM
from rec_kernels.dlrm.ranks import SINGLE_PROCESS, Ranks
from rec_kernels.dlrm.reader import Reader
from rec_kernels.dlrm.runs import PARTS, NotFiniteError

TEST_BATCH_SIZE = 8192


def auc(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Area under the ROC curve of logits [N] against labels [N], 0 or 1; None if only one class is present."""
    return float(roc_auc_score(labels, logits)) if labels.any() and not labels.all() else None


def score(labels: np.ndarray, logits: np.ndarray) -> dict:
    """Scores of logits [N] against labels [N], 0 or 1; docs/trainer.md defines them.

    With labels of one class only, auc and normalized_entropy are None, and so is calibration without positive labels.
    """
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    base_rate = float(labels.mean())
    loss = float(log_loss(labels, probabilities, labels=[0, 1]))
    both = 0 < base_rate < 1
    entropy = log_loss([0, 1], [base_rate, base_rate], sample_weight=[1 - base_rate, base_rate]) if both else None
    return {
        "auc": auc(labels, logits),
        "log_loss": loss,
        "normalized_entropy": loss / entropy if both else None,
        "calibration": float(probabilities.mean()) / base_rate if base_rate else None,
        "accuracy": float(((logits > 0) == (labels > 0)).mean()),
        "base_rate": base_rate,
        "examples": len(labels),
    }


def predict(model: DLRM, data: Reader, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Labels and logits of a split in its order, float32 [rows] each.

    Raises:
        NotFiniteError: a logit is not finite. DataError: a batch is invalid. IndexError: an id is out of range.
    """
    try:
        labels, logits = _predict(model, data, split, TEST_BATCH_SIZE if split == "test" else data.batch_size)
    except MemoryError:  # tables on disk: batches of the training's size fit the memory budget
        labels, logits = _predict(model, data, split, data.batch_size)
    model.local_tables.check()
    label, logit = data.ranks.gather_rows(labels), data.ranks.gather_rows(logits)
    if not logit.isfinite().all():
        row = int((~logit.isfinite()).nonzero()[0])
        raise NotFiniteError(f"the prediction of row {row} of split {split!r} is {logit[row]}, must be finite")
    return label.numpy(), logit.numpy()


def _predict(model: DLRM, data: Reader, split: str, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    labels, logits = [], []
    with torch.no_grad():
        for batch in prefetch(devices.to_device(data.batches(split, size), model.device)):
            labels.append(batch.label)
            logits.append(model(batch))
    return labels, logits


class Clock:
    """A stopwatch that adds the time since the last lap to a part of the step."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.last = seconds, time.perf_counter()

    def lap(self, part: str) -> None:
        """Adds the time since the last lap to ``part``, one of ``PARTS``."""
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


class Window:
    """Logits, labels and times of the steps since the last record; ``state`` and ``record`` are collectives."""

    def __init__(self, state: dict | None = None, ranks: Ranks = SINGLE_PROCESS):
        self.steps, self._ranks = state["steps"] if state else 0, ranks
        own = slice(None if ranks.rank == 0 else 0)  # the state has the rows of all ranks: rank 0 takes them
        self.logits, self.labels = ([state["logits"][own]], [state["labels"][own]]) if self.steps else ([], [])
        self.seconds = dict(state["seconds"]) if state else dict.fromkeys(PARTS, 0.0)
        self._started = time.perf_counter() - sum(self.seconds.values())

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds logits and labels of a batch, float32 [B]; they stay on their device, as a copy would synchronize."""
        self.logits.append(logits)
        self.labels.append(labels)

    def state(self) -> dict:
        """The state for a checkpoint, to be passed to ``__init__``."""
        state = {"steps": self.steps, "seconds": self._all_seconds()}
        if self.steps:
            state |= {"logits": self._ranks.gather_rows(self.logits), "labels": self._ranks.gather_rows(self.labels)}
        return state

    def record(self) -> dict:
        """The fields of a "train" record that the window has collected."""
        logits, labels, seconds = *map(self._ranks.gather_rows, (self.logits, self.labels)), self._all_seconds()
        return {
            "steps": self.steps,
            "loss": binary_cross_entropy_with_logits(logits, labels).item(),
            "auc": auc(labels.numpy(), logits.numpy()),
            "examples": len(labels),
            "examples_per_second": len(labels) / (sum(seconds.values()) - seconds["evaluation"]),
            "seconds": seconds,
        }

    def _all_seconds(self) -> dict[str, float]:
        """Seconds of every part; "other" is the remaining time."""
        known = {part: seconds for part, seconds in self.seconds.items() if part != "other"}
        return known | {"other": time.perf_counter() - self._started - sum(known.values())}
