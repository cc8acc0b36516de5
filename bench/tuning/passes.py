"""Passes over the points, and the document of their results."""

from __future__ import annotations

import statistics
import time

import torch

from bench.subject import Subject
from bench.tuning import measure
from bench.tuning.measure import DIRECTIONS, Effort
from bench.tuning.points import Point, moved


class Run:
    """Passes over the points, and their results so far."""

    def __init__(self, todo: list[Point], effort: Effort, tables: measure.Tables) -> None:
        self._todo, self._effort, self._tables = todo, effort, tables
        # Distinct rows: of a batch, on average, and of all batches together.
        self._unique: list[float] = [0.0] * len(todo)
        self._cycle: list[int] = [0] * len(todo)
        self._batches: list[int] = [0] * len(todo)
        # Seconds of each pass's calls, by point, direction and implementation.
        self._calls = [{d: {} for d in DIRECTIONS} for _ in todo]
        self._rates: dict[str, list[float]] = {}
        self._codecs: dict[str, dict[str, list[float]]] = {"decode": {}, "encode": {}}
        self.passes = 0

    def one_pass(self) -> None:
        """Measures every point once; the implementation that goes first differs from the previous pass's."""
        for i, point in enumerate(self._todo):
            self._batches[i] = self._batches[i] or measure.batches_of(point)
            subject, built = Subject(point.workload, self._batches[i]), self._tables.at(point)
            if not self.passes:
                self._unique[i], self._cycle[i] = subject.unique_rows(), subject.cycle_rows
            if point.sweep == "base":
                for name, found in measure.measure_rates(point, built["ours"], self._effort).items():
                    self._rates.setdefault(name, []).append(statistics.median(found))
            found = measure.measure_point(subject, built, self._effort, first=self.passes)
            for direction, times in found.items():
                for name, seconds in times.items():
                    self._calls[i][direction].setdefault(name, []).append(seconds)
        formats = sorted({p.format for p in self._todo} - {"fp32"})
        for name, of_formats in measure.measure_codecs(formats, self._todo[0].workload.dim, self._effort).items():
            for format, ns in of_formats.items():
                self._codecs[name].setdefault(format, []).append(statistics.median(ns))
        self.passes += 1

    def found(self) -> dict[str, object]:
        """ "rates" and "points" of the document (model.py)."""
        rates: dict[str, object] = {name: statistics.median(of_pass) for name, of_pass in self._rates.items()}
        for name, of_formats in self._codecs.items():
            rates[name] = {format: statistics.median(of_pass) for format, of_pass in of_formats.items()}
        return {"rates": rates, "points": [self._row(i) for i in range(len(self._todo))]}

    def _row(self, i: int) -> dict[str, object]:
        point, unique = self._todo[i], self._unique[i]
        rows = {"unique_rows": unique, "cycle_rows": self._cycle[i]}
        row = point.about() | {"batches": self._batches[i], **rows, "bytes": moved(point, unique)}
        for direction, of_pass in self._calls[i].items():
            row[direction] = {name: _summary(seconds, of_pass["ours"]) for name, seconds in of_pass.items()}
        return row


def _summary(passes: list[list[float]], ours: list[list[float]]) -> dict[str, object]:
    """Medians of the passes' medians; ratios are taken within a pass, under equal conditions."""
    medians = [statistics.median(calls) for calls in passes]
    ratio = statistics.median(a / statistics.median(b) for a, b in zip(medians, ours, strict=True))
    return {
        "ms": statistics.median(medians) * 1e3,
        "passes_ms": [min(medians) * 1e3, max(medians) * 1e3],
        "min_ms": min(map(min, passes)) * 1e3,
        "over_ours": ratio,
    }


def measured(run: Run, passes: int, limit: float, about: dict[str, object]) -> dict[str, object]:
    """Makes the document of a run: machine, rates and points.

    Args:
        run: one that has not begun.
        passes: at most; none but the first is begun that would end later than ``limit`` seconds from now.
        about: the machine and the command.
    """
    start, longest = time.monotonic(), 0.0
    torch.manual_seed(0)
    while run.passes < passes and (not run.passes or time.monotonic() - start + longest < limit):
        begin = time.monotonic()
        run.one_pass()
        longest = max(longest, time.monotonic() - begin)
        print(f"pass {run.passes}: {longest:.0f} s", flush=True)
    return {"machine": about | {"passes": run.passes, "seconds": round(time.monotonic() - start)}, **run.found()}
