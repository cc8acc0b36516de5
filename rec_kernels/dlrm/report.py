"""Report of a run: scores as text, curves as a figure, and an HTML page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from rec_kernels.dlrm import files, page
from rec_kernels.dlrm.config import TrainConfig, option_text
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.page import number, size
from rec_kernels.dlrm.runs import CONFIG, METRICS, Records

TITLES = {"dlrm": "DLRM", "dcnv2": "DCN V2", "wukong": "Wukong"}
MODEL_PARTS = ("forward", "backward", "optimizer")
#: Explains the gap between the training and test curves.
STILL_LEARNING = (
    "In the first epoch, each batch is scored before the model learns from it, by a model trained up to the batch "
    "before. The test scores a frozen model on rows that are later and later. Where behavior changes with time, the "
    "training AUC is therefore above the test AUC without overfitting."
)
SCORES = (("loss", "log_loss", "log loss [nats]"), ("auc", "auc", "AUC"))


def scores(record: dict, split: str) -> list[tuple[str, str, str]]:
    """The scores of a record as (name, value, explanation)."""
    return [
        (f"{split} AUC", number(record["auc"]), ""),
        ("log loss", number(record["log_loss"]), ""),
        ("normalized entropy", number(record["normalized_entropy"]), " (log loss / entropy of the base rate)"),
        ("calibration", number(record["calibration"]), " (mean prediction / base rate)"),
        ("accuracy", number(record["accuracy"]), ""),
        (f"{split} rows", f"{record['examples']:,}", f", {record['base_rate']:.1%} positive"),
    ]


def facts(test: dict) -> dict[str, str]:
    """Further facts of a test record, by name."""
    seconds, rate = test["train_seconds"], test["examples_per_second"]
    found = {
        "training": f"{test['train_examples']:,} rows in {seconds:.1f} s, {rate:,.0f} examples/s",
        "tables": memory(test["tables"]),
    }
    if any(test["tiers"].get(name) for name in ("cache_bytes", "host_bytes", "file_bytes")):
        since = f" after step {step}, where the run was resumed" if (step := test.get("counted_from")) else ""
        found["tiers"] = tiers(test["tiers"]) + since
    if "dedup" in test:
        factor = test.get("dedup_factor")  # measured by "auto" only
        once = "once" if factor is None else f"once: {factor:.1f}x fewer ids"
        found["shared bags"] = once if test["dedup"] else "one for every row"
    flops = f"{test['flops_per_example']:,} FLOPs of a row's forward"
    found["dense part"] = f"{test['dense_parameters']:,} parameters; {flops}"
    if ranks := test.get("ranks"):
        tables, peaks = (", ".join(size(rank[key]) for rank in ranks) for key in ("table_bytes", "peak_memory_bytes"))
        found["processes"] = f"{len(ranks)}: tables of {tables}; peak memory {peaks}"
    return found | {"device": test["device"], "peak memory": f"{test['peak_memory_bytes'] / 2**20:,.0f} MiB"}


def tiers(report: dict[str, int]) -> str:
    """Formats a ``tier_report()``: "cache 1.2 MiB, rows in memory 3.0 MiB, in files 12.0 MiB; moved 40.1 MiB"."""
    memory = "host memory" if report.get("host_bytes") else "memory"
    parts = [f"cache {size(report['cache_bytes'])}", f"rows in {memory} {size(report['row_bytes'])}"]
    moved = f"moved {size(report['moved_bytes'])}"
    if report["file_bytes"]:
        parts += [f"in files {size(report['file_bytes'])}", f"their index {size(report['index_bytes'])}"]
        moved += f", read {size(report['read_bytes'])}, written {size(report['written_bytes'])}"
    return f"{', '.join(parts)}; {moved}"


def memory(tables: Sequence[dict]) -> str:
    """Formats the bytes of tables and row caches: "4.3 MiB (fp32: 11.4 MiB, 2.7x less), state 729.3 KiB"."""
    state = sum(table["state_bytes"] for table in tables)
    weights = sum(table["weight_bytes"] + table.get("cache_bytes", 0) for table in tables)
    full = sum(table["num_embeddings"] * table["embedding_dim"] * 4 for table in tables)
    saved = f" (fp32: {size(full)}, {full / weights:.1f}x less)" if any(t["format"] != "fp32" for t in tables) else ""
    return f"{size(weights)}{saved}, state {size(state)}"


def _with_total(tables: Sequence[dict], keys: Sequence[str]) -> list[dict]:
    total: dict[str, Any] = {"name": "total", "embedding_dim": "", "format": ""}
    return [total | {key: sum(table[key] for table in tables) for key in keys}, *tables]


def memory_rows(tables: Sequence[dict]) -> list[tuple]:
    """Formats a ``memory_report()`` as rows: the header, the total, then the tables by decreasing size."""

    def both(t: dict) -> int:
        return t["weight_bytes"] + t["state_bytes"]

    tables = _with_total(sorted(tables, key=both, reverse=True), ("num_embeddings", "weight_bytes", "state_bytes"))
    rows = [("table", "rows", "dim", "format", "weights [KiB]", "state [KiB]", "share")]
    for t in tables:
        kib = (f"{t[key] / 1024:,.1f}" for key in ("weight_bytes", "state_bytes"))
        share = f"{both(t) / max(both(tables[0]), 1):.1%}"
        rows.append((t["name"], f"{t['num_embeddings']:,}", t["embedding_dim"], t["format"], *kib, share))
    return rows


def cache_rows(tables: Sequence[dict]) -> list[tuple]:
    """Formats the row caches' counters like ``memory_rows``; empty without a cache."""
    keys = ("cached_rows", "lookups", "hits", "inserted", "evicted", "written", "left_out")
    cached = [table for table in tables if "cache_bytes" in table]
    rows = [("table", "hit rate", "cache [KiB]", *(key.replace("_", " ") for key in keys))]
    for t in _with_total(cached, ("cache_bytes", *keys)):
        rate = f"{t['hits'] / t['lookups']:.1%}" if t["lookups"] else "-"
        rows.append((t["name"], rate, f"{t['cache_bytes'] / 1024:,.1f}", *(f"{t[key]:,}" for key in keys)))
    return rows if cached else []


