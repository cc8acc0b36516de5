"""Shared parts of the fake (shape) kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rec_kernels.ops.autograd import arguments_of


def register_fake(op: str, fake: Callable[[dict[str, Any]], Any]) -> None:
    """Registers ``fake`` as the fake kernel of ``rec_kernels::<op>``; it takes a dict of the arguments given."""

    @torch.library.register_fake(f"rec_kernels::{op}")
    def _(*inputs, **given):
        return fake(arguments_of(op, inputs, given))


def check_one_device(arguments: Iterable[object]) -> None:
    """Checks that all tensors, also in lists, are on one device; calls with one meta tensor reach fake kernels, too.

    Raises:
        ValueError: tensors on different devices.
    """
    tensors = (t for given in arguments for t in (given if isinstance(given, list | tuple) else (given,)))
    devices = {t.device for t in tensors if isinstance(t, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on the same device, got {sorted(map(str, devices))}")


def check_devices(arguments: Mapping[str, object]) -> None:
    """Checks that an op's tensors share a device; ``weights`` may be in host memory while the others are on a GPU.

    Raises:
        ValueError: tensors on other devices.
    """
    weights, others = arguments["weights"], [value for name, value in arguments.items() if name != "weights"]
    in_host = isinstance(weights, Tensor) and weights.device.type == "cpu"
    beside_gpu = in_host and any(isinstance(t, Tensor) and t.is_cuda for t in others)
    check_one_device(others if beside_gpu else arguments.values())


def check_rank(name: str, t: Tensor, *ranks: int) -> None:
    """Raises the kernels' ValueError for a tensor with another number of dimensions."""
    if t.dim() not in ranks:
        allowed = f"{ranks[0]} dimension(s)" if len(ranks) == 1 else f"{' or '.join(map(str, ranks))} dimensions"
        raise ValueError(f"{name} must have {allowed}, got shape {list(t.shape)}")


def check_shape(name: str, t: Tensor, shape: Sequence[int | torch.SymInt]) -> None:
    """Raises the kernels' ValueError for a tensor of another shape with the same number of dimensions."""
    for found, wanted in zip(t.shape, shape, strict=True):
        check_size(found, wanted, f"{name} must have shape {list(shape)}, got {list(t.shape)}")


def check_size(found: int | torch.SymInt, wanted: int | torch.SymInt, message: str) -> None:
    """Raises ValueError(message) if sizes differ; a data-dependent one is left to the kernel to check."""
    torch._check_value(found == wanted, lambda: message)


def dynamic_size() -> torch.SymInt:
    """A size that depends on data."""
    return torch.library.get_ctx().new_dynamic_size()
