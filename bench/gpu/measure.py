"""Loop over cases: check, time, record. A failure does not prevent the remaining measurements."""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass, field

import torch

from bench.gpu.subjects import Built, Case, Subject
from bench.gpu.timing import Timer, median_ms

#: Calls faster than this are also measured as replays of a CUDA graph, without the cost of launches.
GRAPH_BELOW_MS = 2.0


@dataclass
class Effort:
    """Time limits: ``budget_ms`` for all calls of one figure, ``limit_s`` for the whole run, from ``start``."""

    budget_ms: float
    least: int
    most: int
    limit_s: float
    start: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.start

    def check(self) -> None:
        """Raises TimeoutError once the run has reached its time limit."""
        if self.seconds() > self.limit_s:
            raise TimeoutError(f"not run: the time limit of {self.limit_s:.0f} s was reached (--limit)")


def measure_case(
    case: Case, device: torch.device, timer: Timer, effort: Effort, copy_gb_per_s: float
) -> dict[str, object]:
    """Measures all operations of one case.

    Args:
        copy_gb_per_s: the rate of a plain copy, which every rate is given as a percentage of.

    Returns:
        ``case.about()``, and "results": a list of what ``_measure`` returns; or "error", why there are none.
    """
    results: list[dict[str, object]] = []
    found: dict[str, object] = {"results": results}
    last = None
    try:
        effort.check()
        for subject in case.subjects(device):
            if subject.implementation != last:
                last = subject.implementation
                _release(device)  # memory of the previous one
            results.append(_measure(subject, timer, effort, copy_gb_per_s))
    except Exception as error:
        found["error"] = _say(error)
    _release(device)
    return case.about() | found


def _measure(subject: Subject, timer: Timer, effort: Effort, copy_gb_per_s: float) -> dict[str, object]:
    """Measures one row of the table.

    Returns:
        "implementation", "operation", "optimizer", "bytes" by count; then either "error", or "ms", "quartiles_ms",
        "repetitions" and, where measured, "graph_ms" (or "graph_error"); "gb_per_s" and "percent_of_copy" by count, of
        graph_ms where there is one and of ms otherwise.
    """
    row: dict[str, object] = {
        "implementation": subject.implementation,
        "operation": subject.operation,
        "optimizer": subject.optimizer,
        "bytes": subject.moved,
    }
    try:
        effort.check()
        built = subject.build()
        built.prepare(0)
        built.check()
        row |= median_ms(timer, built.call, built.prepare, effort.budget_ms, effort.least, effort.most)
        if built.captures and row["ms"] < GRAPH_BELOW_MS:
            row |= _measure_graph(built, timer, effort)
    except Exception as error:
        return row | {"error": _say(error)}
    ms = row.get("graph_ms", row["ms"])
    rates = {count: round(size / ms / 1e6, 3) for count, size in subject.moved.items()}
    percentages = {count: round(100 * rate / copy_gb_per_s, 3) for count, rate in rates.items()}
    return row | {"gb_per_s": rates, "percent_of_copy": percentages}


def _measure_graph(built: Built, timer: Timer, effort: Effort) -> dict[str, object]:
    try:
        replay = timer.capture(built.call)
        found = median_ms(timer, replay, built.prepare, effort.budget_ms, effort.least, effort.most)
    except Exception as error:
        return {"graph_error": _say(error)}
    return {"graph_ms": found["ms"], "graph_quartiles_ms": found["quartiles_ms"]}


def _say(error: Exception) -> str:
    """Type of an error and the start of its message, since CUDA messages are long."""
    return f"{type(error).__name__}: {error}"[:500]


def _release(device: torch.device) -> None:
    """Frees unused memory, including that of reference cycles."""
    gc.collect()
    if device.type == "cuda":
        # After an illegal access every call fails; each missing figure then records its own error.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
