"""The CPU's kernels run clean under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import json
import subprocess
import sys

import fuzz_ops
import pytest
from backends import ROOT
from test_opcheck import registered

pytestmark = pytest.mark.full
#: Tests of kernels that index memory by their input (bags, groups, ids, rows, slots), and of those with tiles and
#: remainders.
TESTS = (
    *("embedding_bag_shared", "expand", "jagged_dedup", "jagged_permute", "row_cache", "scale_rows"),
    *("dot_interaction", "factorization_machine", "grouped_projection", "row_formats"),
)


def run(*command: object) -> str:
    """Output of a Python process that has the sanitized library, and must succeed.

    Drivers and one instruction set's kernels are sanitized: the other sets have the same sources.
    """
    package = fuzz_ops.sanitized_package("baseline")
    options = {"env": fuzz_ops.environment(package), "cwd": package, "capture_output": True, "text": True}
    code = "import rec_kernels._library as found; print(found.__file__)"
    assert subprocess.run([sys.executable, "-c", code], **options).stdout.startswith(str(package))
    done = subprocess.run([sys.executable, *map(str, command)], **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_cpu_kernels_run_clean_under_the_sanitizers() -> None:
    """The kernels' tests pass."""
    tests = [ROOT / "python_tests" / f"test_{name}.py" for name in TESTS]
    printed = run("-m", "pytest", "-q", "-x", "-m", "not full", "-k", "not compiled", "--backends=cpu", *tests)
    assert "comparisons passed by backend: cpu" in printed


def test_every_op_runs_clean_under_the_sanitizers() -> None:
    """Calls of all public ops with invalid arguments, and of embedding_bag with a reference, pass."""
    words = [json.loads(line) for line in run(fuzz_ops.__file__, "--work", "--calls", "1000").splitlines()]
    assert [what for kind, *what in words if kind == "found"] == []
    done = [what for kind, *what in words if kind == "done"]
    assert len(done) == 1000
    assert {op.partition(".")[0] for op, _ in done} >= {name.partition(".")[0] for name in registered()}
    assert {"right", "raised"} <= {outcome for _, outcome in done}
