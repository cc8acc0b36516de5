"""Device and machine of a run, CPU or GPU: speeds of different machines do not compare."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import numpy
import sklearn
import torch

import rec_kernels as rk
from rec_kernels._version import __version__
from rec_kernels.dlrm.data import Batch


class DeviceError(RuntimeError):
    """The device cannot be used; the message says why."""


def find(name: str) -> torch.device:
    """The device of "cpu" or "cuda", for "cuda" the current GPU of torch.

    Raises:
        DeviceError: torch finds no GPU, or there are no kernels for it.
    """
    if name == "cpu":
        return torch.device("cpu")
    where = f"device is {name!r}, but"
    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda or torch.version.hip else "is built for the CPU only"
        raise DeviceError(f"{where} torch {torch.__version__} {built}: choose device cpu")
    about = rk.build_info()
    if about["cuda_unavailable"] is not None and not about["triton_in_use"]:
        raise DeviceError(
            f"{where} rec_kernels has no kernels for a GPU: {about['cuda_unavailable']}; "
            "nor is Triton there, 3.6 or newer"
        )
    return torch.device(name, torch.cuda.current_device())


def gpu_name(device: torch.device) -> str | None:
    """Name of the GPU; None for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def moved(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on a device.

    A GPU gets them from page-locked memory, so that nobody waits for the copy: it is on the GPU's default stream, as
    are the steps that use it, whichever thread asks for the next batch.
    """
    if device.type == "cpu":
        return batches
    return (batch.pin_memory().to(device, non_blocking=True) for batch in batches)


def cpu_model() -> str:
    """Name of the processor."""
    model, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)


def versions() -> dict[str, str]:
    """Python's, and those of the packages that make a run's numbers, as the modules have them: a checkout whose
    libraries are built in place is no installed distribution."""
    packages = {"rec_kernels": __version__, "torch": torch.__version__, "numpy": numpy.__version__}
    return {"python": platform.python_version()} | packages | {"scikit-learn": sklearn.__version__}


def here(device: torch.device, processes: int = 1) -> dict:
    """This machine: "cpu", "threads" of a process, "gpu", which is None on a CPU, and "processes" where several are."""
    several = {"processes": processes} if processes > 1 else {}
    return {"cpu": cpu_model(), "threads": torch.get_num_threads(), "gpu": gpu_name(device)} | several
