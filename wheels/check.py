"""Says what a wheel holds and needs, and exits with 1 unless that is what docs/install.md promises.

    python wheels/check.py dist/*.whl

Needs binutils' objdump and nm, which come with a compiler.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The newest versions of symbols that a machine of manylinux_2_28 has, as torch's own wheels assume it.
FLOORS = {"GLIBC": "2.28", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}
#: Megabytes: of the wheel for the CPU, and of those with a CUDA library, by their label. Kernels that every driver of
#: CUDA 12 can read are compressed to more than twice as many bytes (CMakeLists.txt); no such wheel has been built yet.
LIMITS = {"": 3, "+cu12": 45, "+cu": 20}
#: Libraries that may be needed at load time: the system's, torch's, and the package's own.
SYSTEM = r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux.*"
TORCH = r"libtorch(_cpu)?\.so"
CPU = "rec_kernels/librec_kernels_cpu.so"
#: Wheels with a version such as 1.2+cu13 have these beside the rest.
CUDA = {"rec_kernels/librec_kernels_cuda.so", "rec_kernels/cuda_version.txt"}


def python_files() -> set[str]:
    """The package's modules and the mark that they are typed, as names inside a wheel."""
    files = (path for path in (ROOT / "rec_kernels").rglob("*") if path.suffix == ".py" or path.name == "py.typed")
    return {str(path.relative_to(ROOT)) for path in files}


def wrong_names(wheel: str, names: Iterable[str]) -> list[str]:
    """Lists files that a wheel lacks or must not have.

    Args:
        wheel: its file name. names: of the files in it.
    """
    _, version, python, *_ = wheel.split("-")
    files = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    expected = python_files() | {CPU, "rec_kernels/cuda_architectures.txt"} | (CUDA if "+cu" in version else set())
    pattern = rf"rec_kernels/_host\.{python.replace('cp', 'cpython-')}-.*\.so"
    host = {name for name in files if re.fullmatch(pattern, name)}
    wrong = [f"{name} is missing" for name in sorted(expected - files)]
    wrong += [f"{name} does not belong there" for name in sorted(files - expected - host)]
    return wrong + ([] if len(host) == 1 else [f"one rec_kernels/_host for {python} is expected, found {sorted(host)}"])


def newest_versions(text: str) -> dict[str, str]:
    """Newest version that a library needs by prefix (GLIBC, GLIBCXX, CXXABI, GCC), from the output of ``objdump
    -p``."""
    found: dict[str, str] = {}
    for prefix, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_(\d[\d.]*)\b", text):
        found[prefix] = max(found.get(prefix, "0"), version, key=_number)
    return found


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def wrong_needs(text: str) -> list[str]:
    """Lists what a library needs beyond the floors and the allowed libraries, from the output of ``objdump -p``."""
    wrong = [
        f"needs {prefix}_{version}, newer than {FLOORS[prefix]}"
        for prefix, version in newest_versions(text).items()
        if _number(version) > _number(FLOORS[prefix])
    ]
    needed = re.findall(r"NEEDED +(\S+)", text)
    allowed = rf"{SYSTEM}|{TORCH}|{Path(CPU).name}"
    return wrong + [f"needs {name}" for name in needed if not re.fullmatch(allowed, name)]


def check_library(path: Path) -> list[str]:
    """Prints what a library needs; returns what is wrong with it."""
    text = subprocess.run(["objdump", "-p", path], capture_output=True, text=True, check=True).stdout
    versions = " ".join(f"{prefix}_{version}" for prefix, version in sorted(newest_versions(text).items()))
    print(f"  {path.name}: {path.stat().st_size / 1e6:.2f} MB, {versions}")
    symbols = subprocess.run(["nm", path], capture_output=True, text=True).stdout
    return wrong_needs(text) + (["is not stripped"] if symbols else [])


def limit_of(wheel: str) -> int:
    """The megabytes that a wheel of this name may have."""
    return LIMITS[max((label for label in LIMITS if label in wheel), key=len)]


def check(wheel: Path) -> list[str]:
    """Prints what a wheel needs; returns what is wrong with it."""
    size, limit = wheel.stat().st_size / 1e6, limit_of(wheel.name)
    print(f"{wheel.name}: {size:.2f} MB")
    wrong = [f"{size:.2f} MB are more than {limit}"] if size > limit else []
    if "manylinux_2_28" not in wheel.name:
        wrong.append("is not tagged manylinux_2_28")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        wrong += wrong_names(wheel.name, archive.namelist())
        for name in archive.namelist():
            if name.endswith(".so"):
                wrong += [f"{name} {what}" for what in check_library(Path(archive.extract(name, folder)))]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    wrong = [f"{wheel.name}: {what}" for wheel in parser.parse_args().wheels for what in check(wheel)]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
