"""Precision of the dense side of a model: of its MLPs, and of the interaction between them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

import rec_kernels as rk

#: Of the dense side, and of what the tables give it, by name.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Formats of activations; those of mx are of blocks of 16 columns of a row.
ACTIVATIONS = ("fp32", "mx9", "mx6", "mx4")


def dtype_of(precision: str) -> torch.dtype:
    """What is behind the name.

    Raises:
        ValueError: it is none of ``PRECISIONS``.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, allowed is {' or '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def dense_region(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """In which the dense side runs: that of torch.autocast; of "fp32", as without."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype_of(precision))


def quantize_inputs(modules: Iterable[nn.Module], format: str) -> None:
    """From now on the modules get every tensor as ``format`` holds it, by ``rk.fake_quantize`` to the nearest.

    Blocks are along a row, which a matrix product sums over. The gradient is that of the identity.

    Raises:
        ValueError: ``format`` is none of ``rk.ROW_FORMATS``.
    """
    rk.row_bytes(format, 1)  # raises now, not in the first step
    for module in modules:
        module.register_forward_pre_hook(functools.partial(_quantize, format))


def _quantize(format: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # A data set may have no dense columns; fake_quantize needs one.
    return tuple(rk.fake_quantize(x, format) if x.shape[-1] else x for x in inputs)
