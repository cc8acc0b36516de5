"""Detection of ``torch.export`` for code that behaves differently there."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """True in ``torch.export``, strict or not, and False in ``torch.compile`` and eager code.

    ``torch.compiler.is_exporting()`` is the constant True in all code that the Dynamo of torch 2.10 or 2.11 traces,
    also for ``torch.compile``. The flag behind it is right in every version, and guarded by Dynamo.
    """
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag
