"""Figures of ``reproduce``: claims and their bounds, AUC over bytes, examples per second."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench.studies.claims import CANNOT_TELL, MET, NOT_MET, Faster, shortfall
from bench.studies.compare_report import COLORS, half_width

VERDICT_COLORS = {MET: "#1a7f37", NOT_MET: "#b00020", CANNOT_TELL: "#8a6d00"}
VERDICT_MARKERS = {MET: "o", NOT_MET: "X", CANNOT_TELL: "D"}  # distinguishable without colors
PANELS = (("AUC", "test AUC, difference of paired seeds"), ("times", "times"))
ROW = 0.27  # inches


def claims(entries: Sequence[dict]) -> Figure | None:
    """Draws every measured claim: value, 95 % interval, bound, and the seeds required if it is undecided.

    Args:
        entries: those of ``results.json``, with "name" and "claims".

    Returns:
        None without a measured claim.
    """
    shown = {
        unit: [(e["name"], c) for e in entries for c in e["claims"] if c["unit"] == unit and c["value"] is not None]
        for unit, _ in PANELS
    }
    shown = {unit: rows for unit, rows in shown.items() if rows}
    if not shown:
        return None
    heights = [len(rows) + 2 for rows in shown.values()]
    figure = Figure(figsize=(13, ROW * sum(heights) + 1), layout="constrained")
    panels = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    labels = dict(PANELS)
    for axes, (unit, rows) in zip(panels, shown.items(), strict=True):
        _draw_claims(axes, rows)
        axes.set_xlabel(labels[unit])
    handles = [
        panels[0].plot([], [], VERDICT_MARKERS[verdict], color=color, label=verdict)[0]
        for verdict, color in VERDICT_COLORS.items()
    ]
    bound = panels[0].plot([], [], "|", color="black", ms=12, mew=2, label="bound")
    figure.legend(handles=[*handles, *bound], loc="outside upper right", ncols=4, frameon=False)
    return figure


def _draw_claims(axes: Axes, rows: list[tuple[str, dict]]) -> None:
    for y, (_, claim) in enumerate(rows):
        color, marker = VERDICT_COLORS[claim["verdict"]], VERDICT_MARKERS[claim["verdict"]]
        half = None if claim["low"] is None else claim["value"] - claim["low"]
        axes.errorbar(claim["value"], y, xerr=half, fmt=marker, color=color, capsize=3)
        axes.plot(claim["at_least"], y, "|", color="black", ms=12, mew=2, zorder=3)
        axes.text(1.01, y, shortfall(claim), transform=axes.get_yaxis_transform(), fontsize=7, color=color, va="center")
    axes.set_yticks(range(len(rows)), [f"{name}: {claim['says']}" for name, claim in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)


def quality_over_bytes(entries: Sequence[dict]) -> Figure | None:
    """Draws the AUC lost by every configuration over its fraction of the reference's bytes.

    The figure has the experiments on the default model and data that change the bytes; configurations on the Pareto
    front are named.
    """
    series = {e["name"]: _points(e["result"]) for e in entries if _is_comparable(e["result"])}
    if not series:
        return None
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for (name, points), color, marker in zip(series.items(), itertools.cycle(COLORS), itertools.cycle("osD^vP")):
        shares, means, halves = zip(*(point[1:] for point in points), strict=True)
        axes.errorbar(shares, means, halves, fmt=marker, color=color, elinewidth=0.7, alpha=0.7, label=name)
    frontier = _frontier([point for points in series.values() for point in points])
    axes.step([share for _, share, _, _ in frontier], [mean for _, _, mean, _ in frontier], where="post", color="gray")
    _name_above(axes, [(name, share) for name, share, _, _ in frontier])
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = [1 / 2**power for power in range(9)]
    least = min(share for points in series.values() for _, share, _, _ in points)
    ticks = [tick for tick in ticks if tick > least / 2]
    axes.set_xticks(ticks, ["1" if tick == 1 else f"1/{round(1 / tick)}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.12)
    axes.set_xlabel("bytes of tables, caches and optimizer state, as a share of full FP32 tables")
    axes.set_ylabel("test AUC, difference to full FP32 tables, 95 % interval")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def _name_above(axes: Axes, points: Sequence[tuple[str, float]]) -> None:
    """Puts names along the upper edge; of neighbours that are too close, the smaller is kept."""
    last = 0.0
    for name, x in points:
        axes.axvline(x, color="gray", linewidth=0.6, linestyle=":")
        if x > last * 2**0.1:
            last = x
            place = axes.get_xaxis_transform()
            axes.text(x, 1.01, name, transform=place, rotation=45, rotation_mode="anchor", fontsize=8)


def _is_comparable(result: dict | None) -> bool:
    if result is None:
        return False
    reference = result["configurations"][0]
    sizes = {c["table_bytes"] for c in result["configurations"] if c["table_bytes"] is not None}
    # The weeks are those of the whole list.
    return set(reference["options"]) <= {"weeks"} and len(sizes) > 1 and reference["table_bytes"] is not None


def _points(result: dict) -> list[tuple[str, float, float, float]]:
    """Name, fraction of bytes, AUC difference and half its interval of every configuration but the reference."""
    whole = result["configurations"][0]["table_bytes"]
    points = []
    for c in result["configurations"][1:]:
        apart = c["auc"]["difference"]
        if c["table_bytes"] is not None and apart["mean"] is not None:
            half = 0.0 if apart["low"] is None else apart["mean"] - apart["low"]
            points.append((c["name"], c["table_bytes"] / whole, apart["mean"], half))
    return points


def _frontier(points: Sequence[tuple[str, float, float, float]]) -> list[tuple[str, float, float, float]]:
    """The Pareto front: points that no smaller one reaches, by increasing size."""
    best, kept = float("-inf"), []
    for point in sorted(points, key=lambda point: (point[1], -point[2])):
        if point[2] > best:
            best = point[2]
            kept.append(point)
    return kept


def speed(result: dict) -> Figure:
    """Draws examples per second of every configuration: mean, 95 % interval, and ratio to the reference.

    The times are the mean over the seeds, as in the claims.
    """
    shown, labels, reference = [], [], result["reference"]
    for c in result["configurations"]:
        rates = [run["examples_per_second"] for run in c["runs"] if run["outcome"] == "test"]
        if rates:
            times = Faster(c["name"], reference)(result).value
            labels.append(c["name"] if times is None else f"{c['name']}  {times:.2f}x")
            shown.append((sum(rates) / len(rates), half_width(rates) or 0.0, c["name"] == reference))
    figure = Figure(figsize=(8, ROW * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    for y, (rate, half, own) in enumerate(shown):
        axes.barh(y, rate, xerr=half, color="#888888" if own else COLORS[0], height=0.7, capsize=2)
    axes.set_yticks(range(len(shown)), labels, fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(left=0)
    axes.set_xlabel("examples/s of the training, reading included")
    axes.grid(axis="x", alpha=0.3)
    return figure
