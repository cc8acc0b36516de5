"""Tables of quotients and remainders beside a plain table of as many bytes, hashing, the recipe in torch, and a limit.

The limit is a bare loop over the same rows (bench/step_limit.cpp). The plain table and the hashed one have as many rows
as the parts together; the plain one gets the ids modulo them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import rec_kernels as rk
from bench import peers
from bench.limits import ProductLimit
from bench.shapes import BATCHES
from bench.subject import Subject, subject_fixture
from bench.timing import time_calls

COLLISIONS = 4
IMPLEMENTATIONS = ["ours", "plain table", "hash", "torch", "limit"]


class Lookups(Subject):
    """One workload: each implementation built when first asked for."""

    @property
    def rows(self) -> int:
        """Rows of both parts of a table together."""
        return -(-self.workload.rows // COLLISIONS) + COLLISIONS

    def built(self, name: str):
        """The implementation called `name`."""
        if name not in self._built:
            w = self.workload
            make = {
                "ours": lambda: peers.Ours(w, compression=rk.QuotientRemainder(COLLISIONS)),
                "plain table": lambda: peers.Ours(replace(w, rows=self.rows)),
                "hash": lambda: peers.Ours(w, compression=rk.Hash(self.rows)),
                "torch": lambda: peers.TorchQuotientRemainder(w, COLLISIONS),
                "limit": self._limit,
            }
            self._built[name] = make[name]()
        return self._built[name]

    def _limit(self) -> ProductLimit:
        module = self.built("ours").module
        return ProductLimit(self.workload, COLLISIONS, module._weights, module._memory["_sum"], peers.LR, peers.EPS)

    def ids(self, name: str) -> list[torch.Tensor]:
        """The batches."""
        return [ids % self.rows for ids in self.batches] if name == "plain table" else self.batches

    def forward(self, name: str) -> Callable[[int], object]:
        """A function of a batch number that looks the batch up."""
        tables, batches = self.built(name), self.ids(name)
        if name == "limit":
            return lambda i: tables(batches[i], None)
        return lambda i: tables.forward(batches[i])

    def train(self, name: str) -> Callable[[int], object]:
        """A function of a batch number that trains on it."""
        tables, batches = self.built(name), self.ids(name)
        if name == "limit":
            return lambda i: tables(batches[i], self.grad)
        return lambda i: tables.train(batches[i], self.grad)


subject = subject_fixture(Lookups)


def test_forward(benchmark, subject: Lookups, name: str, rounds: int) -> None:
    """Pooled lookup under no_grad. Bytes: of a plain table, a row for each id."""
    benchmark.group = f"forward {subject.workload.name}"
    with torch.no_grad():
        time_calls(benchmark, subject.forward(name), BATCHES, rounds, subject.workload.forward_bytes())


def test_train(benchmark, subject: Lookups, name: str, rounds: int) -> None:
    """Forward, backward and update: row-wise Adagrad, of torch the element-wise one."""
    benchmark.group = f"train {subject.workload.name}"
    rounds = rounds if name != "torch" else max(rounds // 3, 3)
    time_calls(benchmark, subject.train(name), BATCHES, rounds, subject.moved("train"))
