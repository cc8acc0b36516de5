"""Quotient-remainder tables compared with a plain table of equal bytes, hashing, the recipe in torch, and a limit.

The limit is a bare loop over the same rows (bench/step_limit.cpp). The plain table and the hashed one have as many rows
as the parts together; the plain one gets the ids modulo them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import rec_kernels as rk
from bench import peers
from bench.cases import Case
from bench.limits import ProductLimit
from bench.shapes import WORKLOADS
from bench.subject import Subject
from bench.timing import Call

COLLISIONS = 4


class Lookups(Subject):
    """One workload in every implementation."""

    @property
    def rows(self) -> int:
        """Number of rows of both parts of a table."""
        return -(-self.workload.rows // COLLISIONS) + COLLISIONS

    def make(self, name: str):
        w = self.workload
        if name == "plain table":
            return peers.Ours(replace(w, rows=self.rows))
        if name == "torch":
            return peers.TorchQuotientRemainder(w, COLLISIONS)
        if name == "limit":
            module = self.built("ours").module
            return ProductLimit(w, COLLISIONS, module._weights, module._memory["_sum"], peers.LR, peers.EPS)
        return peers.Ours(w, compression={"ours": rk.QuotientRemainder(COLLISIONS), "hash": rk.Hash(self.rows)}[name])

    def call(self, direction: str, name: str) -> Call:
        batches = [ids % self.rows for ids in self.batches] if name == "plain table" else self.batches
        return self.calls(direction, self.built(name), batches)

    def note(self, direction: str, name: str, row_bytes: int | None = None) -> dict[str, object]:
        """Adds nothing: the sizes are those of plain tables."""
        return {}


def cases() -> Iterator[Case]:
    """Yields the cases. Bytes are those of a plain table, one row per id."""
    for workload in WORKLOADS:
        yield from Lookups(workload).cases(["ours", "plain table", "hash", "torch", "limit"])
