"""A training step with a row cache compared with float32 and int8 tables without one, and with FBGEMM's float32 step.

In "hot" workloads every row is in the cache, and a few batches are trained again and again. In "zipf" ones every step
has ids that were not seen before: some rows are in no slot, come in, and others leave. FBGEMM's CPU kernels have no
cache. Bytes are those of a step on float32 tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import rec_kernels as rk
from bench import peers
from bench.cases import Case
from bench.shapes import BATCHES, Workload
from bench.subject import Subject
from bench.timing import Call

FRACTION = 0.05
CACHES = {"ours": "lfu", "ours lru": "lru"}
WORKLOADS = [
    Workload("d64-hot", 8, 2048, 1_000_000, 64, 8, hot=0.02),
    Workload("d64-zipf", 8, 2048, 1_000_000, 64, 8, zipf=1.15),
    Workload("d128-hot", 8, 512, 400_000, 128, 20, hot=0.02),
]
WARM_UP = 60  # steps
FRESH = 240  # batches of "zipf" workloads before they repeat


class Steps(Subject):
    """One workload; a call trains on the next batch."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        is_new = workload.zipf is not None
        self.fresh = [workload.ids(BATCHES + seed) for seed in range(FRESH)] if is_new else self.batches

    def call(self, direction: str, name: str) -> Call:
        tables = self.built(name)
        batches = itertools.islice(itertools.cycle(self.fresh), WARM_UP, None)
        return lambda _: tables.train(next(batches), self.grad)

    def make(self, name: str):
        if name == "fbgemm":
            return peers.Fbgemm(self.workload)
        if name not in CACHES:
            return peers.Ours(self.workload, name.split()[1])
        tables = peers.Ours(self.workload, "int8", cache=rk.RowCache(FRACTION, policy=CACHES[name]))
        for ids in itertools.islice(itertools.cycle(self.fresh), WARM_UP):
            tables.train(ids, self.grad)
        tables.module.row_cache.stats.zero_()
        return tables

    def note(self, direction: str, name: str, row_bytes: int | None = None) -> dict[str, object]:
        """Hit rate over the batches trained since the warm-up."""
        if name not in CACHES:
            return {}
        lookups, hits = self.built(name).module.row_cache.stats.sum(0)[:2].tolist()
        return {"hit_rate": hits / lookups}


def cases() -> Iterator[Case]:
    """Yields the cases: forward, backward and update."""
    names = [*CACHES, "ours fp32", "ours int8", *["fbgemm"] * ("fbgemm" in peers.available())]
    for workload in WORKLOADS:
        yield from Steps(workload).cases(names, ["train"])
