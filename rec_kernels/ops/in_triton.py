"""Which ops have kernels for GPU tensors in Triton. Triton is imported by the first call of one: that takes seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

#: The ops whose Triton kernels stand in for the compiled CUDA library, by their module of rec_kernels.triton.
STAND_INS = {
    "embedding_bag": (
        "embedding_bag",
        "embedding_bag_backward_dense",
        "embedding_bag_backward_fused_",
        "embedding_bag_backward_per_sample_weights",
        "embedding_bag_backward_sparse",
        "embedding_bag_fused",
        "embedding_bag_tables",
    ),
    "expand": ("expand", "expand_backward"),
    "jagged_permute": ("jagged_permute",),
}


def register(module: str, *ops: str) -> None:
    """Gives GPU tensors the functions of ``rec_kernels.triton.<module>`` that are called as the ops are.

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
        return getattr(importlib.import_module(f"rec_kernels.triton.{module}"), op)(*inputs, **options)

    return kernel
