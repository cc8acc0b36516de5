"""Asks whether the GPU still answers this process; a plugin of pytest may do so before torch is imported."""

from __future__ import annotations

import sys

#: The exit status of a process whose CUDA context is broken.
BROKEN = 86


def context_works() -> bool:
    """False after an illegal access on the GPU, which makes every later CUDA call of the process fail."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
