"""Times ops on the CPU against torch, FBGEMM and a bare loop, prints a table and saves the results.

    python -m bench.run --op embedding_bag --quick --threads 1
    python -m bench.run --op embedding_bag --workload 8,2048,1000000,64,20,1.05 --case forward
    python -m bench.run --op embedding_bag --workload criteo-kaggle --workload mlperf-dcnv2

The table has each implementation's time, bytes, GB/s, share of the measured limit, and ratio to our time.
docs/benchmarks.md describes columns and JSON file, and how to compare two commits.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench import RESULTS, ROOT, save
from bench.cases import Pass
from bench.figures import where
from bench.report import table
from bench.script import machine, positive
from bench.shapes import WORKLOADS
from bench.workloads import NAMED, OPS, workload

#: Benchmarks: an op, or ops in a typical use.
BENCHED = sorted(p.stem.removeprefix("bench_") for p in (ROOT / "bench").glob("bench_*.py"))
#: Additional figures of a benchmark; the first pass's are kept.
EXTRAS = ("distinct_bytes", "features", "hit_rate")
QUICK_ROUNDS = 5


def _contents() -> str:
    """Lists the values of --op and --workload for --help."""
    docs = {op: ast.get_docstring(ast.parse((ROOT / "bench" / f"bench_{op}.py").read_text())) for op in BENCHED}
    lines = ["ops:", *(f"  {op:<24} {' '.join(doc.partition(chr(10) * 2)[0].split())}" for op, doc in docs.items())]
    lines += ["", "workloads of embedding bags (the first ones by default, the others only with --workload):"]
    lines += [f"  {w.name:<24} {w.sizes()}" for w in (*WORKLOADS, *NAMED.values())]
    return "\n".join(lines)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line, or ``given`` instead."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=__doc__, epilog=_contents(), formatter_class=form
    )
    add = parser.add_argument
    add(
        "--op", action="append", choices=BENCHED, metavar="OP", help="run only this op (repeatable; default: all below)"
    )
    takers = f"{', '.join(OPS[:-1])} and {OPS[-1]}"
    text = f"replaces an op's own workloads: a name below, or T,B,E,D,L[,ZIPF] of equal tables (for {takers})"
    add("--workload", action="append", type=workload, default=[], metavar="WORKLOAD", help=text)
    add(
        "--case",
        action="append",
        default=[],
        metavar="TEXT",
        help="run only benchmarks whose name contains TEXT (repeatable)",
    )
    text = "run only ours and this one, by its name in the table, e.g. torch, fbgemm, limit (repeatable)"
    add("--implementation", action="append", default=[], metavar="NAME", help=text)
    add(
        "--passes",
        type=positive,
        default=8,
        help="passes, each in a new process; figures are medians over them (default: 8)",
    )
    add("--rounds", type=positive, default=60, help="timed calls per implementation and pass (default: 60)")
    add("--threads", type=positive, default=0, help="CPU threads (default: torch's choice)")
    text = f"one pass of {QUICK_ROUNDS} rounds, without the ops' tests; writes no file without --output"
    add("--quick", action="store_true", help=text)
    add("--skip-tests", action="store_true", help="do not run the ops' tests first")
    text = (
        "JSON file (default: bench/results/<ops or cpu, workloads>-<threads>threads.json; none for partial benchmarks)"
    )
    add("--output", type=Path, help=text)
    args = parser.parse_args(given)
    if args.workload:
        args.op = args.op or list(OPS)
        if others := sorted(set(args.op) - set(OPS)):
            parser.error(f"--op {', '.join(others)}: only {takers} take a --workload")
    if args.quick:
        args.passes, args.rounds, args.skip_tests = 1, QUICK_ROUNDS, True
    return args


def run_tests(ops: list[str]) -> None:
    """Runs the ops' tests; exits if one fails."""
    tests = [test for op in ops if (ROOT / (test := f"python_tests/test_{op}.py")).exists()]
    if tests and subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT).returncode:
        sys.exit(f"pytest {' '.join(tests)} failed: wrong kernels are not measured")


def one_pass(what: Pass, turn: int) -> dict[str, dict[str, dict]]:
    """Runs ``Pass.measure`` in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(what.measure, turn).result()


def merge(passes: list[dict]) -> dict[str, dict[str, dict]]:
    """Merges passes: medians over passes, and each pass's. Ratios are taken within a pass, under equal conditions."""
    merged: dict[str, dict[str, dict]] = {}
    for group, members in passes[0].items():
        merged[group] = {}
        for name, first in members.items():
            rows = [p[group][name] for p in passes]
            ms = statistics.median(r["ms"] for r in rows)
            merged[group][name] = {
                "ms": ms,
                "min_ms": min(r["min_ms"] for r in rows),
                "passes_ms": [r["ms"] for r in rows],
                "bytes": first["bytes"],
                "gb_per_s": first["bytes"] / ms / 1e6 if first["bytes"] else None,
                **{key: first[key] for key in EXTRAS if key in first},
                "over_ours": statistics.median(p[group][name]["ms"] / p[group]["ours"]["ms"] for p in passes),
            }
    return merged


def check_found(args: argparse.Namespace, groups: dict[str, dict[str, dict]]) -> None:
    """Exits if a pass has no result for a selected option."""
    names = {name for members in groups.values() for name in members}
    if lacking := [text for text in args.case if not any(text in title for title in groups)]:
        sys.exit(f"no benchmark of {', '.join(args.op or BENCHED)} has {' or '.join(lacking)} in its name")
    if lacking := sorted(set(args.implementation) - names):
        sys.exit(f"no benchmark has an implementation {' or '.join(map(repr, lacking))}")


def main() -> None:
    """The command."""
    args = arguments()
    ops = args.op or BENCHED
    if not args.skip_tests:
        run_tests(ops)
    # Before the passes: describes the files that are measured.
    about = machine(args.threads) | {"passes": args.passes, "rounds": args.rounds}
    what = Pass(ops, args.workload, args.rounds, args.threads, args.case, args.implementation)
    first = one_pass(what, 0)
    check_found(args, first)
    groups = merge([first, *(one_pass(what, turn) for turn in range(1, args.passes))])
    document = {"machine": about, "results": groups}
    print(f"\n{where(document)}\n\n{table(document)}")
    if args.output is None and (args.quick or args.case or args.implementation):
        return  # bench/results has only complete benchmarks
    name = "-".join([*(args.op or ["cpu"]), *(w.name for w in args.workload)])
    output = args.output or RESULTS / f"{name}-{about['threads']}threads.json"
    save(document, output)
    print(f"\nsaved to {output}")


if __name__ == "__main__":
    main()
