"""Training beside a busy neighbour: examples/s with idle cores, and with another program on one of them.

Trains the reference DLRM on Complete Journey with the trainer's own way of waiting, which adapts to other programs, and
with ways fixed by OpenMP's environment variables. Each figure is a training in a process of its own; the ways take
turns, so that a change of the machine's speed meets all of them. Writes a JSON file after each pass.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bench
from bench.script import environment, parser_of, positive

WAITS = {
    "the trainer's": {},
    "libgomp's": {"GOMP_SPINCOUNT": "300000"},  # its default, set so that the trainer leaves it alone
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """A block beside ``count`` programs that each keep a core busy."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def train(threads: int, variables: dict[str, str]) -> float:
    """Examples/s of one training on Complete Journey, reading included, in a process of its own."""
    variables = {name: text for name, text in os.environ.items() if name not in NAMES} | variables
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "rec_kernels.dlrm", "train", "--threads", str(threads), "--runs-dir", runs]
        subprocess.run([*command, "--run", "run"], env=variables, check=True, capture_output=True)
        records = [json.loads(line) for line in (Path(runs) / "run" / "metrics.jsonl").read_text().splitlines()]
    return next(record["examples_per_second"] for record in records if record["kind"] == "test")


def write(path: Path, threads: int, passes: dict[str, dict[str, list[float]]]) -> None:
    """Writes the figures of all passes so far, and their medians."""
    medians = {name: {key: statistics.median(all) for key, all in keys.items()} for name, keys in passes.items()}
    document = {"machine": environment(), "trained_with": threads, "examples_per_second": medians, "passes": passes}
    bench.save(document, path)


def main() -> None:
    parser = parser_of(__doc__, "neighbour.json")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="threads that compute (all cores)")
    parser.add_argument("--passes", type=positive, default=3, help="trainings per figure (3); the median is written")
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {name: {"idle": [], "busy": []} for name in WAITS}
    for _ in range(arguments.passes):
        for name, variables in WAITS.items():
            for count, key in ((0, "idle"), (1, "busy")):
                with neighbours(count):
                    found[name][key].append(train(arguments.threads, variables))
                print(f"{name:<26} {key}  {found[name][key][-1]:>10,.0f} examples/s", flush=True)
        write(arguments.output, arguments.threads, found)


if __name__ == "__main__":
    main()
