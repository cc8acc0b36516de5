"""A workload under test: its batches, and the implementations that have been built for it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from bench.shapes import BATCHES, WORKLOADS, Shape
from bench.workloads import NAMED


class Subject:
    """A workload and its batches. Benchmarks derive from it and build what they time when it is first asked for."""

    def __init__(self, workload: Shape, batches: int = BATCHES) -> None:
        self.workload = workload
        self.batches = [workload.ids(seed) for seed in range(batches)]
        self.grad = torch.randn(workload.batch, workload.tables * workload.dim)
        self._built: dict[object, object] = {}

    @functools.cached_property
    def linear(self) -> list[torch.Tensor]:
        """Rows of each batch, numbered over consecutive tables."""
        return [self.workload.linear(ids) for ids in self.batches]

    @functools.cached_property
    def unique(self) -> list[torch.Tensor]:
        """Distinct rows of each batch, sorted."""
        return [rows.unique() for rows in self.linear]

    def unique_rows(self) -> float:
        """Distinct rows of a batch, on average."""
        return sum(len(rows) for rows in self.unique) / len(self.unique)

    @functools.cached_property
    def cycle_rows(self) -> int:
        """Distinct rows of all batches together."""
        return len(torch.cat(self.unique).unique())

    def moved(self, direction: str, row_bytes: int | None = None, distinct: bool = False) -> float:
        """Bytes of a call, "forward" or "train" with row-wise Adagrad; ``distinct``: no row is counted twice."""
        w, unique = self.workload, self.unique_rows()
        moved = w.forward_bytes(row_bytes, unique if distinct else None)
        if direction == "forward":
            return moved
        return moved + w.backward_bytes(unique, row_bytes, gradient_rows=w.tables * w.batch if distinct else None)

    def features(self, row_bytes: int | None = None) -> dict[str, float]:
        """Sizes of a call, which the cost model predicts from (``Load`` of bench/tuning/model.py).

        Args:
            row_bytes: a float32 row's by default.
        """
        w = self.workload
        sizes = {"ids": w.num_ids, "bags": w.tables * w.batch, "tables": w.tables, "dim": w.dim}
        rows = {"unique_rows": self.unique_rows(), "cycle_rows": self.cycle_rows}
        return sizes | {"row_bytes": row_bytes or 4 * w.dim} | rows

    def note(self, benchmark, direction: str, name: str, row_bytes: int | None = None) -> None:
        """Has the JSON file say of a call what is not its time: distinct bytes; of ours the features, too."""
        benchmark.extra_info["distinct_bytes"] = self.moved(direction, row_bytes, distinct=True)
        if name == "ours":
            benchmark.extra_info["features"] = {"direction": direction} | self.features(row_bytes)

    def drop(self, keep: Callable[[object], bool] = lambda _: False) -> None:
        """Gives back the memory of what was built under keys that ``keep`` does not want."""
        for key in [key for key in self._built if not keep(key)]:
            del self._built[key]
        gc.collect()


def subject_fixture(make: type[Subject], workloads: Sequence[Shape] = WORKLOADS, named: bool = False) -> Callable:
    """The fixture ``subject``: one for every workload; with ``named``, the named ones, too, for --workload."""

    @pytest.fixture(scope="module", params=[*workloads, *(NAMED.values() if named else ())], ids=lambda w: w.name)
    def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
        """The workload under test."""
        subject = make(request.param)
        yield subject
        subject.drop()

    return subject
