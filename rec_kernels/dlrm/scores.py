"""The figures of a run: its predictions and their quality, and what a training collects between two records."""

from __future__ import annotations

import time

import numpy as np
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits

from rec_kernels.dlrm import devices
from rec_kernels.dlrm.data import ahead
from rec_kernels.dlrm.model import DLRM
from rec_kernels.dlrm.ranks import ALONE, Ranks
from rec_kernels.dlrm.reader import Reader
from rec_kernels.dlrm.runs import PARTS, NotFiniteError

TEST_BATCH_SIZE = 8192


def auc(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Area under the ROC curve of logits [N] against labels [N], 0 or 1; None where only one class is present."""
    return float(roc_auc_score(labels, logits)) if labels.any() and not labels.all() else None


def score(labels: np.ndarray, logits: np.ndarray) -> dict:
    """Scores of logits [N] against labels [N], 0 or 1.

    Returns:
        auc; log_loss in nats; normalized_entropy, the log loss divided by the entropy of the base rate of
        ``labels`` (1 is a constant prediction); calibration, the mean prediction over the base rate (1 is
        unbiased); accuracy at probability 0.5; base_rate; examples. With labels of one class only, auc and
        normalized_entropy are None, and so is calibration without a positive label.
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
        NotFiniteError: a logit is not finite. DataError: a batch is wrong. IndexError: an id is out of range.
    """
    try:
        labels, logits = _predict(model, data, split, TEST_BATCH_SIZE if split == "test" else data.batch_size)
    except MemoryError:  # of tables on disk; in batches as those of the training they fit
        labels, logits = _predict(model, data, split, data.batch_size)
    model.own_tables.check()
    label, logit = data.ranks.joined(labels), data.ranks.joined(logits)
    if not logit.isfinite().all():
        row = int((~logit.isfinite()).nonzero()[0])
        raise NotFiniteError(f"the prediction of row {row} of split {split!r} is {logit[row]}, must be finite")
    return label.numpy(), logit.numpy()


def _predict(model: DLRM, data: Reader, split: str, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    labels, logits = [], []
    with torch.no_grad():
        for batch in ahead(devices.moved(data.batches(split, size), model.device)):
            labels.append(batch.label)
            logits.append(model(batch))
    return labels, logits


class Clock:
    """Adds the time since the last lap to a part of the step."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.last = seconds, time.perf_counter()

    def lap(self, part: str) -> None:
        """``part`` is one of ``PARTS``."""
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


class Window:
    """Logits, labels and times of the steps since the last record.

    With several processes, ``state`` and ``record`` are collectives, which bring the logits of all together.
    """

    def __init__(self, state: dict | None = None, ranks: Ranks = ALONE):
        self.steps, self._ranks = state["steps"] if state else 0, ranks
        own = slice(None if ranks.rank == 0 else 0)  # what was stopped has the rows of all processes
        self.logits, self.labels = ([state["logits"][own]], [state["labels"][own]]) if self.steps else ([], [])
        self.seconds = dict(state["seconds"]) if state else dict.fromkeys(PARTS, 0.0)
        self._started = time.perf_counter() - sum(self.seconds.values())

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Those of a batch, float32 [B] each, which stay where the model is: a copy waits for all asked of a GPU."""
        self.logits.append(logits)
        self.labels.append(labels)

    def state(self) -> dict:
        """State for a checkpoint, from which a new window is made."""
        state = {"steps": self.steps, "seconds": self._all_seconds()}
        if self.steps:
            state |= {"logits": self._ranks.joined(self.logits), "labels": self._ranks.joined(self.labels)}
        return state

    def record(self) -> dict:
        """Loss, AUC, sizes, and seconds of each of ``PARTS``."""
        logits, labels, seconds = *map(self._ranks.joined, (self.logits, self.labels)), self._all_seconds()
        return {
            "steps": self.steps,
            "loss": binary_cross_entropy_with_logits(logits, labels).item(),
            "auc": auc(labels.numpy(), logits.numpy()),
            "examples": len(labels),
            "examples_per_second": len(labels) / (sum(seconds.values()) - seconds["evaluation"]),
            "seconds": seconds,
        }

    def _all_seconds(self) -> dict[str, float]:
        """Those of every part, "other" being what no part accounts for."""
        known = {part: seconds for part, seconds in self.seconds.items() if part != "other"}
        return known | {"other": time.perf_counter() - self._started - sum(known.values())}
