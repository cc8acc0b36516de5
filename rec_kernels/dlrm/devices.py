"""Device of a run, and a description of its machine: speeds of different machines are not comparable."""

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
    """The device cannot be used; the message has the reason."""


def find(name: str) -> torch.device:
    """The device "cpu", or torch's current GPU for "cuda"; DeviceError without a usable GPU or kernels for it."""
    if name == "cpu":
        return torch.device("cpu")
    where = f"device is {name!r}, but"
    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda or torch.version.hip else "is built for the CPU only"
        raise DeviceError(f"{where} torch {torch.__version__} {built}: choose device cpu")
    about = rk.build_info()
    if about["cuda_unavailable"] is not None and not about["triton_in_use"]:
        raise DeviceError(
            f"{where} rec_kernels has no kernels for a GPU: {about['cuda_unavailable']}; and Triton 3.6 or "
            "newer is not installed"
        )
    return torch.device(name, torch.cuda.current_device())


def gpu_name(device: torch.device) -> str | None:
    """The name of the GPU; None for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Copies batches to a device, to a GPU asynchronously from pinned memory.

    The copies are on the default stream in every thread, so the steps that use them are ordered after them.
    """
    if device.type == "cpu":
        return batches
    return (batch.pin_memory().to(device, non_blocking=True) for batch in batches)


def cpu_model() -> str:
    """The name of the processor."""
    model, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results, from the modules: a checkout has no distribution."""
    packages = {"rec_kernels": __version__, "torch": torch.__version__, "numpy": numpy.__version__}
    return {"python": platform.python_version()} | packages | {"scikit-learn": sklearn.__version__}


def machine(device: torch.device, processes: int = 1) -> dict:
    """This machine: "cpu", "threads" per process, "gpu" (None on a CPU), and "processes" if there are several."""
    record = {"cpu": cpu_model(), "threads": torch.get_num_threads(), "gpu": gpu_name(device)}
    return record | ({"processes": processes} if processes > 1 else {})
