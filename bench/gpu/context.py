"""Checks whether the GPU context still works, for pytest plugins that run before torch is imported."""

from __future__ import annotations

import sys

#: Exit status of a process with a broken CUDA context.
BROKEN = 86


def context_works() -> bool:
    """Returns False after an illegal access on the GPU, after which every CUDA call of the process fails."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
