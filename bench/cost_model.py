"""Predicts the time of lookups and training steps on a CPU from sizes: `python -m bench.cost_model FILE`.

FILE is of bench.tuning, or of `--calibrate`, which takes a minute: rates of bare loops, and nine workloads that the
model is fitted to. The file's other float32 workloads are predicted twice: by that model, and by one that is fitted to
all workloads of other kinds. docs/tuning.md has the formula, docs/benchmarks.md how far off it is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import bench
from bench.figures import FiguresError, load, where
from bench.script import machine
from bench.shapes import WORKLOADS, Shape
from bench.subject import Subject
from bench.tuning import model
from bench.tuning.measure import Effort, Tables
from bench.tuning.model import Load, Model
from bench.tuning.passes import Run, measured
from bench.tuning.points import CALIBRATION, Point, points
from bench.tuning.report import fitted_prices
from bench.workloads import NAMED

#: Direction in files of bench.run -> direction in files of bench.tuning.
DIRECTIONS = {"forward": "forward", "train": "step"}
#: A calibration: seconds during which passes are started, and the maximum number of passes.
SECONDS, PASSES = 60.0, 5
EFFORT = Effort(0.06, 2, PASSES)
SHAPES: dict[str, Shape] = {shape.name: shape for shape in (*WORKLOADS, *NAMED.values())}


@dataclass(frozen=True)
class Sample:
    """A measured workload: its name, its kind (the sweep), and a call's direction, sizes and nanoseconds."""

    name: str
    kind: str
    direction: str
    load: Load
    ns: float

    def error(self, of: Model) -> float:
        """Predicted over measured, minus 1."""
        return of.ns(self.direction, self.load) / self.ns - 1


def of_points(rows: Sequence[dict]) -> list[Sample]:
    """Returns both directions of the points of a file."""
    return [
        Sample(f"{row['sweep']} {point.value}", row["sweep"], d, Load.of_point(point, row), row[d]["ours"]["ms"] * 1e6)
        for row, point in ((row, Point.read(row)) for row in rows)
        for d in DIRECTIONS.values()
    ]


def of_run(document: dict) -> list[Sample]:
    """The float32 workloads of a document of bench.run that have features (``Subject.features``)."""
    found = []
    for group, rows in document["results"].items():
        ours, name = rows.get("ours", {}), group.partition(" ")[2]
        features = dict(ours.get("features") or {})
        if not features or features["row_bytes"] != model.FLOAT_BYTES * features["dim"]:
            continue
        direction = DIRECTIONS[features["direction"]]
        if "tables" not in features:  # older files do not record it
            features["tables"] = SHAPES[name].tables
        sizes = {field.name: features[field.name] for field in fields(Load) if field.name in features}
        found.append(Sample(name, name, direction, Load(**sizes), ours["ms"] * 1e6))
    return found


def calibrate(file: Path, threads: int) -> None:
    """Measures the bare loops and the points of ``CALIBRATION``, without peers, into a file as bench.tuning's."""
    if threads:
        torch.set_num_threads(threads)
    named = {(point.sweep, point.value): point for point in points()}
    run = Run([named[key] for key in CALIBRATION], EFFORT, Tables(alone=True))
    document = measured(run, PASSES, SECONDS, machine(threads))
    model.add_model(document)
    bench.save(document, file)


def kinds(document: dict, of: Model) -> str:
    """Median errors of each kind and of all, in markdown: of workloads that ``of`` was not fitted to, and of all
    workloads by models that are fitted to those of other kinds."""
    rows = [row for row in document["points"] if row["format"] == "fp32"]
    fitted_to = model.calibration(rows)
    rest = of_points([row for row in rows if not any(row is one for one in fitted_to)])
    names = list(dict.fromkeys(row["sweep"] for row in rows))
    without = {name: model.fit_to(document, [row for row in rows if row["sweep"] != name]) for name in names}
    errors = [(s, 0, s.error(of)) for s in rest] + [(s, 1, s.error(without[s.kind])) for s in of_points(rows)]
    heads = [f"{d}, {how}" for d in DIRECTIONS.values() for how in ("fitted to nine", "to other kinds")]
    lines = []
    for name in [*names, None]:
        own = [(s.direction, how, error) for s, how, error in errors if name in (s.kind, None)]
        cells = [_median([e for *which, e in own if which == [d, how]]) for d in DIRECTIONS.values() for how in (0, 1)]
        count = sum(name in (row["sweep"], None) for row in rows)
        lines.append((name or "all", count, *cells))
    return bench.table(["kind", "workloads", *heads], lines)


