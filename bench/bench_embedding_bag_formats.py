"""embedding_bag over every bag format, forward and a training step with stochastic rounding.

Beside it in the same turn: our own float32; FBGEMM's lookup of the same rows (forward of fp16, int8, int4); its step
(fp16 rows beside ours of fp16, the only ones of these that its CPU kernels train, else float32); and the limit: a bare
loop that touches every cache line of the same rows and writes the outputs (a step: and rewrites the touched rows),
without looking at what is in them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

import rec_kernels as rk
from bench import peers
from bench.cases import Case
from bench.limits import limits
from bench.shapes import WORKLOADS, Shape
from bench.subject import DIRECTIONS, Subject
from bench.timing import Call

FORMATS = ("bf16", "fp16", "int8", "int4", "mx9", "mx6", "mx4")
HAS_FBGEMM = "fbgemm" in peers.available()


def implementations(direction: str, format: str) -> list[str]:
    """Names of the implementations to time."""
    fbgemm = HAS_FBGEMM and (direction == "train" or format in peers.FbgemmInference.FORMATS)
    return ["ours", "ours fp32", *["fbgemm"] * fbgemm, "limit"]


class Formats(Subject):
    """One workload, with tables of one format at a time and those in float32, built under keys (kind, format)."""

    format = ""

    def in_format(self, format: str) -> Formats:
        """Returns itself, with our tables in this format; drops those of other formats, except float32."""
        if format != self.format:
            self.format = format
            self.drop(keep=lambda key: key[1] in (format, "fp32"))
        return self

    def of(self, kind: str, format: str):
        """Returns the tables of a kind ("ours", "fbgemm", "fbgemm training") and a format."""
        if (kind, format) not in self._built:
            self._built[kind, format] = self._make(kind, format)
        return self._built[kind, format]

    def _make(self, kind: str, format: str):
        if kind != "fbgemm":
            return (peers.Ours if kind == "ours" else peers.Fbgemm)(self.workload, format)
        ours = self.of("ours", format)
        theirs, first = peers.FbgemmInference(self.workload, format, ours), self.batches[0]
        # FBGEMM rounds the scale and bias of int8 rows to float16.
        torch.testing.assert_close(theirs.forward(first), ours.forward(first), rtol=1e-3, atol=1e-3)
        return theirs

    def format_of(self, direction: str, name: str) -> str:
        """Format of an implementation's rows."""
        untrained = name == "fbgemm" and direction == "train" and self.format not in peers.FBGEMM_FORMATS
        return "fp32" if name == "ours fp32" or untrained else self.format

    def width(self, direction: str, name: str) -> int:
        """Bytes of an implementation's row."""
        return rk.row_bytes(self.format_of(direction, name), self.workload.dim)

    def call(self, direction: str, name: str) -> Call:
        if name == "limit":
            return self._limit(direction)
        kind = "fbgemm training" if (name, direction) == ("fbgemm", "train") else name.split()[0]
        return self.calls(direction, self.of(kind, self.format_of(direction, name)), self.batches)

    def _limit(self, direction: str) -> Call:
        w, weights = self.workload, self.of("ours", self.format).module._weights.detach()
        width = rk.row_bytes(self.format, w.dim)
        # Ignores the gaps between tables, which are smaller than a cache line.
        rows = weights.view(torch.uint8).view(-1)[: sum(w.table_rows) * width].view(-1, width)
        runs = w.runs(torch.empty(w.batch, w.tables * w.dim))
        pieces = [[(of[ids], bag, w.dim, columns) for bag, ids, columns in runs] for of in self.linear]

        def least(i: int) -> None:
            for piece in pieces[i]:
                limits().touch(rows, *piece)
            if direction == "train":
                limits().rewrite(rows, self.unique[i])

        return least


def cases(workloads: Sequence[Shape] = WORKLOADS) -> Iterator[Case]:
    """Yields the cases. Bytes are those of a call with rows in the implementation's format (bench/shapes.py)."""
    for workload in workloads:
        subject = Formats(workload)
        for format, direction in itertools.product(FORMATS, DIRECTIONS):
            yield _case(subject, format, direction)


def _case(subject: Formats, format: str, direction: str) -> Case:
    (case,) = subject.cases(implementations(direction, format), [direction])

    def width(name: str) -> int:
        return subject.in_format(format).width(direction, name)

    return dataclasses.replace(
        case,
        title=f"{direction} {format} {subject.workload.name}",
        call=lambda name: subject.in_format(format).call(direction, name),
        moved=lambda name: subject.moved(direction, width(name)),
        note=lambda name: subject.note(direction, name, width(name)),
    )
