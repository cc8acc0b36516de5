"""jagged_index_select beside FBGEMM's, and the time that reading and writing as many bytes takes."""

from __future__ import annotations

import functools

import pytest
import torch

from bench.peers import fbgemm_ops
from bench.timing import time_calls, turned

#: Inputs that the calls take in turn.
INPUTS = 6
ROWS, CHOSEN, MOST = 2048, 4096, 10
COLUMNS = (1, 16, 64, 128)

ops = torch.ops.rec_kernels


class Subject:
    """Rows of 0 to 9 values of D columns, some of which are chosen: functions of the number of an input."""

    def __init__(self, columns: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(MOST, (ROWS,), generator=generator)
        self.offsets = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        total = int(self.offsets[-1])
        self.values = [torch.randn(total, columns, requires_grad=True) for _ in range(INPUTS)]
        self.index = [torch.randint(ROWS, (CHOSEN,), generator=generator) for _ in range(INPUTS)]
        self.grads = [torch.randn(int(self.lengths[i].sum()), columns) for i in self.index]
        self.columns = columns

    @property
    def bytes(self) -> int:
        """Written, and read once for each."""
        return 8 * self.grads[0].numel()

    def ours(self, i: int) -> torch.Tensor:
        """One call."""
        return ops.jagged_index_select(self.values[i], self.offsets, self.index[i])[0]

    def fbgemm(self, i: int) -> torch.Tensor:
        """One call."""
        return torch.ops.fbgemm.jagged_index_select(self.values[i], self.lengths, self.index[i])[0]

    def copy(self, i: int) -> torch.Tensor:
        """A limit: a copy of as many bytes that lie in a row."""
        return self.grads[i].clone()

    def train(self, name: str, i: int) -> None:
        """Forward and gradient."""
        torch.autograd.grad(getattr(self, name)(i), self.values[i], self.grads[i])


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda d: f"D={d}")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The rows under test."""
    return Subject(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The implementations take turns at who goes first."""
    names = ["ours", *["fbgemm"] * (fbgemm_ops() is not None)]
    names += ["copy"] * (metafunc.function is test_forward)
    metafunc.parametrize("name", turned(names, metafunc.config))


def test_forward(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Under no_grad."""
    benchmark.group = f"jagged_index_select {CHOSEN} of {ROWS}, D={subject.columns}"
    with torch.no_grad():
        time_calls(benchmark, getattr(subject, name), INPUTS, rounds, subject.bytes)


def test_train(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Forward and gradient."""
    benchmark.group = f"jagged_index_select, trained, {CHOSEN} of {ROWS}, D={subject.columns}"
    time_calls(benchmark, functools.partial(subject.train, name), INPUTS, rounds, 2 * subject.bytes)
