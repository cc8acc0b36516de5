"""Benchmarks of every op against its peers, with bytes moved and the measured limit.

On the CPU: `python -m bench.run --help`. On a GPU: `python -m bench.gpu --help`.
"""

import json
import os
import subprocess
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def save(document: object, path: Path) -> None:
    """Writes a JSON file atomically: an interrupted run leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(part, path)


def table(heads: Sequence[str], rows: Iterable[Iterable[object]], texts: Collection[str] = ()) -> str:
    """A Markdown table. Columns are right-aligned, except the first and those with the headings ``texts``."""
    rule = ["---" if number == 0 or head in texts else "---:" for number, head in enumerate(heads)]
    lines = ["|" + "|".join(f" {cell}".rstrip() + " " for cell in cells) + "|" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def commit() -> dict[str, object]:
    """The checked-out commit: "commit" by `git describe`, "" if unknown; "dirty" if tracked files differ."""
    described = ["git", "describe", "--always", "--tags", "--dirty"]
    try:
        name = subprocess.run(described, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # there is no git
        name = ""
    return {"commit": name.removesuffix("-dirty"), "dirty": name.endswith("-dirty")}
