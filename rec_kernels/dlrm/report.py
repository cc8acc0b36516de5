"""What a run shows: its scores as text, its curves as pictures, and a page with all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from rec_kernels.dlrm import files, page
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.runs import CONFIG, METRICS, Records

PANELS = (("loss", "log_loss", "log loss [nats]"), ("auc", "auc", "AUC"))


def memory_table(tables: list[dict]) -> str:
    """Text table of ``memory_report()``: rows, dim, KiB of weights and of optimizer state, and their sums.

    With row caches also KiB of the caches and the share of the ids whose row was cached.
    """
    cached = any("cache_bytes" in table for table in tables)
    header = f"{'table':<14}{'rows':>9}{'dim':>5}{'format':>8}{'weight KiB':>12}{'state KiB':>11}"
    lines = [header + (f"{'cache KiB':>11}{'hits':>8}" if cached else "")]
    for table in tables:
        line = (
            f"{table['name']:<14}{table['num_embeddings']:>9,}{table['embedding_dim']:>5}{table['format']:>8}"
            f"{table['weight_bytes'] / 1024:>12,.1f}{table['state_bytes'] / 1024:>11,.1f}"
        )
        if cached:
            line += f"{table.get('cache_bytes', 0) / 1024:>11,.1f}{page.percent(table.get('hit_rate')):>8}"
        lines.append(line)
    rows, weight, state, cache = (
        sum(table.get(key, 0) for table in tables)
        for key in ("num_embeddings", "weight_bytes", "state_bytes", "cache_bytes")
    )
    total = f"{'total':<14}{rows:>9,}{'':>13}{weight / 1024:>12,.1f}{state / 1024:>11,.1f}"
    if cached:
        hits, lookups = (sum(table.get(key, 0) for table in tables) for key in ("hits", "lookups"))
        total += f"{cache / 1024:>11,.1f}{page.percent(hits / lookups if lookups else None):>8}"
    return "\n".join([*lines, total])


def scores_text(scores: dict, split: str) -> str:
    """The record of ``score`` as text for a person."""
    number = page.number
    return "\n".join(
        [
            f"{split + ' rows':<20}{scores['examples']:,}, {scores['base_rate']:.1%} positive",
            f"{split + ' AUC':<20}{number(scores['auc'])}",
            f"log loss            {number(scores['log_loss'])}",
            f"normalized entropy  {number(scores['normalized_entropy'])} (log loss / entropy of the base rate)",
            f"calibration         {number(scores['calibration'])} (mean prediction / base rate)",
            f"accuracy            {number(scores['accuracy'])}",
        ]
    )


def summary(test: dict) -> str:
    """The test record as text for a person."""
    return "\n".join(
        [
            memory_table(test["tables"]),
            "",
            scores_text(test, "test"),
            f"training            {test['train_examples']:,} rows in {test['train_seconds']:.1f} s, "
            f"{test['examples_per_second']:,.0f} examples/s",
            f"tables              {page.memory(test['tables'])}",
            *([f"tiers               {page.tiers(test['tiers'])}"] if page.has_tiers(test) else []),
            *([f"shared bags         {page.dedup(test)}"] if "dedup" in test else []),
            *([f"dense part          {page.dense(test)}"] if "flops_per_example" in test else []),
            f"device              {test.get('device', 'cpu')}",
            f"peak memory         {test['peak_memory_bytes'] / 2**20:,.0f} MiB",
        ]
    )


def write(directory: Path) -> None:
    """Write ``report.html`` and ``report.png`` of a run from its config and records, however far it got.

    ``report.html`` needs nothing but itself: the pictures are in it, and there are no scripts.

    Raises:
        OSError: the run has no ``config.json``, or its folder cannot be written to.
        DataError: ``config.json`` or ``metrics.jsonl`` is not what a run writes.
    """
    settings = files.read_json(directory / CONFIG)
    records = Records(directory).read()
    try:
        draw(directory / "report.png", records, settings["config"].get("model", "dlrm"))
        pictures = [(label, page.picture(figure)) for label, figure in curves(records)]
        text = page.render(directory.name, settings, records, pictures)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(f"{CONFIG} or {METRICS} of {directory} is not what a run writes: {error!r}") from error
    files.write_text(directory / "report.html", text)


def draw(path: Path, records: list[dict], model: str = "dlrm") -> None:
    """Write a picture of loss and AUC: progressive during the training, at the evaluations, and of the test."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, 2), PANELS, strict=True):
        _draw_scores(axes, records, *panel)
    figure.suptitle(f"{page.TITLES[model]}: {path.parent.name}", parse_math=False)
    page.save(figure, path, dpi=120)


