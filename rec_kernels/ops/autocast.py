"""Registration of the ops' behaviour under torch.autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rec_kernels.ops.autograd import overload_of

_implementations = torch.library.Library("rec_kernels", "IMPL")
_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
_ALL_KEYS = torch._C.DispatchKeySet(_KEYS["cpu"]) | torch._C.DispatchKeySet(_KEYS["cuda"])


def register(op: str, prepare: Callable[[tuple, str], tuple]) -> None:
    """Registers an autocast kernel that calls ``rec_kernels::<op>`` with ``prepare(arguments, "cpu" or "cuda")``.

    The op itself runs without autocast; autograd records the casts of ``prepare``.
    """
    for device in _KEYS:
        _register(op, device, prepare)


def _register(op: str, device: str, prepare: Callable[[tuple, str], tuple]) -> None:
    overload = overload_of(op)

    def kernel(*inputs):
        with torch._C._ExcludeDispatchKeyGuard(_ALL_KEYS):
            return overload(*prepare(inputs, device))

    _implementations.impl(op, kernel, _KEYS[device].name)


def to_lower_precision(inputs: tuple, device: str) -> tuple:
    """Casts floating-point tensors on the device, except float64, to autocast's dtype, as torch.bmm does.

    torch.library.register_autocast supports only a dtype that is fixed at registration.
    """
    dtype = torch.get_autocast_dtype(device)

    def cast(given: object) -> object:
        if not isinstance(given, Tensor) or given.dtype == torch.float64:
            return given
        return given.to(dtype) if given.is_floating_point() and given.device.type == device else given

    return tuple(map(cast, inputs))
