"""The page of ``reproduce`` in Markdown and HTML, and its figures."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench import pictures
from bench.studies import compare_report, reproduce_pictures
from bench.studies.claims import RULE, VERDICTS, shortfall
from bench.studies.experiments import LOSS
from rec_kernels.dlrm import files, page

CLAIMS, BYTES, SPEED, COMPARISON = "claims.png", "bytes.png", "speed.png", "compare.png"


@dataclass(frozen=True)
class Table:
    """A table of the page; the first row is the header."""

    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A picture of the page; the path is relative to the page's folder."""

    path: str
    shows: str


@dataclass(frozen=True)
class Code:
    """A shell command of the page."""

    text: str


Part = str | Table | Picture | Code


def write(folder: Path, results: dict) -> None:
    """Writes ``report.md``, ``report.html`` and the pictures across experiments; each experiment's own already exist.

    Args:
        folder: of the page.
        results: as in ``results.json``.
    """
    entries = results["experiments"]
    figures = {CLAIMS: reproduce_pictures.claims(entries), BYTES: reproduce_pictures.quality_over_bytes(entries)}
    for name, figure in figures.items():
        (folder / name).unlink(missing_ok=True)  # a picture of an earlier call is outdated
        if figure is not None:
            pictures.save(figure, folder / name, dpi=110)
    title = "Reproduced" + (" quickly" if results["quick"] else "")
    sections = [("Claims", _claims(results)), *((entry["name"], _experiment(entry)) for entry in entries)]
    files.write_text(folder / "report.md", markdown(folder, title, sections))
    files.write_text(folder / "report.html", html(folder, title, sections))


def markdown(folder: Path, title: str, sections: Sequence[tuple[str, Sequence[Part]]]) -> str:
    """The page as Markdown, without pictures that are not in ``folder``."""
    lines = [f"# {title}"]
    for heading, parts in sections:
        lines.append(f"## {heading}")
        for part in parts:
            if isinstance(part, Picture):
                lines += [f"![{part.shows}]({part.path})"] if (folder / part.path).exists() else []
            elif isinstance(part, Table):
                lines.append(compare_report.table(part.rows))
            else:
                lines.append(f"    {part.text}" if isinstance(part, Code) else part)
    return "\n\n".join(lines) + "\n"


def html(folder: Path, title: str, sections: Sequence[tuple[str, Sequence[Part]]]) -> str:
    """The page as one HTML file with embedded pictures."""

    def content(part: Part) -> str:
        if isinstance(part, Table):
            return page.table(part.rows[0], part.rows[1:], kind="text")
        if isinstance(part, Code):
            return f'<pre class="scroll">{escape(part.text)}</pre>'
        if isinstance(part, str):
            return f"<p>{escape(part)}</p>"
        path = folder / part.path
        if not path.is_file():
            return ""
        source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        return f'<figure><img src="{source}" alt="{escape(part.shows)}"></figure>'

    made = [page.section(heading, "".join(map(content, parts))) for heading, parts in sections]
    return page.document(title, [f"<h1>{escape(title)}</h1>", *made])


def counts(results: dict) -> str:
    """Counts verdicts: "12 met, 5 not met, 3 cannot tell; of experiments that are not done: 4"."""
    done = Counter(c["verdict"] for e in results["experiments"] if e["result"] for c in e["claims"])
    text = ", ".join(f"{done[verdict]} {verdict}" for verdict in VERDICTS)
    rest = sum(len(e["claims"]) for e in results["experiments"] if not e["result"])
    return text + (f"; of experiments that are not done: {rest}" if rest else "")


