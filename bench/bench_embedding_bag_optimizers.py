"""A training step of embedding_bag with each fused optimizer, rows of float32 and of int8.

Beside it in the same turn: torch with sparse gradients and its own optimizer where it has one for them (Adagrad, Adam),
FBGEMM where its CPU kernels have the optimizer (row-wise Adagrad, Adagrad), and our row-wise Adagrad.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import rec_kernels as rk
from bench import peers
from bench.shapes import BATCHES, Workload
from bench.subject import Subject, subject_fixture
from bench.timing import time_calls, turned

HAS_FBGEMM = "fbgemm" in peers.available()
CASES = [(optimizer, format) for optimizer in peers.OPTIMIZERS for format in ("fp32", "int8")]


def implementations(optimizer: str, format: str) -> list[str]:
    """Names of the implementations to time."""
    plain = ["ours rowwise_adagrad"] if optimizer != "rowwise_adagrad" else []
    others = {"torch": peers.TORCH_OPTIMIZERS, "fbgemm": peers.FBGEMM_OPTIMIZERS if HAS_FBGEMM else {}}
    return ["ours", *plain, *(name for name, has in others.items() if optimizer in has and format == "fp32")]


def optimizer_of(name: str, optimizer: str) -> str:
    """An implementation's optimizer: its case's, or row-wise Adagrad for the entry beside it."""
    return "rowwise_adagrad" if name.endswith("rowwise_adagrad") else optimizer


def state_bytes(w: Workload, optimizer: str) -> int:
    """Bytes of a row's state."""
    return sum(4 * w.dim if each else 4 for each in peers.OPTIMIZERS[optimizer]().state.values())


class Steps(Subject):
    """One workload; tables with one optimizer at a time."""

    _case: tuple[str, str] | None = None

    def train(self, optimizer: str, format: str, name: str) -> Callable[[int], object]:
        """A function of a batch number that trains on it."""
        if (optimizer, format) != self._case:
            # Adam's state alone is twice the tables.
            self.drop()
            self._case = optimizer, format
        if name not in self._built:
            self._built[name] = self._build(name, format, optimizer_of(name, optimizer))
        tables = self._built[name]
        return lambda i: tables.train(self.batches[i], self.grad)

    def _build(self, name: str, format: str, optimizer: str) -> object:
        if name == "torch":
            return peers.TorchTables(self.workload, optimizer)
        if name == "fbgemm":
            return peers.Fbgemm(self.workload, format, optimizer)
        return peers.Ours(self.workload, format, optimizer)

    def bytes_moved(self, optimizer: str, format: str) -> float:
        """Bytes that a step of ours moves."""
        w, row = self.workload, rk.row_bytes(format, self.workload.dim)
        return w.forward_bytes(row) + w.backward_bytes(self.unique_rows(), row, state_bytes(w, optimizer))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The implementations take turns at who goes first."""
    cases = [(*case, name) for case in CASES for name in turned(implementations(*case), metafunc.config)]
    metafunc.parametrize(("optimizer", "format", "name"), cases)


subject = subject_fixture(Steps)


def test_step(benchmark, subject: Steps, optimizer: str, format: str, name: str, rounds: int) -> None:
    """Forward, backward and update. Bytes: of a step of ours with that optimizer (``bench/shapes.py``)."""
    benchmark.group = f"train {optimizer} {format} {subject.workload.name}"
    rounds = rounds if name != "torch" else max(rounds // 3, 3)
    function = subject.train(optimizer, format, name)
    time_calls(benchmark, function, BATCHES, rounds, subject.bytes_moved(optimizer_of(name, optimizer), format))
