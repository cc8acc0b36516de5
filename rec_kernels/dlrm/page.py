"""The HTML page of a run: one file, no scripts, nothing loaded from elsewhere; for a phone, a screen and paper."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from rec_kernels.dlrm import files
from rec_kernels.dlrm.config import TrainConfig

#: Models, for a reader.
TITLES = {"dlrm": "DLRM", "dcnv2": "DCN V2", "wukong": "Wukong"}
MODEL_PARTS = ("forward", "backward", "optimizer")

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 46rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5em; overflow-wrap: anywhere; margin: 0 0 .25rem; }
h2 { font-size: 1.15em; margin: 2rem 0 .5rem; border-bottom: 1px solid #ccc; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.failed { border-left: 4px solid #b00020; padding-left: .6rem; }
.scores { display: flex; flex-wrap: wrap; gap: .5rem 1.75rem; margin: 1rem 0; }
.scores dt { font-size: .85em; color: #555; }
.scores dd { font-size: 1.8em; line-height: 1.2; margin: 0; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9em; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .5rem; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
table.text td, table.text th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tr.strong { font-weight: 600; }
.wide { width: 40%; min-width: 6rem; }
.bar { height: .8rem; background: #1f77b4; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
figure { margin: .75rem 0; break-inside: avoid; }
img { width: 100%; max-width: 40rem; height: auto; }
@media print { body { max-width: none; font-size: 11px; padding: 0; } .scroll { overflow: visible; }
  tr, .scores { break-inside: avoid; } h2 { break-after: avoid; } img { max-width: 12cm; } }
"""


def number(value: float | None, digits: int = 4) -> str:
    """The number with ``digits`` decimals; None, a score that is not defined, is "-"."""
    return "-" if value is None else f"{value:.{digits}f}"


