"""Errors that kernels on a GPU find: kernels cannot raise, so their op returns a ``status``."""

from __future__ import annotations

import torch
from torch import Tensor


def cannot_read(t: Tensor) -> bool:
    """True while the host cannot read a status of ``t``'s device: under compilation or CUDA graph capture."""
    return torch.compiler.is_compiling() or (t.is_cuda and torch.cuda.is_current_stream_capturing())
