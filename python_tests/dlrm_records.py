"""Records of a run, and their keys that differ between two runs."""

from __future__ import annotations

import json
from pathlib import Path

TIMES = {"examples_per_second", "train_seconds", "seconds", "peak_memory_bytes", "counted_from"}


def records(run: Path) -> list[dict]:
    """All records of a run, the test's last."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(run: Path, *others: str) -> list[dict]:
    """All records of a run, without times and other keys that differ between runs."""
    return [{key: value for key, value in record.items() if key not in {*TIMES, *others}} for record in records(run)]
