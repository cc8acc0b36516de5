"""The cost model: bytes over measured rates, and a few constants fitted to half of the points.

docs/tuning.md explains it in a paragraph; a user can calculate with it by hand.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from bench.tuning.points import LINE_BYTES, Point, backward_bytes, forward_bytes, line_bytes

#: Constant -> what it is paid for: nanoseconds of a lookup, and of the backward that makes it a step.
FORWARD, BACKWARD = ("call", "bag", "id"), ("call", "id", "row")
#: float32 columns of an AVX-512 register.
REGISTER_COLUMNS = 16


@dataclass(frozen=True)
class Rates:
    """Rates that the bare loops of the same run reached (bench/tuning/measure.py).

    Args:
        gather, cached, stream, update: GB/s.
        decode: format -> nanoseconds a column of a lookup of rows in the cache; nothing for fp32.
        encode: format -> nanoseconds a column of rounding rows stochastically; nothing for fp32.
    """

    gather: float
    cached: float
    stream: float
    update: float
    decode: dict[str, float]
    encode: dict[str, float]


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of one direction at a point, part by part.

    Args:
        known: from bytes and rates.
        counts: of each fitted constant, how often it is paid.
    """

    known: dict[str, float]
    counts: dict[str, float]

    def parts(self, constants: dict[str, float]) -> dict[str, float]:
        """All parts, with the fitted constants, nanoseconds each."""
        return self.known | {name: constants[name] * count for name, count in self.counts.items()}

    def total(self, constants: dict[str, float]) -> float:
        """Sum of the parts."""
        return sum(self.parts(constants).values())


def forward_cost(point: Point, unique_rows: float, rates: Rates, id_ns: float) -> Cost:
    """A lookup. Each distinct row comes from memory once, every further id of the batch finds it in the cache.

    Float32 rows to come are fetched while others are added up, so that a row from memory costs the larger of two
    prices: that of its cache lines, and that of an id whose row is in the cache. Rows that are decoded cost both.

    Args:
        point, unique_rows, rates: what is looked up, its distinct rows, and what the machine can do.
        id_ns: the constant "id", by which to tell which of the two is larger.
    """
    moved, lines = forward_bytes(point, unique_rows), line_bytes(point.row_bytes)
    rest = {"ids, offsets, output": (moved["ids"] + moved["offsets"] + moved["output"]) / rates.stream}
    from_memory = lines / rates.gather
    if point.format != "fp32":
        decoded = point.num_ids * point.workload.dim * rates.decode[point.format]
        known = {"rows from memory": unique_rows * from_memory, "decoding": decoded}
        return Cost(known | rest, {"call": 1, "bag": point.num_bags, "id": 0})
    from_cache = lines / rates.cached
    waits = from_memory > from_cache + id_ns
    cached_ids = point.num_ids - (unique_rows if waits else 0)
    known = {
        "rows from memory": unique_rows * from_memory if waits else 0.0,
        "rows from the cache": cached_ids * from_cache,
    }
    return Cost(known | rest, {"call": 1, "bag": point.num_bags, "id": cached_ids})


def backward_cost(point: Point, unique_rows: float, rates: Rates) -> Cost:
    """Cost of a step after its lookup: gradients are gathered, distinct rows read, updated and written."""
    moved = backward_bytes(point, unique_rows, point.num_ids)
    coded = rates.decode.get(point.format, 0.0) + rates.encode.get(point.format, 0.0)
    known = {
        "gradient": moved["gradient"] / rates.cached,
        # A row's state is 4 bytes, and brings its cache line along.
        "rows and state": 2 * unique_rows * (line_bytes(point.row_bytes) + LINE_BYTES) / rates.update,
        "ids, offsets": (moved["ids"] + moved["offsets"]) / rates.stream,
        "decoding, encoding": unique_rows * point.workload.dim * coded,
    }
    return Cost(known, {"call": 1, "id": point.num_ids, "row": unique_rows})


def step_cost(lookup: float, backward: Cost) -> Cost:
    """The backward, and the lookup as predicted, nanoseconds."""
    return Cost({"lookup": lookup} | backward.known, backward.counts)


