"""Check that the NVIDIA driver supports the CUDA version of the compiled library, before the library is loaded."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

#: Oldest driver branch that supports each major CUDA version.
_OLDEST = {12: 525, 13: 580}


def built_by(package: Path) -> tuple[int, int] | None:
    """CUDA version that the package's CUDA library was built with; None without that library."""
    path = package / "cuda_version.txt"  # written by CMakeLists.txt
    return _pair(path.read_text()) if path.exists() else None


def installed() -> tuple[int, int] | None:
    """Newest CUDA version that this machine's driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def too_old(package: Path) -> str | None:
    """Describes why the driver is too old for the package's CUDA library; None if it is recent enough or unknown."""
    library, driver = built_by(package), installed()
    if library is None or driver is None or driver[0] >= library[0]:
        return None
    needed = f"{library[0]} ({_OLDEST[library[0]]} or newer)" if library[0] in _OLDEST else str(library[0])
    return (
        f"the CUDA library of rec_kernels was built with CUDA {text(library)} and needs a driver for CUDA {needed}, "
        f"but this machine's driver supports CUDA {text(driver)}: update the driver, "
        f"or install a wheel of rec_kernels for CUDA {driver[0]} (+cu{driver[0]}), "
        f"or build it with nvcc {driver[0]}"
    )


def text(version: tuple[int, int] | None) -> str | None:
    """Formats a version pair: (13, 0) -> "13.0"."""
    return None if version is None else f"{version[0]}.{version[1]}"


def _pair(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
