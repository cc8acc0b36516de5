"""The cost model: bytes over measured rates, plus a few costs and two sizes fitted to a handful of points.

docs/tuning.md explains it; a user can calculate with it by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.tuning.points import CALIBRATION, ID_BYTES, LINE_BYTES, OFFSET_BYTES, Point, line_bytes

FLOAT_BYTES = 4
#: Page size in bytes of gradients, for which, unlike tables, no huge pages are requested.
PAGE_BYTES = 4096
#: Prices of a lookup, and of the backward that makes it a step, nanoseconds.
LOOKUP, BACKWARD = ("call", "id", "byte of output"), ("call", "id or row", "byte of gradient")
#: Sizes that "caches" and "near" are chosen from, bytes.
CACHES, NEAR = (0.0, *(2.0**k for k in range(20, 28))), tuple(2.0**k for k in range(19, 24))


@dataclass(frozen=True)
class Rates:
    """Rates of the bare loops in the same run (bench/tuning/measure.py).

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
class Load:
    """Sizes of a call.

    Args:
        ids, bags, tables, dim, row_bytes: N, T * B, T, D and r.
        unique_rows: U, distinct rows of a batch, on average.
        cycle_rows: C, distinct rows of all batches that the calls take in turn.
        format: of rows.
    """

    ids: float
    bags: float
    tables: int
    dim: int
    row_bytes: int
    unique_rows: float
    cycle_rows: float
    format: str = "fp32"

    @classmethod
    def of_point(cls, point: Point, row: dict) -> Load:
        """Makes the load of a file's point, which has "unique_rows" and "cycle_rows"."""
        rows = {name: row[name] for name in ("unique_rows", "cycle_rows")}
        w, sizes = point.workload, {"ids": point.num_ids, "bags": point.num_bags, "row_bytes": point.row_bytes}
        return cls(**sizes, tables=w.tables, dim=w.dim, **rows, format=point.format)

    @property
    def output_bytes(self) -> float:
        """Bytes of the output, and of its gradient."""
        return FLOAT_BYTES * self.bags * self.dim

    @property
    def index_bytes(self) -> float:
        """Bytes of ids and offsets."""
        return ID_BYTES * self.ids + OFFSET_BYTES * (self.bags + 1)

    def from_memory(self, bytes_of_row: float, caches: float) -> float:
        """Distinct rows of a batch that are not cached when the call begins."""
        return self.unique_rows * (1 - min(1.0, caches / (self.cycle_rows * bytes_of_row)))

    def gradient_reach(self) -> float:
        """Bytes of the pages that a table's gradient spans; the stride of its bags is a sample's columns."""
        own, sample = FLOAT_BYTES * self.dim, FLOAT_BYTES * self.dim * self.tables
        return self.bags / self.tables * min(sample, max(PAGE_BYTES, own))


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of one direction, by part.

    Args:
        known: from bytes and rates, part by part.
        counts: of each price, how often it is paid.
    """

    known: dict[str, float]
    counts: dict[str, float]

    def total(self, prices: dict[str, float]) -> float:
        """Sum of all parts."""
        return sum(self.known.values()) + sum(prices[name] * count for name, count in self.counts.items())


def lookup_cost(load: Load, rates: Rates, caches: float) -> Cost:
    """Cost of a lookup. Each distinct row comes from memory at most once; later ids find it in a cache."""
    line = line_bytes(load.row_bytes)
    rows = load.from_memory(line, caches)
    known = {"rows from memory": rows * line / rates.gather, "ids, offsets": load.index_bytes / rates.stream}
    counts = {"call": 1.0, "id": load.ids, "byte of output": load.output_bytes}
    if load.format == "fp32":
        known["rows from a cache"] = (load.ids - rows) * line / rates.cached
    else:
        known["decoding"] = load.ids * load.dim * rates.decode[load.format]
        counts["id"] = 0.0
    return Cost(known, counts)


def backward_cost(load: Load, rates: Rates, caches: float, near: float) -> Cost:
    """Cost of a step after its lookup: gathers gradients in row order; reads, updates and writes distinct rows."""
    line = line_bytes(load.row_bytes) + LINE_BYTES  # a row's state is 4 bytes, and brings its cache line along
    gathered = FLOAT_BYTES * load.ids * load.dim
    far = 1 - min(1.0, near / load.gradient_reach())
    coded = rates.decode.get(load.format, 0.0) + rates.encode.get(load.format, 0.0)
    known = {
        "gradient": gathered * (far / rates.stream + (1 - far) / rates.cached),
        "rows and state": 2 * load.from_memory(line, caches) * line / rates.update,
        "ids, offsets": load.index_bytes / rates.stream,
        "decoding, encoding": load.unique_rows * load.dim * coded,
    }
    return Cost(known, {"call": 1.0, "id or row": load.ids + load.unique_rows, "byte of gradient": load.output_bytes})


@dataclass(frozen=True)
class Model:
    """The fitted model of a machine.

    Args:
        rates: measured.
        caches: bytes of rows that stay in the caches from call to call.
        near: bytes of gradient that a core reaches as fast as rows in the cache.
        lookup, backward: the prices by name, nanoseconds.
    """

    rates: Rates
    caches: float
    near: float
    lookup: dict[str, float]
    backward: dict[str, float]

    def ns(self, direction: str, load: Load) -> float:
        """Predicts the nanoseconds of a lookup ("forward") or of a whole step ("step")."""
        found = lookup_cost(load, self.rates, self.caches).total(self.lookup)
        if direction == "forward":
            return found
        return found + backward_cost(load, self.rates, self.caches, self.near).total(self.backward)


def fit(costs: Sequence[Cost], measured: Sequence[float]) -> dict[str, float]:
    """Least-squares fit of non-negative prices to relative errors; a price that no point pays is 0.

    Args:
        costs: of at least as many points as there are prices.
        measured: nanoseconds.
    """
    names = list(costs[0].counts)
    weight = 1 / np.asarray(measured)
    target = 1 - weight * np.array([sum(cost.known.values()) for cost in costs])
    columns = {name: weight * np.array([cost.counts[name] for cost in costs]) for name in names}
    kept = [name for name in names if columns[name].any()]  # a count that is zero in all points has no price
    while kept:
        # Scales columns, which differ by powers of ten, for numerical stability.
        size = np.array([np.linalg.norm(columns[name]) for name in kept])
        matrix = np.stack([columns[name] for name in kept], axis=1) / size
        found = np.linalg.lstsq(matrix, target, rcond=None)[0] / size
        if (found >= 0).all():
            break
        kept = [name for name, value in zip(kept, found, strict=True) if value != found.min()]
    return dict.fromkeys(names, 0.0) | (dict(zip(kept, map(float, found), strict=True)) if kept else {})


def _best(tried: dict[float, list[Cost]], measured: Sequence[float]) -> tuple[float, dict[str, float]]:
    """The size with the least squared relative errors, and its prices; ``tried``: size -> costs of the points."""
    found = []
    for size, costs in tried.items():
        prices = fit(costs, measured)
        squares = sum((cost.total(prices) / ns - 1) ** 2 for cost, ns in zip(costs, measured, strict=True))
        found.append((squares, size, prices))
    return min(found, key=lambda one: one[0])[1:]


def fit_model(rates: Rates, loads: Sequence[Load], forward: Sequence[float], step: Sequence[float]) -> Model:
    """Fits the model of a machine.

    Args:
        rates: of the bare loops.
        loads: float32, at least as many as there are prices.
        forward, step: measured nanoseconds of each.
    """
    caches, lookup = _best({size: [lookup_cost(load, rates, size) for load in loads] for size in CACHES}, forward)
    lookups = [lookup_cost(load, rates, caches).total(lookup) for load in loads]

    def after(size: float) -> list[Cost]:
        costs = [backward_cost(load, rates, caches, size) for load in loads]
        return [Cost({"lookup": ns} | cost.known, cost.counts) for ns, cost in zip(lookups, costs, strict=True)]

    near, backward = _best({size: after(size) for size in NEAR}, step)
    return Model(rates, caches, near, lookup, backward)


def fit_to(document: dict, rows: Sequence[dict]) -> Model:
    """Fits a model with a file's rates to ``rows`` of its points."""
    loads = [Load.of_point(Point.read(row), row) for row in rows]
    measured = ([row[d]["ours"]["ms"] * 1e6 for row in rows] for d in ("forward", "step"))
    return fit_model(Rates(**document["rates"]), loads, *measured)


