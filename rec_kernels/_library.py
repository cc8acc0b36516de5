"""Find and load the compiled libraries, with a one-sentence error if that fails."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import platform
import re
import warnings
from pathlib import Path
from types import ModuleType

import torch

from rec_kernels import _cuda_driver, _triton_versions
from rec_kernels._version import __version__

_FOLDER = Path(__file__).resolve().parent
_CPU_LIBRARY = "librec_kernels_cpu.so"
_CUDA_LIBRARY = "librec_kernels_cuda.so"
_OLDEST_TORCH = (2, 10)
#: First torch version that turns most C++ exceptions into RuntimeErrors.
RUNTIME_ERRORS_SINCE = (2, 15)

# Registration of the Triton kernels; it lasts as long as this object.
_triton: torch.library.Library | None = None
#: Why the CUDA library is not in use; None if it is in use.
cuda_unavailable: str | None = None


def torch_version() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def _load_cpu() -> None:
    if torch_version() < _OLDEST_TORCH:
        raise ImportError(f"rec_kernels needs torch >= 2.10 (its stable ABI), found torch {torch.__version__}")
    path = _FOLDER / _CPU_LIBRARY
    if not path.exists():
        raise ImportError(
            f"{path} does not exist: rec_kernels is not built; "
            "run `pip install --no-build-isolation .` (or `make build`)"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded into torch {torch.__version__}: {_loader_error(error)}") from error
    if torch_version() >= RUNTIME_ERRORS_SINCE:
        with contextlib.suppress(ImportError):  # without _host, they remain RuntimeErrors
            keep_value_errors(path)


def changed_source(package: Path) -> Path | None:
    """The newest C++ file of the checkout if it is newer than the last build of ``package``; None for a wheel."""
    checkout = package.parent
    if not (checkout / "CMakeLists.txt").exists():
        return None
    files = [path for path in (checkout / "csrc").rglob("*.*") if "emulator" not in path.parts]
    built = [*package.glob("*.so"), *package.glob("cuda_architectures.txt")]
    if not files or not built:
        return None
    newest, last_built = (max(paths, key=lambda path: path.stat().st_mtime) for paths in (files, built))
    return newest if newest.stat().st_mtime > last_built.stat().st_mtime else None


def _warn_if_stale() -> None:
    with contextlib.suppress(OSError):  # a file may disappear meanwhile
        if changed := changed_source(_FOLDER):
            warnings.warn(
                f"{changed} has changed since rec_kernels was built, so this build is out of date: run `make build` "
                "(or `pip install --no-build-isolation -e .`) to compile the changes",
                RuntimeWarning,
                stacklevel=2,
            )


def keep_value_errors(path: str | Path) -> None:
    """Makes invalid arguments of a library's ops raise ValueError in torch 2.15 as well (see csrc/core/errors.cpp).

    Raises:
        ImportError: ``_host``, which provides the exception, is missing.
    """
    ctypes.CDLL(str(path)).rec_kernels_throw_value_errors_by(ctypes.c_void_p(host().value_error_thrower()))


def _load_cuda() -> str | None:
    """Loads the CUDA library if it can run; otherwise returns the reason."""
    path = _FOLDER / _CUDA_LIBRARY
    if not path.exists():
        return "this build of rec_kernels has no CUDA library (built without nvcc, or with REC_KERNELS_CUDA=0)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if reason := _cuda_driver.too_old(_FOLDER):
        # The library would fail at its first kernel; without it, Triton serves GPU tensors.
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
        return reason
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} cannot be loaded into torch {torch.__version__}: {_loader_error(error)}"
    return None


def _loader_error(error: OSError) -> BaseException:
    """The system loader's error: since 2.10, torch's own message names only the file."""
    return error.__cause__ or error


def use_triton() -> None:
    """Registers the Triton kernels for GPU tensors if Triton is installed and the CUDA library is not in use."""
    global _triton
    if cuda_unavailable is None or not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    # Imported here to avoid a cycle: the package's __init__ imports the ops after this module.
    from rec_kernels.ops.in_triton import register_stand_ins

    _triton = torch.library.Library("rec_kernels", "IMPL")
    register_stand_ins(_triton, "CUDA")


def host() -> ModuleType:
    """Imports ``rec_kernels._host``, the extension module with the stateful host objects.

    Raises:
        ImportError: this installation was built without it, or for another Python version.
    """
    try:
        return importlib.import_module("rec_kernels._host")
    except ImportError as error:
        raise ImportError(
            "rec_kernels._host cannot be loaded: it is built only on Linux with the Python headers "
            f"(Debian: apt install python3-dev) and pybind11; then run `make build` ({error})"
        ) from error


def _host_library() -> str | None:
    built = (_FOLDER / f"_host{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((str(path) for path in built if path.exists()), None)


_warn_if_stale()
_load_cpu()
cuda_unavailable = _load_cuda()


def build_info() -> dict[str, object]:
    """Describes the installed libraries and which of them are in use.

    Returns a dict: ``version`` of rec_kernels, ``torch`` and ``python`` versions, ``machine`` (architecture),
    ``cpu_library`` path, ``cpu_isa`` in use ("baseline", "v3" = AVX2, "v4" = AVX-512), ``cuda_library`` path or None,
    ``cuda_unavailable`` (why the CUDA library is not in use, or None), ``cuda_architectures`` compiled in,
    ``cuda_version`` that built the CUDA library and ``cuda_driver_version`` that the driver supports ("13.0", or None),
    ``host_library`` path (of ``_host``, for tables in files) or None,
    ``triton`` (version, or None if it is not installed), ``triton_in_use`` (whether GPU tensors use the Triton kernels
    instead of the CUDA library; also False if Triton is too old for them).
    """
    triton = _triton_versions.installed()
    cuda = _FOLDER / _CUDA_LIBRARY
    architectures = _FOLDER / "cuda_architectures.txt"
    return {
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_library": str(_FOLDER / _CPU_LIBRARY),
        "cpu_isa": torch.ops.rec_kernels._get_cpu_isa(),
        "cuda_library": str(cuda) if cuda.exists() else None,
        "cuda_unavailable": cuda_unavailable,
        "cuda_architectures": architectures.read_text().split() if architectures.exists() else [],
        "cuda_version": _cuda_driver.text(_cuda_driver.built_by(_FOLDER)),
        "cuda_driver_version": _cuda_driver.text(_cuda_driver.installed()),
        "host_library": _host_library(),
        "triton": triton,
        "triton_in_use": _triton is not None and not _triton_versions.is_too_old(triton or "unknown"),
    }
