"""Page-locked host memory, mapped into GPUs, for tables that kernels access in place."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ops = torch.ops.rec_kernels

_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
# Address -> memory of a `host_zeros` tensor. torch's pinned allocator would round sizes up to a power of two.
_memory: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
# Address of pinned memory -> the GPUs that access it.
_gpus: dict[int, set[int]] = {}


def host_zeros(size: int, dtype: torch.dtype) -> Tensor:
    """A tensor [size] of zeros in host memory, on huge pages if supported; ``pin`` can pin it in place."""
    like = torch.empty(0, dtype=dtype, device="cpu")
    if type(like) is not Tensor or size == 0:  # tensors of a tracer have no memory
        return like.new_zeros(size)
    num_bytes = size * dtype.itemsize
    memory = np.empty(_whole_pages(num_bytes) + mmap.PAGESIZE, dtype=np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    flat = torch.from_numpy(memory[first : first + num_bytes]).view(dtype)
    _ops._advise_huge_pages(flat)  # before the first touch, which is what allocates the pages
    _memory[flat.data_ptr()] = memory
    return flat.zero_()


def pin(flat: Tensor, device: torch.device) -> Tensor:
    """Pin a tensor for kernels of a GPU: in place if it comes from ``host_zeros``, else in a copy.

    Raises:
        RuntimeError: the system cannot lock this much memory.
    """
    if type(flat) is not Tensor or flat.numel() == 0:
        return flat
    gpu = torch.cuda.current_device() if device.index is None else device.index
    if flat.is_pinned():
        _gpus.get(flat.data_ptr(), set()).add(gpu)  # several GPUs may have used it
        return flat
    if flat.data_ptr() not in _memory:
        flat = host_zeros(flat.numel(), flat.dtype).copy_(flat)
    address, num_bytes, runtime = flat.data_ptr(), flat.nbytes, torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, _whole_pages(num_bytes), _PORTABLE_AND_MAPPED))
    if error:
        # Clear the runtime's last error: otherwise torch would raise it at the next kernel launch.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        raise RuntimeError(f"{num_bytes} bytes of tables in host memory cannot be page-locked: CUDA error {error}")
    _gpus[address] = {gpu}
    weakref.finalize(_memory[address], _unpin, runtime, address).atexit = False
    return flat


def _unpin(runtime: Any, address: int) -> None:
    for gpu in _gpus.pop(address):
        torch.cuda.synchronize(gpu)  # launched kernels may still access it
    runtime.cudaHostUnregister(address)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def pin_instead_of_moving(weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wraps ``fn`` of ``torch.nn.Module._apply``: if it moves tensors to a GPU, pin ``weights`` instead."""
    device = fn(torch.empty(0, dtype=torch.uint8, device=weights.device)).device
    if device.type != "cuda":
        return fn

    def moved(t: Tensor) -> Tensor:
        if t is not weights:
            return fn(t)
        return pin(host_zeros(t.numel(), t.dtype) if t.is_meta else t, device)

    return moved