def scores_text(record: dict, split: str) -> str:
    """Formats the scores of a record as text."""
    return "\n".join(f"{name:<20}{value}{meaning}" for name, value, meaning in scores(record, split))


def summary(test: dict) -> str:
    """Formats the test record as text."""
    parts = []
    for header, *rows in filter(None, (memory_rows(test["tables"]), cache_rows(test["tables"]))):
        names, *columns = zip(*rows, strict=True)
        frame = pd.DataFrame(dict(zip(header[1:], columns, strict=True)), index=names, dtype=str)
        parts.append(frame.rename_axis(columns=header[0]).to_string() + "\n")
    return "\n".join([*parts, scores_text(test, "test"), *(f"{name:<20}{text}" for name, text in facts(test).items())])


def write(directory: Path) -> None:
    """Writes ``report.html`` of a complete or incomplete run from its config and records.

    Raises:
        OSError: the run has no ``config.json``, or its folder cannot be written to.
        DataError: ``config.json`` or ``metrics.jsonl`` is invalid.
    """
    settings = files.read_json(directory / CONFIG)
    records = Records(directory).read()
    try:
        text = render(directory.name, settings, records)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(f"{CONFIG} or {METRICS} of {directory} is not what a run writes: {error!r}") from error
    files.write_text(directory / "report.html", text)


def render(name: str, settings: dict, records: list[dict]) -> str:
    """The HTML page of a run, from the content of ``config.json`` and the records, of which any may be missing."""
    test = next(iter(_of_kind("test", records)), None)
    tables = about = ""
    if test is not None:
        found = filter(None, (memory_rows(test["tables"]), cache_rows(test["tables"])))
        tables = "".join(page.table(header, rows, strong=1) for header, *rows in found)
        about = page.table(("fact", "value"), facts(test).items(), kind="text")
    title = TITLES[settings["config"]["model"]]
    sections = [
        f"<h1>{escape(name)}</h1><p>{title}</p>{_status(records, test)}{_scores(records, test)}{about}",
        page.section("Curves", _curves(records)),
        page.section("Time", _time(_of_kind("train", records))),
        page.section("Memory", tables),
        page.section("Configuration", _configuration(settings["config"])),
        page.section("Versions", page.table(("package", "version"), settings["versions"].items(), kind="text")),
    ]
    return page.document(name, sections)


def _status(records: list[dict], test: dict | None) -> str:
    for failed in _of_kind("failed", records):
        return f'<p class="failed">Failed: {escape(failed["error"])}</p>'
    if test is None:
        last = max((record["step"] for record in records), default=0)
        return f'<p class="failed">Not finished: no test yet; the last record is of step {last:,}.</p>'
    early = ", stopped early" if test["stopped_early"] else ""
    return f"<p>Tested after {test['step']:,} steps on {test['train_examples']:,} rows{early}.</p>"


