"""What a kernel on a GPU found wrong: no kernel there can raise, so its op returns a ``status``."""

from __future__ import annotations

import torch
from torch import Tensor


def cannot_read(t: Tensor) -> bool:
    """Whether nothing on the host can see a status of ``t``'s device now: it is compiled, or captured in a graph."""
    return torch.compiler.is_compiling() or (t.is_cuda and torch.cuda.is_current_stream_capturing())
