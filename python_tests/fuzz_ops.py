"""Calls public ops with invalid arguments for a given time (op_fuzz.py makes the calls).

    python python_tests/fuzz_ops.py --minutes 30
    python python_tests/fuzz_ops.py --minutes 30 --asan       # CPU kernels built with sanitizers, in build/sanitized
    python python_tests/fuzz_ops.py --first 4711 --calls 1    # repeats one call, by its number

Calls run in a subprocess. If it dies or hangs, that call is a finding, and a new process continues after it. Memory is
limited: an op that needs terabytes must raise an error. Calls of embedding_bag_fuzz.py and row_cache_fuzz.py, which
compare with a reference, are interspersed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import IO

import torch
from backends import Backend, sanitized_environment
from layout_calls import OPS

ROOT = Path(__file__).parents[1]
SANITIZED = ROOT / "build" / "sanitized"
#: Seconds without output after which a call hangs. Starting a process under the sanitizers is slow, too.
TIMEOUT = 120
#: Bytes of address space of a process that calls ops. The sanitizers need more; there, single allocations are limited.
MEMORY = 12 << 30
#: One call in this many is from a fuzzer with a reference.
REFERENCE_EVERY = 20


def sanitized_package(kernels: str = "ON") -> Path:
    """Builds the CPU library with the sanitizers, copies the package's Python files, and returns their folder.

    ``kernels`` is the option REC_KERNELS_SANITIZE of CMakeLists.txt: "ON", or "baseline" for one instruction set.
    """
    folder = SANITIZED if kernels == "ON" else SANITIZED.with_name(f"sanitized-{kernels}")
    package = folder / "rec_kernels"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "rec_kernels", package, dirs_exist_ok=True, ignore=ignored)
    options = {"REC_KERNELS_SANITIZE": kernels, "REC_KERNELS_OUTPUT": package, "REC_KERNELS_TORCH": torch.__path__[0]}
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, *definitions], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "rec_kernels_cpu"], check=True)
    return folder


def environment(package: Path | None) -> dict[str, str]:
    """The environment of subprocesses that call ops: of ``sanitized_package()``, or of this process."""
    if package is None:
        return dict(os.environ)
    sanitized = sanitized_environment()
    sanitized["ASAN_OPTIONS"] += f":allocator_may_return_null=1:max_allocation_size_mb={MEMORY >> 22}"
    return sanitized | {"PYTHONPATH": str(package)}


def work(first: int, count: int | None, seed: int, op: str | None) -> None:
    """Calls ops until it is killed or has made ``count`` calls; prints lines of JSON before and after each."""
    import op_fuzz

    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")  # torch's, of casts and of gradients
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)  # memory that no kernel writes is NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    valid = op_fuzz.Samples()
    for number in itertools.islice(itertools.count(first), count):
        _print("call", number)
        try:
            if op is None and number % REFERENCE_EVERY == REFERENCE_EVERY - 1:
                done = ("with a reference", _with_reference(seed, number))
            else:
                done = op_fuzz.check(valid, f"{seed}:{number}", op)
        except op_fuzz.FoundError as finding:
            done = (finding.op, "finding")
            _print("found", number, str(finding))
        except AssertionError as finding:
            done = ("with a reference", "finding")
            _print("found", number, str(finding))
        _print("done", *done)


def _with_reference(seed: int, number: int) -> str:
    import embedding_bag_fuzz
    import row_cache_fuzz

    call, cpu = embedding_bag_fuzz.bad_call(seed * 2**32 + number), Backend("cpu", OPS)
    embedding_bag_fuzz.check(call, cpu)
    row_cache_fuzz.check(call, number, cpu)
    return "raised" if call.expected_error else "right"


def _print(*what: object) -> None:
    print(json.dumps(what), flush=True)


class Campaign:
    """Runs calls for a given time, in consecutive subprocesses, and counts their outcomes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.findings: list[str] = []
        self._environment = environment(sanitized_package() if options.asan else None)

    def run(self) -> None:
        end = time.monotonic() + 60 * self.options.minutes
        first, last = self.options.first, sys.maxsize
        if self.options.calls is not None:
            last = first + self.options.calls
        while first < last and time.monotonic() < end:
            first = self._one_process(first, last, end)

    def _one_process(self, first: int, last: int, end: float) -> int:
        """Calls from ``first`` on, until the process or the time ends; returns the number of the next call."""
        command = [sys.executable, __file__, "--work", "--first", str(first), "--calls", str(last - first)]
        command += ["--seed", str(self.options.seed), *(["--op", self.options.op] if self.options.op else [])]
        number = first
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, env=self._environment, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
            )
            try:
                for kind, *what in _lines(process.stdout):
                    if kind == "call":
                        number = what[0]
                    elif kind == "found":
                        self._add_finding(*what)
                    elif kind == "done":
                        self.outcomes[what[0]][what[1]] += 1
                        if time.monotonic() > end:
                            return number + 1
                if process.wait() != 0:
                    errors.seek(0)
                    self._add_finding(number, f"the process died with {process.returncode}: {errors.read()[-4000:]}")
            except Empty:
                self._add_finding(number, f"nothing came within {TIMEOUT} s")
            finally:
                process.kill()
                process.wait()
        return number + 1

    def _add_finding(self, number: int, what: str) -> None:
        self.findings.append(what)
        print(f"call {number} of seed {self.options.seed}: {what}", flush=True)

    def table(self) -> str:
        """Calls per op, as Markdown."""
        rows = ["| op | calls | right | raised | findings |", "|---|---|---|---|---|"]
        total = sum(self.outcomes.values(), collections.Counter())
        for name, counts in [*sorted(self.outcomes.items()), ("all", total)]:
            shown = [counts.total(), *(counts[outcome] for outcome in ("right", "raised", "finding"))]
            rows.append(f"| {name} | " + " | ".join(f"{n:,}" for n in shown) + " |")
        return "\n".join(rows)


def _lines(stream: IO[str]) -> Iterator[list]:
    """Yields a process's lines; raises Empty if none arrives for TIMEOUT seconds."""
    lines: Queue[str | None] = Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get(timeout=TIMEOUT)) is not None:
        yield json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    parser.add_argument("--asan", action="store_true", help="with kernels that have AddressSanitizer and UBSan")
    parser.add_argument("--seed", type=int, default=0, help="of all calls (default: 0)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first call (default: 0)")
    parser.add_argument("--calls", type=int, metavar="N", help="at most so many")
    parser.add_argument("--op", help="this op alone")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.first, options.calls, options.seed, options.op)
        return 0
    campaign = Campaign(options)
    with contextlib.suppress(KeyboardInterrupt):  # prints the table of the calls so far
        campaign.run()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = (used.ru_utime + used.ru_stime) / 60
    print(campaign.table())
    print(f"\nseed {options.seed}: {minutes:.1f} minutes of CPU, {len(campaign.findings)} findings")
    return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