def _median(errors: Sequence[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.1%}" if errors else ""


def held_out(samples: Sequence[Sample], of: Model) -> str:
    """Measured and predicted times in Markdown, with the median errors."""
    names = list(dict.fromkeys(s.name for s in samples))
    lines = []
    for name in names:
        cells = []
        for d in DIRECTIONS.values():
            own = [s for s in samples if (s.name, s.direction) == (name, d)]
            cells += [f"{own[0].ns / 1e6:.3g}", f"{own[0].error(of):+.0%}"] if own else ["", ""]
        lines.append((name, *cells))
    medians = [_median([s.error(of) for s in samples if s.direction == d]) for d in DIRECTIONS.values()]
    lines.append(("median error", "", medians[0], "", medians[1]))
    return bench.table(("held out", "lookup, ms", "predicted", "step, ms", "predicted"), lines)


def predictions(of: Model, workloads: Sequence[str]) -> str:
    """Predicted milliseconds of named workloads that were not measured."""
    lines = []
    for name in workloads:
        sizes = Load(**Subject(NAMED[name]).features())
        lines.append(f"{name}: " + ", ".join(f"{d} {of.ns(d, sizes) / 1e6:.3g} ms" for d in DIRECTIONS.values()))
    return "\n".join(lines)


def read(name: str) -> dict:
    """Reads a file of bench.tuning and fits its model again.

    Raises:
        FiguresError: it is of another program, or has fewer float32 points than a model has numbers.
    """
    document = load(name, kinds=("points",))
    count, least = sum(row["format"] == "fp32" for row in document["points"]), len(CALIBRATION)
    if count < least:
        raise FiguresError(f"{name}: {count} float32 workloads, needs at least {least}")
    model.add_model(document)
    return document


def read_held_out(names: Sequence[str], document: dict) -> list[Sample]:
    """The samples of files of bench.run.

    Raises:
        FiguresError: a file is of another program, or of another machine than ``document``.
    """
    found = []
    for name in names:
        other = load(name)
        for key in ("cpu", "threads"):
            if (own := other["machine"][key]) != (first := document["machine"][key]):
                raise FiguresError(f"{name}: {key} is {own}, but {first} in the file that the model is fitted to")
        found += of_run(other)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line, or ``given`` instead."""
    parser = argparse.ArgumentParser(prog="python -m bench.cost_model", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="JSON file of bench.tuning or --calibrate, or COMMIT:PATH")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine into FILE first: a minute, 2 GB of memory"
    )
    parser.add_argument("--threads", type=int, default=0, help="of --calibrate (default: torch's choice)")
    parser.add_argument("--held-out", action="append", default=[], metavar="FILE", help="file of bench.run to predict")
    parser.add_argument(
        "--predict", action="append", default=[], choices=NAMED, help="a workload that was not measured"
    )
    return parser.parse_args(given)


def main() -> None:
    """The command."""
    args = arguments()
    if args.calibrate:
        calibrate(Path(args.file), args.threads)
    try:
        document = read(args.file)
        others = read_held_out(args.held_out, document)
    except FiguresError as error:
        sys.exit(str(error))
    fitted_to = model.calibration(document["points"])
    fitted = model.fit_to(document, fitted_to)
    own = [s.error(fitted) for s in of_points(fitted_to)]
    print(f"{where(document)}\n\n{fitted_prices(document['model'])}\n\nOff at the points fitted to: {_median(own)}")
    if sum(row["format"] == "fp32" for row in document["points"]) > len(CALIBRATION):
        print(f"\nMedian errors:\n\n{kinds(document, fitted)}")
    if others:
        print(f"\n{held_out(others, fitted)}")
    if args.predict:
        print(f"\nPredicted:\n{predictions(fitted, args.predict)}")


if __name__ == "__main__":
    main()
