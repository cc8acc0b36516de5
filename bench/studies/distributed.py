"""Measurements of training on several processes of this machine with gloo: quality, bytes, time and memory.

auc     test AUC of examples/train_torchrec.py on 1, 2 and 4 processes, over paired seeds, with an interval
bytes   bytes that a process sends in a step, by plan, counted where the collectives are called
step    time of a step on 2 processes beside TorchRec's own CPU kernels, in turns: lookups, updates, communication
memory  bytes of tables on each of 2 processes, and what the process takes more, beside the planner's promise

Each part writes its own key of one JSON file. Processes of a part are started by torch.distributed.run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import bench
from bench import ROOT
from bench.script import machine, options_of, parser_of, positive

PARTS = {"auc": (1, 2, 4), "bytes": (2, 4), "step": (2,), "memory": (2,)}


def on_processes(world: int, part: str, options: argparse.Namespace) -> dict:
    """Runs ``bench.studies.distributed_ranks`` on this number of processes and returns its result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m"]
        command += ["--", "bench.studies.distributed_ranks", part, str(out), str(options.weeks), str(options.seeds)]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
        settings = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=settings, check=True)
        return json.loads(out.read_text())


def paired(found: dict[str, list[float]], seed: int = 0) -> dict:
    """Mean AUC by number of processes, and its difference to one process with a bootstrapped 95 % interval."""
    alone, result = np.array(found["1"]), {}
    generator = np.random.default_rng(seed)
    for world, each in found.items():
        difference = np.array(each) - alone
        means = generator.choice(difference, (10_000, len(difference))).mean(1)
        low, high = (float(q) for q in np.quantile(means, (0.025, 0.975)))
        result[world] = {"mean": float(np.mean(each)), "difference": float(difference.mean()), "interval": [low, high]}
    return result


def quartiles(numbers: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return statistics.quantiles(numbers, n=4, method="inclusive")


def summarised(part: str, found: dict[str, dict]) -> dict:
    """The result of a part of the study."""
    if part == "auc":
        each = {world: result["auc"] for world, result in found.items()}
        return {"seeds": len(each["1"]), "each": each, "paired": paired(each)}
    if part == "step":
        return {name: {key: quartiles(v) for key, v in rows.items()} for name, rows in found["2"].items()}
    return found


def main() -> None:
    parser = parser_of(__doc__, "distributed.json")
    parser.add_argument("parts", nargs="+", choices=PARTS, help="parts of the study to run")
    parser.add_argument(
        "--weeks", type=positive, default=8, help="weeks of Complete Journey for auc and bytes (default: 8)"
    )
    parser.add_argument("--seeds", type=positive, default=32, help="seeds of auc (default: 32)")
    options = options_of(parser)
    result = json.loads(options.output.read_text()) if options.output.exists() else {}
    for part in options.parts:
        found = {str(world): on_processes(world, part, options) for world in PARTS[part]}
        about = machine() | {"load": os.getloadavg()[0]}
        result[part] = {"environment": about, "results": summarised(part, found)}
        bench.save(result, options.output)
        print(json.dumps(result[part]["results"], indent=2))


if __name__ == "__main__":
    main()
