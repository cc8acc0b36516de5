"""jagged_overlaps on histories of users, and the time that reading the ids takes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import rec_kernels  # noqa: F401 -- registers the ops
from bench.timing import time_calls

#: Inputs that the calls take in turn.
INPUTS = 6
IMPLEMENTATIONS = ["ours", "read"]
SAMPLES, LENGTH = 6, 50  # of a user: windows of so many ids

ops = torch.ops.rec_kernels


@dataclass(frozen=True)
class Histories:
    """Windows of users in turns, each ``step`` ids further than the one before it."""

    users: int
    step: int

    @property
    def name(self) -> str:
        """Label in tables."""
        return f"{self.users * SAMPLES} x {LENGTH}, {self.step} new"

    def ids(self, seed: int) -> torch.Tensor:
        """[samples, LENGTH] int64."""
        generator = torch.Generator().manual_seed(seed)
        all_ids = torch.randint(100_000, (self.users, LENGTH + self.step * (SAMPLES - 1)), generator=generator)
        return all_ids.unfold(1, LENGTH, self.step).transpose(0, 1).reshape(-1, LENGTH)


HISTORIES = [Histories(users, step) for users in (40, 1200) for step in (1, 10, LENGTH)]


class Subject:
    """Histories, and who looks at them: functions of the number of an input."""

    def __init__(self, histories: Histories) -> None:
        self.name = histories.name
        self.values = [histories.ids(seed).flatten() for seed in range(INPUTS)]
        self.offsets = torch.arange(0, len(self.values[0]) + 1, LENGTH)

    def ours(self, i: int) -> object:
        """One call; on the calling thread, whatever their number."""
        return ops.jagged_overlaps(self.values[i], self.offsets)

    def read(self, i: int) -> object:
        """A limit: every id once."""
        return self.values[i].sum()


@pytest.fixture(scope="module", params=HISTORIES, ids=lambda h: h.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    """The histories under test."""
    return Subject(request.param)


def test_overlaps(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Bytes are those of the ids."""
    benchmark.group = f"jagged_overlaps {subject.name}"
    time_calls(benchmark, getattr(subject, name), INPUTS, rounds, subject.values[0].nbytes)
