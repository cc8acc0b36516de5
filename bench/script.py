"""Common parts of measurement scripts: options, and the description of machine and versions in results."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import rec_kernels
from bench import RESULTS, ROOT, commit, save
from bench.peers import fbgemm_version
from rec_kernels.dlrm.devices import cpu_model


def positive(text: str) -> int:
    """Parses a positive integer, as a type of command-line options."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parser_of(about: str | None, file: str, *, data: bool = False) -> argparse.ArgumentParser:
    """Makes the parser of a script's options, with ``--output``.

    Args:
        about: docstring of the script. file: the result's, in bench/results.
        data: whether it reads the Complete Journey: ``--threads``, ``--weeks`` and ``--data-dir``.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form, allow_abbrev=False)
    if data:
        parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
        parser.add_argument("--weeks", type=positive, help="use only the first weeks (default: the whole year)")
        parser.add_argument("--data-dir", help="folder of the prepared data (default: ~/.cache/rec_kernels)")
    parser.add_argument("--output", type=Path, default=RESULTS / file, help=f"result file (default: {file})")
    return parser


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the options of the command line and sets torch's number of threads."""
    options = parser.parse_args()
    if getattr(options, "threads", None):
        torch.set_num_threads(options.threads)
    return options


def machine(threads: int = 0) -> dict[str, object]:
    """Describes command, commit, machine and versions of the figures; ``threads``: 0 for torch's choice."""
    file, about = Path(sys.argv[0]).resolve(), rec_kernels.build_info()
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts) if file.is_relative_to(ROOT) else file.name
    return {
        "command": shlex.join(["python", "-m", name.removesuffix(".__main__"), *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        **commit(),
        "cpu": cpu_model(),
        "threads": threads or torch.get_num_threads(),
        **{key: about[key] for key in ("version", "torch", "python", "cpu_isa")},
        "fbgemm": fbgemm_version(),
    }


def write_result(options: argparse.Namespace, settings: Sequence[str], results: Any) -> None:
    """Writes results to ``options.output``, with the machine and the options named in ``settings``."""
    given = {name: getattr(options, name) for name in settings}
    save({"environment": machine(), "settings": given, "results": results}, options.output)
    print(f"written to {options.output}")
