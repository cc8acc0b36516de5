"""embedding_bag beside torch, FBGEMM and the measured limit: forward, a whole training step, and a tiny call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import rec_kernels as rk
from bench import peers
from bench.limits import StepLimit, limits
from bench.shapes import BATCHES
from bench.subject import Subject, subject_fixture
from bench.timing import time_calls, turned

IMPLEMENTATIONS = [*peers.available(), "limit"]


class Lookups(Subject):
    """One workload: each implementation built when first asked for."""

    def built(self, name: str):
        """The implementation called `name`."""
        if name not in self._built:
            self._built[name] = peers.available()[name](self.workload)
        return self._built[name]

    def forward(self, name: str) -> Callable[[int], object]:
        """A function of a batch number that looks the batch up."""
        if name != "limit":
            subject = self.built(name)
            return lambda i: subject.forward(self.batches[i])
        w, weights = self.workload, self.built("ours").module._weights
        runs = w.runs(torch.empty(w.batch, w.tables * w.dim))
        pieces = [[(rows[ids], bag, w.dim, columns) for bag, ids, columns in runs] for rows in self.linear]

        def gather(i: int) -> None:
            for piece in pieces[i]:
                limits().gather(weights, *piece)

        return gather

    def train(self, name: str) -> Callable[[int], object]:
        """A function of a batch number that looks it up, goes backward and updates the tables."""
        if name != "limit":
            subject = self.built(name)
            return lambda i: subject.train(self.batches[i], self.grad)
        gather, module = self.forward("limit"), self.built("ours").module
        step = StepLimit(self.workload, module._weights, module._memory["_sum"], peers.LR, peers.EPS)

        def least(i: int) -> None:
            gather(i)
            step(self.batches[i], self.grad)

        return least


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The implementations take turns at who goes first."""
    if "subject" in metafunc.fixturenames:
        metafunc.parametrize("name", turned(IMPLEMENTATIONS, metafunc.config))


subject = subject_fixture(Lookups, named=True)


def test_forward(benchmark, subject: Lookups, name: str, rounds: int) -> None:
    """Pooled lookup under no_grad."""
    benchmark.group = f"forward {subject.workload.name}"
    with torch.no_grad():
        time_calls(benchmark, subject.forward(name), BATCHES, rounds, subject.moved("forward"))
    subject.note(benchmark, "forward", name)


def test_train(benchmark, subject: Lookups, name: str, rounds: int) -> None:
    """Forward, backward and update. torch: sparse gradients and element-wise Adagrad (it has no row-wise one)."""
    benchmark.group = f"train {subject.workload.name}"
    rounds = rounds if name != "torch" else max(rounds // 3, 3)
    time_calls(benchmark, subject.train(name), BATCHES, rounds, subject.moved("train"))
    subject.note(benchmark, "train", name)


@pytest.mark.parametrize("name", ["ours", "torch"])
def test_tiny(benchmark, name: str) -> None:
    """Eight ids, four bags, D = 16, under no_grad: what a call costs by itself."""
    benchmark.group = "tiny call"
    weight, ids, offsets = torch.randn(1000, 16), torch.arange(8) * 7, torch.arange(0, 8, 2)
    function = rk.embedding_bag if name == "ours" else torch.nn.functional.embedding_bag
    with torch.no_grad():
        benchmark.pedantic(
            function, (ids, weight, offsets), {"mode": "sum"}, rounds=200, warmup_rounds=20, iterations=100
        )
