"""Detection of tracers and CUDA graph captures, for code that behaves differently there."""

from __future__ import annotations

import torch
from torch import Tensor


def cannot_read(t: Tensor) -> bool:
    """True if the host cannot read a tensor on ``t``'s device: during compilation or CUDA graph capture.

    GPU kernels, which cannot raise, report errors in a ``status`` that the host reads otherwise.
    """
    return torch.compiler.is_compiling() or (t.is_cuda and torch.cuda.is_current_stream_capturing())


def is_exporting() -> bool:
    """True in ``torch.export``, strict or not, and False in ``torch.compile`` and eager code.

    ``torch.compiler.is_exporting()`` is the constant True in all code that the Dynamo of torch 2.10 or 2.11 traces,
    also for ``torch.compile``. The flag behind it is right in every version, and guarded by Dynamo.
    """
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag
