"""Tables in host memory that kernels of a GPU read and write where they lie: page-locked, and mapped for the GPU."""

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
# Memory of the tensors of `host_zeros`, by address. torch's own page-locked memory is as large as a power of two.
_memory: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
# The GPUs whose kernels read and write what is pinned there, by address.
_gpus: dict[int, set[int]] = {}


def host_zeros(size: int, dtype: torch.dtype) -> Tensor:
    """[size] zeros in host memory, on huge pages where the system offers them, which ``pinned`` pins in place."""
    like = torch.empty(0, dtype=dtype, device="cpu")
    if type(like) is not Tensor or size == 0:  # a tracer's have no memory
        return like.new_zeros(size)
    num_bytes = size * dtype.itemsize
    memory = np.empty(_whole_pages(num_bytes) + mmap.PAGESIZE, dtype=np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    flat = torch.from_numpy(memory[first : first + num_bytes]).view(dtype)
    _ops._advise_huge_pages(flat)  # before the first touch, which is what allocates the pages
    _memory[flat.data_ptr()] = memory
    return flat.zero_()


def pinned(flat: Tensor, device: torch.device) -> Tensor:
    """The tensor in page-locked memory, for kernels of a GPU: where it is if ``host_zeros`` made it, else a copy.

    Raises:
        RuntimeError: the system does not let so much memory be locked.
    """
    if type(flat) is not Tensor or flat.numel() == 0:
        return flat
    gpu = torch.cuda.current_device() if device.index is None else device.index
    if flat.is_pinned():
        _gpus.get(flat.data_ptr(), set()).add(gpu)  # several GPUs may be at work on it, one after the other
        return flat
    if flat.data_ptr() not in _memory:
        flat = host_zeros(flat.numel(), flat.dtype).copy_(flat)
    address, num_bytes, runtime = flat.data_ptr(), flat.nbytes, torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, _whole_pages(num_bytes), _PORTABLE_AND_MAPPED))
    if error:
        # It stays the last error of torch's runtime, which takes it for the next kernel's: this one's.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        raise RuntimeError(f"{num_bytes} bytes of tables in host memory cannot be page-locked: CUDA error {error}")
    _gpus[address] = {gpu}
    weakref.finalize(_memory[address], _unpin, runtime, address).atexit = False
    return flat


def _unpin(runtime: Any, address: int) -> None:
    for gpu in _gpus.pop(address):
        torch.cuda.synchronize(gpu)  # kernels that have been launched may still read and write there
    runtime.cudaHostUnregister(address)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def staying(weights: Tensor, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of ``torch.nn.Module._apply``, except that ``weights`` are pinned where ``fn`` moves tensors to a GPU."""
    device = fn(torch.empty(0, dtype=torch.uint8, device=weights.device)).device
    if device.type != "cuda":
        return fn

    def moved(t: Tensor) -> Tensor:
        if t is not weights:
            return fn(t)
        return pinned(host_zeros(t.numel(), t.dtype) if t.is_meta else t, device)

    return moved