def calibration(rows: Sequence[dict]) -> list[dict]:
    """Those of a file's points that a model is fitted to; all float32 ones where a file has too few of them (--sweep,
    --quick)."""
    of_them = [row for row in rows if (row["sweep"], Point.read(row).value) in CALIBRATION]
    return of_them if len(of_them) >= len(CALIBRATION) else [row for row in rows if row["format"] == "fp32"]


def add_model(document: dict) -> None:
    """Fits the model, and adds prices, each point's prediction and the errors to the document of a run.

    Args:
        document: "rates" and "points", each with "unique_rows", "cycle_rows" and the medians "forward" and "step".
    """
    rows = document["points"]
    chosen = calibration(rows)
    model = fit_to(document, chosen)
    for row in rows:
        load = Load.of_point(Point.read(row), row)
        found = {d: model.ns(d, load) for d in ("forward", "step")}
        row["model"] = {d: {"ms": ns / 1e6, "error": ns / (row[d]["ours"]["ms"] * 1e6) - 1} for d, ns in found.items()}
        row["model"]["fitted"] = any(row is one for one in chosen)
    sizes = {"caches_bytes": model.caches, "near_bytes": model.near}
    prices = {"forward": model.lookup, "step": model.backward}
    document["model"] = {"prices_ns": prices, **sizes, "errors": errors(rows)}


def errors(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Mean absolute relative errors of each sweep, of fitted points, of the others, and of all."""
    groups = {row["sweep"]: [r for r in rows if r["sweep"] == row["sweep"]] for row in rows if row["sweep"] != "base"}
    groups["points fitted to"] = [r for r in rows if r["model"]["fitted"]]
    groups["other points"] = [r for r in rows if not r["model"]["fitted"]]
    groups["all points"] = list(rows)
    return {
        name: {d: statistics.fmean(abs(r["model"][d]["error"]) for r in group) for d in ("forward", "step")}
        for name, group in groups.items()
        if group
    }
