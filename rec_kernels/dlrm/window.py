"""Collects a training run's figures between two records of its curves."""

from __future__ import annotations

import time

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rec_kernels.dlrm.ranks import ALONE, Ranks
from rec_kernels.dlrm.runs import PARTS
from rec_kernels.dlrm.scores import auc

AT_ONCE = 256  # batches


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
        self._recent: list[tuple[torch.Tensor, torch.Tensor]] = []  # where the model is
        self.seconds = dict(state["seconds"]) if state else dict.fromkeys(PARTS, 0.0)
        self._started = time.perf_counter() - sum(self.seconds.values())

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Those of a batch, float32 [B] each.

        They go to the CPU with those of other batches: on a GPU, each time waits for all that was asked of it before.
        """
        self._recent.append((logits, labels))
        if len(self._recent) == AT_ONCE:
            self._fetch()

    def _fetch(self) -> None:
        if self._recent:
            logits, labels = zip(*self._recent, strict=True)
            self.logits.append(torch.cat(logits).cpu())
            self.labels.append(torch.cat(labels).cpu())
            self._recent.clear()

    def state(self) -> dict:
        """State for a checkpoint, from which a new window is made."""
        state = {"steps": self.steps, "seconds": self._all_seconds()}
        if not self.steps:
            return state
        self._fetch()
        return state | {"logits": self._ranks.joined(self.logits), "labels": self._ranks.joined(self.labels)}

    def record(self) -> dict:
        """Loss, AUC, sizes, and seconds of each of ``PARTS``."""
        self._fetch()
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
