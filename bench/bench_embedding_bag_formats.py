"""embedding_bag over every bag format, forward and a training step with stochastic rounding.

Beside it in the same turn: our own float32; FBGEMM's lookup of the same rows (forward of fp16, int8, int4); its step
(fp16 rows beside ours of fp16, the only ones of these that its CPU kernels train, else float32); and the limit: a bare
loop that touches every cache line of the same rows and writes the outputs (a step: and rewrites the touched rows),
without looking at what is in them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rec_kernels as rk
from bench import peers
from bench.limits import limits
from bench.shapes import BATCHES, Shape
from bench.subject import Subject, subject_fixture
from bench.timing import time_calls, turned

FORMATS = ("bf16", "fp16", "int8", "int4", "mx9", "mx6", "mx4")
HAS_FBGEMM = "fbgemm" in peers.available()


def implementations(direction: str, format: str) -> list[str]:
    """Names of the implementations to time."""
    fbgemm = HAS_FBGEMM and (direction == "train" or format in peers.FbgemmInference.FORMATS)
    return ["ours", "ours fp32", *["fbgemm"] * fbgemm, "limit"]


class Formats(Subject):
    """One workload; tables of one format at a time beside those in float32."""

    def __init__(self, workload: Shape) -> None:
        super().__init__(workload)
        self.runs = workload.runs(torch.empty(workload.batch, workload.tables * workload.dim))

    def _tables(self, kind: str, format: str) -> object:
        if (kind, format) not in self._built:
            self.drop(keep=lambda key: key[1] in (format, "fp32"))
            self._built[kind, format] = self._build(kind, format)
        return self._built[kind, format]

    def _build(self, kind: str, format: str) -> object:
        if kind == "fbgemm training":
            return peers.Fbgemm(self.workload, format)
        if kind == "ours":
            return peers.Ours(self.workload, format)
        ours = self._tables("ours", format)
        theirs = peers.FbgemmInference(self.workload, format, ours)
        with torch.no_grad():
            # FBGEMM rounds the scale and bias of int8 rows to float16.
            torch.testing.assert_close(
                theirs.forward(self.batches[0]), ours.forward(self.batches[0]), rtol=1e-3, atol=1e-3
            )
        return theirs

    def _rows(self, format: str) -> Tensor:
        weights = self._tables("ours", format).module._weights.detach()
        return weights.view(torch.uint8).view(-1, rk.row_bytes(format, self.workload.dim))

    @staticmethod
    def read_format(direction: str, format: str, name: str) -> str:
        """Format of an implementation's rows where ours are of ``format``."""
        untrained = name == "fbgemm" and direction == "train" and format not in peers.FBGEMM_FORMATS
        return "fp32" if name == "ours fp32" or untrained else format

    def call(self, direction: str, format: str, name: str) -> Callable[[int], object]:
        """A function of a batch number."""
        if name == "limit":
            return self._limit(direction, self._rows(format))
        kind = "fbgemm training" if (name, direction) == ("fbgemm", "train") else name.split()[0]
        tables = self._tables(kind, self.read_format(direction, format, name))
        if direction == "forward":
            return lambda i: tables.forward(self.batches[i])
        return lambda i: tables.train(self.batches[i], self.grad)

    def _limit(self, direction: str, rows: Tensor) -> Callable[[int], object]:
        dim = self.workload.dim
        pieces = [[(of[ids], bag, dim, columns) for bag, ids, columns in self.runs] for of in self.linear]

        def least(i: int) -> None:
            for piece in pieces[i]:
                limits().touch(rows, *piece)
            if direction == "train":
                limits().rewrite(rows, self.unique[i])

        return least


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The implementations take turns at who goes first."""
    cases = [
        (format, direction, name)
        for format in FORMATS
        for direction in ("forward", "train")
        for name in turned(implementations(direction, format), metafunc.config)
    ]
    metafunc.parametrize(("format", "direction", "name"), cases)


subject = subject_fixture(Formats, named=True)


def test_formats(benchmark, subject: Formats, format: str, direction: str, name: str, rounds: int) -> None:
    """Bytes: of a call with rows of the format that the implementation has (``bench/shapes.py``)."""
    benchmark.group = f"{direction} {format} {subject.workload.name}"
    function = subject.call(direction, format, name)
    width = rk.row_bytes(subject.read_format(direction, format, name), subject.workload.dim)
    with torch.set_grad_enabled(direction == "train"):
        time_calls(benchmark, function, BATCHES, rounds, subject.moved(direction, width))
    subject.note(benchmark, direction, name, width)
