"""Benchmarks: every op beside its peers, with bytes moved and the measured limit.

On the CPU: `python -m bench.run --help`. On a GPU: `python -m bench.gpu --help`.
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def commit() -> dict[str, object]:
    """The commit checked out: "commit" by `git describe`, "" if nobody knows; "dirty" if tracked files differ."""
    described = ["git", "describe", "--always", "--tags", "--dirty"]
    try:
        name = subprocess.run(described, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # there is no git
        name = ""
    return {"commit": name.removesuffix("-dirty"), "dirty": name.endswith("-dirty")}