def size(count: float) -> str:
    """Bytes, as in "11.4 MiB"."""
    power = min(max(int(count).bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:,.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def percent(share: float | None) -> str:
    """As in "93.1%"; None is "-"."""
    return "-" if share is None else f"{share:.1%}"


def has_tiers(test: dict) -> bool:
    """Whether a run had rows in more than one place."""
    return any(test.get("tiers", {}).get(name) for name in ("cache_bytes", "host_bytes", "file_bytes"))


def tiers(report: dict[str, int]) -> str:
    """A ``tier_report()``, as in "cache 1.2 MiB, rows in memory 3.0 MiB, in files 12.0 MiB; moved 40.1 MiB"."""
    memory = "host memory" if report.get("host_bytes") else "memory"
    parts = [f"cache {size(report['cache_bytes'])}", f"rows in {memory} {size(report['row_bytes'])}"]
    moved = f"moved {size(report['moved_bytes'])}"
    if report["file_bytes"]:
        parts += [f"in files {size(report['file_bytes'])}", f"their index {size(report['index_bytes'])}"]
        moved += f", read {size(report['read_bytes'])}, written {size(report['written_bytes'])}"
    return f"{', '.join(parts)}; {moved}"


def dense(test: dict) -> str:
    """All but the tables, as in "39,873 parameters; 78,912 FLOPs of a row's forward"."""
    flops = f"; {test['flops_per_example']:,} FLOPs of a row's forward" if "flops_per_example" in test else ""
    return f"{test['dense_parameters']:,} parameters{flops}"


def dedup(test: dict) -> str:
    """What became of the shared bags, as in "once: history 9.2x fewer ids; 1.4 s on the reader's thread".

    Of windows: "once, as windows: ...".
    """
    if not test["dedup"]:
        return "one for every row"
    factors = ", ".join(f"{name} {factor:.1f}x" for name, factor in test.get("dedup_factors", {}).items())
    once = "once, as windows" if test.get("windows") else "once"
    return f"{once}: {factors} fewer ids; {test.get('dedup_seconds', 0.0):.1f} s on the reader's thread"


def memory(tables: Sequence[dict]) -> str:
    """Bytes of a ``memory_report()``, as in "4.3 MiB (fp32: 11.4 MiB, 2.7x less), state 729.3 KiB".

    Those of row caches are among them.
    """
    state = sum(table["state_bytes"] for table in tables)
    weights = sum(table["weight_bytes"] + table.get("cache_bytes", 0) for table in tables)
    full = sum(table["num_embeddings"] * table["embedding_dim"] * 4 for table in tables)
    saved = f" (fp32: {size(full)}, {full / weights:.1f}x less)" if any(t["format"] != "fp32" for t in tables) else ""
    return f"{size(weights)}{saved}, state {size(state)}"


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write the figure as a PNG file, in place of what is there."""
    with files.replacing(path) as file:
        figure.savefig(file, format="png", dpi=dpi)


def picture(figure: Figure) -> str:
    """The figure as an SVG in a ``data:`` address, which keeps its ids and styles away from the page's."""
    out = io.StringIO()
    # Without metadata and with fixed ids, the same figure always gives the same text.
    with matplotlib.rc_context({"svg.hashsalt": "rec_kernels"}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue().encode()).decode()


def render(name: str, settings: dict, records: list[dict], pictures: Sequence[tuple[str, str]]) -> str:
    """The page.

    Args:
        name: of the run.
        settings: content of ``config.json``: "config" and "versions".
        records: of ``metrics.jsonl``; none of them has to be there.
        pictures: label and address of each.

    Returns:
        HTML; every text in it is escaped.
    """
    test = next((record for record in records if record["kind"] == "test"), None)
    title = TITLES[settings["config"].get("model", "dlrm")]
    figures = "".join(
        f'<figure><img src="{escape(source)}" alt="{escape(label)} over the rows trained on"></figure>'
        for label, source in pictures
    )
    sections = [
        f"<h1>{escape(name)}</h1><p>{title}</p>{_status(records, test)}{_scores(records, test)}",
        section("Curves", figures),
        section("Time", _time([r for r in records if r["kind"] == "train"]) + _shared(test)),
        section("Memory", _memory(test) if test else ""),
        section("Configuration", _configuration(settings["config"])),
        section("Versions", table(("package", "version"), settings["versions"].items(), kind="text")),
    ]
    return document(name, sections)


def document(title: str, sections: Sequence[str]) -> str:
    """A page of sections, which are HTML; the title is a text and is escaped."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def section(title: str, content: str) -> str:
    """A part of a page: the title is a text, the content HTML; nothing where there is no content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def table(header: Sequence[str], rows, *, kind: str = "", strong: int = 0) -> str:
    """HTML table of texts, which are escaped; the first ``strong`` rows stand out."""

    def line(cells, tag: str, css: str = "") -> str:
        return f"<tr{css}>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td", ' class="strong"' if i < strong else "") for i, row in enumerate(rows))
    css = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{css}><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def _status(records: list[dict], test: dict | None) -> str:
    failed = next((record for record in records if record["kind"] == "failed"), None)
    if failed is not None:
        return f'<p class="failed">Failed: {escape(failed["error"])}</p>'
    if test is None:
        last = max((record["step"] for record in records), default=0)
        return f'<p class="failed">Not finished: no test yet; the last record is of step {last:,}.</p>'
    early = ", stopped early" if test["stopped_early"] else ""
    device = escape(test.get("device", "cpu"))
    return f"<p>Tested after {test['step']:,} steps on {test['train_examples']:,} rows{early}; device: {device}.</p>"


def _scores(records: list[dict], test: dict | None) -> str:
    """The last scores there are, as big numbers."""
    train = [record for record in records if record["kind"] == "train"]
    if test is not None:
        shown = [
            ("test AUC", number(test["auc"])),
            ("test log loss [nats]", number(test["log_loss"])),
            ("normalized entropy", number(test["normalized_entropy"])),
            ("calibration", number(test["calibration"], 3)),
            ("accuracy", number(test["accuracy"])),
            ("test rows", f"{test['examples']:,}"),
            ("examples per second", f"{test['examples_per_second']:,.0f}"),
            ("training [s]", f"{test['train_seconds']:,.1f}"),
            ("peak memory [MiB]", f"{test['peak_memory_bytes'] / 2**20:,.0f}"),
        ]
    elif train:
        shown = [("last training AUC", number(train[-1]["auc"])), ("last training log loss", number(train[-1]["loss"]))]
    else:
        return ""
    return (
        '<dl class="scores">'
        + "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in shown)
        + "</dl>"
    )


