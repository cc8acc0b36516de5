"""Sweeps of one parameter at a time from a base workload, and the bytes that a point must move."""

from __future__ import annotations

from dataclasses import dataclass, replace

import rec_kernels as rk
from bench.shapes import Workload

#: Tables of 256 MB each, so that rows come from memory, with a row width that the bare loops support (bench/limits.py).
BASE = Workload("base", tables=4, batch=2048, rows=1_000_000, dim=64, bag=20)
#: Small sizes for tests of the program, whose figures are meaningless.
QUICK_BASE = Workload("base", tables=2, batch=64, rows=2000, dim=16, bag=4)

Value = int | float | str | None
#: Sweep -> the values of its parameter besides the base's. Together with FBGEMM's, tables stay below 9 GB.
SWEEPS: dict[str, tuple[Value, ...]] = {
    "tables": (1, 2, 8, 12, 16),
    "batch": (128, 256, 512, 1024, 4096, 8192),
    "bag": (1, 2, 5, 10, 50, 100),
    "dim": (8, 16, 32, 128, 256),
    "zipf": (0.6, 0.8, 1.0, 1.2, 1.4),
    "format": ("bf16", "fp16", "int8", "int4", "mx9", "mx6", "mx4"),
}
QUICK_SWEEPS: dict[str, tuple[Value, ...]] = {
    "tables": (1, 4),
    "batch": (16, 256),
    "bag": (1, 16),
    "dim": (8, 64),
    "zipf": (0.8, 1.2),
    "format": ("bf16", "int8", "mx9"),
}
#: Sweep and value of the points to which the cost model is fitted: far apart, with at most 2 GB of tables.
CALIBRATION: tuple[tuple[str, Value], ...] = (
    ("base", "base"),
    ("batch", 128),
    ("batch", 8192),
    ("bag", 1),
    ("bag", 100),
    ("zipf", 1.2),
    ("tables", 1),
    ("dim", 16),
    ("dim", 128),
)

OFFSET_BYTES = ID_BYTES = 8
LINE_BYTES = 64


@dataclass(frozen=True)
class Point:
    """A workload in a row format; ``sweep`` names the parameter that differs from the base ("base" for the base)."""

    sweep: str
    workload: Workload
    format: str = "fp32"

    @classmethod
    def read(cls, row: dict) -> Point:
        """Makes a point from ``about()``'s fields."""
        sizes = {name: row[name] for name in ("tables", "batch", "rows", "dim", "bag", "zipf")}
        return cls(row["sweep"], Workload(row["sweep"], **sizes), row["format"])

    def about(self) -> dict[str, object]:
        """Fields for a JSON file."""
        sizes = {name: size for name, size in vars(self.workload).items() if name != "name"}
        return {"sweep": self.sweep, **sizes, "format": self.format}

    @property
    def value(self) -> Value:
        """Value of the parameter that the sweep varies; "base" for the base."""
        return {"base": "base", "format": self.format}.get(self.sweep) or getattr(self.workload, self.sweep)

    @property
    def num_ids(self) -> int:
        """N = T * B * L."""
        return self.num_bags * self.workload.bag

    @property
    def num_bags(self) -> int:
        """T * B."""
        return self.workload.tables * self.workload.batch

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in its format."""
        return rk.row_bytes(self.format, self.workload.dim)


def points(quick: bool = False) -> list[Point]:
    """The base, then sweep by sweep; within a sweep in ascending order."""
    base, sweeps = (QUICK_BASE, QUICK_SWEEPS) if quick else (BASE, SWEEPS)
    found = [Point("base", base)]
    for sweep, values in sweeps.items():
        for value in values:
            if sweep == "format":
                found.append(Point(sweep, base, str(value)))
            else:
                found.append(Point(sweep, replace(base, name=f"{sweep}-{value}", **{sweep: value})))
    return found


def line_bytes(row_bytes: int) -> float:
    """Bytes of the cache lines that a row touches, on average over the places where rows of a table begin."""
    step = next(size for size in (64, 32, 16, 8, 4, 2, 1) if row_bytes % size == 0)
    return row_bytes + LINE_BYTES - step


def moved(point: Point, unique_rows: float) -> dict[str, dict[str, float]]:
    """Bytes of a lookup and of a whole step with row-wise Adagrad, without those of sorting the ids.

    Args:
        point: fp32 outputs and int64 ids and offsets, of which every lookup and every backward reads all.
        unique_rows: distinct rows U; a step reads and writes each of them once, with its state.

    Returns:
        {"forward" or "step": {"all" or "unique": bytes}}. "all" counts a row for every id, and in the backward a row of
        the gradient for every id; "unique" a row that was read once as one that stays in the cache: U, and T * B.
    """
    w, row, offsets = point.workload, point.row_bytes, OFFSET_BYTES * (point.num_bags + 1)
    forward = {"all": w.forward_bytes(row) + offsets, "unique": w.forward_bytes(row, unique_rows) + offsets}
    backward = {
        "all": w.backward_bytes(unique_rows, row) + offsets,
        "unique": w.backward_bytes(unique_rows, row, gradient_rows=point.num_bags) + offsets,
    }
    return {"forward": forward, "step": {count: forward[count] + backward[count] for count in forward}}
