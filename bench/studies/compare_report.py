"""Report of a comparison: means, paired differences and intervals, as JSON, Markdown and a figure."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation
from scipy import stats

from bench import pictures
from bench.studies.compare import Comparison, comparable_defaults
from rec_kernels.dlrm import files
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.files import TEXT, Check, Each, Maybe, integer, mismatch
from rec_kernels.dlrm.files import number as a_number
from rec_kernels.dlrm.page import number
from rec_kernels.dlrm.runs import MACHINE

ENOUGH = 8  # pairs; the AUC's standard deviation over seeds is as large as typical differences
CONFIDENCE = 0.95
COLORS = [colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]  # ten colors, then their light variants
SCORES = (("auc", "test AUC", 1), ("log_loss", "test log loss", -1))  # 1: more is better

_RATE, _NONE = a_number(1e-9), Check("null", lambda value: value is None)
_RUNS: dict[str, dict[str, Any]] = {
    "test": {"auc": Maybe(a_number()), "examples_per_second": _RATE, "machines?": Maybe(Each(MACHINE))},
    "failed": {"error": TEXT},
}
_MEANS = [(_NONE, _NONE), (a_number(), _NONE), (a_number(), a_number())]  # for 0, 1 and more pairs
_DIFFERENCES = [{"mean": mean, "low": bound, "high": bound} for mean, bound in _MEANS]
_DIFFERENCE = Check("a difference", lambda value: any(mismatch(value, shape, "") is None for shape in _DIFFERENCES))
_SIZES = dict.fromkeys(("parameters", "weight_bytes", "table_bytes"), Maybe(integer(1)))


def half_width(values: Sequence[float]) -> float | None:
    """Half the 95 % confidence interval of the mean of N values (Student's t, N - 1 degrees); None below 2 values."""
    if len(values) < 2:
        return None
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def difference(reference: dict[int, dict], other: dict[int, dict], key: str, sign: int) -> dict:
    """The paired difference other - reference of a score.

    Args:
        reference, other: the records that end the runs, by seed; pairs are the seeds that both finished.
        key: of the score in the records.
        sign: 1 if more is better, -1 if less is.

    Returns:
        pairs; mean; low and high of the 95 % interval of the mean, None below 2 pairs; verdict: "better" or "worse" if
        the interval excludes zero, else "indistinguishable", or why there is none.
    """
    seeds = [seed for seed in reference if _value(reference[seed], key) is not None and seed in other]
    seeds = [seed for seed in seeds if _value(other[seed], key) is not None]
    nothing = {"pairs": 0, "mean": None, "low": None, "high": None}
    if any(_test_rows(reference[seed]) != _test_rows(other[seed]) for seed in seeds):
        return nothing | {"verdict": "not comparable: other test rows"}
    if not seeds:
        return nothing | {"verdict": "no pair of finished runs"}
    values = [other[seed][key] - reference[seed][key] for seed in seeds]
    mean, half = float(np.mean(values)), half_width(values)
    if half is None:
        return {"pairs": 1, "mean": mean, "low": None, "high": None, "verdict": "no interval from 1 pair"}
    low, high = mean - half, mean + half
    verdict = "indistinguishable"
    if low > 0 or high < 0:
        verdict = "better" if mean * sign > 0 else "worse"
    return {"pairs": len(values), "mean": mean, "low": low, "high": high, "verdict": verdict}


def _value(record: dict, key: str) -> float | None:
    return record[key] if record["kind"] == "test" else None


def _test_rows(record: dict) -> tuple:
    return record["examples"], record["base_rate"]


def summarise(comparison: Comparison, outcomes: dict[str, dict[int, dict]]) -> dict:
    """The result as plain data: "seeds", and "configurations" with their runs, scores, differences and costs.

    Args:
        comparison: what was to be trained.
        outcomes: what ``compare.run`` returned.
    """
    reference = next(iter(comparison.configs))
    return {
        "seeds": list(comparison.seeds),
        "confidence": CONFIDENCE,
        "reference": reference,
        "configurations": [
            {
                "name": name,
                "options": changed_options(config),
                "runs": [_run(comparison, name, seed, record) for seed, record in outcomes[name].items()],
                **{key: _score(outcomes, reference, name, key, sign) for key, _, sign in SCORES},
                **_cost(list(outcomes[name].values())),
            }
            for name, config in comparison.configs.items()
        ],
    }


def is_result(value: dict) -> bool:
    """True if a result read from a file, of the right configurations, has all required fields."""
    first, *others = value["configurations"]
    common: dict[str, Any] = {"auc": {"mean": Maybe(a_number())}, **_SIZES, "examples_per_second": Maybe(_RATE)}
    compared = common | {"auc": common["auc"] | {"difference": _DIFFERENCE}}
    runs = [run for c in (first, *others) for run in c["runs"]]
    return (
        value["reference"] == first["name"]
        and first["auc"]["difference"] is None
        and mismatch(first, common, "") is None
        and all(mismatch(other, compared, "") is None for other in others)
        and all(_is_run(run) for run in runs)
    )


def _is_run(run: dict) -> bool:
    shape = {"seed": integer(0, 2**64 - 1), "run": TEXT} | _RUNS[run["outcome"]]
    return mismatch(run, shape, "") is None


def changed_options(config: TrainConfig) -> dict:
    """The options, except the seed, that affect the outcome and differ from their default."""
    changed = {name: (getattr(config, name), default) for name, default in comparable_defaults().items()}
    return {name: list(v) if isinstance(v, tuple) else v for name, (v, default) in changed.items() if v != default}


def _run(comparison: Comparison, name: str, seed: int, record: dict) -> dict:
    kept = ("error",) if record["kind"] == "failed" else ("auc", "log_loss", "examples_per_second")
    run = comparison.run_config(name, seed).run
    found = {"seed": seed, "run": run, "outcome": record["kind"]} | {key: record[key] for key in kept}
    return found | ({"machines": record.get("machines")} if record["kind"] == "test" else {})


def _score(outcomes: dict[str, dict[int, dict]], reference: str, name: str, key: str, sign: int) -> dict:
    values = [_value(record, key) for record in outcomes[name].values()]
    values = [value for value in values if value is not None]
    return {
        "mean": float(np.mean(values)) if values else None,
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "half_width": half_width(values),
        "difference": difference(outcomes[reference], outcomes[name], key, sign) if name != reference else None,
    }


def _cost(records: list[dict]) -> dict:
    """Parameters, bytes of rows, of optimizer state and of both, and examples/s; None without a finished run."""
    tests = [record for record in records if record["kind"] == "test"]
    if not tests:
        return dict.fromkeys(("parameters", "weight_bytes", "state_bytes", "table_bytes", "examples_per_second"))
    tables = tests[0]["tables"]
    in_tables = sum(table["num_embeddings"] * table["embedding_dim"] for table in tables)
    weights = sum(table["weight_bytes"] + table.get("cache_bytes", 0) for table in tables)
    state = sum(table["state_bytes"] for table in tables)
    return {
        "parameters": tests[0]["dense_parameters"] + in_tables,
        "weight_bytes": weights,
        "state_bytes": state,
        "table_bytes": weights + state,
        "examples_per_second": float(np.mean([test["examples_per_second"] for test in tests])),
    }


def markdown(title: str, result: dict) -> str:
    """The result of ``summarise`` as Markdown."""
    parts = [f"# Comparison {title}", _notes(result)]
    parts += [f"## {label}\n\n{_score_table(result, key)}" for key, label, _ in SCORES]
    parts.append(f"## Cost\n\n{_cost_table(result)}")
    failed = [
        f"- {run['run']}: {run['error']}"
        for configuration in result["configurations"]
        for run in configuration["runs"]
        if run["outcome"] == "failed"
    ]
    if failed:
        parts.append("## Failed runs\n\nThey are left out of the numbers above.\n\n" + "\n".join(failed))
    return "\n\n".join(parts) + "\n"


def _notes(result: dict) -> str:
    seeds, reference = ", ".join(map(str, result["seeds"])), result["reference"]
    common = _common(result)
    notes = [
        f"Seeds: {seeds}. Options of all configurations not at their default: {_options(common) or 'none'}.",
        f"Differences are to {reference}, between runs of the same seed; intervals are 95 % of the mean difference "
        '(Student\'s t). "better" and "worse": the interval excludes zero. Each interval stands by itself: the more '
        "configurations, the more often one excludes zero by chance. sd: standard deviation over the seeds.",
    ]
    notes += filter(None, [machines_note(result)])
    pairs = {c["name"]: c["auc"]["difference"]["pairs"] for c in result["configurations"] if c["name"] != reference}
    few = ", ".join(f"{name} {count}" for name, count in pairs.items() if count < ENOUGH)
    if few:
        notes.append(
            f"Fewer than {ENOUGH} pairs of finished runs ({few}): small differences cannot be told from chance; below "
            "2 pairs there is no interval."
        )
    return "\n\n".join(notes)


def machines_note(result: dict) -> str | None:
    """A note that examples per second are not comparable; None if all runs used one machine."""
    found = machines_of(run for c in result["configurations"] for run in c["runs"])
    if len(found) < 2:
        return None
    return (
        f"Examples per second do not compare: runs are of several machines or numbers of threads: {'; '.join(found)}."
    )


def machines_of(runs: Iterable[dict]) -> list[str]:
    """Descriptions of the distinct machines of a comparison's finished runs.

    Args:
        runs: each with "machines", those that it computed on one after the other; of a run from before they were
            recorded it is missing or None.
    """
    found = [machine for run in runs if run["outcome"] == "test" for machine in run.get("machines") or [None]]
    return sorted({"not recorded" if machine is None else _machine_text(machine) for machine in found})


def _machine_text(machine: dict) -> str:
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    return ", ".join(filter(None, (machine["cpu"], threads, machine["gpu"])))


def _common(result: dict) -> dict:
    first, *others = (configuration["options"] for configuration in result["configurations"])
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _options(options: dict) -> str:
    return ", ".join(f"{key}={'+'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in options.items())


def _score_table(result: dict, key: str) -> str:
    rows = [("configuration", "runs", "mean", "sd", "difference", "95 % interval", "verdict")]
    for configuration in result["configurations"]:
        score, runs = configuration[key], configuration["runs"]
        ended = sum(run["outcome"] == "test" for run in runs)
        apart = score["difference"] or {"mean": None, "low": None, "high": None, "verdict": "reference"}
        interval = "-" if apart["low"] is None else f"{apart['low']:+.5f} to {apart['high']:+.5f}"
        mean = "-" if apart["mean"] is None else f"{apart['mean']:+.5f}"
        count = f"{ended} of {len(runs)}" if ended < len(runs) else str(ended)
        scores = number(score["mean"], 5), number(score["std"], 5)
        rows.append((configuration["name"], count, *scores, mean, interval, apart["verdict"]))
    return table(rows)


def _cost_table(result: dict) -> str:
    sizes = "tables [MiB]", "of the reference", "state [MiB]"
    rows = [("configuration", "parameters", *sizes, "examples/s", "its options not at their default")]
    common, reference = _common(result), result["configurations"][0]["weight_bytes"]
    for c in result["configurations"]:
        own = {key: value for key, value in c["options"].items() if key not in common}
        numbers = ("-",) * 5
        if c["parameters"] is not None:
            share = f"{c['weight_bytes'] / reference:.1%}" if reference else "-"
            sizes = f"{c['weight_bytes'] / 2**20:.2f}", share, f"{c['state_bytes'] / 2**20:.2f}"
            numbers = f"{c['parameters']:,}", *sizes, f"{c['examples_per_second']:,.0f}"
        rows.append((c["name"], *numbers, _options(own) or "-"))
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns aligned in the source."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in wide) + "|", *lines[1:]])


def draw(result: dict) -> Figure:
    """Plots the mean test AUC and its paired difference to the reference over the bytes of tables and state.

    Bars are 95 % intervals. Those of the means are not paired, hence wider than what they say about a difference.
    """
    figure = Figure(figsize=(9, 8), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    shown = [c for c in result["configurations"] if c["auc"]["mean"] is not None]
    sizes = [c["table_bytes"] for c in shown]
    for i, (c, marker) in enumerate(zip(shown, itertools.cycle("osD^vP*X"))):
        apart = c["auc"]["difference"] or {"mean": None, "low": None}
        half = None if apart["low"] is None else apart["mean"] - apart["low"]
        points = (c["auc"]["mean"], c["auc"]["half_width"]), (apart["mean"], half)
        for axes, (mean, bar) in zip(panels, points, strict=True):
            if mean is not None:
                # Several of the same size side by side: the bars would hide each other.
                beside = ScaledTranslation(sizes[:i].count(sizes[i]) / 12, 0, figure.dpi_scale_trans)
                style = {"fmt": marker, "color": COLORS[i % len(COLORS)], "capsize": 4, "label": c["name"]}
                axes.errorbar(sizes[i] / 2**20, mean, bar, **style, transform=axes.transData + beside)
                axes.update_datalim([(sizes[i] / 2**20, mean + (bar or 0) * sign) for sign in (-1, 1)])
    if sizes and max(sizes) > 10 * min(sizes):
        panels[1].set_xscale("log")
        panels[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[1].xaxis.set_major_formatter("{x:g}")
        panels[1].xaxis.set_minor_formatter(NullFormatter())
    intervals = " and 95 % interval" if len(result["seeds"]) > 1 else ""
    panels[0].set_ylabel(f"test AUC, mean over the seeds{intervals}")
    panels[1].set_ylabel(f"difference to {result['reference']}, same seeds{intervals}")
    panels[1].axhline(0, color="black", linewidth=1)
    panels[1].set_xlabel("tables and optimizer state [MiB]")
    for axes in panels:
        axes.grid(alpha=0.3)
    if shown:
        figure.legend(*panels[0].get_legend_handles_labels(), title="configuration", loc="outside right upper")
    return figure


def write(comparison: Comparison, result: dict) -> str:
    """Writes ``compare.json``, ``compare.md`` and ``compare.png`` to the comparison's folder; returns the Markdown."""
    text = markdown(comparison.folder.name, result)
    files.write_text(comparison.folder / "compare.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
    files.write_text(comparison.folder / "compare.md", text)
    pictures.save(draw(result), comparison.folder / "compare.png", dpi=120)
    return text
