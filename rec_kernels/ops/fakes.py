"""What fake (shape) kernels have in common."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def check_one_device(arguments: Iterable[object]) -> None:
    """Fake kernels also answer calls with a meta tensor among others, and would return memory that nobody has written.

    Raises:
        ValueError: tensors on different devices.
    """
    devices = {t.device for t in arguments if isinstance(t, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on the same device, got {sorted(map(str, devices))}")
