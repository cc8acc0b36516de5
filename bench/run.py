"""Runs the CPU benchmarks, prints ours beside the peers and the limit, and saves the figures: `python -m bench.run`.

The table is bench.report's. docs/benchmarks.md says what its columns and the JSON file hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path

import torch

import rec_kernels
from bench import RESULTS, ROOT, commit, save
from bench.figures import where
from bench.peers import fbgemm_version
from bench.report import table
from bench.script import positive
from bench.workloads import NAMED, OPS
from rec_kernels.dlrm.devices import cpu_model

#: Benchmarks: an op, or ops in one use of theirs.
BENCHED = sorted(p.stem.removeprefix("bench_") for p in (ROOT / "bench").glob("bench_*.py"))
#: Figures that a benchmark gives beside a call's time; that of the first pass is kept.
EXTRAS = ("distinct_bytes", "features", "hit_rate")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; ``given``: in its place."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--op", action="append", choices=BENCHED, help="benchmark only this (repeatable; default: all)")
    parser.add_argument(
        "--workload",
        action="append",
        choices=NAMED,
        default=[],
        help=f"give the op this named workload in place of its own (repeatable; {' and '.join(OPS)} take them)",
    )
    parser.add_argument(
        "--passes", type=positive, default=8, help="whole passes; the table shows medians over them (default 8)"
    )
    parser.add_argument("--rounds", type=positive, default=60, help="turns per implementation and pass (default 60)")
    parser.add_argument("--threads", type=positive, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--skip-tests", action="store_true", help="do not run the ops' tests first")
    where = "JSON file (default: bench/results/<ops or cpu, workloads>-<threads>threads.json)"
    parser.add_argument("--output", type=Path, help=where)
    args = parser.parse_args(given)
    if args.workload:
        args.op = args.op or list(OPS)
        if others := sorted(set(args.op) - set(OPS)):
            parser.error(f"--op {', '.join(others)}: only {' and '.join(OPS)} take a --workload")
    return args


def run_pytest(options: list[str]) -> None:
    """Runs pytest from the repository's root; ends the program when it fails."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=ROOT)
    if done.returncode:
        sys.exit(f"pytest {' '.join(options)} failed: no figures from kernels that are wrong")


def one_pass(files: list[str], args: argparse.Namespace, turn: int) -> dict[str, dict[str, dict]]:
    """group -> implementation -> {"ms", "min_ms", "bytes", EXTRAS} of one pass over all benchmarks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pass.json"
        options = [f"--rounds={args.rounds}", f"--turn={turn}", f"--threads={args.threads}"]
        options += [f"--workload={name}" for name in args.workload]
        run_pytest([*files, *options, f"--benchmark-json={path}", "--benchmark-quiet", "-p", "no:cacheprovider"])
        raw = json.loads(path.read_text())
    groups: dict[str, dict[str, dict]] = defaultdict(dict)
    for b in raw["benchmarks"]:
        groups[b["group"]][b["params"]["name"]] = {
            "ms": b["stats"]["median"] * 1e3,
            "min_ms": b["stats"]["min"] * 1e3,
            "bytes": b["extra_info"].get("bytes"),
            **{key: b["extra_info"][key] for key in EXTRAS if b["extra_info"].get(key) is not None},
        }
    return groups


def merge(passes: list[dict]) -> dict[str, dict[str, dict]]:
    """Medians over the passes, beside those of each; ratios are taken within a pass, where the machine was the same."""
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


def machine(threads: int, command: str = "python -m bench.run") -> dict[str, object]:
    """Describes machine and versions of the figures; ``threads``: 0 for torch's choice."""
    about = rec_kernels.build_info()
    return {
        "command": " ".join([command, *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        **commit(),
        "cpu": cpu_model(),
        "threads": threads or torch.get_num_threads(),
        **{key: about[key] for key in ("version", "torch", "python", "cpu_isa")},
        "fbgemm": fbgemm_version(),
    }


def main() -> None:
    """The command."""
    args = arguments()
    ops = args.op or BENCHED
    tests = [test for op in ops if (ROOT / (test := f"python_tests/test_{op}.py")).exists()]
    if tests and not args.skip_tests:
        run_pytest(tests)
    files = [f"bench/bench_{op}.py" for op in ops]
    # Before the passes: of the files that are measured.
    about = machine(args.threads) | {"passes": args.passes, "rounds": args.rounds}
    groups = merge([one_pass(files, args, turn) for turn in range(args.passes)])
    document = {"machine": about, "results": groups}
    print(f"\n{where(document)}\n\n{table(document)}")
    what = "-".join([*(args.op or ["cpu"]), *args.workload])
    output = args.output or RESULTS / f"{what}-{about['threads']}threads.json"
    save(document, output)
    print(f"\nsaved to {output}")


if __name__ == "__main__":
    main()
