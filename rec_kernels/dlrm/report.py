"""What a run leaves behind: scores, ``runs/<name>/`` with its records, and a picture."""

from __future__ import annotations

import itertools
import json
import re
import resource
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.metrics import log_loss, roc_auc_score

RUN_NAMES = "letters, digits, '.', '_' and '-', starting with a letter or digit"


class RunExistsError(RuntimeError):
    """A run of that name is there already; nothing is overwritten."""


def is_run_name(name: str) -> bool:
    """Whether ``name`` can be a run's folder."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is not None


def refuse_existing(runs_dir: str, name: str) -> None:
    """Raise RunExistsError if ``runs_dir`` has a run ``name``."""
    if (Path(runs_dir) / name).exists():
        raise RunExistsError(f"run {name!r} exists in {runs_dir}: choose another name or delete it")


def create_run(runs_dir: str, name: str | None, default: str) -> Path:
    """Create the folder of run ``name``, or of the first free of ``default``, ``default-2``, ...

    Raises:
        RunExistsError: run ``name`` exists.
    """
    numbered = itertools.chain([default], (f"{default}-{number}" for number in itertools.count(2)))
    for candidate in numbered if name is None else [name]:
        directory = Path(runs_dir) / candidate
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            continue
    raise RunExistsError(f"run {name!r} exists in {runs_dir}: choose another name or delete it")


def write_config(directory: Path, config: dict) -> None:
    """Write ``config.json``: the options of the run and the versions it ran with."""
    versions = {package: metadata.version(package) for package in ("torch", "numpy", "scikit-learn")}
    text = json.dumps(config | {"versions": versions}, indent=2)
    (directory / "config.json").write_text(text + "\n")


def append(directory: Path, record: dict) -> None:
    """Append one record to ``metrics.jsonl``."""
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def auc(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Area under the ROC curve; None where only one class is present."""
    return float(roc_auc_score(labels, logits)) if 0 < labels.mean() < 1 else None


def score(labels: np.ndarray, logits: np.ndarray) -> dict:
    """Scores of logits [N] against labels [N] of both classes.

    Returns:
        auc; log_loss in nats; normalized_entropy, the log loss divided by the entropy of the base rate of
        ``labels`` (1 is a constant prediction); accuracy at probability 0.5; base_rate; examples.
    """
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    base_rate = float(labels.mean())
    entropy = log_loss([0, 1], [base_rate, base_rate], sample_weight=[1 - base_rate, base_rate])
    loss = float(log_loss(labels, probabilities))
    return {
        "auc": auc(labels, logits),
        "log_loss": loss,
        "normalized_entropy": loss / entropy,
        "accuracy": float(((logits > 0) == (labels > 0)).mean()),
        "base_rate": base_rate,
        "examples": len(labels),
    }


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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


def summary(test: dict) -> str:
    """The test record as text for a person."""
    return "\n".join(
        [
            memory_table(test["tables"]),
            "",
            f"test rows           {test['examples']:,}, {test['base_rate']:.1%} positive",
            f"test AUC            {test['auc']:.4f}",
            f"log loss            {test['log_loss']:.4f}",
            f"normalized entropy  {test['normalized_entropy']:.4f} (log loss / entropy of test base rate)",
            f"accuracy            {test['accuracy']:.4f}",
            f"training            {test['train_examples']:,} rows in {test['train_seconds']:.1f} s, "
            f"{test['examples_per_second']:,.0f} examples/s",
            f"peak memory         {test['peak_memory_bytes'] / 2**20:,.0f} MiB",
        ]
    )


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
    figure.suptitle(f"DLRM on Complete Journey: {path.parent.name}")
    figure.savefig(path, dpi=120)
