"""Command line of the studies: ``python -m bench.studies compare``, ``reproduce``, ``roofline``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bench.studies import compare, compare_report, reproduce, reproduce_report, roofline
from rec_kernels.dlrm.__main__ import Parser, add_run, config_of, config_of_run, execute
from rec_kernels.dlrm.config import EMBEDDINGS, FORMATS, MODELS, ROUNDINGS, add_options
from rec_kernels.dlrm.reader import open_data
from rec_kernels.dlrm.train import RunInterruptedError


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.studies", description="Studies: conclusions from many runs of the trainer.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_compare(commands)
    _add_reproduce(commands)
    _add_roofline(commands)
    return parser


def _add_compare(commands: Any) -> None:
    command = commands.add_parser(
        "compare",
        help="train configurations with the same seeds and compare their test scores",
        description="Train every configuration with every seed and compare the test scores in pairs of equal "
        "seeds. Name the configurations, or give lists such as --format fp32,int8,int4 --rounding "
        "stochastic,nearest, --embedding full,hash,qr,mixed or --model dlrm,dcnv2,wukong. Repeat an interrupted "
        "command to resume it. Other flags are options of all configurations.",
    )
    command.set_defaults(run_command=_compare)
    command.add_argument(
        "configurations",
        nargs="*",
        metavar="NAME[:OPTION=VALUE,...]",
        help="the first configuration is the reference; join widths by +, as in wide:bottom=128+64",
    )
    command.add_argument(
        "--format",
        metavar="FORMAT,...",
        help=f"row format, or a list with the reference first: every "
        f"configuration in every format; {', '.join(FORMATS)} (default: fp32)",
    )
    command.add_argument(
        "--rounding",
        metavar="ROUNDING,...",
        help=f"rounding of updated rows, or a list: every format with every rounding; {', '.join(ROUNDINGS)} "
        f"(default: {ROUNDINGS[0]})",
    )
    command.add_argument(
        "--embedding",
        metavar="KIND,...",
        help=f"table compression, or a list: every configuration with each; {', '.join(EMBEDDINGS)} (default: full)",
    )
    command.add_argument(
        "--model",
        metavar="MODEL,...",
        help=f"model, or a list: every configuration with each; {', '.join(MODELS)} (default: dlrm)",
    )
    command.add_argument("--seeds", default="8", help="number of seeds, or a list as in 0,1,2 (default: 8)")
    command.add_argument("--name", default="comparison", help="folder in the runs' folder (default: comparison)")
    add_options(command, without=("run", "seed", "format", "rounding", "embedding", "model"))


def _add_reproduce(commands: Any) -> None:
    command = commands.add_parser(
        "reproduce",
        help="train a list of comparisons and check papers' claims",
        description="Train a list of comparisons and check papers' claims against the results, on one page with "
        "pictures in runs/reproduce or runs/reproduce-quick. Repeat an interrupted command to resume it.",
    )
    command.set_defaults(run_command=_reproduce)
    command.add_argument("--list", action="store_true", help="print the experiments with their costs and exit")
    command.add_argument("--quick", action="store_true", help="run the same experiments with fewer weeks and seeds")
    command.add_argument(
        "--only", metavar="NAME,...", help="run only these experiments; the page keeps earlier results"
    )
    command.add_argument(
        "--movielens", metavar="PATH", help="folder of a MovieLens data set, required by some experiments"
    )
    command.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    command.add_argument("--runs-dir", default="runs", help="parent folder of the runs' folder (default: runs)")
    command.add_argument("--data-dir", help="folder for prepared data (default: ~/.cache/rec_kernels)")


def _add_roofline(commands: Any) -> None:
    command = commands.add_parser(
        "roofline",
        help="compare the parts of a run's steps with the machine's limits",
        description="Compare the seconds of each part of a finished run's steps with the time that its bytes and "
        "matrix products take at the measured limits of this machine.",
    )
    command.set_defaults(run_command=_roofline)
    add_run(command)


def _plan(parser: argparse.ArgumentParser, options: dict) -> compare.Comparison:
    configurations, seeds, name = (options.pop(key) for key in ("configurations", "seeds", "name"))
    lists = {f"{option}s": options.pop(option) for option in ("format", "rounding", "embedding", "model")}
    try:
        return compare.plan(configurations, config_of(parser, options), seeds, name, **lists, given=options)
    except ValueError as error:
        parser.error(str(error))


def _compare(parser: argparse.ArgumentParser, options: dict) -> None:
    plan = _plan(parser, options)
    try:
        outcomes = compare.run(plan)
    except RunInterruptedError as interrupted:
        print(f"{interrupted}; repeat the command to resume", file=sys.stderr)
        raise KeyboardInterrupt from interrupted
    print(f"{compare_report.write(plan, compare_report.summarise(plan, outcomes))}\nwritten to {plan.folder}")


def _reproduce(parser: argparse.ArgumentParser, options: dict) -> int:
    if options.pop("list"):
        print(reproduce.listing())
        return 0
    only, quick, movielens = (options.pop(key) for key in ("only", "quick", "movielens"))
    try:
        names = () if only is None else tuple(only.split(","))
        request = reproduce.Request(config_of(parser, options), names, quick, movielens)
    except ValueError as error:
        parser.error(str(error))
    try:
        results = reproduce.run(request)
    except (RunInterruptedError, KeyboardInterrupt) as interrupted:
        print(f"repeat the command to resume; results so far: {request.folder / 'report.md'}", file=sys.stderr)
        raise KeyboardInterrupt from interrupted
    print(f"{reproduce_report.counts(results)}\nwritten to {request.folder / 'report.html'}")
    failed = reproduce.failures(results, [experiment.name for experiment in request.chosen()])
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failed else 0


def _roofline(parser: argparse.ArgumentParser, options: dict) -> None:
    data = open_data(config_of_run(parser, options))
    print(roofline.markdown(roofline.profile(options["run"], data)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 when done, 1 on an error, 130 when interrupted; wrong usage exits 2."""
    return execute(_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
