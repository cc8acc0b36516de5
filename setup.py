"""Builds the native libraries with CMake and ninja; everything else is in pyproject.toml.

Environment: REC_KERNELS_CUDA=1 demands the CUDA library, 0 leaves it out; unset, it is built where nvcc is found and
the torch at hand is a CUDA build, because a torch for CPUs could not load it.
TORCH_CUDA_ARCH_LIST names the GPU architectures ("9.0", "8.0;9.0+PTX"). Unset, a wheel is for those below, and a build
in place for the machine's own GPUs, or 9.0 where there is none: each architecture takes minutes.
REC_KERNELS_PORTABLE=1 builds for a wheel that others install: stripped, for older C and C++ libraries (csrc/portable),
and with CUDA's major version in its own, 1.2+cu13, as torch has it. docs/install.md says why.
CUDA_HOME names the folder of the CUDA toolkit, where several are installed. CXX names the C++ compiler.

What is missing is told in one sentence before anything is built, and at the end what was built and what was left out.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"
FIRST_ARCHITECTURE = 8  # with instructions that the kernels have, as the largest number of a warp's
PORTABLE = os.environ.get("REC_KERNELS_PORTABLE", "0")
if PORTABLE not in ("0", "1"):
    sys.exit(f"REC_KERNELS_PORTABLE must be 0, 1 or unset, got {PORTABLE!r}")


def check_setuptools() -> None:
    """Ends where setuptools cannot read pyproject.toml, whose licence is an SPDX expression."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        sys.exit(
            f"setuptools {setuptools.__version__} is too old to build rec_kernels, which needs 77 or newer: "
            'run `pip install "setuptools>=77,<82"`, which suits every torch'
        )


def find_tool(name: str) -> str | None:
    """A program on the PATH, or among this Python's scripts: nobody need activate a virtual environment."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def check_tools() -> None:
    """Ends with one sentence for the first thing that a build needs and does not find."""
    torch = import_torch()
    if torch_version(torch) < (2, 10):
        sys.exit(f"torch {torch.__version__} is too old to build rec_kernels, which needs 2.10 or newer")
    for name, package in (("cmake", '"cmake>=3.20"'), ("ninja", "ninja")):
        if find_tool(name) is None:
            sys.exit(f"{name} is needed to build rec_kernels and is not on the PATH: run `pip install {package}`")
    wish = shlex.split(os.environ.get("CXX", ""))[:1]
    if not any(map(shutil.which, wish or ("c++", "g++", "clang++"))):
        found = f"CXX={wish[0]} does not exist" if wish else "neither c++, g++ nor clang++ is on the PATH"
        sys.exit(
            f"a C++ compiler is needed to build rec_kernels, and {found}: install GCC 11 or Clang 12, or newer "
            "(Debian and Ubuntu: apt install g++)"
        )
    cuda_compiler()


def import_torch() -> ModuleType:
    """The module of torch, against whose stable ABI everything is compiled."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            sys.exit(f"torch cannot be imported by {sys.executable}: {error}")
        sys.exit(
            f"torch is not installed for {sys.executable}, and is needed to build rec_kernels: run `pip install "
            '"torch>=2.10"`, or leave out --no-build-isolation: pip then downloads a torch for the build alone'
        )
    except (ImportError, OSError) as error:
        sys.exit(f"torch cannot be imported by {sys.executable}: {error}")
    return torch


def torch_version(torch: ModuleType) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def cuda_compiler() -> tuple[str | None, str]:
    """The nvcc to use, or None and the reason for a build without the CUDA library."""
    wish = os.environ.get("REC_KERNELS_CUDA", "auto")
    if wish not in ("0", "1", "auto"):
        sys.exit(f"REC_KERNELS_CUDA must be 0, 1 or unset, got {wish!r}")
    if wish == "0":
        return None, "REC_KERNELS_CUDA=0"
    torch = import_torch()
    if wish == "auto" and torch.version.cuda is None:
        return None, f"torch {torch.__version__} is a build without CUDA; REC_KERNELS_CUDA=1 demands it all the same"
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=Path(home) / "bin") if home else shutil.which("nvcc")
    missing = f"there is no bin/nvcc in CUDA_HOME={home}" if home else "nvcc is not on the PATH"
    if wish == "1" and nvcc is None:
        sys.exit(
            f"REC_KERNELS_CUDA=1 demands the CUDA library, but {missing}: install NVIDIA's CUDA toolkit, 12.8 or "
            "newer, and name its folder (CUDA_HOME=/usr/local/cuda), or build with REC_KERNELS_CUDA=0 for the CPU alone"
        )
    return nvcc, "" if nvcc else f"{missing}; CUDA_HOME names the folder of a CUDA toolkit"


