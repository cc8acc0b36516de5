"""Shared parts of the Triton kernels on vectors of samples: checks with the CPU ops' messages, tile sizes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rec_kernels.triton.inputs import check

#: Vectors of a sample, and columns of a vector, at the most; programs of a launch.
MOST, MOST_PROGRAMS = 2**20, 2**31 - 1


def check_columns(t: Tensor, name: str) -> None:
    """Raises ValueError for vectors with too few or too many columns."""
    fits = 1 <= t.shape[-1] <= MOST
    check(fits, f"{name} must have 1 to {MOST} columns, got shape {list(t.shape)}")


def check_precision(precision: str) -> None:
    """Raises ValueError for an unknown precision."""
    check(precision in ("ieee", "tf32"), f'precision must be "ieee" or "tf32", got "{precision}"')


def by_sample(t: Tensor) -> Tensor:
    """Returns t with each sample contiguous; copies only where needed."""
    return t if t[:1].is_contiguous() else t.contiguous()


def tile_size(size: int, most: int) -> int:
    """Size of a tile: a power of two, at least the 16 that tl.dot requires."""
    return max(16, min(most, triton.next_power_of_2(size)))


def tile_precision(dtype: torch.dtype, precision: str) -> str:
    """``input_precision`` of tl.dot for tiles of a dtype: for "ieee" of float32, three TF32 passes on an NVIDIA GPU.

    A factor is split into its nearest TF32 value and the rest, of which TF32 keeps 11 significant bits; the product of
    the rests is dropped. The relative error of a product is at most 2^-21. Inf and NaN are as in float32's product,
    but a factor of 2^128 - 2^116 or more rounds to infinity and gives Inf or NaN.
    """
    if torch.version.hip:
        return "ieee"  # only NVIDIA's tensor cores have TF32
    return "tf32x3" if dtype == torch.float32 and precision == "ieee" else precision