def fit(costs: list[Cost], measured: list[float]) -> dict[str, float]:
    """The constants, none below 0, that make the squares of the relative errors least; 0 if none of the points pays.

    Args:
        costs: of at least as many points as there are constants.
        measured: nanoseconds.
    """
    names = list(costs[0].counts)
    weight = 1 / np.asarray(measured)
    target = 1 - weight * np.array([sum(cost.known.values()) for cost in costs])
    columns = {name: weight * np.array([cost.counts[name] for cost in costs]) for name in names}
    kept = [name for name in names if columns[name].any()]  # what nobody pays for has no price to be found
    while kept:
        # Columns differ by powers of ten: scaled, so that none is lost.
        size = np.array([np.linalg.norm(columns[name]) for name in kept])
        matrix = np.stack([columns[name] for name in kept], axis=1) / size
        found = np.linalg.lstsq(matrix, target, rcond=None)[0] / size
        if (found >= 0).all():
            break
        kept = [name for name, value in zip(kept, found, strict=True) if value != found.min()]
    return dict.fromkeys(names, 0.0) | (dict(zip(kept, map(float, found), strict=True)) if kept else {})


def is_fit_for_model(point: Point) -> bool:
    """Rows of float32 that fill whole registers. Other formats have measured prices only; rows with a partial register
    are slower than their bytes, and the model leaves that out."""
    return point.format == "fp32" and point.workload.dim % REGISTER_COLUMNS == 0


def takes_part(points: list[Point]) -> list[bool]:
    """True for the points that the constants are fitted to: every other one of a sweep, of those that the model is
    for."""
    found, number = [], dict.fromkeys((point.sweep for point in points), 0)
    for point in points:
        is_candidate = is_fit_for_model(point)
        found.append(is_candidate and number[point.sweep] % 2 == 0)
        number[point.sweep] += is_candidate
    return found


def fit_forward(points: list[Point], unique_rows: list[float], rates: Rates, measured: list[float]) -> dict[str, float]:
    """The constants of lookups. Which points wait for memory depends on one of them: settled in a few rounds."""
    constants: dict[str, float] = dict.fromkeys(FORWARD, 0.0)
    for _ in range(20):
        costs = [forward_cost(p, u, rates, constants["id"]) for p, u in zip(points, unique_rows, strict=True)]
        before, constants = constants, fit(costs, measured)
        if constants == before:
            break
    return constants


def add_model(document: dict, points: list[Point]) -> None:
    """Fits, and writes constants, each point's prediction and the errors into the document of a run.

    Args:
        document: "rates" and "points", each with "unique_rows" and the medians "forward" and "step".
        points: of the document, in its order.
    """
    rates, rows, chosen = Rates(**document["rates"]), document["points"], takes_part(points)
    unique = [row["unique_rows"] for row in rows]
    measured = {d: [row[d]["ours"]["ms"] * 1e6 for row in rows] for d in ("forward", "step")}

    def fitted_to(of_points: list) -> list:
        return [one for one, is_in in zip(of_points, chosen, strict=True) if is_in]

    forward = fit_forward(fitted_to(points), fitted_to(unique), rates, fitted_to(measured["forward"]))
    costs = [forward_cost(p, u, rates, forward["id"]) for p, u in zip(points, unique, strict=True)]
    lookups = [cost.total(forward) for cost in costs]
    costs = [
        step_cost(lookup, backward_cost(p, u, rates)) for lookup, p, u in zip(lookups, points, unique, strict=True)
    ]
    step = fit(fitted_to(costs), fitted_to(measured["step"]))
    predicted = {"forward": lookups, "step": [cost.total(step) for cost in costs]}
    for i, row in enumerate(rows):
        found = {d: predicted[d][i] for d in predicted}
        row["model"] = {d: {"ms": ns / 1e6, "error": ns / measured[d][i] - 1} for d, ns in found.items()}
        row["model"]["fitted"] = chosen[i]
    document["model"] = {"constants_ns": {"forward": forward, "step": step}, "errors": errors(rows)}


def errors(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Mean absolute relative error: of each sweep, of the points that were fitted, of the others, of all."""
    groups = {row["sweep"]: [r for r in rows if r["sweep"] == row["sweep"]] for row in rows if row["sweep"] != "base"}
    groups["points fitted to"] = [r for r in rows if r["model"]["fitted"]]
    groups["other points"] = [r for r in rows if not r["model"]["fitted"]]
    groups["all points"] = rows
    return {
        name: {d: statistics.fmean(abs(r["model"][d]["error"]) for r in group) for d in ("forward", "step")}
        for name, group in groups.items()
    }