def release(nvcc: str) -> str:
    """Version of CUDA that an nvcc is of, such as "13.0"."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    return found.group(1) if found else sys.exit(f"`{nvcc} --version` names no release of CUDA: {said!r}")


def host_missing() -> str:
    """The reason why _host, for tables in files, cannot be built; "" where it can."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not sys.platform.startswith("linux"):
        return "it is for Linux"
    if not header.exists():
        return f"{header} does not exist (Debian and Ubuntu: apt install python3-dev)"
    return "" if importlib.util.find_spec("pybind11") else "pybind11 is not installed (pip install pybind11)"


def cmake_architectures(text: str) -> list[str]:
    """ "8.0;9.0+PTX" -> ["80-real", "90-real", "90-virtual"]."""
    found = []
    for item in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", item)
        if match is None:
            sys.exit(f"TORCH_CUDA_ARCH_LIST: {item!r} is not an architecture such as 9.0 or 12.0+PTX")
        if int(match.group(1)) < FIRST_ARCHITECTURE:
            sys.exit(f"TORCH_CUDA_ARCH_LIST: {item!r} is older than {FIRST_ARCHITECTURE}.0, the first for the kernels")
        number = "".join(match.group(1, 2, 3))
        found += [f"{number}-real"] + ([f"{number}-virtual"] if match.group(4) else [])
    return found


def default_architectures(inplace: bool) -> str:
    """CUDA architectures to compile for: all supported ones in a wheel, this machine's own in place."""
    if not inplace:
        return DEFAULT_ARCHITECTURES
    torch = import_torch()
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found) if major >= FIRST_ARCHITECTURE) or "9.0"


def version() -> str:
    """Version of the package; a CUDA wheel's ends with "+cu" and CUDA's major version."""
    text = (ROOT / "rec_kernels" / "_version.py").read_text()
    label = ""
    if PORTABLE == "1" and (nvcc := cuda_compiler()[0]):
        label = "+cu" + release(nvcc).split(".")[0]
    return re.search(r'"(.+)"', text).group(1) + label


class FreshBuild(build):
    """Empties the build folder first: files of an earlier build would enter the wheel."""

    def run(self) -> None:
        check_tools()
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CheckedEditable(editable_wheel):
    """Looks for what is missing before setuptools prints pages about metadata."""

    def run(self) -> None:
        check_tools()
        super().run()


class CMakeBuild(build_ext):
    """One CMake build for all libraries, written beside the Python files."""

    def run(self) -> None:
        check_tools()
        torch, (nvcc, no_cuda), no_host = import_torch(), cuda_compiler(), host_missing()
        output = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "rec_kernels"
        # One folder per torch and compiler choice: a cache made for another one would be reused silently.
        kind = (f"cuda-{release(nvcc)}" if nvcc else "cpu") + ("-portable" if PORTABLE == "1" else "")
        build = ROOT / "build" / f"{kind}-torch{torch.__version__}"
        options = [f"-DREC_KERNELS_TORCH={torch.__path__[0]}", f"-DREC_KERNELS_OUTPUT={output}"]
        options += [f"-DREC_KERNELS_PYTHON={'' if no_host else sys.executable}", f"-DREC_KERNELS_PORTABLE={PORTABLE}"]
        # The cache names the ninja of an earlier build, whose virtual environment may be gone.
        options.append(f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}")
        for folder in (output, build):
            folder.mkdir(parents=True, exist_ok=True)
        architectures = []
        if nvcc:
            wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_architectures(self.inplace)
            architectures = cmake_architectures(wanted)
            options += ["-DREC_KERNELS_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
            options += [f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}"]
        left_out = [] if nvcc else ["librec_kernels_cuda.so", "cuda_version.txt"]
        left_out += ["_host" + sysconfig.get_config_var("EXT_SUFFIX")] if no_host else []
        for name in left_out:  # of an earlier build
            (output / name).unlink(missing_ok=True)
        run_cmake("-G", "Ninja", "-S", ROOT, "-B", build, *options)
        run_cmake("--build", build)
        (output / "cuda_architectures.txt").write_text(" ".join(architectures) + "\n")
        tell(
            f"rec_kernels is built with torch {torch.__version__} for Python {sysconfig.get_python_version()}",
            "CPU library: built",
            f"CUDA library: {f'built by {nvcc} for ' + ' '.join(architectures) if nvcc else 'left out: ' + no_cuda}",
            f"host library, for tables in files: {'left out: ' + no_host if no_host else 'built'}",
        )


def run_cmake(*arguments: object) -> None:
    """Runs CMake, and ends with one sentence where it fails: its own output says what the reason is."""
    code = subprocess.run([find_tool("cmake"), *map(str, arguments)]).returncode
    if code:
        sys.exit(f"rec_kernels is not built: `cmake {arguments[0]}` failed with status {code} for the reason above")


def tell(*lines: str) -> None:
    """Prints what was built, and leaves it in a file for make, as pip hides what builds print."""
    print(*lines, sep="\n  ")
    (ROOT / "build" / "built.txt").write_text("\n  ".join(lines) + "\n")


check_setuptools()
setup(
    version=version(),
    ext_modules=[Extension("rec_kernels._native", sources=[])],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild, "editable_wheel": CheckedEditable},
)
