"""expand beside torch's indexing and index_select, forward and with the gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import rec_kernels as rk
from bench.timing import time_calls, turned

#: Inputs that the calls take in turn.
INPUTS = 6
SESSION = 9.4  # samples of a distinct row


@dataclass(frozen=True)
class Rows:
    """M samples of M / 9.4 distinct rows of D columns; samples of a session are neighbours, or anywhere."""

    samples: int
    columns: int
    clustered: bool

    @property
    def name(self) -> str:
        """Label in tables."""
        return f"{self.samples} x {self.columns}, {'clustered' if self.clustered else 'shuffled'}"


ROWS = [Rows(b, d, clustered) for b in (2048, 65536) for d in (64, 128) for clustered in (True, False)]


class Subject:
    """Distinct rows, and who repeats them: functions of the number of an input."""

    def __init__(self, rows: Rows) -> None:
        distinct = int(rows.samples / SESSION)
        self.rows = rows
        self.x = [torch.randn(distinct, rows.columns, requires_grad=True) for _ in range(INPUTS)]
        inverse = torch.arange(rows.samples) * distinct // rows.samples
        order = torch.arange(rows.samples) if rows.clustered else torch.randperm(rows.samples)
        self.inverse = inverse[order]
        self.grad = torch.randn(rows.samples, rows.columns)

    def ours(self, i: int) -> Tensor:
        """One call."""
        return rk.expand(self.x[i], self.inverse)

    def indexing(self, i: int) -> Tensor:
        """torch's."""
        return self.x[i][self.inverse]

    def index_select(self, i: int) -> Tensor:
        """torch's."""
        return self.x[i].index_select(0, self.inverse)

    def copy(self, i: int) -> Tensor:
        """A limit: writing as many bytes, and reading as many."""
        return self.grad.clone()

    def train(self, name: str, i: int) -> None:
        """Forward and gradient."""
        torch.autograd.grad(getattr(self, name)(i), self.x[i], self.grad)


@pytest.fixture(scope="module", params=ROWS, ids=lambda r: r.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    """The rows under test."""
    return Subject(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The implementations take turns at who goes first."""
    names = ["ours", "indexing", "index_select", *["copy"] * (metafunc.function is test_forward)]
    metafunc.parametrize("name", turned(names, metafunc.config))


def test_forward(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Under no_grad. Bytes: what is written, and read for it."""
    benchmark.group = f"expand {subject.rows.name}"
    with torch.no_grad():
        time_calls(benchmark, getattr(subject, name), INPUTS, rounds, 8 * subject.grad.numel())


def test_train(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Forward and gradient, which reads as many bytes again."""
    benchmark.group = f"expand, trained, {subject.rows.name}"
    function = functools.partial(subject.train, name)
    time_calls(benchmark, function, INPUTS, rounds, 12 * subject.grad.numel())
