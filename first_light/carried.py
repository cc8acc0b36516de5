"""Reads what `make carry` packed: the libraries, and the packages that the machine lacks."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from first_light import CARRY, ROOT

PACKAGE = ROOT / "rec_kernels"


def about(carry: Path = CARRY) -> dict[str, object]:
    """Contents of about.json ("commit", "architectures", ...); empty where nothing is packed."""
    file = carry / "about.json"
    return json.loads(file.read_text()) if file.exists() else {}


def commit() -> str | None:
    """Commit of the sources, from git or from the pack; None where neither has it."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return about().get("commit")
    return done.stdout.strip() if done.returncode == 0 else about().get("commit")


def sources(root: Path = ROOT) -> str:
    """A digest of what the libraries are built from."""
    found = hashlib.sha256()
    for path in sorted([root / "CMakeLists.txt", *(root / "csrc").rglob("*.*")]):
        if path.is_file() and "emulator" not in path.parts:
            found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def add_packages(folder: Path, carry: Path = CARRY) -> list[str]:
    """Unpacks the wheels of packages that this Python lacks into ``folder``; returns what they are called."""
    added = []
    for wheel in sorted((carry / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            modules = {name.split("/")[0].removesuffix(".py") for name in packed.namelist()}
            modules = {name for name in modules if name.isidentifier() and not name.startswith("_")}
            if all(importlib.util.find_spec(name) is None for name in modules):
                packed.extractall(folder)
                added.append(wheel.name.split("-")[0])
    return added


def capability() -> str | None:
    """The first GPU's compute capability, as "9.0": from the driver, or from torch, which takes seconds; or None."""
    torch = "import torch; print('%d.%d' % torch.cuda.get_device_capability())"
    asked = (["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], [sys.executable, "-c", torch])
    for command in asked:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if found := re.match(r"\d+\.\d+$", done.stdout, re.MULTILINE):
                return found[0]
    return None


def place_libraries(wanted: str | None, carry: Path = CARRY, package: Path = PACKAGE) -> str:
    """Copies the packed libraries into the package, if they are for this GPU and nothing newer was built here.

    Args:
        wanted: the GPU's compute capability.

    Returns:
        A sentence that says what was done.
    """
    packed, architectures = sorted((carry / "lib").glob("*.so")), about(carry).get("architectures", [])
    if not packed:
        return "no libraries are packed"
    if about(carry).get("sources") != sources():
        return "the packed libraries are of other sources than these"
    if wanted not in architectures:
        return f"the packed libraries are for {', '.join(architectures)}, and this GPU is {wanted}"
    built = [file.stat().st_mtime for file in package.glob("librec_kernels_*.so")]
    if len(built) == 2 and min(built) > (carry / "about.json").stat().st_mtime:
        return "the libraries in place are newer than those that are packed"
    for file in packed:
        # The copy is as new as now: the package warns of libraries that are older than their sources.
        shutil.copyfile(file, package / file.name)
    if (version := carry / "lib" / "cuda_version.txt").exists():
        shutil.copyfile(version, package / version.name)
    (package / "cuda_architectures.txt").write_text(about(carry)["cmake_architectures"] + "\n")
    return f"{', '.join(file.name for file in packed)} are those that were packed"


def have_cuda_library(package: Path = PACKAGE) -> bool:
    """True if the package has both libraries of ops, packed or built here."""
    return all((package / f"librec_kernels_{kind}.so").exists() for kind in ("cpu", "cuda"))
