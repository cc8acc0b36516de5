"""The measured limits: bare C++ loops that gather rows, read and write them, and multiply, built for this machine."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor


@functools.cache
def limits() -> Limits:
    """The bare loops, compiled when first asked for."""
    return Limits()


class Limits:
    """Bare loops over the same memory: `gather` for the forward, `update` for the row update."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("gather_limit.cpp")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "limits.so"
            flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
            subprocess.run([os.environ.get("CXX", "c++"), *flags, str(source), "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))
        self._omp = ctypes.CDLL("libgomp.so.1")
        self._omp.omp_set_num_threads(torch.get_num_threads())

    def gather(self, weights: Tensor, rows: Tensor, bag: int, dim: int, out: Tensor) -> None:
        """out [n / bag, dim] = sums of `bag` rows each; rows [n] int64 are row numbers of the flat weights."""
        pointers = (ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()))
        sizes = (ctypes.c_int64(rows.numel() // bag), ctypes.c_int64(bag), ctypes.c_int64(dim))
        if not self._library.gather_sum(*pointers, *sizes, ctypes.c_void_p(out.data_ptr())):
            raise ValueError(f"dim = {dim} must be 16, 64 or 128")

    def update(self, weights: Tensor, rows: Tensor, dim: int) -> None:
        """Adds a number to every element of the given (unique, sorted) rows."""
        pointers = (ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()))
        sizes = (ctypes.c_int64(rows.numel()), ctypes.c_int64(dim))
        self._library.update_rows(*pointers, *sizes, ctypes.c_float(1e-6))

    def touch(self, weights: Tensor, rows: Tensor, bag: int, dim: int, out: Tensor) -> None:
        """Reads a word of every cache line of the rows; weights uint8 [N, row bytes], out [n / bag, dim] float32."""
        pointers = (ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()))
        sizes = (rows.numel() // bag, bag, weights.shape[1], dim)
        self._library.touch_rows(*pointers, *map(ctypes.c_int64, sizes), ctypes.c_void_p(out.data_ptr()))

    def rewrite(self, weights: Tensor, rows: Tensor) -> None:
        """Reads and writes a byte of every cache line of the given (unique, sorted) rows of uint8 [N, row bytes]."""
        pointers = (ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()))
        self._library.rewrite_rows(*pointers, ctypes.c_int64(rows.numel()), ctypes.c_int64(weights.shape[1]))

    def multiply_add(self, count: int) -> None:
        """``count`` multiplications, each with an addition, of numbers in registers."""
        self._library.multiply_add(ctypes.c_int64(count))
