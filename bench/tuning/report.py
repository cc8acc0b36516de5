"""Writes tables in Markdown, the generated parts of docs/tuning.md, and links to the pictures."""

from __future__ import annotations

import os
import re
from pathlib import Path

import bench
from bench.tuning.points import Point

#: A generated part of the page.
PART = re.compile(r"(<!-- generated: tuning (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
NAMES = {
    "base": "base",
    "tables": "T, tables",
    "batch": "B, bags per table",
    "bag": "L, ids per bag",
    "dim": "D, columns",
    "zipf": "Zipf exponent",
    "format": "row format",
}
DIRECTIONS = {"forward": "Lookup (forward)", "step": "Training step (forward, backward, row-wise Adagrad)"}


def label(point: Point) -> str:
    """ "batch 512"."""
    return "base" if point.sweep == "base" else f"{point.sweep} {point.value}"


def curves(document: dict, direction: str) -> str:
    """A table of a direction's measured points, with the model and FBGEMM."""
    lines = []
    for row in document["points"]:
        ours, moved, found = row[direction]["ours"], row["bytes"][direction], row["model"][direction]
        name = label(Point.read(row)) + ("" if row["model"]["fitted"] else " *")
        cells = [name, f"{row['unique_rows']:,.0f}", f"{moved['unique'] / 1e6:.3g}", _ms(ours["ms"])]
        cells += [f"{moved['unique'] / ours['ms'] / 1e6:.1f}", f"{found['error']:+.0%}"]
        lines.append([*cells, _peer(row[direction].get("fbgemm"))])
    return bench.table(("", "unique rows", "MB", "ms", "GB/s", "model's error", "FBGEMM, ms"), lines)


def _ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def _peer(found: dict | None) -> str:
    return f"{_ms(found['ms'])} ({found['over_ours']:.2f}x)" if found else ""


def errors(document: dict) -> str:
    """Mean absolute relative errors of the model."""
    found = document["model"]["errors"].items()
    rows = ((NAMES.get(name, name), f"{of['forward']:.0%}", f"{of['step']:.0%}") for name, of in found)
    return bench.table(("", "forward", "step"), rows)


def prices(document: dict) -> str:
    """Rates and prices."""
    rates = document["rates"]
    loops = ((name, f"{rates[name]:.1f}") for name in ("gather", "cached", "stream", "update"))
    found = [bench.table(("measured rate", "GB/s"), loops)]
    if rates["decode"]:
        coded = ((f"`{f}`", f"{rates['decode'][f]:.3f}", f"{rates['encode'][f]:.3f}") for f in rates["decode"])
        found.append(bench.table(("format", "decode, ns per column", "encode, ns per column"), coded))
    return "\n\n".join([*found, fitted_prices(document["model"])])


def fitted_prices(model: dict) -> str:
    """Prices and sizes of a document's "model"."""
    lookup, backward = model["prices_ns"]["forward"], model["prices_ns"]["step"]
    values = [
        ("call, us", lookup["call"] / 1e3),
        ("id, ns", lookup["id"]),
        ("output, ns per byte", lookup["byte of output"]),
        ("call', us", backward["call"] / 1e3),
        ("id', ns", backward["id or row"]),
        ("gradient, ns per byte", backward["byte of gradient"]),
        ("caches, MB", model["caches_bytes"] / 1e6),
        ("near, MB", model["near_bytes"] / 1e6),
    ]
    return bench.table(("fitted", ""), ((name, f"{value:.3g}") for name, value in values))


def tables(document: dict) -> str:
    """All tables, for the terminal."""
    found = [f"{heading}\n\n{curves(document, d)}" for d, heading in DIRECTIONS.items()]
    return "\n\n".join([*found, prices(document), errors(document)])


def parts(document: dict, file: str, pictures: dict[str, str]) -> dict[str, str]:
    """The parts of the page by name.

    Args:
        document: of a run, with its model.
        file: the run's file, and
        pictures: direction -> its picture, as the page links to them; only those that exist.
    """
    about = document["machine"]
    where = (
        f"[{Path(file).name}]({file}): {about['cpu']} ({about['cpu_isa']}), {about['threads']} threads, torch "
        f"{about['torch']}, {about['date']}, commit {about['commit']}; medians of {about['passes']} passes, "
        f"{about['seconds']} s: `{about['command']}`."
    )
    of_direction = [
        "\n\n".join(
            [f"### {heading}", *([f"![{heading}]({pictures[d]})"] if d in pictures else []), curves(document, d)]
        )
        for d, heading in DIRECTIONS.items()
    ]
    return {
        "curves": "\n\n".join([where, *of_direction]) + "\n",
        "prices": prices(document) + "\n",
        "errors": errors(document) + "\n",
    }


def page_with(text: str, document: dict, page: Path, file: Path) -> str:
    """The text of a page with its generated parts replaced.

    Raises:
        ValueError: it has another part, or none.
    """
    links = {d: Path("images") / f"tuning-{d}.png" for d in DIRECTIONS}
    pictures = {d: link.as_posix() for d, link in links.items() if (page.parent / link).exists()}
    made = parts(document, Path(os.path.relpath(file.resolve(), page.resolve().parent)).as_posix(), pictures)
    named = [match[2] for match in PART.finditer(text)]
    if sorted(named) != sorted(made):
        raise ValueError(
            f"{page} must have the generated parts {', '.join(made)}, but has {', '.join(named) or 'none'}"
        )
    return PART.sub(lambda match: match[1] + made[match[2]] + match[3], text)


def renew(page: Path, document: dict, file: Path) -> None:
    """Writes ``page_with`` to the page."""
    page.write_text(page_with(page.read_text(), document, page, file))
