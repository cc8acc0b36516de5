"""A workload under test: its batches, and the implementations that have been built for it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from bench.shapes import BATCHES, WORKLOADS, Workload


class Subject:
    """A workload and its batches. Benchmarks derive from it and build what they time when it is first asked for."""

    def __init__(self, workload: Workload, batches: int = BATCHES) -> None:
        self.workload = workload
        self.batches = [workload.ids(seed) for seed in range(batches)]
        self.grad = torch.randn(workload.batch, workload.tables * workload.dim)
        self._built: dict[object, object] = {}

    @functools.cached_property
    def linear(self) -> list[torch.Tensor]:
        """Of each batch, its rows in tables that lie one after the other."""
        return [self.workload.linear(ids) for ids in self.batches]

    @functools.cached_property
    def unique(self) -> list[torch.Tensor]:
        """Of each batch, its distinct rows, sorted."""
        return [rows.unique() for rows in self.linear]

    def unique_rows(self) -> float:
        """Distinct rows of a batch, on average."""
        return sum(len(rows) for rows in self.unique) / len(self.unique)

    def drop(self, keep: Callable[[object], bool] = lambda _: False) -> None:
        """Gives back the memory of what was built under keys that ``keep`` does not want."""
        for key in [key for key in self._built if not keep(key)]:
            del self._built[key]
        gc.collect()


def subject_fixture(make: type[Subject], workloads: list[Workload] = WORKLOADS) -> Callable:
    """The fixture ``subject``: one for every workload."""

    @pytest.fixture(scope="module", params=workloads, ids=lambda w: w.name)
    def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
        """The workload under test."""
        subject = make(request.param)
        yield subject
        subject.drop()

    return subject
