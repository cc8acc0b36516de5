"""Installs one wheel beside several versions of torch and writes down what works: bench/results/compatibility.json.

    .venv/bin/python wheels/compatibility.py dist/*.whl --torch 2.10.0 2.11.0 2.13.0 2.15.0

For each torch a virtual environment is made, filled from the package index, and deleted again: some GB, where the index
has CUDA builds of torch only. There the wheel is installed and a copy of ``python_tests`` runs, away from the checkout.
Whether the CUDA library loads and registers its kernels is seen without a GPU, where torch is a CUDA build. ``--table``
prints the table of docs/install.md from the JSON file, and runs nothing. A row's Python is the one
that runs this script. ``--tests leaks`` runs ``test_leaks.py`` alone, as it does other files, and records nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "compatibility.json"
#: Every op on the CPU, their gradients, ``opcheck``, ``torch.compile``, ``torch.export``, modules, a table in a
#: file; that calls keep no memory, which depends on the torch of the build and on that of the process.
TESTS = (
    *("scale_rows", "embedding_bag", "embedding_bag_fused", "embedding_bag_accumulate", "embedding_bag_compile"),
    *("row_formats", "row_formats_compile", "row_cache_ahead", "row_cache_disk", "grouped_projection"),
    *("dot_interaction", "factorization_machine", "expand", "jagged_bucketize", "jagged_dedup"),
    *("jagged_index_select", "jagged_overlaps", "jagged_permute", "jagged_windows", "opcheck", "serving"),
    *("flops", "import", "embedding_collection", "jagged_containers", "grad_scaler", "grad_scaler_state"),
    "leaks",
)
#: Tests among them that compile or read files of the checkout.
LEFT_OUT = (
    "python_tests/test_embedding_collection.py::test_late_reports",
    "python_tests/test_leaks.py::test_torch_converts_no_handles",
    "python_tests/test_jagged_overlaps.py::test_rows_that_differ_in_one_id_spread_over_the_table",
)
REQUIREMENTS = ("pytest", "hypothesis", "filelock", "numpy", "ml_dtypes")
PROBE = """
import json, torch, rec_kernels
has = torch._C._dispatch_has_kernel_for_dispatch_key
names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("rec_kernels::")]
info = rec_kernels.build_info()
print(json.dumps({
    "torch": torch.__version__, "torch_cuda": torch.version.cuda,
    "cuda_library": ("not in the wheel" if info["cuda_library"] is None else info["cuda_unavailable"]) or "loaded",
    "cuda_ops": sum(has(n, "CUDA") for n in names) if info["cuda_unavailable"] is None else 0,
    "host_library": info["host_library"] is not None,
}))
"""
IMPORTS = """
import time, torch
start = time.process_time(), time.perf_counter()
import rec_kernels
print(time.process_time() - start[0], time.perf_counter() - start[1])
"""


def run(*command: object, folder: Path, **more: str) -> subprocess.CompletedProcess:
    """A command that must succeed, away from the checkout, with more variables; its output is kept."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment(folder) | more, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done


def environment(folder: Path) -> dict[str, str]:
    """One thread, no Python files but those of the virtual environment, caches of torch.compile of its own."""
    cleared = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return cleared | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def new_environment(interpreter: str, folder: Path, *packages: str, pip: Sequence[str] = ()) -> Path:
    """Makes a virtual environment with packages from the index; returns its Python."""
    python = folder / "venv" / "bin" / "python"
    run(interpreter, "-m", "venv", folder / "venv", folder=folder)
    run(python, "-m", "pip", "install", "-q", "--no-compile", *pip, *packages, folder=folder)
    return python


def run_tests(python: Path, folder: Path, names: Sequence[str]) -> dict[str, object]:
    """The tests of the installed package: how many passed, failed, were skipped; which failed."""
    tests, report = folder / "python_tests", folder / "report.xml"
    shutil.copytree(ROOT / "python_tests", tests, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:cacheprovider\nmarkers = full\n")
    command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *(f"--deselect={name}" for name in LEFT_OUT)]
    files = [tests / f"test_{name}.py" for name in names]
    start = time.perf_counter()
    done = subprocess.run(
        [*map(str, command + files)], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    if not report.exists():
        raise RuntimeError(f"pytest wrote no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    if bad:
        print(done.stdout, file=sys.stderr)
    skipped = sum(c.find("skipped") is not None for c in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in bad],
        "skipped": skipped,
        "seconds": round(time.perf_counter() - start),
    }


def import_seconds(python: Path, folder: Path) -> dict[str, float]:
    """Times ``import rec_kernels`` after ``import torch``: medians of five, in CPU seconds and elapsed seconds."""
    lines = [run(python, "-c", IMPORTS, folder=folder).stdout.split() for _ in range(5)]
    processor, clock = zip(*[map(float, line) for line in lines], strict=True)
    return {"cpu": round(statistics.median(processor), 2), "elapsed": round(statistics.median(clock), 2)}


def try_version(version: str, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """One row of the table."""
    wheel = options.wheel.resolve()
    pip = options.pip.split()
    python = new_environment(sys.executable, folder, f"torch=={version}", *REQUIREMENTS, pip=pip)
    start = time.perf_counter()
    run(python, "-m", "pip", "install", "-q", "--no-compile", *pip, "--no-deps", wheel, folder=folder)
    seconds = round(time.perf_counter() - start, 1)
    found = json.loads(run(python, "-c", PROBE, folder=folder).stdout.splitlines()[-1])
    return found | {
        "python": platform.python_version(),
        "wheel": wheel.name,
        "install_seconds": seconds,
        "import_seconds": import_seconds(python, folder),
        "tests": run_tests(python, folder, options.tests or TESTS),
    }


def table(rows: list[dict]) -> str:
    """The rows as docs/install.md has them."""
    lines = [
        "| torch | Python | CUDA library | import, s | tests: passed, failed, skipped |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        tests = row["tests"]
        cuda = f"loads, {row['cuda_ops']} ops" if row["cuda_library"] == "loaded" else row["cuda_library"]
        counts = f"{tests['passed']}, {len(tests['failed'])}, {tests['skipped']}"
        build = row["torch"] + (f" (CUDA {row['torch_cuda']})" if row["torch_cuda"] else "")
        lines.append(f"| {build} | {row['python']} | {cuda} | {row['import_seconds']['cpu']} | {counts} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("--torch", nargs="+", default=["2.10.0", "2.11.0", "2.13.0", "2.15.0"])
    parser.add_argument("--pip", default="", help="more options of pip install, such as '--find-links folder'")
    parser.add_argument("--tests", nargs="+", default=[], help="only these, such as leaks; nothing is recorded")
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    if not options.table:
        if options.wheel is None:
            parser.error("a wheel is needed")
        for version in options.torch:
            with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
                row = try_version(version, options, Path(folder))
            print(json.dumps(row, indent=1), flush=True)
            if options.tests:
                continue
            # A row that is taken again replaces the one before; every row is written at once.
            same = (row["torch"], row["python"][:4], row["torch_cuda"])
            rows = [r for r in rows if (r["torch"], r["python"][:4], r["torch_cuda"]) != same] + [row]
            rows.sort(key=lambda r: [int(n) for n in r["torch"].split("+")[0].split(".")] + [r["python"]])
            RESULTS.write_text(json.dumps({"command": "wheels/compatibility.py", "rows": rows}, indent=1) + "\n")
    if not options.tests:
        print(table(rows))


if __name__ == "__main__":
    main()
