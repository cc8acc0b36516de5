"""The machines that runs compute on: speeds of different ones do not compare."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy
import sklearn
import torch

from rec_kernels._version import __version__
from rec_kernels.dlrm import devices


def cpu_model() -> str:
    """What the processor calls itself."""
    model, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)


def versions() -> dict[str, str]:
    """Python's, and those of the packages that make a run's numbers, as the modules have them: a checkout whose
    libraries are built in place is no installed distribution."""
    packages = {"rec_kernels": __version__, "torch": torch.__version__, "numpy": numpy.__version__}
    return {"python": platform.python_version()} | packages | {"scikit-learn": sklearn.__version__}


def here(device: torch.device) -> dict:
    """This machine: "cpu", "threads" and "gpu", which is None on a CPU."""
    return {"cpu": cpu_model(), "threads": torch.get_num_threads(), "gpu": devices.gpu_name(device)}
