"""Packs into carry/ what a machine with a GPU may lack: libraries built here, and packages for its Python as wheels.

For a machine that reaches no network and whose minutes are too dear for a build. Copy the checkout with carry/ to it;
`make first-light` there takes what is missing from it. Libraries of ops use torch's stable ABI and know no Python: one
build serves every torch from 2.10 on. `_host`, for tables in files, is built where that Python is, with its headers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from first_light import CARRY, ROOT, carried
from first_light.carried import commit

#: Packages that the tests need; torch and its dependencies are the machine's own.
PACKAGES = ("pytest", "pytest-xdist", "hypothesis", "filelock")
#: Bytes of the sources and carry/ together.
MOST = 60_000_000
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def cmake_architecture(architecture: str) -> str:
    """ "9.0" -> "90-real".

    Raises:
        ValueError: it is not an architecture as TORCH_CUDA_ARCH_LIST has them.
    """
    if not re.fullmatch(r"\d+\.\d", architecture):
        raise ValueError(f"{architecture!r} is not an architecture such as 9.0")
    return f"{architecture.replace('.', '')}-real"


def requirements(text: str) -> list[str]:
    """The lines of requirements-dev.txt for ``PACKAGES``, the others' names alone."""
    found = []
    for name in PACKAGES:
        lines = [line for line in text.splitlines() if re.match(rf"{name}==", line)]
        found += lines or [name]
    return found


def find_python(version: str) -> str | None:
    """An interpreter of a version, as "3.12", on the PATH or of pyenv; None where there is none with headers."""
    known = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    asked = "import os, sys, sysconfig as s; print('%d.%d' % sys.version_info[:2]); "
    asked += "print(os.path.exists(os.path.join(s.get_path('include'), 'Python.h')))"
    for python in filter(None, known):
        done = subprocess.run([python, "-c", asked], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.split() == [version, "True"]:
            return str(python)
    return None


def build(architectures: list[str], python: str | None, output: Path) -> None:
    """Builds the libraries for GPU architectures into ``output``, and ``_host`` for a Python.

    Raises:
        subprocess.CalledProcessError: CMake or a compiler fails.
    """
    import pybind11
    import torch

    folder = ROOT / "build" / "carry"
    packages = folder / "packages"  # pybind11 alone: that Python has packages of its own, or none
    packages.mkdir(parents=True, exist_ok=True)
    if not (packages / "pybind11").exists():
        (packages / "pybind11").symlink_to(Path(pybind11.__file__).parent)
    options = {
        "REC_KERNELS_TORCH": torch.__path__[0],
        "REC_KERNELS_OUTPUT": str(output),
        "REC_KERNELS_PYTHON": python or "",
        "REC_KERNELS_PORTABLE": "1",
        "REC_KERNELS_CUDA": "ON",
        "CMAKE_CUDA_COMPILER": shutil.which("nvcc") or "nvcc",
        "CMAKE_CUDA_ARCHITECTURES": ";".join(map(cmake_architecture, architectures)),
        # compute-sanitizer and Nsight Compute name lines of the sources by it; the kernels' instructions are the same.
        "CMAKE_CUDA_FLAGS": "-lineinfo",
    }
    environment = os.environ | {"PYTHONPATH": str(packages)}
    configure = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, *(f"-D{name}={v}" for name, v in options.items())]
    for command in (configure, ["cmake", "--build", folder]):
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)


def download(python: str, output: Path) -> None:
    """Wheels of ``PACKAGES`` and what they need, for Linux on x86-64.

    Raises:
        subprocess.CalledProcessError: pip fails.
    """
    wanted = requirements((ROOT / "requirements-dev.txt").read_text())
    # pip takes the environment markers of this Python's version: only those lines that are for the other one remain.
    wanted = [line.split(";")[0] for line in wanted if "python_version <" not in line]
    options = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "-d", str(output)]
    options += [option for platform in PLATFORMS for option in ("--platform", platform)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, *wanted], check=True)


def size() -> int:
    """Bytes of all files that are not ignored, and of carry/."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    files = {ROOT / name for name in listed.stdout.split("\0") if name} | set(CARRY.rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m first_light.pack", description=__doc__)
    parser.add_argument("--python", default="3.12", help="that of the machine with the GPU (default: 3.12)")
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or "9.0"
    parser.add_argument("--architectures", default=wanted, help="its GPU's (default: TORCH_CUDA_ARCH_LIST, else 9.0)")
    options = parser.parse_args()
    architectures = re.split(r"[;,\s]+", options.architectures.strip())
    try:
        for architecture in architectures:
            cmake_architecture(architecture)
    except ValueError as error:
        parser.error(str(error))
    for name in ("lib", "wheels"):
        shutil.rmtree(CARRY / name, ignore_errors=True)
        (CARRY / name).mkdir(parents=True)
    (CARRY / "earlier").mkdir(exist_ok=True)
    python = find_python(options.python)
    if python is None:
        print(f"_host is left out: there is no python{options.python} with its headers here")
    build(architectures, python, CARRY / "lib")
    download(options.python, CARRY / "wheels")
    about = {
        "commit": commit(),
        "sources": carried.sources(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "architectures": architectures,
        "cmake_architectures": " ".join(map(cmake_architecture, architectures)),
        "python": options.python,
        "libraries": sorted(path.name for path in (CARRY / "lib").iterdir()),
        "wheels": sorted(path.name for path in (CARRY / "wheels").iterdir()),
    }
    (CARRY / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))
    print(f"the sources and {CARRY.name}/ are {size() / 1e6:.1f} MB")
    return int(size() > MOST)


if __name__ == "__main__":
    sys.exit(main())
