"""Ops with Triton kernels for GPU tensors. The first call of one imports Triton, which takes seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

#: The ops whose Triton kernels stand in for the compiled CUDA library, by their module of rec_kernels.triton.
STAND_INS = {
    "embedding_bag": (
        "embedding_bag.layout",
        "embedding_bag.table",
        "embedding_bag_backward_dense.layout",
        "embedding_bag_backward_dense.table",
        "embedding_bag_backward_fused_.layout",
        "embedding_bag_backward_per_sample_weights.layout",
        "embedding_bag_backward_per_sample_weights.table",
        "embedding_bag_backward_sparse.layout",
        "embedding_bag_backward_sparse.table",
        "embedding_bag_fused.layout",
        "embedding_bag_tables.layout",
    ),
    "expand": ("expand", "expand_backward"),
    "jagged_permute": ("jagged_permute",),
}


def register(module: str, *ops: str) -> None:
    """Registers the functions of ``rec_kernels.triton.<module>`` named like the ops as their CUDA kernels.

    For ops that have no kernels in the compiled CUDA library.
    """
    for op in ops:
        torch.library.impl(f"rec_kernels::{op}", "CUDA")(_kernel(module, op))


def register_stand_ins(library: torch.library.Library, key: str) -> None:
    """Makes the functions of ``STAND_INS`` the kernels of a dispatch key.

    Args:
        library: of kind "IMPL" or "FRAGMENT", of a namespace with the ops' schemas. The registration ends with it.
        key: a dispatch key such as "CUDA" (AMD GPUs have that one, too).
    """
    for module, ops in STAND_INS.items():
        for op in ops:
            library.impl(op, _kernel(module, op), key)


def _kernel(module: str, op: str) -> Callable[..., object]:
    def kernel(*inputs, **options):
        found: Any = importlib.import_module(f"rec_kernels.triton.{module}")
        for name in op.split("."):  # an op, and its overload
            found = getattr(found, name)
        return found(*inputs, **options)

    return kernel
