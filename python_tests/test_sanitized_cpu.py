"""The CPU's kernels, built with the sanitizers: no access outside of memory, no undefined step."""

from __future__ import annotations

import subprocess
import sys

import pytest
from backends import ROOT
from fuzz_ops import environment, sanitized_package

#: Tests of kernels that follow numbers of their input into memory: bags and groups, ids, rows of tables, slots.
TESTS = ("embedding_bag_shared", "expand", "jagged_dedup", "jagged_permute", "row_cache", "scale_rows")


@pytest.mark.full
def test_cpu_kernels_run_clean_under_the_sanitizers() -> None:
    """The process that computes has the library with the sanitizers, and its tests pass.

    The drivers and one instruction set's kernels have them: their sources are those of the others.
    """
    package = sanitized_package("baseline")
    code = "import rec_kernels._library as found; print(found.__file__)"
    options = {"env": environment(package), "cwd": package, "capture_output": True, "text": True}
    assert subprocess.run([sys.executable, "-c", code], **options).stdout.startswith(str(package))
    tests = [ROOT / "python_tests" / f"test_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not full", "--backends=cpu", *map(str, tests)]
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "comparisons passed by backend: cpu" in done.stdout