def _time(train: list[dict]) -> str:
    """Seconds and share of every part of the steps; the share that is not the model's."""
    if not train:
        return ""
    seconds = {part: sum(record["seconds"][part] for record in train) for part in train[0]["seconds"]}
    total = sum(seconds.values())
    training = total - seconds["evaluation"]
    outside = training - sum(seconds[part] for part in MODEL_PARTS)
    rows = "".join(
        f"<tr><td>{escape(part)}</td><td>{value:,.2f}</td><td>{value / total:.1%}</td>"
        f'<td class="wide"><div class="bar" style="width:{value / total:.1%}"></div></td></tr>'
        for part, value in seconds.items()
    )
    return (
        '<div class="scroll"><table><thead><tr><th>part</th><th>seconds</th><th>share</th><th></th></tr></thead>'
        f'<tbody>{rows}<tr class="strong"><td>total</td><td>{total:,.2f}</td><td></td><td></td></tr></tbody></table>'
        f"</div><p>Outside the model (data, other): {outside / training:.1%} of the training time, evaluations left "
        "out. Backward includes the update of the tables, optimizer is that of all but the tables, data is the time "
        "spent waiting for a batch. The test is not in the table.</p>"
    )


def _memory(test: dict) -> str:
    tables = sorted(test["tables"], key=lambda table: table["weight_bytes"] + table["state_bytes"], reverse=True)
    weights, state = (sum(table[key] for table in tables) for key in ("weight_bytes", "state_bytes"))

    def row(name: str, rows: int, dim: object, kind: str, weight: int, extra: int) -> tuple:
        share = (weight + extra) / (weights + state) if weights + state else 0
        return name, f"{rows:,}", dim, kind, f"{weight / 1024:,.1f}", f"{extra / 1024:,.1f}", f"{share:.1%}"

    lines = [row("total", sum(table["num_embeddings"] for table in tables), "", "", weights, state)]
    keys = ("name", "num_embeddings", "embedding_dim", "format", "weight_bytes", "state_bytes")
    lines += [row(*(table[key] for key in keys)) for table in tables]
    header = ("table", "rows", "dim", "format", "weights [KiB]", "state [KiB]", "share")
    kept = f"{test['dense_parameters'] * 4 / 1024:,.1f} KiB in FP32, of which Adam keeps two more numbers each"
    notes = f"<p>Tables: {memory(tables)}.</p><p>Dense part: {dense(test)}; {kept}.</p>"
    if has_tiers(test):
        notes += f"<p>Tiers: {escape(tiers(test['tiers']))}.</p>{_caches(tables)}"
    return table(header, lines, strong=1) + notes


def _shared(test: dict | None) -> str:
    return f"<p>Shared bags: {escape(dedup(test))}.</p>" if test and "dedup" in test else ""


def _caches(tables: list[dict]) -> str:
    """Of the tables with a row cache: what it holds, and what became of their rows."""
    keys = ("cached_rows", "lookups", "hits", "inserted", "evicted", "written", "left_out")
    rows = [
        (t["name"], percent(t["hit_rate"]), f"{t['cache_bytes'] / 1024:,.1f}", *(f"{t[key]:,}" for key in keys))
        for t in tables
        if "cache_bytes" in t
    ]
    header = ("table", "hit rate", "cache [KiB]", *(key.replace("_", " ") for key in keys))
    return table(header, rows) if rows else ""


def _configuration(config: dict) -> str:
    """The options that are not at their default first."""
    defaults = {option.name: option.default for option in dataclasses.fields(TrainConfig)}

    values = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    changed = [name for name in values if values[name] != defaults.get(name)]
    names = [*changed, *(name for name in values if name not in changed)]
    rows = [(name, _option(values[name]), _option(defaults.get(name))) for name in names]
    note = f"<p>{len(changed)} of {len(names)} options are not at their default; they come first.</p>"
    return note + table(("option", "value", "default"), rows, kind="text", strong=len(changed))


def _option(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)
