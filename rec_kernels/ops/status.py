"""Reading the ``status`` in which GPU kernels, which cannot raise, report errors."""

from __future__ import annotations

import torch
from torch import Tensor


def cannot_read(t: Tensor) -> bool:
    """True if the host cannot read a status on ``t``'s device: during compilation or CUDA graph capture."""
    return torch.compiler.is_compiling() or (t.is_cuda and torch.cuda.is_current_stream_capturing())
