"""Measures in separate processes: a kernel that hangs or corrupts the GPU's context loses only its case."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import bench
from bench.gpu import report
from bench.gpu.context import BROKEN

#: Time limits in seconds, for one case and for the start-up before the first one.
CASE_SECONDS = 90.0
#: Prefix of the error of a case that ended its process.
LOST = "not measured: "


def measure_apart(measure: Callable[[argparse.Namespace], None], args: argparse.Namespace, case_seconds: float) -> int:
    """Calls ``measure(args)`` in successive processes until one completes.

    Args:
        measure: a function of a module. It measures the cases that the file ``args.output`` lacks, has the one that it
            is at there as "running", and ends its process with ``BROKEN`` where others have to be measured by another.
        args: the command line; ``args.output`` is written anew.
        case_seconds: after which a process is ended whose file has not changed.

    Returns:
        The exit status of the last process; 1 for one that was ended, or that died, outside of all cases.
    """
    args.output.unlink(missing_ok=True)
    while True:
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(args,))
        process.start()
        try:
            ended = _wait(process, args.output, case_seconds)
        finally:
            process.kill()
            process.join(3)  # a process that waits for a device cannot be killed
        found = report.read(args.output)
        if running := found.pop("running", None):
            how = f"its process ended with status {process.exitcode}" if ended else f"it lasted {case_seconds:.0f} s"
            found["cases"].append(running | {"results": [], "error": LOST + how})
            bench.save(found, args.output)
            print(f"{running['name']}: {how}; another process goes on", flush=True)
        elif not ended or process.exitcode != BROKEN:
            return process.exitcode if ended and process.exitcode >= 0 else 1


def _wait(process: BaseProcess, output: Path, seconds: float) -> bool:
    """Returns True once the process has ended, False when its file has not changed for this many seconds."""
    seen, since = None, time.monotonic()
    while process.is_alive():
        process.join(0.2)
        now = output.stat().st_mtime_ns if output.exists() else None
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > seconds:
            return False
    return True