def curves(records: list[dict]) -> list[tuple[str, Figure]]:
    """A figure, small enough for a phone, of loss, of AUC, and of the learning rate if it changes, with its label."""
    figures = []
    for panel in PANELS if any(record["kind"] == "train" for record in records) else ():
        figure, axes = _small_figure()
        _draw_scores(axes, records, *panel)
        figures.append((panel[-1], figure))
    _, examples = _progress(records)
    if figure := _hit_rates(records):
        figures.append(("share of the ids whose row was cached", figure))
    rates = [record["lr"] for record in records if record["kind"] == "train"]
    if len(set(rates)) > 1:
        figure, axes = _small_figure()
        axes.plot(examples, rates, marker=".")
        _finish(axes, "learning rate of the tables")
        figures.append(("learning rate of the tables", figure))
    return figures


def _hit_rates(records: list[dict]) -> Figure | None:
    """Of each table with a row cache, the largest ten, between two records."""
    train = [record for record in records if record["kind"] == "train"]
    tables = list(dict.fromkeys(name for record in train for name in record.get("hit_rates", ())))
    if not tables:
        return None
    test = next((record for record in records if record["kind"] == "test"), None)
    if test is not None:
        sizes = {table["name"]: table["num_embeddings"] for table in test["tables"]}
        tables = sorted(tables, key=lambda name: -sizes.get(name, 0))[:10]
    figure, axes = _small_figure()
    _, examples = _progress(records)
    for name in tables[:10]:
        axes.plot(examples, [r.get("hit_rates", {}).get(name, np.nan) for r in train], marker=".", label=name)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize="x-small", ncols=2)
    _finish(axes, "share of ids in the cache")
    return figure


def _small_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    return figure, figure.subplots()


def _progress(records: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Step and rows trained on so far of each training record."""
    train = [record for record in records if record["kind"] == "train"]
    return np.array([r["step"] for r in train]), np.cumsum([r["examples"] for r in train])


def _draw_scores(axes: Axes, records: list[dict], key: str, score_key: str, label: str) -> None:
    steps, examples = _progress(records)
    train = [np.nan if r[key] is None else r[key] for r in records if r["kind"] == "train"]
    axes.plot(examples, train, marker=".", label="training, scored before learning")
    evaluations = [r for r in records if r["kind"] == "eval" and r[score_key] is not None]
    if evaluations and len(steps):
        # Evaluations know their step only. Between two records steps have the same number of rows.
        where = np.interp([r["step"] for r in evaluations], [0, *steps], [0, *examples])
        split = "rows set apart" if evaluations[0]["split"] == "valid" else "test rows"
        axes.plot(where, [r[score_key] for r in evaluations], "s", ms=4, color="tab:green", label=f"on the {split}")
    test = next((r for r in records if r["kind"] == "test"), None)
    if test is not None and test[score_key] is not None:
        value = test[score_key]
        axes.axhline(value, color="tab:orange", linestyle="--", linewidth=1)
        axes.plot(test["train_examples"], value, "D", color="tab:orange", label=f"test, model frozen: {value:.4f}")
    axes.legend(fontsize="small")
    _finish(axes, label)


def _finish(axes: Axes, label: str) -> None:
    axes.set_xlabel("rows trained on")
    axes.set_ylabel(label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