def _claims(results: dict) -> list[Part]:
    machine, quick = results["machine"], results["quick"]
    parts: list[Part] = [
        f"{counts(results)}. {RULE} Each interval stands by itself: of twenty, one misses by chance. Where a claim is "
        f"that nothing is lost, the bound is {LOSS} of AUC below, unless the paper gives one.",
        f"{machine['cpu']}, {machine['cores']} cores, threads: {machine['threads']}; torch {machine['torch']}, "
        f"rec_kernels {machine['rec_kernels']}: where this page was made. Examples per second are of the whole "
        "training and of the machine as it was: runs of a seed take turns, minutes apart. Runs that are kept may be of "
        "another machine or number of threads, and then no claim of speed is judged.",
    ]
    if quick:
        parts.append(
            f"Quick: the first {quick['weeks']} weeks of Complete Journey and {quick['seeds']} seeds. Small "
            "differences cannot be told from chance, and a model that has seen less is another one."
        )
    parts += [
        Picture(CLAIMS, "Every claim: our number with its interval, and the bound"),
        Picture(BYTES, "Test AUC over bytes, all techniques"),
    ]
    for source, label in (("arXiv", "Of papers"), ("target", "Of this project")):
        rows = [
            (entry["name"], claim["says"], claim["source"], *_numbers(claim), claim["verdict"])
            for entry in results["experiments"]
            if entry["result"]
            for claim in entry["claims"]
            if claim["source"].startswith(source)
        ]
        if rows:
            header = ("experiment", "claim", "source", "ours", "95 % interval", "bound", "verdict")
            parts += [f"{label}:", Table([header, *rows])]
    return parts


def _numbers(claim: dict) -> tuple[str, str, str]:
    """The measured value, its interval and the bound."""

    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:+.4f}" if claim["unit"] == "AUC" else f"{value:.2f}x"

    interval = "-" if claim["low"] is None else f"{text(claim['low'])} to {text(claim['high'])}"
    return text(claim["value"]), interval, "above " * claim["strictly"] + text(claim["at_least"])


def _premise(premise: dict) -> str:
    """Formats a premise: "parameters, full / dim8: 1.99x, must be 1.8x to 2.22x"."""
    value = "-" if premise["value"] is None else f"{premise['value']:.2f}x"
    return f"{premise['measure']}: {value}, must be {premise['at_least']:.3g}x to {premise['at_most']:.3g}x"


def _experiment(entry: dict) -> list[Part]:
    parts: list[Part] = [f"{entry['shows'].capitalize()}.", Code(entry["command"]), _status(entry)]
    if entry["result"] is None:
        return parts
    for claim in entry["claims"]:
        ours, interval, bound = _numbers(claim)
        within = "" if interval == "-" else f", interval {interval}"
        differs = f" ({claim['differs']}.)" if claim["differs"] else ""
        premises = "".join(f" Premise: {_premise(premise)}." for premise in claim["premises"])
        lacks = "" if (lacks := shortfall(claim)) in ("", claim["why"]) else f" ({lacks})"
        parts.append(
            f"{claim['verdict'].capitalize()}: {claim['says']} [{claim['source']}]. {claim['measure']}: {ours}{within}"
            f"; bound {bound}: {claim['why']}{lacks}.{premises}{differs}"
        )
    parts += [
        Picture(f"{entry['name']}/{COMPARISON}", f"{entry['name']}: test AUC over the bytes of the tables"),
        Picture(f"{entry['name']}/{SPEED}", f"{entry['name']}: examples per second"),
        Table(_scores(entry["result"])),
    ]
    parts += filter(None, [compare_report.machines_note(entry["result"])])
    failed = [run for c in entry["result"]["configurations"] for run in c["runs"] if run["outcome"] == "failed"]
    if failed:
        parts.append("Left out of the numbers: " + "; ".join(f"{run['run']}: {run['error']}" for run in failed) + ".")
    return parts


def _status(entry: dict) -> str:
    why = f": {entry['why']}" if entry["why"] else ""
    took = ""
    if entry["seconds"] is not None:
        took = f" It took {entry['seconds'] / 60:.1f} min so far, {entry['cpu_seconds'] / 60:.1f} of the processor."
    return f"{entry['status'].capitalize()}{why}.{took} The list says {entry['stated_minutes']:g} min of it."


def _scores(result: dict) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("configuration", "runs", "test AUC", "difference", "95 % interval", "MiB", "examples/s")
    ]
    for c in result["configurations"]:
        apart = c["auc"]["difference"] or {"mean": None, "low": None}
        ended = sum(run["outcome"] == "test" for run in c["runs"])
        interval = "-" if apart["low"] is None else f"{apart['low']:+.5f} to {apart['high']:+.5f}"
        mean = "-" if apart["mean"] is None else f"{apart['mean']:+.5f}"
        size = "-" if c["table_bytes"] is None else f"{c['table_bytes'] / 2**20:.2f}"
        rate = "-" if c["examples_per_second"] is None else f"{c['examples_per_second']:,.0f}"
        rows.append((c["name"], str(ended), page.number(c["auc"]["mean"], 5), mean, interval, size, rate))
    return rows
