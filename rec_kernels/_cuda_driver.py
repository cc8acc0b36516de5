"""Compares NVIDIA's driver with the CUDA version that the CUDA library was built by, before the library is loaded."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

#: Oldest driver that runs what each major version of CUDA builds.
_OLDEST = {12: 525, 13: 580}


def built_by(package: Path) -> tuple[int, int] | None:
    """Version of CUDA that built a package's CUDA library; None without that library."""
    path = package / "cuda_version.txt"  # CMakeLists.txt writes it
    return _pair(path.read_text()) if path.exists() else None


def installed() -> tuple[int, int] | None:
    """Newest version of CUDA that the driver of this machine supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def too_old(package: Path) -> str | None:
    """A sentence about a driver that is too old for a package's CUDA library; None where it is not, or not known."""
    library, driver = built_by(package), installed()
    if library is None or driver is None or driver[0] >= library[0]:
        return None
    needed = f"{library[0]} ({_OLDEST[library[0]]} or newer)" if library[0] in _OLDEST else str(library[0])
    return (
        f"the CUDA library of rec_kernels is of CUDA {text(library)} and needs a driver of CUDA {needed}, "
        f"but this machine's driver is of CUDA {text(driver)}: update the driver, "
        f"or install a wheel of rec_kernels for CUDA {driver[0]} (+cu{driver[0]}), "
        f"or build it with the nvcc of CUDA {driver[0]}"
    )


def text(version: tuple[int, int] | None) -> str | None:
    """ "13.0" of (13, 0)."""
    return None if version is None else f"{version[0]}.{version[1]}"


def _pair(written: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", written)[:2]
    return int(major), int(minor)
