"""jagged_windows beside torch's indexing and FBGEMM's copies of whole rows, and the time of copying as many bytes.

FBGEMM has no windows: its jagged_index_select copies the same rows from a tensor that has each of them whole.
"""

from __future__ import annotations

import functools

import pytest
import torch

from bench.peers import fbgemm_ops
from bench.timing import time_calls, turned

#: Inputs that the calls take in turn.
INPUTS = 6
USERS, SAMPLES, STEP, LONGEST = 100, 20, 3, 50  # windows of LONGEST values, each STEP further than the one before it
COLUMNS = (1, 16, 64)

ops = torch.ops.rec_kernels


class Subject:
    """Windows of D columns, those of a user one after the other: functions of the number of an input."""

    def __init__(self, columns: int) -> None:
        each = LONGEST + STEP * (SAMPLES - 1)
        self.starts = (each * torch.arange(USERS)[:, None] + STEP * torch.arange(SAMPLES)).flatten()
        self.lengths = torch.full_like(self.starts, LONGEST)
        self.values = [torch.randn(each * USERS, columns, requires_grad=True) for _ in range(INPUTS)]
        self.rows = [ops.jagged_windows(v.detach(), self.starts, self.lengths)[0] for v in self.values]
        for rows in self.rows:
            rows.requires_grad_()
        self.index = torch.arange(len(self.starts))
        self.grads = [torch.randn_like(rows) for rows in self.rows]
        self.columns = columns

    @property
    def bytes(self) -> int:
        """Written, and read once for each."""
        return 8 * self.grads[0].numel()

    def ours(self, i: int) -> torch.Tensor:
        """One call."""
        return ops.jagged_windows(self.values[i], self.starts, self.lengths)[0]

    def torch(self, i: int) -> torch.Tensor:
        """The place of every value, which is then indexed."""
        within = torch.arange(int(self.lengths.sum())) - (self.lengths.cumsum(0) - self.lengths).repeat_interleave(
            self.lengths
        )
        return self.values[i].index_select(0, self.starts.repeat_interleave(self.lengths) + within)

    def fbgemm(self, i: int) -> torch.Tensor:
        """One call, of rows that are stored whole."""
        return torch.ops.fbgemm.jagged_index_select(self.rows[i], self.lengths, self.index)[0]

    def copy(self, i: int) -> torch.Tensor:
        """A limit: a copy of as many bytes that lie in a row."""
        return self.grads[i].clone()

    def train(self, name: str, i: int) -> None:
        """Forward and gradient."""
        given = self.rows if name == "fbgemm" else self.values
        torch.autograd.grad(getattr(self, name)(i), given[i], self.grads[i])


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda d: f"D={d}")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The windows under test."""
    return Subject(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The implementations take turns at who goes first."""
    names = ["ours", "torch", *["fbgemm"] * (fbgemm_ops() is not None)]
    names += ["copy"] * (metafunc.function is test_forward)
    metafunc.parametrize("name", turned(names, metafunc.config))


def test_forward(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Under no_grad."""
    benchmark.group = f"jagged_windows {USERS * SAMPLES} of {LONGEST}, D={subject.columns}"
    with torch.no_grad():
        time_calls(benchmark, getattr(subject, name), INPUTS, rounds, subject.bytes)


def test_train(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Forward and gradient."""
    benchmark.group = f"jagged_windows, trained, {USERS * SAMPLES} of {LONGEST}, D={subject.columns}"
    time_calls(benchmark, functools.partial(subject.train, name), INPUTS, rounds, 2 * subject.bytes)
