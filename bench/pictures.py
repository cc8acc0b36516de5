"""Draws pictures of README and docs from bench/results: `python -m bench.pictures`, which `make docs` runs.

Text stays text in them, so that a test can compare every number with the files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from bench import RESULTS, ROOT
from bench.figures import load
from bench.report import COLOURS, LIMIT_COLOUR
from rec_kernels.dlrm import files

IMAGES = ROOT / "docs" / "images"
SPEED = "embedding_bag-workloads-1thread.json"
QUALITY = "formats_quality.json"
PEERS = (("torch", "torch"), ("fbgemm", "FBGEMM"), ("fbgemm, huge pages", "FBGEMM in huge pages"))
PANELS = (("forward", "lookup"), ("train", "training step"))
BAR = 0.27
TICKS = (1, 2, 4, 8, 16, 32)
MIB = 2**20


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Writes the figure as a PNG file, replacing an existing one."""
    with files.atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=dpi)


def times_over_ours(direction: str, peer: str) -> dict[str, float]:
    """Workload -> a peer's time over ours, of lookups ("forward") or training steps ("train"), one thread each."""
    groups = load(str(RESULTS / SPEED))["results"]
    return {
        title.split()[1]: group[peer]["over_ours"] for title, group in groups.items() if title.startswith(direction)
    }


def speed() -> Figure:
    """Draws the times of torch and FBGEMM over ours, for the workloads of public sizes."""
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    for axes, (direction, title) in zip(figure.subplots(1, 2, sharey=True), PANELS, strict=True):
        for number, ((peer, name), colour) in enumerate(zip(PEERS, COLOURS, strict=False)):
            found = times_over_ours(direction, peer)
            places = [y + (number - 1) * BAR for y in range(len(found))]
            bars = axes.barh(places, [times - 1 for times in found.values()], BAR, left=1, color=colour, label=name)
            axes.bar_label(bars, [_said(times) for times in found.values()], padding=2, fontsize=7)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(found)), found)
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_xlim(0.7, 45)
        axes.set_xticks(TICKS, [f"{tick}x" for tick in TICKS])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{title}: time over ours", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _said(times: float) -> str:
    return f"{times:.2f}x" if times < 0.995 else f"{times:.1f}x" if times < 10 else f"{times:.0f}x"


def losses() -> list[tuple[str, float, float, float, float]]:
    """Returns format, MiB of tables and state, test AUC minus fp32's, and its interval, with stochastic rounding."""
    rows = []
    for c in json.loads((RESULTS / QUALITY).read_text())["configurations"][1:]:
        name, _, rounding = c["name"].partition("-")
        if rounding == "stochastic":
            apart = c["auc"]["difference"]
            rows.append((name, c["table_bytes"] / MIB, apart["mean"], apart["low"], apart["high"]))
    return rows


def formats() -> Figure:
    """Draws the test AUC that each row format costs over the bytes that it takes."""
    whole = json.loads((RESULTS / QUALITY).read_text())["configurations"][0]["table_bytes"] / MIB
    figure = Figure(figsize=(7.6, 2.7), layout="constrained")
    axes = figure.subplots()
    rows = losses()
    for y, (_, _, mean, low, high) in enumerate(rows):
        axes.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt="o", color=COLOURS[0], capsize=3)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{name}: {size:.1f} MiB" for name, size, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"test AUC of rows in a format less that of fp32 rows ({whole:.1f} MiB), 95 % interval", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    return figure


def steps() -> Figure:
    """Draws the parts of a training step's time, and the bare loop of the same update."""
    found = json.loads((RESULTS / "step_parts.json").read_text())["results"]
    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    panels = figure.subplots(len(found), 1)
    for axes, (name, step) in zip(panels, found.items(), strict=True):
        left = 0.0
        for (part, share), colour in zip(step["parts"].items(), COLOURS, strict=False):
            axes.barh(0, share * step["ms"], left=left, color=colour, label=part)
            left += share * step["ms"]
        axes.barh(1, step["limit_ms"], color=LIMIT_COLOUR, label="bare loop")
        for y, ms in enumerate((step["ms"], step["limit_ms"])):
            axes.text(ms, y, f" {ms:.2f} ms", va="center", fontsize=7)
        axes.set_yticks(range(2), ["step", "bare loop"], fontsize=7)
        axes.set_ylim(1.6, -0.6)
        axes.set_xlim(0, 1.15 * max(step["ms"], step["limit_ms"]))
        axes.set_xticks([])
        axes.set_title(name, fontsize=8, loc="left", pad=2)
    legend = panels[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


PICTURES = {"speed": speed, "formats": formats, "steps": steps}


def draw(folder: Path) -> list[Path]:
    """Writes every picture as SVG into a folder; equal figures give equal bytes with one version of matplotlib."""
    paths = []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rec_kernels", "font.family": "sans-serif"}):
        for name, make in PICTURES.items():
            paths.append(folder / f"{name}.svg")
            make().savefig(paths[-1], metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return paths


def main() -> None:
    """The command."""
    argparse.ArgumentParser(prog="python -m bench.pictures", description=__doc__).parse_args()
    for path in draw(IMAGES):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
