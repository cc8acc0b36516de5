"""Fallbacks for GPUs without the compiled CUDA library: embedding_bag and expand in Triton, jagged_permute in torch.

``rec_kernels.ops.in_triton`` imports this package when one of its ops is called; it needs Triton 3.6 to 3.9
(``rec_kernels._triton_versions``). rec_kernels.triton.embedding_bag lists the guarantees.
"""

# ruff: noqa: E402 (with a Triton that is too old, the kernels' own imports may fail in other words)
from __future__ import annotations

import triton

from rec_kernels import _triton_versions

_triton_versions.check(triton.__version__)

from rec_kernels.triton.embedding_bag import (
    embedding_bag,
    embedding_bag_backward_dense,
    embedding_bag_backward_fused_,
    embedding_bag_backward_per_sample_weights,
    embedding_bag_backward_sparse,
    embedding_bag_fused,
    embedding_bag_tables,
)
from rec_kernels.triton.expand import expand, expand_backward
from rec_kernels.triton.jagged_permute import jagged_permute

__all__ = [
    "embedding_bag",
    "embedding_bag_backward_dense",
    "embedding_bag_backward_fused_",
    "embedding_bag_backward_per_sample_weights",
    "embedding_bag_backward_sparse",
    "embedding_bag_fused",
    "embedding_bag_tables",
    "expand",
    "expand_backward",
    "jagged_permute",
]
