"""jagged_dedup beside torch.unique over rows, and the time that reading the ids takes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import rec_kernels  # noqa: F401 -- registers the ops
from bench.timing import time_calls

#: Inputs that the calls take in turn.
INPUTS = 6
IMPLEMENTATIONS = ["ours", "torch", "read"]
SESSION = 9.4  # samples that share a bag, as histories of Complete Journey's baskets do

ops = torch.ops.rec_kernels


@dataclass(frozen=True)
class Bags:
    """B bags of L ids; ``order``: samples of a session are neighbours, anywhere in the batch, or all differ."""

    batch: int
    length: int
    order: str

    @property
    def name(self) -> str:
        """Label in tables."""
        return f"{self.batch} x {self.length}, {self.order}"

    def ids(self, seed: int) -> Tensor:
        """[B, L] int64."""
        generator = torch.Generator().manual_seed(seed)
        distinct = self.batch if self.order == "distinct" else 1 + int((self.batch - 1) / SESSION)
        ids = torch.randint(100_000, (distinct, self.length), generator=generator)
        session = torch.arange(self.batch) * distinct // self.batch
        if self.order == "shuffled":
            session = session[torch.randperm(self.batch, generator=generator)]
        return ids[session]


BAGS = [Bags(b, 50, order) for b in (2043, 65536) for order in ("clustered", "shuffled", "distinct")]


class Subject:
    """The ids of some bags, and who tells them apart: functions of the number of an input."""

    def __init__(self, bags: Bags) -> None:
        self.bags, self.dense = bags, [bags.ids(seed) for seed in range(INPUTS)]
        self.values = [ids.view(-1) for ids in self.dense]
        self.offsets = torch.arange(bags.batch + 1) * bags.length

    def ours(self, i: int) -> object:
        """Jagged bags, compared id by id."""
        return ops.jagged_dedup(self.values[i], self.offsets, [0])

    def torch(self, i: int) -> object:
        """torch.unique, which needs bags of one length."""
        return torch.unique(self.dense[i], dim=0, return_inverse=True)

    def read(self, i: int) -> object:
        """A limit: every id once."""
        return self.values[i].sum()


@pytest.fixture(scope="module", params=BAGS, ids=lambda b: b.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    """The bags under test."""
    return Subject(request.param)


def test_dedup(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """One group of one feature; bytes are those of the ids."""
    benchmark.group = f"jagged_dedup {subject.bags.name}"
    time_calls(benchmark, getattr(subject, name), INPUTS, rounds, 8 * subject.values[0].numel())
