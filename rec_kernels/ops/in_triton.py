"""Ops whose kernels for GPU tensors are in Triton, whether the compiled CUDA library is there or not."""

from __future__ import annotations

import importlib

import torch


def register(module: str, *ops: str) -> None:
    """Gives GPU tensors the functions of ``rec_kernels.triton.<module>`` that are called as the ops are."""
    for op in ops:
        _register(module, op)


def _register(module: str, op: str) -> None:
    def kernel(*inputs):
        # Imported here: it takes Triton, and seconds.
        return getattr(importlib.import_module(f"rec_kernels.triton.{module}"), op)(*inputs)

    torch.library.impl(f"rec_kernels::{op}", "CUDA")(kernel)
