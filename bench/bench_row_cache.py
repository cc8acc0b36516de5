"""A training step with a row cache beside float32 and int8 tables without one, and FBGEMM's float32 step.

In "hot" workloads every row is in the cache, and a few batches are trained again and again. In "zipf" ones every step
has ids that were not seen before: some rows are in no slot, come in, and others leave. FBGEMM's CPU kernels have no
cache. Bytes are those of a step on float32 tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from torch import Tensor

import rec_kernels as rk
from bench import peers
from bench.shapes import BATCHES, Workload
from bench.subject import Subject, subject_fixture
from bench.timing import time_calls

FRACTION = 0.05
CACHES = {"ours": "lfu", "ours lru": "lru"}
WORKLOADS = [
    Workload("d64-hot", 8, 2048, 1_000_000, 64, 8, hot=0.02),
    Workload("d64-zipf", 8, 2048, 1_000_000, 64, 8, zipf=1.15),
    Workload("d128-hot", 8, 512, 400_000, 128, 20, hot=0.02),
]
WARM_UP = 60  # steps
FRESH = 240  # batches of "zipf" workloads, before the first of them is seen again
IMPLEMENTATIONS = [*CACHES, "ours fp32", "ours int8", *["fbgemm"] * ("fbgemm" in peers.available())]


class Steps(Subject):
    """One workload; tables are built when they are first trained."""

    @functools.cached_property
    def fresh(self) -> list[Tensor]:
        """Batches, by turns."""
        if "zipf" not in self.workload.name:
            return self.batches
        return [self.workload.ids(seed) for seed in range(BATCHES, BATCHES + FRESH)]

    def train(self, name: str) -> Callable[[int], object]:
        """A function, of a number that does not matter, that trains on the next batch."""
        if name not in self._built:
            self._built[name] = self._build(name)
        tables = self._built[name]
        batches = itertools.islice(itertools.cycle(self.fresh), WARM_UP, None)
        return lambda _: tables.train(next(batches), self.grad)

    def _build(self, name: str) -> object:
        if name == "fbgemm":
            return peers.Fbgemm(self.workload)
        if name not in CACHES:
            return peers.Ours(self.workload, name.split()[1])
        tables = peers.Ours(self.workload, "int8", cache=rk.RowCache(FRACTION, policy=CACHES[name]))
        for ids in itertools.islice(itertools.cycle(self.fresh), WARM_UP):
            tables.train(ids, self.grad)
        tables.module.row_cache.stats.zero_()
        return tables

    def hit_rate(self, name: str) -> float | None:
        """Hit rate over the batches trained since the warm-up."""
        if name not in CACHES:
            return None
        lookups, hits = self._built[name].module.row_cache.stats.sum(0)[:2].tolist()
        return hits / lookups


subject = subject_fixture(Steps, WORKLOADS)


def test_step(benchmark, subject: Steps, name: str, rounds: int) -> None:
    """Forward, backward and update. Bytes: of a step on float32 tables (``bench/shapes.py``)."""
    benchmark.group = f"train {subject.workload.name}"
    time_calls(benchmark, subject.train(name), BATCHES, rounds, subject.moved("train"))
    benchmark.extra_info["hit_rate"] = subject.hit_rate(name)
