"""embedding_bag compared with torch, FBGEMM and the measured limit: lookups, and whole training steps.

torch trains with sparse gradients and element-wise Adagrad (it has no row-wise one), the others with the row-wise one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bench import peers
from bench.cases import Case
from bench.limits import DIMS, StepLimit, limits
from bench.shapes import WORKLOADS, Shape
from bench.subject import Subject
from bench.timing import Call


class Lookups(Subject):
    """One workload in every implementation."""

    def make(self, name: str):
        return peers.available()[name](self.workload)

    def call(self, direction: str, name: str) -> Call:
        if name != "limit":
            return super().call(direction, name)
        w, module = self.workload, self.built("ours").module
        runs = w.runs(torch.empty(w.batch, w.tables * w.dim))
        pieces = [[(rows[ids], bag, w.dim, columns) for bag, ids, columns in runs] for rows in self.linear]
        step = (
            StepLimit(w, module._weights, module._memory["_sum"], peers.LR, peers.EPS) if direction == "train" else None
        )

        def least(i: int) -> None:
            for piece in pieces[i]:
                limits().gather(module._weights, *piece)
            if step is not None:
                step(self.batches[i], self.grad)

        return least


def cases(workloads: Sequence[Shape] = WORKLOADS) -> Iterator[Case]:
    """Yields the cases; bench/shapes.py counts their bytes."""
    for workload in workloads:
        limit = ["limit"] * (workload.dim in DIMS)
        yield from Lookups(workload).cases([*peers.available(), *limit])
