"""Breakdown of a training step's time on the CPU, compared with the bare loop: `python -m bench.step_parts`.

Linux's `perf` samples the process during steps of a named workload on one thread; each sample's function determines its
part of the step. Needs `perf` (Debian: linux-perf) and the right to use it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import bench
from bench import RESULTS
from bench.bench_embedding_bag import Lookups
from bench.script import machine
from bench.shapes import BATCHES
from bench.timing import take_turns
from bench.workloads import NAMED

#: Parts of a step in order, with patterns of our library's functions; the first match counts.
PARTS = {
    "lookup": r"pool|look_up|lookup",
    "keys, sort, runs": r"[Ss]ort(?!ed)|entries|find_runs|read_bags|keys|radix",
    "sums of gradients, update": r"[Ff]inish|Update|sum_|Sum|update|Terms",
    "other kernels": r"",
}
OUTSIDE = "Python, autograd, system"
LIBRARY = "librec_kernels_cpu.so"
STARTS, FREQUENCY = 0.5, 2000  # seconds until perf samples; samples a second


def part_of(library: str, function: str) -> str:
    """Returns the part of a step to which a sample in a library's function belongs."""
    if library != LIBRARY:
        return OUTSIDE
    own = re.sub(r"<.*|\(anonymous namespace\)", "", function)  # the function, not its template arguments
    return next(part for part, names in PARTS.items() if re.search(names, own))


def shares(report: str) -> dict[str, float]:
    """Part -> share of the samples, from lines "percent;library;function" of `perf report`."""
    found = dict.fromkeys([*PARTS, OUTSIDE], 0.0)
    for line in report.splitlines():
        if line.strip() and not line.startswith("#"):
            percent, library, function = line.split(";", 2)
            found[part_of(library.strip(), function)] += float(percent.strip().removesuffix("%"))
    total = sum(found.values())
    return {part: percent / total for part, percent in found.items()}


def sampled(step: Callable[[int], object], seconds: float) -> dict[str, float]:
    """Samples steps for some seconds; returns part -> share of the time."""
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "perf.data")
        record = ["perf", "record", "--quiet", f"--freq={FREQUENCY}", f"--pid={os.getpid()}", f"--output={data}"]
        with subprocess.Popen(record) as perf:
            time.sleep(STARTS)
            end, number = time.perf_counter() + seconds, 0
            while time.perf_counter() < end:
                step(number % BATCHES)
                number += 1
            perf.send_signal(signal.SIGINT)
        report = ["perf", "report", "--stdio", "--no-children", "--sort=dso,symbol", "--field-separator=;"]
        done = subprocess.run([*report, f"--input={data}"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"perf report failed: {done.stderr.strip()}")
        return shares(done.stdout)


def measure(name: str, turns: int, seconds: float) -> dict[str, object]:
    """Returns milliseconds of a step and of the bare loop, measured in turns, and the shares of the step's parts."""
    subject = Lookups(NAMED[name])
    steps = {who: subject.call("train", who) for who in ("ours", "limit")}
    times = take_turns(steps, BATCHES, turns=turns, seconds=seconds)
    ms = {who: statistics.median(calls) * 1e3 for who, calls in times.items()}
    return {"ms": ms["ours"], "limit_ms": ms["limit"], "parts": sampled(steps["ours"], 4 * seconds)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.step_parts", description=__doc__)
    parser.add_argument("--workload", action="append", choices=NAMED, help="only this (repeatable; default: all)")
    parser.add_argument("--turns", type=int, default=6, help="of ours and the bare loop's steps (default: 6)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn, at the least (default: 1)")
    where = RESULTS / "step_parts.json"
    parser.add_argument("--output", type=Path, default=where, help="default: bench/results/step_parts.json")
    args = parser.parse_args()
    if shutil.which("perf") is None:
        parser.error("perf is not installed: Debian's package is linux-perf")
    torch.set_num_threads(1)
    about, results = machine(1), {}
    for name in args.workload or NAMED:
        found = results[name] = measure(name, args.turns, args.seconds)
        parts = ", ".join(f"{part} {share:.0%}" for part, share in found["parts"].items())
        print(f"{name}: {found['ms']:.2f} ms, bare loop {found['limit_ms']:.2f} ms; {parts}", flush=True)
    bench.save({"machine": about, "results": results}, args.output)
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
