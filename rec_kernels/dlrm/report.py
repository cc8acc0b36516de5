"""What a run shows: its scores as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from rec_kernels.dlrm.runs import Records


def memory_table(tables: list[dict]) -> str:
    """Text table of ``memory_report()``: rows, dim, KiB of weights and of optimizer state, and their sums."""
    lines = [f"{'table':<14}{'rows':>9}{'dim':>5}{'format':>8}{'weight KiB':>12}{'state KiB':>11}"]
    for table in tables:
        lines.append(
            f"{table['name']:<14}{table['num_embeddings']:>9,}{table['embedding_dim']:>5}{table['format']:>8}"
            f"{table['weight_bytes'] / 1024:>12,.1f}{table['state_bytes'] / 1024:>11,.1f}"
        )
    rows, weight, state = (
        sum(table[key] for table in tables) for key in ("num_embeddings", "weight_bytes", "state_bytes")
    )
    lines.append(f"{'total':<14}{rows:>9,}{'':>13}{weight / 1024:>12,.1f}{state / 1024:>11,.1f}")
    return "\n".join(lines)


def scores_text(scores: dict, split: str) -> str:
    """The record of ``score`` as text for a person."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

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
            f"peak memory         {test['peak_memory_bytes'] / 2**20:,.0f} MiB",
        ]
    )


def write(directory: Path) -> None:
    """Write ``report.png`` of a run from its records."""
    records = Records(directory).read()
    curve = [record for record in records if record["kind"] == "train"]
    draw(directory / "report.png", curve, records[-1])


def draw(path: Path, curve: list[dict], test: dict) -> None:
    """Write a picture of loss and AUC: progressive during the training, and the final test score."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    examples = np.cumsum([record["examples"] for record in curve]) / 1e6
    panels = (("loss", "log_loss", "log loss [nats]"), ("auc", "auc", "AUC"))
    for axes, (key, test_key, label) in zip(figure.subplots(1, 2), panels, strict=True):
        values = [np.nan if record[key] is None else record[key] for record in curve]
        axes.plot(examples, values, marker=".", label="training, scored before learning")
        axes.axhline(
            test[test_key],
            color="tab:orange",
            linestyle="--",
            label=f"test, model frozen: {test[test_key]:.4f}",
        )
        axes.set_xlabel("training examples [million]")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"DLRM: {path.parent.name}")
    figure.savefig(path, dpi=120)
