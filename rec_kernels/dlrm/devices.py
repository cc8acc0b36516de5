"""Where a run computes: on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import rec_kernels as rk
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
    """What the GPU calls itself; None for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def moved(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on a device.

    A GPU gets them from page-locked memory, so that nobody waits for the copy: it is on the GPU's default stream, as
    are the steps that use it, whichever thread asks for the next batch.
    """
    if device.type == "cpu":
        return batches
    return (batch.pin_memory().to(device, non_blocking=True) for batch in batches)
