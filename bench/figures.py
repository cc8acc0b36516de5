"""Reads the JSON files of bench.run and derives values from a group's figures.

A group is what implementations are compared on: name -> row of figures, as `bench.run.merge` makes them. Files that
were written before it kept every pass have rows without "passes_ms" and "bytes".
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench import ROOT

#: Bare loops and copies that do the minimum work of any implementation.
LIMITS = ("limit", "bytes", "products", "copy", "read")
#: Those of them whose time is proportional to the bytes that they move.
OF_BYTES = ("limit", "bytes", "copy", "read")
#: Names of implementations whose code is not in this repository.
OTHERS = frozenset(LIMITS) | {
    *("torch", "compiled", "tuned", "bmm", "indexing", "index_select", "torch, whole batch"),
    *("fbgemm", "fbgemm, huge pages", "fbgemm, whole batch"),
}

#: The program that writes a document, identified by a field of the document.
WRITERS = {"results": "python -m bench.run", "points": "python -m bench.tuning"}

Row = dict[str, object]
Group = dict[str, Row]


#: Fields of "machine" that are read in every file.
ABOUT = ("cpu", "threads", "torch", "date", "commit")
#: Fields of a point that are read.
POINT = ("sweep", "tables", "batch", "rows", "dim", "bag", "zipf", "format", "batches", "unique_rows", "cycle_rows")


class FiguresError(ValueError):
    """A file not written by bench.run or bench.tuning, or without the required figures."""


def load(name: str, kinds: Sequence[str] = ("results",)) -> dict[str, object]:
    """The document of a file.

    Args:
        name: its path, or COMMIT:PATH for the file as git has it at a commit.
        kinds: "results" for files of bench.run, "points" for those of bench.tuning.

    Raises:
        FiguresError: it is missing, or of another kind.
    """
    text = Path(name).read_text(errors="replace") if Path(name).is_file() else _of_commit(name)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise FiguresError(f"{name}: not a JSON file: {error}") from error
    if not isinstance(document, dict) or not any(_is_kind(document, kind) for kind in kinds):
        raise FiguresError(f"{name}: not written by {' or '.join(WRITERS[kind] for kind in kinds)}")
    return document


def _of_commit(name: str) -> str:
    shown = None
    if ":" in name:
        with contextlib.suppress(FileNotFoundError):  # there is no git
            shown = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, text=True)
    if shown is None or shown.returncode:
        raise FiguresError(f"{name}: neither a file nor the COMMIT:PATH of a file in git")
    return shown.stdout


def _is_kind(document: dict[str, object], kind: str) -> bool:
    about = document.get("machine")
    found = document.get(kind) if isinstance(about, dict) and about.keys() >= set(ABOUT) else None
    if kind == "points":
        return isinstance(found, list) and all(map(_is_point, found))
    groups = found.values() if isinstance(found, dict) else [None]
    return all(isinstance(group, dict) and all(map(_is_row, group.values())) for group in groups)


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and "ms" in row


def _is_point(row: object) -> bool:
    if not isinstance(row, dict) or not row.keys() >= set(POINT):
        return False
    times = [row[key].get("ours") if isinstance(row.get(key), dict) else None for key in ("forward", "step")]
    return all(isinstance(ours, dict) and ours.keys() >= {"ms", "passes_ms"} for ours in times)


def where(document: dict[str, object]) -> str:
    """Describes machine, versions, effort, date and commit of a document in one line."""
    about = document["machine"]
    threads = f"{about['threads']} thread{'s' * (about['threads'] != 1)}"
    commit = f"commit {about['commit']}{' and changes' * about.get('dirty', False)}"
    peer = f", FBGEMM {about['fbgemm']}" if about.get("fbgemm") else ""
    effort = "".join(f", {about[key]} {key}" for key in ("passes", "rounds") if key in about)
    return f"{about['cpu']}, {threads}, torch {about['torch']}{peer}{effort}, {about['date']}, {commit}"


def is_other(name: str) -> bool:
    """True for code outside this repository, whose time does not depend on our commits."""
    return name in OTHERS


def passes(row: Row) -> list[float]:
    """Milliseconds of each pass, or one value for all passes if the file has no more."""
    return row.get("passes_ms") or [row["ms"]]


def moved(row: Row) -> float | None:
    """Bytes of a call, every occurrence of a row counted."""
    return row.get("bytes") or (row["gb_per_s"] * row["ms"] * 1e6 if row.get("gb_per_s") else None)


def share_of_limit(group: Group, name: str) -> float | None:
    """The limit's time over an implementation's, the median over passes; None where the group has no limit.

    Of several limits the slowest counts: each has to be paid. A limit that moves more or fewer bytes than the
    implementation, such as one of rows in bfloat16 beside float32, counts for as many as that one's.
    """
    limits = [_scaled(group, limit, name) for limit in LIMITS if limit in group]
    if not limits or name in LIMITS:
        return None
    least = [max(of_pass) for of_pass in zip(*limits, strict=True)]
    return statistics.median(a / b for a, b in zip(least, passes(group[name]), strict=True))


def _scaled(group: Group, limit: str, name: str) -> list[float]:
    """Milliseconds of each pass of a limit, for the bytes of an implementation."""
    own, of_limit = moved(group[name]), moved(group[limit])
    scale = own / of_limit if limit in OF_BYTES and own and of_limit else 1.0
    return [ms * scale for ms in passes(group[limit])]
