"""The command `python -m bench.tuning`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from bench.run import RESULTS, machine
from bench.subject import Subject
from bench.tuning import measure, model, pictures, report
from bench.tuning.measure import DIRECTIONS, FULL, QUICK, Effort
from bench.tuning.points import Point, moved, points

#: No pass is begun that would end later: seconds.
LIMIT = 700


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tuning",
        description="Measures how lookups and training steps of EmbeddingBagCollection grow with tables, batch, ids, "
        "columns, skew and row format, beside FBGEMM where it is installed, and fits the cost model of docs/tuning.md.",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="tiny tables and seconds: figures that mean nothing")
    parser.add_argument("--sweep", action="append", help="measure only the base and this sweep (repeatable)")
    parser.add_argument(
        "--passes", type=int, help="passes over all points; medians are over them (default 5, --quick: 1)"
    )
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/tuning-<threads>threads.json)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw forward and step into this folder")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="measure nothing: fit the JSON file again, and renew the page's part"
    )
    args = parser.parse_args()
    if args.quick and args.output is None:
        parser.error("--quick needs --output: its figures are no results")
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output = args.output or RESULTS / f"tuning-{torch.get_num_threads()}threads.json"
    return args


class Run:
    """Passes over the points, and what they have found so far."""

    def __init__(self, todo: list[Point], effort: Effort) -> None:
        self._todo, self._effort = todo, effort
        # Distinct rows: of a batch, on average, and of all batches together.
        self._unique: list[float] = [0.0] * len(todo)
        self._cycle: list[int] = [0] * len(todo)
        self._batches: list[int] = [0] * len(todo)
        # Seconds of each pass's calls, by point, direction and implementation.
        self._calls = [{d: {} for d in DIRECTIONS} for _ in todo]
        self._rates: dict[str, list[float]] = {}
        self._codecs: dict[str, dict[str, list[float]]] = {"decode": {}, "encode": {}}
        self._tables = measure.Tables()
        self.passes = 0

    def one_pass(self) -> None:
        """Measures every point once; another implementation goes first than in the pass before."""
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
    """Medians over the medians of passes; ratios are taken within a pass, where the machine was the same."""
    medians = [statistics.median(calls) for calls in passes]
    ratio = statistics.median(a / statistics.median(b) for a, b in zip(medians, ours, strict=True))
    return {
        "ms": statistics.median(medians) * 1e3,
        "passes_ms": [min(medians) * 1e3, max(medians) * 1e3],
        "min_ms": min(map(min, passes)) * 1e3,
        "over_ours": ratio,
    }


def measured(args: argparse.Namespace) -> dict[str, object]:
    """The document of a run: where it was taken, rates and points."""
    effort, start = QUICK if args.quick else FULL, time.monotonic()
    todo = [p for p in points(args.quick) if not args.sweep or p.sweep in ("base", *args.sweep)]
    run, longest = Run(todo, effort), 0.0
    torch.manual_seed(0)
    while run.passes < (args.passes or effort.passes) and time.monotonic() - start + longest < LIMIT:
        begin = time.monotonic()
        run.one_pass()
        longest = max(longest, time.monotonic() - begin)
        print(f"pass {run.passes}: {longest:.0f} s", flush=True)
    about = machine(args.threads, "python -m bench.tuning") | {"passes": run.passes}
    return {"machine": about | {"seconds": round(time.monotonic() - start)}, **run.found()}


def main() -> None:
    """The command."""
    args = arguments()
    if args.docs and not args.output.exists():
        sys.exit(f"{args.output} does not exist: measure first, or name another file with --output")
    document = json.loads(args.output.read_text()) if args.docs else measured(args)
    model.add_model(document, [Point.read(row) for row in document["points"]])
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{report.tables(document)}\nfigures: {args.output}")
    if args.pictures:
        print(pictures.draw(document, args.pictures))
    if args.docs:
        report.renew(args.docs, document, args.output)


if __name__ == "__main__":
    main()
