"""The command `python -m bench.tuning`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import bench
from bench import RESULTS
from bench.script import machine
from bench.tuning import measure, model, pictures, report
from bench.tuning.measure import FULL, QUICK
from bench.tuning.passes import Run, measured
from bench.tuning.points import points

#: Seconds; no pass starts that would end later.
LIMIT = 700


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tuning",
        description="Measures how lookups and training steps of EmbeddingBagCollection grow with tables, batch, ids, "
        "columns, skew and row format, beside FBGEMM where it is installed, and fits the cost model of docs/tuning.md.",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="tiny tables and seconds: figures that mean nothing")
    parser.add_argument("--sweep", action="append", help="measure only the base and this sweep (repeatable)")
    parser.add_argument(
        "--passes", type=int, help="passes over all points; medians are over them (default 5, --quick: 1)"
    )
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/tuning-<threads>threads.json)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw forward and step into this folder")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="measure nothing: fit the JSON file again, and renew the page's part"
    )
    args = parser.parse_args()
    if args.quick and args.output is None:
        parser.error("--quick needs --output, because its figures are not results")
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output = args.output or RESULTS / f"tuning-{torch.get_num_threads()}threads.json"
    return args


def measured_points(args: argparse.Namespace) -> dict[str, object]:
    """Measures the points that the command line selects."""
    effort = QUICK if args.quick else FULL
    todo = [p for p in points(args.quick) if not args.sweep or p.sweep in ("base", *args.sweep)]
    run = Run(todo, effort, measure.Tables())
    return measured(run, args.passes or effort.passes, LIMIT, machine(args.threads))


def main() -> None:
    """The command."""
    args = arguments()
    if args.docs and not args.output.exists():
        sys.exit(f"{args.output} does not exist: measure first, or name another file with --output")
    document = json.loads(args.output.read_text()) if args.docs else measured_points(args)
    model.add_model(document)
    bench.save(document, args.output)
    print(f"{report.tables(document)}\nfigures: {args.output}")
    if args.pictures:
        print(pictures.draw(document, args.pictures))
    if args.docs:
        report.renew(args.docs, document, args.output)


if __name__ == "__main__":
    main()
