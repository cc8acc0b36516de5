"""Measures the points, ours and FBGEMM in turns, and the rates of bare loops and row codecs for the cost model."""

from __future__ import annotations

import functools
import gc
import statistics
from dataclasses import dataclass

import torch

import rec_kernels as rk
from bench import peers
from bench.limits import limits
from bench.shapes import BATCHES
from bench.subject import Subject
from bench.timing import Call, take_turns
from bench.tuning.points import Point

DIRECTIONS = ("forward", "step")
#: Rows that the cached rates are measured with: 1 MB of them stay in a core's second-level cache.
CACHED_BYTES = 2**20
#: The batches of a point read this many bytes of rows before a batch repeats: several times a usual L3 cache. Their
#: number is also bounded, because few rows are hot everywhere.
CYCLE_BYTES, MOST_BATCHES = 160e6, 60
#: Columns of the bare loops' rows: enough bytes in flight to reach the machine's best rate.
WIDE = 128
#: Cached rows to decode, in this many bags of this many ids, and to encode.
CODED_ROWS, CODED_BAGS, CODED_BAG = 4096, 2048, 20


@dataclass(frozen=True)
class Effort:
    """``seconds`` of a turn, ``turns`` of every implementation at a point and pass, ``passes`` over all points."""

    seconds: float
    turns: int
    passes: int


FULL, QUICK = Effort(0.06, 2, 5), Effort(0.002, 1, 1)


class Tables:
    """The tables of the current point, ours and FBGEMM's; rebuilt when the next point needs others.

    Args:
        alone: leave FBGEMM out.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self._key: tuple[object, ...] | None = None
        self._built: dict[str, object] = {}

    def at(self, point: Point) -> dict[str, object]:
        """Returns name -> implementation (bench/peers.py) for bags of the point's length."""
        w = point.workload
        key = (w.tables, w.rows, w.dim, point.format)
        if key != self._key:
            self._built.clear()
            gc.collect()
            self._key, self._built = key, self._build(point)
        for tables in self._built.values():
            tables.offsets = w.offsets()
        return self._built

    def _build(self, point: Point) -> dict[str, object]:
        ours = peers.Ours(point.workload, point.format)
        found: dict[str, object] = {"ours": ours}
        if self._alone or "fbgemm" not in peers.available():
            return found
        if point.format == "fp32":
            found["fbgemm"] = peers.Fbgemm(point.workload)
        elif point.format in peers.FbgemmInference.FORMATS:
            found["fbgemm"] = peers.FbgemmInference(point.workload, point.format, ours)
        return found


def batches_of(point: Point) -> int:
    """Number of batches that a point cycles through."""
    first = Subject(point.workload, 1)
    rows = first.unique_rows() * point.row_bytes
    return int(min(max(BATCHES, CYCLE_BYTES // rows + 1), MOST_BATCHES))


def measure_point(subject: Subject, built: dict[str, object], effort: Effort, first: int) -> dict[str, dict]:
    """Measures a point: direction -> implementation -> seconds of its calls."""
    found = {}
    for direction in DIRECTIONS:
        with torch.set_grad_enabled(direction == "step"):
            trains, batches = direction == "step", subject.batches
            able = {name: tables for name, tables in built.items() if hasattr(tables, "train") or not trains}
            call = functools.partial(subject.calls, "train" if trains else "forward", batches=batches)
            functions = {name: call(tables=tables) for name, tables in able.items()}
            found[direction] = take_turns(
                functions, len(subject.batches), turns=effort.turns, seconds=effort.seconds, first=first
            )
    return found


def measure_rates(point: Point, ours: peers.Ours, effort: Effort) -> dict[str, list[float]]:
    """Rates of the bare loops over the memory of our tables, taken as rows of 512 bytes: GB/s of every call.

    Args:
        point: whose batch has the bytes of rows that a call reads.
        ours: its float32 tables.

    Returns:
        "gather": rows at random places are read; "stream": rows one after the other; "cached": rows at random places
        of ``CACHED_BYTES``; "update": distinct rows, in ascending order, are read and written (both count).
    """
    weights, bag = ours.module._weights.detach(), point.workload.bag
    row, rows = 4 * WIDE, weights.numel() // WIDE
    n = max(point.num_ids * point.row_bytes // row // bag, 1) * bag
    out = torch.empty(1, n // bag, WIDE)
    random = [torch.randint(rows, (n,)) for _ in range(BATCHES)]
    in_order = [(torch.arange(n) + i * n) % rows for i in range(BATCHES)]
    cached = [torch.randint(min(CACHED_BYTES // row, rows), (n,)) for _ in range(BATCHES)]
    distinct = [chosen.unique() for chosen in random]

    def gather(chosen: list[torch.Tensor]) -> Call:
        return lambda i: limits().gather(weights, chosen[i], bag, WIDE, out)

    functions = {
        "gather": gather(random),
        "stream": gather(in_order),
        "cached": gather(cached),
        "update": lambda i: limits().update(weights, distinct[i], WIDE),
    }
    moved = dict.fromkeys(functions, n * row) | {"update": 2 * statistics.fmean(map(len, distinct)) * row}
    times = take_turns(functions, BATCHES, turns=2 * effort.turns, seconds=effort.seconds)
    return {name: [moved[name] / s / 1e9 for s in seconds] for name, seconds in times.items()}


def measure_codecs(formats: list[str], dim: int, effort: Effort) -> dict[str, dict[str, list[float]]]:
    """Measures reading and writing of encoded rows that are in the cache: nanoseconds per column of every call.

    Returns:
        "decode": format -> of lookups; "encode": format -> of rounding float32 rows stochastically.
    """
    found: dict[str, dict[str, list[float]]] = {"decode": {}, "encode": {}}
    for format in formats:
        x = torch.randn(CODED_ROWS, dim)
        rows = rk.quantize_rows(x, format)
        ids = torch.randint(CODED_ROWS, (CODED_BAGS, CODED_BAG))
        look_up = {"mode": "sum", "format": format, "embedding_dim": dim}
        functions = {
            "decode": lambda i, rows=rows, ids=ids, how=look_up: rk.embedding_bag(ids, rows, **how),
            "encode": lambda i, x=x, format=format: rk.quantize_rows(x, format, rounding="stochastic", seed=i),
        }
        columns = {"decode": ids.numel() * dim, "encode": x.numel()}
        with torch.no_grad():
            times = take_turns(functions, BATCHES, turns=effort.turns, seconds=effort.seconds)
        for name, seconds in times.items():
            found[name][format] = [s * 1e9 / columns[name] for s in seconds]
    return found
