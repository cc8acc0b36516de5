"""Predicts the time of lookups and training steps on a CPU from sizes: `python -m bench.cost_model FILE...`.

FILEs are of bench.tuning and of bench.run (embedding_bag), all of one machine and number of threads. The time is a sum
of prices, each paid for something that a workload has so many of; the prices are fitted to all float32 workloads in the
files. Every workload is also predicted by prices that were fitted without it, and without its family: without the whole
sweep that a point of bench.tuning belongs to. Off by 10 % in geometric mean means: the magnitudes of the logarithms of
predicted over measured have the mean ln(1.1). docs/benchmarks.md has the formula.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.figures import FiguresError, load, passes, where
from bench.subject import Subject
from bench.tuning.model import Cost, fit
from bench.tuning.points import Point, line_bytes
from bench.tuning.report import label
from bench.workloads import NAMED

DIRECTIONS = ("forward", "train")
#: Bytes of rows that stay in the caches from call to call: the one that fits best is taken.
CACHE_BYTES = (0.0, *(2.0**k for k in range(19, 28)))
FLOAT = 4
#: Prices of a direction, at most: so many workloads must be fitted to, and one more if each is to be left out once.
PRICES = 6


@dataclass(frozen=True)
class Sample:
    """A measured workload.

    Args:
        name: for tables.
        family: of workloads that are alike: points of a sweep, or both directions of a workload of bench.run.
        direction: "forward" or "train".
        features: as ``Subject.features`` of bench/subject.py gives them.
        ns: of a call.
    """

    name: str
    family: str
    direction: str
    features: dict[str, float]
    ns: float


@dataclass(frozen=True)
class CostModel:
    """Fitted prices of one direction; ``cache_bytes`` of rows are in the caches when a call begins."""

    cache_bytes: float
    prices_ns: dict[str, float]

    def ns(self, direction: str, features: dict[str, float]) -> float:
        """Predicted nanoseconds of a call."""
        return Cost({}, counts(direction, features, self.cache_bytes)).total(self.prices_ns)


def counts(direction: str, f: dict[str, float], cache_bytes: float) -> dict[str, float]:
    """Counts what a call pays for.

    A batch's distinct rows come from memory but for the share of all rows in use that the caches hold; every further id
    of a row finds it in a cache. Bytes of rows are those of whole cache lines. A bag of one id is copied, which has no
    price beside its bytes. A byte of a step's output is written, and its gradient brought near.

    Args:
        direction, f: "forward" or "train", and the features; "cycle_rows", C of the formula, is how many distinct rows
            the batches that calls take in turn have together.
        cache_bytes: what the caches hold of the rows that the batches in turn name.
    """
    line = line_bytes(int(f["row_bytes"]))
    resident = min(1.0, cache_bytes / (f["cycle_rows"] * line))
    from_memory = f["unique_rows"] * (1 - resident)
    output = FLOAT * f["bags"] * f["dim"]
    found = {"call": 1, "byte from memory": from_memory * line, "byte of output": output}
    if direction == "forward":
        return found | {"byte from a cache": (f["ids"] - from_memory) * line, "pooled bag": f["pooled_bags"]}
    return found | {"id": f["ids"], "row": f["unique_rows"], "byte of gradient": FLOAT * f["ids"] * f["dim"]}


def fitted(samples: Sequence[Sample]) -> CostModel:
    """The prices, none below 0, and the bytes in the caches that make the squares of relative errors least.

    Args:
        samples: of one direction.

    Raises:
        FiguresError: there are fewer of them than prices.
    """
    if len(samples) < PRICES:
        raise FiguresError(
            f"{len(samples)} float32 workloads of a direction, at least {PRICES} are needed: give more files"
        )
    found = []
    for cache_bytes in CACHE_BYTES:
        costs = [Cost({}, counts(s.direction, s.features, cache_bytes)) for s in samples]
        prices = fit(costs, [s.ns for s in samples])
        squares = sum((cost.total(prices) / s.ns - 1) ** 2 for cost, s in zip(costs, samples, strict=True))
        found.append((squares, CostModel(cache_bytes, prices)))
    return min(found, key=lambda pair: pair[0])[1]


def left_out(samples: Sequence[Sample], of: str) -> list[float]:
    """[len(samples)] nanoseconds: each predicted by what is fitted to the others; NaN where too few are left.

    Args:
        samples: of one direction.
        of: "name", the others are all but itself; or "family", all but its family.
    """
    keys = [getattr(s, of) for s in samples]
    others = {key: [s for s, own in zip(samples, keys, strict=True) if own != key] for key in set(keys)}
    models = {key: fitted(rest) for key, rest in others.items() if len(rest) >= PRICES}
    return [
        models[key].ns(s.direction, s.features) if key in models else math.nan
        for s, key in zip(samples, keys, strict=True)
    ]


def geometric_error(predicted: Sequence[float], samples: Sequence[Sample]) -> float:
    """Error factor of predictions in geometric mean, less 1: exp(mean |ln(predicted / measured)|) - 1.

    Twice and half of what was measured are both off by 100 %. NaN if a prediction is.
    """
    logs = [abs(math.log(p / s.ns)) if p else math.inf for p, s in zip(predicted, samples, strict=True)]
    return math.expm1(statistics.fmean(logs))


def families(of: dict[str, Sequence[Sample]]) -> str:
    """The errors of each family, and of all workloads, left out of the fit alone and with the family; in markdown.

    Args:
        of: direction -> its samples.
    """
    names = list(dict.fromkeys(s.family for samples in of.values() for s in samples))
    heads = [f"{d}, {how}" for d in of for how in ("left out alone", "with its family")]
    lines = [f"| family | workloads | {' | '.join(heads)} |", f"|---|---:|{'---:|' * len(heads)}"]
    found = {d: [(left_out(own, "name"), left_out(own, "family")), own] for d, own in of.items()}
    for name in [*names, None]:
        cells, count = [], 0
        for both, own in found.values():
            chosen = [i for i, s in enumerate(own) if name in (s.family, None)]
            count = max(count, len(chosen))
            for predicted in both:
                error = geometric_error([predicted[i] for i in chosen], [own[i] for i in chosen]) if chosen else None
                cells.append(_cell(error))
        lines.append(f"| {'all' if name is None else name} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(error: float | None) -> str:
    """An error; None: the direction has no workload of the family."""
    if error is None:
        return " "
    return "too few others" if math.isnan(error) else f"{error:.1%}"


def samples_of(document: dict, fastest: bool = False) -> list[Sample]:
    """The float32 workloads of a document of bench.tuning or bench.run.

    Args:
        document: of a JSON file.
        fastest: take the fastest pass, not the median of the passes: for machines that others use, too.
    """
    if "points" in document:
        return [s for row in document["points"] if row["format"] == "fp32" for s in _of_point(row, fastest)]
    found = []
    for group, rows in document["results"].items():
        ours = rows.get("ours", {})
        features = ours.get("features")
        if features and features["row_bytes"] == FLOAT * features["dim"]:
            ms = min(passes(ours)) if fastest else ours["ms"]
            direction = features["direction"]
            found.append(Sample(group, group.removeprefix(f"{direction} "), direction, features, ms * 1e6))
    return found


def _of_point(row: dict, fastest: bool) -> list[Sample]:
    point = Point.read(row)
    features = {"ids": point.num_ids, "bags": point.num_bags, "pooled_bags": point.num_bags * (point.workload.bag > 1)}
    features |= {"dim": point.workload.dim, "row_bytes": point.row_bytes, "unique_rows": row["unique_rows"]}
    # Files from before it was kept: ids are the same whenever they are drawn.
    features["cycle_rows"] = row.get("cycle_rows") or Subject(point.workload, row["batches"]).cycle_rows
    found = []
    for direction, key in zip(DIRECTIONS, ("forward", "step"), strict=True):
        ours = row[key]["ours"]
        ms = ours["passes_ms"][0] if fastest else ours["ms"]
        found.append(Sample(f"{direction} {label(point)}", point.sweep, direction, features, ms * 1e6))
    return found


def read(names: Sequence[str], fastest: bool) -> tuple[list[Sample], dict]:
    """The samples of files, and the first one's document.

    Raises:
        FiguresError: a file is neither of bench.tuning nor of bench.run, or of another machine than the first.
    """
    documents = [load(name, kinds=("results", "points")) for name in names]
    for name, document in zip(names, documents, strict=True):
        for key in ("cpu", "threads"):
            if (other := document["machine"][key]) != (first := documents[0]["machine"][key]):
                raise FiguresError(f"{name}: {key} is {other}, and {first} in {names[0]}")
    return [s for document in documents for s in samples_of(document, fastest)], documents[0]


def refuse_fitted(samples: Sequence[Sample], held_out: Sequence[Sample]) -> None:
    """Raises FiguresError if a workload that is to be predicted is one of those fitted to, measured again or not."""
    fitted_to = {_workload(s) for s in samples}
    again = [s.name for s in held_out if _workload(s) in fitted_to]
    if again:
        names = ", ".join(dict.fromkeys(again))
        raise FiguresError(f"--held-out: fitted to, and so not held out: {names}")


def _workload(sample: Sample) -> tuple:
    return sample.direction, *sorted((key, size) for key, size in sample.features.items() if key != "direction")


def table(samples: Sequence[Sample], predicted: Sequence[float]) -> str:
    """Measured beside predicted, in markdown."""
    lines = ["| workload | measured, ms | predicted, ms | error |", "|---|---:|---:|---:|"]
    for s, ns in zip(samples, predicted, strict=True):
        lines.append(f"| {s.name} | {s.ns / 1e6:.4g} | {ns / 1e6:.4g} | {ns / s.ns - 1:+.0%} |")
    return "\n".join(lines)


def prices(models: dict[str, CostModel]) -> str:
    """The prices of each direction, in markdown."""
    names = list(dict.fromkeys(name for model in models.values() for name in model.prices_ns))
    lines = [f"| price, ns | {' | '.join(models)} |", f"|---|{'---:|' * len(models)}"]
    for name in names:
        cells = [_price(m.prices_ns[name]) if name in m.prices_ns else " " for m in models.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, f"| MB in the caches | {' | '.join(f'{m.cache_bytes / 1e6:.3g}' for m in models.values())} |"]
    )


def _price(ns: float) -> str:
    return f"{float(f'{ns:.3g}'):,g}"


def report(samples: list[Sample], held_out: list[Sample]) -> str:
    """Prices, errors and tables of both directions.

    Raises:
        FiguresError: too few workloads.
    """
    of = {direction: [s for s in samples if s.direction == direction] for direction in DIRECTIONS}
    for direction, own in of.items():
        if (count := len({s.name for s in own})) <= PRICES:
            raise FiguresError(
                f"{count} float32 workloads of {direction!r}, at least {PRICES + 1} are needed, to leave out "
                f"one and fit {PRICES} prices: give more files"
            )
    models = {direction: fitted(own) for direction, own in of.items()}
    parts = [f"Off in geometric mean (exp of the mean |ln(predicted / measured)|, less 1):\n\n{families(of)}"]
    for direction, own in of.items():
        parts.append(f"{direction}, each left out of the fit\n\n{table(own, left_out(own, 'name'))}")
        if others := [s for s in held_out if s.direction == direction]:
            found = [models[direction].ns(direction, s.features) for s in others]
            heading = f"{direction}, held out: off by {geometric_error(found, others):.1%} in geometric mean"
            parts.append(f"{heading}\n\n{table(others, found)}")
    return "\n\n".join([prices(models), *parts])


def predictions(samples: list[Sample], workloads: Sequence[str]) -> str:
    """Milliseconds of named workloads, which nobody measured."""
    models = {d: fitted([s for s in samples if s.direction == d]) for d in DIRECTIONS}
    lines = []
    for name in workloads:
        features = Subject(NAMED[name]).features()
        lines.append(f"{name}: " + ", ".join(f"{d} {models[d].ns(d, features) / 1e6:.3g} ms" for d in DIRECTIONS))
    return "\n".join(lines)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; ``given``: in its place."""
    parser = argparse.ArgumentParser(prog="python -m bench.cost_model", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON file to fit to, or COMMIT:PATH")
    parser.add_argument("--held-out", action="append", default=[], metavar="FILE", help="predict it, do not fit to it")
    parser.add_argument(
        "--predict", action="append", default=[], choices=NAMED, help="a workload that was not measured"
    )
    parser.add_argument("--fastest", action="store_true", help="take the fastest pass instead of the median of passes")
    return parser.parse_args(given)


def main() -> None:
    """The command."""
    args = arguments()
    try:
        everything, first = read([*args.files, *args.held_out], args.fastest)
        samples, _ = read(args.files, args.fastest)
        held_out = everything[len(samples) :]
        refuse_fitted(samples, held_out)
        found = report(samples, held_out)
    except FiguresError as error:
        sys.exit(str(error))
    print(f"{where(first)}\n\n{found}")
    if args.predict:
        print(f"\nPredicted:\n{predictions(samples, args.predict)}")


if __name__ == "__main__":
    main()