def _scores(records: list[dict], test: dict | None) -> str:
    """The latest scores, in large type."""
    train = _of_kind("train", records)
    if test is not None:
        shown = scores(test, "test")
    elif train:
        last = train[-1]
        shown = [("last training AUC", number(last["auc"]), ""), ("last training log loss", number(last["loss"]), "")]
    else:
        return ""
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value, _ in shown)
    return f'<dl class="scores">{"".join(items)}</dl>'


def _time(train: list[dict]) -> str:
    """Seconds and share of every part of the steps."""
    if not train:
        return ""
    seconds = {part: sum(record["seconds"][part] for record in train) for part in train[0]["seconds"]}
    total = sum(seconds.values())
    training = total - seconds["evaluation"]
    outside = training - sum(seconds[part] for part in MODEL_PARTS)
    rows = [("total", f"{total:,.2f}", ""), *((part, f"{s:,.2f}", f"{s / total:.1%}") for part, s in seconds.items())]
    return page.table(("part", "seconds", "share"), rows, strong=1) + (
        f"<p>Outside the model (data, other): {outside / training:.1%} of the training time without evaluations. "
        "Backward includes the tables' update, optimizer is the update of dense parameters, data is the time spent "
        "waiting for a batch. The test is not included.</p>"
    )


def _configuration(config: dict) -> str:
    """All options; those that differ from their default come first."""
    defaults = {option.name: option.default for option in dataclasses.fields(TrainConfig)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    changed = [name for name in values if values[name] != defaults.get(name)]
    names = [*changed, *(name for name in values if name not in changed)]
    rows = [(name, option_text(values[name]), option_text(defaults.get(name))) for name in names]
    note = f"<p>{len(changed)} of {len(names)} options differ from their default; they come first.</p>"
    return note + page.table(("option", "value", "default"), rows, kind="text", strong=len(changed))


def _of_kind(kind: str, records: list[dict]) -> list[dict]:
    return [record for record in records if record["kind"] == kind]


def _curves(records: list[dict]) -> str:
    if (figure := draw(records)) is None:
        return ""
    what = ", ".join(axes.get_ylabel() for axes in figure.axes)
    image = f'<img src="{page.picture(figure)}" alt="{escape(what)} over the rows trained on">'
    return f"<figure>{image}</figure><p>{STILL_LEARNING}</p>"


def draw(records: list[dict]) -> Figure | None:
    """Draws loss, AUC and a changing learning rate over the rows trained on; None without a record."""
    if not (train := _of_kind("train", records)):
        return None
    changes = len({record["lr"] for record in train}) > 1
    panels = SCORES + ((("lr", "", "learning rate of the tables"),) if changes else ())
    figure = Figure(figsize=(5.2, 3.2 * len(panels)), layout="constrained")  # small enough for a phone
    rows = np.cumsum([record["examples"] for record in train])
    for axes, (key, score_key, label) in zip(figure.subplots(len(panels)), panels, strict=True):
        values = [np.nan if record[key] is None else record[key] for record in train]
        axes.plot(rows, values, marker=".", label="training, scored before learning")
        if score_key:
            _draw_scores(axes, records, score_key, [0, *(r["step"] for r in train)], [0, *rows])
        axes.set(xlabel="rows trained on", ylabel=label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    return figure


def _draw_scores(axes: Axes, records: list[dict], key: str, steps: list, examples: list) -> None:
    """Draws a score of the evaluations, whose positions are interpolated between records, and of the test."""
    evaluations = [r for r in _of_kind("eval", records) if r[key] is not None]
    if evaluations:
        where = np.interp([r["step"] for r in evaluations], steps, examples)
        split = "held-out rows" if evaluations[0]["split"] == "valid" else "test rows"
        axes.plot(where, [r[key] for r in evaluations], "s", ms=4, color="tab:green", label=f"on the {split}")
    for test in _of_kind("test", records)[:1]:
        if (value := test[key]) is not None:
            axes.axhline(value, color="tab:orange", linestyle="--", linewidth=1)
            axes.plot(test["train_examples"], value, "D", color="tab:orange", label=f"test, model frozen: {value:.4f}")
    axes.legend(fontsize="small")
