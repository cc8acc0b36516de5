"""Measures the CUDA kernels against Triton's, torch and FBGEMM: time, bytes, and the share of a plain copy's rate.

Every shape is checked before it is timed. Times are medians of single calls between CUDA events, with an emptied L2
cache; calls below two milliseconds are also timed as replays of a CUDA graph, without the cost of launches. A case that
fails is recorded with its message. The JSON file is complete after every case. If a case hangs or corrupts the GPU's
context, another process continues after it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path

import torch

import bench
from bench.gpu import recorded, report
from bench.gpu.apart import CASE_SECONDS, LOST, measure_apart
from bench.gpu.context import BROKEN, context_works
from bench.gpu.every_case import every_case
from bench.gpu.implementations import available
from bench.gpu.measure import Effort, measure_case
from bench.gpu.subjects import Case
from bench.gpu.timing import CudaTimer, Timer, WallClock, copy_gb_per_s

# (budget_ms, least, most) calls of a figure, and the limit of the whole run in seconds.
FULL, QUICK, TRIAL = (150, 10, 300, 510), (40, 5, 60, 225), (5, 2, 4, 600)
COPY_BYTES, TRIAL_COPY_BYTES = 2**31, 2**16


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: less than 4 minutes instead of 9")
    parser.add_argument("--case", action="append", help="only cases whose name contains this (repeatable)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print and draw the results in a JSON file, and exit")
    parser.add_argument(
        "--limit", type=float, help="seconds after which no more cases start (default: 510; with --quick: 225)"
    )
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/gpu-<name>.json)")
    parser.add_argument("--commit", help="commit to record if the files are not a git repository")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: a trial of this program with tiny cases and meaningless figures; requires --output",
    )
    args = parser.parse_args()
    args.begun = time.monotonic()  # the clock is common to all processes of this run
    if args.show is not None:
        return args
    if args.device == "cpu" and args.output is None:
        parser.error("--device cpu needs --output, because its figures are not results")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu runs the program without one")
    return args


def chosen_cases(args: argparse.Namespace, found: dict[str, object], memory: int) -> list[Case]:
    """The cases, filtered by --case."""
    every = every_case(found, memory, trial=args.device == "cpu")
    return [case for case in every if not args.case or any(part in case.name for part in args.case)]


def effort_of(args: argparse.Namespace) -> Effort:
    """Returns the effort that the command line specifies."""
    *calls, limit = TRIAL if args.device == "cpu" else QUICK if args.quick else FULL
    return Effort(*calls, limit_s=limit if args.limit is None else args.limit, start=args.begun)


def run(args: argparse.Namespace, device: torch.device, timer: Timer, chosen: list[Case], found: dict) -> None:
    """Measures case after case; saves ``found`` before and after each. Ends the process if its GPU context is lost."""
    effort = effort_of(args)
    copied = functools.partial(copy_gb_per_s, timer, device, COPY_BYTES if device.type == "cuda" else TRIAL_COPY_BYTES)
    if "copy_gb_per_s" not in found:
        found["copy_gb_per_s"] = {"before": copied()}
    print(f"copy: {found['copy_gb_per_s']['before']:.0f} GB/s", flush=True)
    for case in chosen:
        bench.save(found | {"running": case.about()}, args.output)
        measured = measure_case(case, device, timer, effort, found["copy_gb_per_s"]["before"])
        measured["predicted"] = recorded.beside(measured, (found["about"].get("gpu") or {}).get("name"))
        if lost := not context_works():
            measured["error"] = f"{LOST}it has left the CUDA context broken"
        found["cases"].append(measured)
        found["seconds"] = round(effort.seconds(), 1)
        bench.save(found, args.output)
        rows = measured["results"]
        failed = f"{sum('error' in row for row in rows)} failed"
        print(f"{found['seconds']:6.1f} s  {case.name}: {len(rows)} figures, {failed}", flush=True)
        if lost:
            print(f"{case.name}: {measured['error']}; another process goes on", flush=True)
            sys.exit(BROKEN)
    try:
        found["copy_gb_per_s"]["after"] = copied()
    except Exception as error:  # a kernel may have ended the GPU's context
        found["copy_gb_per_s"]["after_error"] = str(error)[:500]
    bench.save(found, args.output)


def show(found: dict, output: Path) -> None:
    """Prints the table and draws the picture beside the JSON file."""
    print(f"\n{report.table(found)}\n")
    print(report.picture(found, output.with_suffix(".png")))
    print(f"figures: {output}")


def wrong_results(found: dict) -> list[str]:
    """Lists cases and operations in which our kernels failed their check."""
    rows = [(case["name"], row) for case in found["cases"] for row in case["results"]]
    return [
        f"{name}, {report.label(row)}"
        for name, row in rows
        if row["implementation"] in (report.OURS, report.OPS) and row.get("error", "").startswith("AssertionError")
    ]


def measure(args: argparse.Namespace) -> None:
    """Measures the cases that are missing from the file of an earlier process of this run."""
    os.environ.setdefault(report.CUBLAS, report.CUBLAS_WORKSPACE)
    device = torch.device(args.device)
    implementations, left_out = available(device)
    found = report.read(args.output)
    if not found:
        found = {"about": report.about(device, left_out, args.commit), "cases": []}
        for name, reason in left_out.items():
            print(f"{name} is left out: {reason}")
    known = {case["name"] for case in found["cases"]}
    chosen = [case for case in chosen_cases(args, implementations, memory_of(args)) if case.name not in known]
    torch.manual_seed(0)
    run(args, device, CudaTimer() if args.device == "cuda" else WallClock(), chosen, found)


def memory_of(args: argparse.Namespace) -> int:
    """Bytes of GPU memory; 0 in a trial."""
    return torch.cuda.get_device_properties(args.device).total_memory if args.device == "cuda" else 0


def main() -> None:
    """The command."""
    args = arguments()
    if args.show is not None:
        show(json.loads(args.show.read_text()), args.show)
        return
    if args.list:
        print(*(case.name for case in chosen_cases(args, {"ours": None}, memory_of(args))), sep="\n")
        return
    args.output = args.output or report.default_output(torch.cuda.get_device_properties(0).name)
    # A trial may interpret Triton's kernels on a busy machine.
    if status := measure_apart(measure, args, CASE_SECONDS * (1 if args.device == "cuda" else 10)):
        sys.exit(status)
    found = report.read(args.output)
    show(found, args.output)
    wrong, lost = wrong_results(found), [c["name"] for c in found["cases"] if c.get("error", "").startswith(LOST)]
    said = [f"wrong results, hence no figures: {', '.join(wrong)}"] if wrong else []
    said += [f"cases that ended their process: {', '.join(lost)}"] if lost else []
    if said:
        sys.exit("; ".join(said))


if __name__ == "__main__":
    # The processes of measure_apart() find measure() by the name of this module.
    from bench.gpu import __main__ as command

    command.main()
