"""Builds the native libraries with CMake and ninja; everything else is in pyproject.toml.

Environment: REC_KERNELS_CUDA=1 demands the CUDA library, 0 leaves it out; unset, it is built where nvcc is found and
the torch at hand is a CUDA build, because a torch for CPUs could not load it.
TORCH_CUDA_ARCH_LIST names the GPU architectures ("9.0", "8.0;9.0+PTX"). Unset, a wheel is for those below, and a build
in place for the machine's own GPUs, or 9.0 where there is none: each architecture takes minutes.
REC_KERNELS_PORTABLE=1 builds for a wheel that others install: stripped, for older C and C++ libraries (csrc/portable),
and with CUDA's major version in its own, 1.2+cu13, as torch has it. docs/install.md says why.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"
PORTABLE = os.environ.get("REC_KERNELS_PORTABLE", "0")
if PORTABLE not in ("0", "1"):
    sys.exit(f"REC_KERNELS_PORTABLE must be 0, 1 or unset, got {PORTABLE!r}")


def cuda_compiler() -> str | None:
    """The nvcc to use, or None for a CPU-only build."""
    wish = os.environ.get("REC_KERNELS_CUDA", "auto")
    if wish not in ("0", "1", "auto"):
        sys.exit(f"REC_KERNELS_CUDA must be 0, 1 or unset, got {wish!r}")
    if wish == "0" or (wish == "auto" and not torch_has_cuda()):
        return None
    nvcc = shutil.which("nvcc")
    if wish == "1" and nvcc is None:
        sys.exit("REC_KERNELS_CUDA=1 asks for the CUDA library, but nvcc is not on the PATH")
    return nvcc


def torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def cmake_architectures(text: str) -> list[str]:
    """ "8.0;9.0+PTX" -> ["80-real", "90-real", "90-virtual"]."""
    found = []
    for item in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", item)
        if match is None:
            sys.exit(f"TORCH_CUDA_ARCH_LIST: {item!r} is not an architecture such as 9.0 or 12.0+PTX")
        number = "".join(match.group(1, 2, 3))
        found += [f"{number}-real"] + ([f"{number}-virtual"] if match.group(4) else [])
    return found


def default_architectures(inplace: bool) -> str:
    """CUDA architectures to compile for: all supported ones in a wheel, this machine's own in place."""
    if not inplace:
        return DEFAULT_ARCHITECTURES
    import torch

    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found)) or "9.0"


def version() -> str:
    """Version of the package; a CUDA wheel's ends with "+cu" and CUDA's major version."""
    text = (ROOT / "rec_kernels" / "_version.py").read_text()
    label = ""
    if PORTABLE == "1" and (nvcc := cuda_compiler()):
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        label = "+cu" + re.search(r"release (\d+)\.", said).group(1)
    return re.search(r'"(.+)"', text).group(1) + label


class FreshBuild(build):
    """Empties the build folder first: files of an earlier build would enter the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """One CMake build for all libraries, written beside the Python files."""

    def run(self) -> None:
        import torch

        output = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "rec_kernels"
        # One folder per torch and compiler choice: a cache made for another one would be reused silently.
        nvcc = cuda_compiler()
        kind = ("cuda" if nvcc else "cpu") + ("-portable" if PORTABLE == "1" else "")
        build = ROOT / "build" / f"{kind}-torch{torch.__version__}"
        options = [f"-DREC_KERNELS_TORCH={torch.__path__[0]}", f"-DREC_KERNELS_OUTPUT={output}"]
        options += [f"-DREC_KERNELS_PYTHON={sys.executable}", f"-DREC_KERNELS_PORTABLE={PORTABLE}"]
        if ninja := shutil.which("ninja"):
            # The cache names that of an earlier build, whose virtual environment may be gone.
            options.append(f"-DCMAKE_MAKE_PROGRAM={ninja}")
        output.mkdir(parents=True, exist_ok=True)
        architectures = []
        if nvcc:
            wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_architectures(self.inplace)
            architectures = cmake_architectures(wanted)
            options += ["-DREC_KERNELS_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
            options += [f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}"]
        else:
            (output / "librec_kernels_cuda.so").unlink(missing_ok=True)
        subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", build, *options], check=True)
        subprocess.run(["cmake", "--build", build], check=True)
        (output / "cuda_architectures.txt").write_text(" ".join(architectures) + "\n")


setup(
    version=version(),
    ext_modules=[Extension("rec_kernels._native", sources=[])],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild},
)
