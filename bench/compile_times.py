"""Processor seconds that each CUDA file takes to compile by itself, for the architectures of the last build.

    python -m bench.compile_times [BUILD_FOLDER]

reads the folder's ``compile_commands.json``, by default the newest of ``build/cuda-*``. docs/install.md has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import ROOT

COMMANDS = "compile_commands.json"


def user_seconds(command: list[str], folder: str) -> float:
    """User time of a compiler command and its children, without ccache; discards the output."""
    command = [*command]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as output:
        command[command.index("-o") + 1] = f"{output}/out.o"
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, "CCACHE_DISABLE": "1"})
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def compile_times(build: Path) -> dict[str, float]:
    """Compiles the CUDA files of csrc one by one; returns the seconds of each.

    Raises:
        FileNotFoundError: ``build`` has no compile_commands.json.
    """
    entries = json.loads((build / COMMANDS).read_text())
    files = {e["file"].partition("/csrc/")[2]: e for e in entries if e["file"].endswith(".cu")}
    return {name: user_seconds(shlex.split(e["command"]), e["directory"]) for name, e in sorted(files.items())}


def main() -> None:
    """Prints the files, slowest first."""
    parser = argparse.ArgumentParser(prog="python -m bench.compile_times", description=__doc__)
    parser.add_argument("build", type=Path, nargs="?", help="build folder (default: the newest build/cuda-*)")
    build = parser.parse_args().build
    builds = [build] if build else sorted(ROOT.glob("build/cuda-*"), key=lambda folder: folder.stat().st_mtime)
    if not builds:
        sys.exit("no build/cuda-*: REC_KERNELS_CUDA=1 make build makes one")
    if not (builds[-1] / COMMANDS).is_file():
        parser.error(f"{builds[-1]} has no {COMMANDS}: it is not a build folder")
    for name, seconds in sorted(compile_times(builds[-1]).items(), key=lambda item: -item[1]):
        print(f"{seconds:6.1f} {name}")


if __name__ == "__main__":
    main()
