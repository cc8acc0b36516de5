"""Compares two files of bench.run, of two commits on one machine: `python -m bench.compare BEFORE.json AFTER.json`.

BEFORE and AFTER are files, or COMMIT:PATH of files that git has. A ratio is AFTER's time over BEFORE's, of geometric
means over the passes; its interval is Welch's, of the logarithms. "Others" are the least and the largest ratio of the
group's implementations whose code did not change (torch, FBGEMM, bare loops): what the machine alone has moved. Other
differences between the runs are listed: machine, threads, versions of torch and FBGEMM, rounds of a pass.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass

import bench
from bench.figures import FiguresError, Group, is_other, load, passes, where

CONFIDENCE = 0.95
#: Settings that must agree for a comparison of commits.
SAME = ("cpu", "threads", "torch", "fbgemm", "python", "cpu_isa", "rounds")
#: Value of a setting in older files, which do not record it.
UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Ratio:
    """AFTER over BEFORE; ``low`` and ``high`` are None if either side has fewer than two passes."""

    value: float
    low: float | None
    high: float | None


def ratio(before: list[float], after: list[float]) -> Ratio:
    """Ratio of the geometric means, with the interval of Welch's t for means of logarithms.

    Args:
        before, after: milliseconds of each pass, all above 0.
    """
    logs = [[math.log(ms) for ms in side] for side in (before, after)]
    apart = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    if min(map(len, logs)) < 2:
        return Ratio(math.exp(apart), None, None)
    squared = [statistics.variance(side) / len(side) for side in logs]
    if not sum(squared):
        return Ratio(math.exp(apart), math.exp(apart), math.exp(apart))
    from scipy.stats import t

    freedom = sum(squared) ** 2 / sum(s**2 / (len(side) - 1) for s, side in zip(squared, logs, strict=True))
    half = float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(sum(squared))
    return Ratio(math.exp(apart), math.exp(apart - half), math.exp(apart + half))


def verdict(found: Ratio, others: list[float]) -> str:
    """Returns "faster", "slower", "within noise" (also if peers moved as much), or why there is no verdict.

    Args:
        others: ratios of implementations that did not change.
    """
    if found.low is None:
        return "no interval"
    if found.low <= 1 <= found.high or min([1, *others]) <= found.value <= max([1, *others]):
        return "within noise"
    return "faster" if found.value < 1 else "slower"


def times(group: Group, name: str, against: str | None) -> list[float]:
    """Milliseconds of each pass, or their ratio to ``against``'s in the same pass."""
    own = passes(group[name])
    return own if against is None else [a / b for a, b in zip(own, passes(group[against]), strict=True)]


def compare_group(before: Group, after: Group, against: str | None) -> dict[str, tuple[Ratio, str]]:
    """Implementation -> ratio and verdict, for those in both documents; only groups that have ``against``, if given."""
    if against is not None and not (against in before and against in after):
        return {}
    names = [name for name in after if name in before and name != against]
    ratios = {name: ratio(times(before, name, against), times(after, name, against)) for name in names}
    unchanged = [] if against else [ratios[name].value for name in names if is_other(name)]
    return {name: (r, verdict(r, [] if is_other(name) else unchanged)) for name, r in ratios.items()}


def table(before: dict, after: dict, against: str | None) -> str:
    """A Markdown table of all groups in both documents, with a summary."""
    heads = ["benchmark", "implementation", "before", "after", "after / before", "95 % interval", "others", "verdict"]
    lines = []
    own: list[tuple[Ratio, str]] = []
    for group in after["results"]:
        sides = [document["results"].get(group, {}) for document in (before, after)]
        found = compare_group(*sides, against)
        moved = [] if against else sorted(r.value for name, (r, _) in found.items() if is_other(name))
        for name, (r, said) in found.items():
            cells = [f"{_mean(times(side, name, against)):.4g}" for side in sides]
            interval = "" if r.low is None else f"{r.low:.3f} to {r.high:.3f}"
            others = f"{moved[0]:.3f} to {moved[-1]:.3f}" if moved and not is_other(name) else ""
            cells += [f"{r.value:.3f}", interval, others, said]
            lines.append([group, name, *cells])
            own += [] if is_other(name) else [(r, said)]
    return f"{bench.table(heads, lines, texts=('implementation', 'verdict'))}\n\n{_summary(own)}"


def _mean(values: list[float]) -> float:
    return statistics.geometric_mean(values)


def _summary(own: list[tuple[Ratio, str]]) -> str:
    if not own:
        return "Nothing to compare: no benchmark is in both files."
    said = [verdict for _, verdict in own]
    counts = ", ".join(f"{said.count(verdict)} {verdict}" for verdict in dict.fromkeys(said))
    return f"Ours: {counts}; geometric mean {_mean([r.value for r, _ in own]):.3f}."


def differences(before: dict, after: dict) -> list[str]:
    """Lists the differences between the runs besides the commit; a key in only one file counts as different."""
    found = {key: [document["machine"].get(key, UNKNOWN) for document in (before, after)] for key in SAME}
    return [f"{key}: {one}, {other}" for key, (one, other) in found.items() if one != other]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line, or ``given`` instead."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("before", metavar="BEFORE", help="JSON file, or COMMIT:PATH")
    parser.add_argument("after", metavar="AFTER", help="JSON file, or COMMIT:PATH")
    parser.add_argument(
        "--against",
        metavar="NAME",
        help="compare not times but what they are of this implementation's in the same pass, such as limit or torch",
    )
    return parser.parse_args(given)


def main() -> None:
    """The command."""
    args = arguments()
    try:
        before, after = load(args.before), load(args.after)
    except FiguresError as error:
        sys.exit(str(error))
    print(f"before: {where(before)}\nafter:  {where(after)}")
    for difference in differences(before, after):
        how = "may differ" if UNKNOWN in difference else "differ"
        print(f"The runs {how} in {difference}: no comparison of commits.")
    print(f"Times in ms{f' over those of {args.against}' if args.against else ''}.\n")
    print(table(before, after, args.against))


if __name__ == "__main__":
    main()
