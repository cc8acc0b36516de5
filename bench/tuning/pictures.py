"""The pictures: one for lookups, one for steps; a panel for every parameter."""

from __future__ import annotations

from pathlib import Path

from bench.tuning.points import Point
from bench.tuning.report import DIRECTIONS, NAMES

# Colours that colour-blind readers can tell apart.
OURS, PEER = "#0072b2", "#d55e00"
SIZE_INCHES, DPI = (10, 6), 100


def draw(document: dict, folder: Path) -> str:
    """Draws tuning-forward.png and tuning-step.png into a folder.

    Returns:
        What happened, for the user: where they are, or why there are none.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no pictures: matplotlib is not installed"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for direction, heading in DIRECTIONS.items():
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        sweeps = [s for s in NAMES if s != "base" and any(row["sweep"] == s for row in document["points"])]
        axes = figure.subplots(2, 3, squeeze=False).flatten()
        for panel, sweep in zip(axes, sweeps, strict=False):
            _panel(panel, document, sweep, direction)
        for panel in axes[len(sweeps) :]:
            panel.set_visible(False)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
        about = document["machine"]
        threads = "1 thread" if about["threads"] == 1 else f"{about['threads']} threads"
        title = f"{heading}\n{about['cpu']}, {threads}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        paths.append(folder / f"tuning-{direction}.png")
        figure.savefig(paths[-1], dpi=DPI)
    return f"pictures: {', '.join(map(str, paths))}"


def _panel(axes, document: dict, sweep: str, direction: str) -> None:
    """Measured points, the model's line and FBGEMM's points over the values of a parameter."""
    from matplotlib.ticker import LogLocator

    rows = [row for row in document["points"] if row["sweep"] in ("base", sweep)]
    named = [(Point.read({**row, "sweep": sweep}).value, row) for row in rows]
    if sweep == "format":
        places = list(range(len(named)))
        axes.set_xticks(places, [str(value) for value, _ in named], rotation=45, ha="right")
    else:
        named = sorted(((value or 0, row) for value, row in named), key=lambda pair: pair[0])
        places = [value for value, _ in named]
        if sweep != "zipf":
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(places, [f"{value:,}" for value in places], rotation=45, ha="right")
            axes.minorticks_off()
            # Keeps a few labels where all values lie within a power of ten.
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
    rows = [row for _, row in named]
    style = {"linestyle": "none" if sweep == "format" else "-", "marker": "_" if sweep == "format" else None}
    faces = [OURS if row["model"]["fitted"] else "white" for row in rows]
    ours = [row[direction]["ours"]["ms"] for row in rows]
    axes.scatter(places, ours, 36, faces, edgecolors=OURS, zorder=3, label="measured (hollow: not fitted to)")
    axes.plot(
        places, [row["model"][direction]["ms"] for row in rows], color=OURS, markersize=14, label="model", **style
    )
    peer = [
        (x, row[direction]["fbgemm"]["ms"]) for x, row in zip(places, rows, strict=True) if "fbgemm" in row[direction]
    ]
    if peer:
        axes.plot(*zip(*peer, strict=True), "^", color=PEER, markersize=5, label="FBGEMM")
    if sweep in ("zipf", "format"):
        axes.set_ylim(bottom=0)
    axes.set_xlabel(NAMES[sweep] + (" (0: uniform)" if sweep == "zipf" else ""))
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
