"""Supported Triton versions, and detection of the installed one without importing Triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import warnings

#: The oldest and the newest minor version with which every kernel has been compiled: those of torch 2.10 and 2.15.
OLDEST, NEWEST = (3, 6), (3, 9)
SUPPORTED = "Triton 3.6 to 3.9"


class UnsupportedTritonError(ImportError):
    """The installed Triton version is not supported."""


def installed() -> str | None:
    """Version of the installed Triton; "unknown" if it has no package metadata, None if it is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    # Read the package metadata: importing Triton takes seconds. Builds for other GPUs have other package names.
    names = importlib.metadata.packages_distributions().get("triton", [])
    return importlib.metadata.version(names[0]) if names else "unknown"


def is_too_old(version: str) -> bool:
    """True if the version is known to be older than the oldest supported one."""
    numbers = _minor(version)
    return numbers is not None and numbers < OLDEST


def check(version: str) -> None:
    """Checks the installed Triton when ``rec_kernels.triton`` is imported; a version without numbers passes.

    Emits a RuntimeWarning if the version is newer than the newest supported one.

    Raises:
        UnsupportedTritonError: the version is too old, or TRITON_INTERPRET=1 is set and its interpreter does not work
            with the installed NumPy.
    """
    numbers, numpy = _minor(version), _minor(importlib.metadata.version("numpy"))
    if is_too_old(version):
        raise UnsupportedTritonError(
            f"the Triton kernels of rec_kernels need {SUPPORTED}, found Triton {version}: install the version "
            "that your torch requires (torch 2.10 and 2.11: triton==3.6.0), or build the CUDA library "
            "(docs/install.md), which needs no Triton"
        )
    if numbers is not None and numbers > NEWEST:
        warnings.warn(
            f"the Triton kernels of rec_kernels were tested with {SUPPORTED}, found Triton {version}: they may fail to "
            "compile, or violate docs/numerics.md; install a tested version if they do",
            RuntimeWarning,
            stacklevel=3,
        )
    if os.environ.get("TRITON_INTERPRET") == "1" and numbers == (3, 6) and numpy is not None and numpy >= (2, 4):
        raise UnsupportedTritonError(
            f"the interpreter of Triton {version} (TRITON_INTERPRET=1) fails with NumPy 2.4 and newer, found NumPy "
            f"{importlib.metadata.version('numpy')}: install numpy<2.4, or Triton 3.7 or newer"
        )


def _minor(version: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None
