"""Shows result files of bench.run as markdown and pictures: `python -m bench.report [FILE...] [--pictures FOLDER]`.

Without a file it shows those of bench/results. docs/benchmarks.md describes the columns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import bench
from bench import RESULTS
from bench.figures import LIMITS, FiguresError, Group, load, moved, passes, share_of_limit, where

HEADS = ("benchmark", "implementation", "MB", "MB, distinct", "ms", "passes, ms", "GB/s", "% of limit")
# Colours that colour-blind readers can tell apart; limits are grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
LIMIT_COLOUR = "#777777"
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
INCHES_PER_GROUP, DPI = 0.85, 100
#: Pictures of more groups than this would be unreadable.
MOST_GROUPS = 24


def summary(document: dict) -> str:
    """One line per group: our time, then the others' times relative to ours, the limit last."""
    lines = []
    for title, group in document["results"].items():
        own, *others = sorted(group, key=lambda name: (name != "ours", name in LIMITS))
        times = [f"{name} {group[name]['over_ours']:.2f}x" for name in others if "over_ours" in group[name]]
        lines.append(f"- {title}: {own} {group[own]['ms']:.4g} ms{''.join(f'; {part}' for part in times)}")
    return "\n".join(lines)


def table(document: dict) -> str:
    """A Markdown table of every group and implementation of a document."""
    groups = document["results"].items()
    rows = ([title, name, *_cells(group, name)] for title, group in groups for name in group)
    return bench.table([*HEADS, "time over ours"], rows, texts=("implementation",))


def _cells(group: Group, name: str) -> list[str]:
    row = group[name]
    bytes_, distinct, share, of_pass = moved(row), row.get("distinct_bytes"), share_of_limit(group, name), passes(row)
    return [
        f"{bytes_ / 1e6:.3g}" if bytes_ else "",
        f"{distinct / 1e6:.3g}" if distinct else "",
        f"{row['ms']:.4g}",
        f"{min(of_pass):.4g} to {max(of_pass):.4g}" if len(of_pass) > 1 else "",
        f"{bytes_ / row['ms'] / 1e6:.1f}" if bytes_ else "",
        f"{share:.0%}" if share else "",
        f"{row['over_ours']:.2f}" if "over_ours" in row else "",
    ]


def drawable(document: dict) -> dict[str, Group]:
    """The groups whose bytes are known, and which have a limit."""
    return {
        title: group
        for title, group in document["results"].items()
        if any(limit in group for limit in LIMITS) and all(moved(row) for row in group.values())
    }


def draw(document: dict, name: str, folder: Path) -> str:
    """Draws NAME-rates.png into a folder.

    Returns:
        What happened, for the user: where it is, or why there is none.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed"
    everything = drawable(document)
    if not everything:
        return f"no picture of {name}: no benchmark in it has bytes and a limit"
    groups = dict(list(everything.items())[:MOST_GROUPS])
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(n for group in groups.values() for n in group if n not in LIMITS))
    colours = dict(zip(names, COLOURS * len(names), strict=False))
    figure = Figure(figsize=(9, 1.2 + INCHES_PER_GROUP * len(groups)), layout="constrained")
    _bars(figure.subplots(), groups, colours)
    figure.suptitle(where(document), x=0.01, ha="left", fontsize=9)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    path = folder / f"{name}-rates.png"
    figure.savefig(path, dpi=DPI)
    left_out = len(everything) - len(groups)
    note = f" (without the last {left_out} benchmarks)" if left_out else ""
    return f"picture: {path}{note}"


def _rate(row: dict) -> float:
    return moved(row) / row["ms"] / 1e6


def _limit_rate(group: Group) -> float:
    return min(_rate(group[limit]) for limit in LIMITS if limit in group)


def _bars(axes, groups: dict[str, Group], colours: dict[str, str]) -> None:
    """Draws the rates of every implementation, with the limit's rate across them, group by group."""
    height = 0.8 / len(colours)
    for number, name in enumerate(colours):
        places = [(i + (number + 0.5) * height - 0.4, g) for i, g in enumerate(groups.values()) if name in g]
        rates = [_rate(group[name]) for _, group in places]
        bars = axes.barh([y for y, _ in places], rates, height, color=colours[name], label=name)
        shares = [share_of_limit(group, name) for _, group in places]
        axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3, fontsize=8, bbox=LABEL_BOX)
    limits = [_limit_rate(group) for group in groups.values()]
    rows = range(len(groups))
    axes.vlines(limits, [i - 0.45 for i in rows], [i + 0.45 for i in rows], LIMIT_COLOUR, label="limit")
    axes.set_yticks(rows, groups)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.set_xlabel("GB/s, every occurrence of a row counted; beside a bar: % of the limit")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line, or ``given`` instead."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="JSON file of bench.run, or COMMIT:PATH")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the rates of each file there")
    return parser.parse_args(given)


def main() -> None:
    """The command."""
    args = arguments()
    for name in args.files or sorted(map(str, RESULTS.glob("*.json"))):
        try:
            document = load(name)
        except FiguresError as error:
            if args.files:
                sys.exit(str(error))
            continue  # bench/results also has files of other benchmarks
        heading = f"## {Path(name).stem}\n\n{where(document)}"
        print(f"{heading}\n\n    {document['machine']['command']}\n\n{summary(document)}\n\n{table(document)}\n")
        if args.pictures:
            print(f"{draw(document, Path(name).stem, args.pictures)}\n")


if __name__ == "__main__":
    main()
