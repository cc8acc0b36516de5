"""The ops of embedding_bag and expand in Triton, jagged_permute in torch: for GPUs without the compiled CUDA library.

``import rec_kernels`` imports this package only where it is needed; it needs Triton. What is promised is said in
rec_kernels.triton.embedding_bag. Tests use Triton 3.8.
"""

from __future__ import annotations

import torch

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

_OPS = (
    embedding_bag,
    embedding_bag_backward_dense,
    embedding_bag_backward_fused_,
    embedding_bag_backward_per_sample_weights,
    embedding_bag_backward_sparse,
    embedding_bag_fused,
    embedding_bag_tables,
    expand,
    expand_backward,
    jagged_permute,
)

__all__ = ["register", *(op.__name__ for op in _OPS)]


def register(library: torch.library.Library, key: str) -> None:
    """Makes the functions of this package the kernels of a dispatch key.

    Args:
        library: of kind "IMPL" or "FRAGMENT", of a namespace with the ops' schemas. The registration ends with it.
        key: a dispatch key such as "CUDA" (AMD GPUs have that one, too).
    """
    for op in _OPS:
        for overload, function in getattr(op, "all", {"": op}).items():
            library.impl(f"{op.__name__}.{overload}" if overload else op.__name__, function, key)
