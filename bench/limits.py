"""Measured limits: bare C++ loops that gather, read, write and multiply rows, compiled for this machine."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.shapes import Shape, Workload

#: Row widths that the loops support (bench/limit_rows.h).
DIMS = (16, 32, 64, 128, 256)
SOURCES = ("gather_limit.cpp", "step_limit.cpp", "block_limit.cpp")


@functools.cache
def limits() -> Limits:
    """The bare loops, compiled on first use."""
    return Limits()


class Limits:
    """Bare loops over the same memory: `gather` for lookups, `update` for distinct rows, `step` for a training step."""

    def __init__(self) -> None:
        sources = [str(Path(__file__).with_name(name)) for name in SOURCES]
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "limits.so"
            flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
            subprocess.run([os.environ.get("CXX", "c++"), *flags, *sources, "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))
        self._omp = ctypes.CDLL("libgomp.so.1")
        self._omp.omp_set_num_threads(torch.get_num_threads())

    def gather(self, weights: Tensor, rows: Tensor, bag: int, dim: int, out: Tensor) -> None:
        """Writes out [T, B, dim], sums of `bag` rows each; rows [T * B * bag] int64 are rows of the flat weights."""
        pointers = (ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()))
        if not self._library.gather_sum(*pointers, ctypes.c_int64(bag), ctypes.c_int64(dim), *_columns(out)):
            raise ValueError(f"dim = {dim} must be one of {DIMS}")

    def update(self, weights: Tensor, rows: Tensor, dim: int) -> None:
        """Adds a constant to every element of the given (unique, sorted) rows."""
        pointers = (ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()))
        sizes = (ctypes.c_int64(rows.numel()), ctypes.c_int64(dim))
        self._library.update_rows(*pointers, *sizes, ctypes.c_float(1e-6))

    def step(self, sizes: tuple[int, int, int], rates: tuple[float, float], *tensors: Tensor) -> None:
        """Updates tables with row-wise Adagrad, as ``StepLimit`` says: tables, batch, dim; lr, eps; and its tensors."""
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        numbers = map(ctypes.c_int64, sizes), map(ctypes.c_float, rates)
        if not self._library.step_rowwise_adagrad(*pointers[:5], *numbers[0], *pointers[5:], *numbers[1]):
            raise ValueError(f"dim = {sizes[2]} must be one of {DIMS}")

    def step_products(self, sizes: Tensor, rates: tuple[float, float], *tensors: Tensor | None) -> None:
        """Looks up and updates tables of quotients and remainders, as ``ProductLimit`` says, with its tensors."""
        pointers = [ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in (*tensors, sizes)]
        if not self._library.step_quotient_remainder(*pointers, *map(ctypes.c_float, rates)):
            raise ValueError(f"dim = {sizes[3]} must be one of {DIMS}")

    def touch(self, weights: Tensor, rows: Tensor, bag: int, dim: int, out: Tensor) -> None:
        """Reads a word of every cache line of the rows; weights uint8 [N, row bytes], out [T, B, dim] float32."""
        pointers = (ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()))
        sizes = (bag, weights.shape[1], dim)
        self._library.touch_rows(*pointers, *map(ctypes.c_int64, sizes), *_columns(out))

    def move_blocks(self, files: tuple[int, int], memory: np.ndarray, *numbers: np.ndarray | int) -> None:
        """Reads and writes blocks of files as bench/block_limit.cpp says: reads, writes and frames int64; first."""
        *places, first = numbers
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (memory, *places)]
        sizes = map(ctypes.c_int64, (len(places[0]), len(places[1]), first))
        if not self._library.move_blocks(*files, *pointers, *sizes):
            raise OSError("a block could not be read or written")

    def rewrite(self, weights: Tensor, rows: Tensor) -> None:
        """Reads and writes a byte of every cache line of the given (unique, sorted) rows of uint8 [N, row bytes]."""
        pointers = (ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()))
        self._library.rewrite_rows(*pointers, ctypes.c_int64(rows.numel()), ctypes.c_int64(weights.shape[1]))

    def multiply_add(self, count: int) -> None:
        """Runs ``count`` multiply-adds on registers."""
        self._library.multiply_add(ctypes.c_int64(count))


def _columns(out: Tensor) -> tuple[ctypes.c_void_p, ctypes.Array]:
    """The address of out [T, B, dim], whose last dimension is contiguous, and sizes as gather_limit.cpp has them."""
    return ctypes.c_void_p(out.data_ptr()), (ctypes.c_int64 * 4)(*out.shape[:2], *out.stride()[:2])


class StepLimit:
    """The backward and update of a step with row-wise Adagrad as a bare loop: sort, sum the gradients, update.

    Args:
        shape: the workload. weights: float32, its tables one after the other. state: float32, a number for each row.
    """

    def __init__(self, shape: Shape, weights: Tensor, state: Tensor, lr: float, eps: float) -> None:
        self._tables, self._sizes, self._rates = (weights, state), (shape.tables, shape.batch, shape.dim), (lr, eps)
        self._first_rows = torch.tensor([0, *itertools.accumulate(shape.table_rows)])
        self._bags = torch.tensor(shape.table_bags)
        self._buffers = torch.empty(2 * shape.num_ids, dtype=torch.int64)

    def __call__(self, ids: Tensor, grad: Tensor) -> None:
        """Makes one step with ids [N], key-major, and the gradient [B, T * D] of their sums."""
        tensors = *self._tables, ids, self._first_rows, self._bags, grad, self._buffers
        limits().step(self._sizes, self._rates, *tensors)


class ProductLimit:
    """Lookup and step of multiplied quotients and remainders as a bare loop: both rows of each id, every gradient once.

    Args:
        shape: the workload.
        collisions: ids that share a row of a table's first part, [E / collisions, D]; rows of its second part.
        weights: float32, both parts of each table, one table after the other. state: float32, a number for each row.
    """

    def __init__(self, shape: Workload, collisions: int, weights: Tensor, state: Tensor, lr: float, eps: float) -> None:
        self._tables, self._rates = (weights, state), (lr, eps)
        rows = -(-shape.rows // collisions)
        self._sizes = torch.tensor([shape.tables, shape.batch, shape.bag, shape.dim, rows, collisions])
        self._out = torch.empty(shape.batch, shape.tables * shape.dim)
        self._buffers = torch.empty(2 * shape.num_ids, dtype=torch.int64)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the lookup [B, T * D] of ids [N], key-major."""
        return self.train(ids, None)

    def train(self, ids: Tensor, grad: Tensor | None) -> Tensor:
        """Runs the lookup and one step with its gradient."""
        limits().step_products(self._sizes, self._rates, *self._tables, ids, grad, self._out, self._buffers)
        return self._out
