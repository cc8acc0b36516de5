"""Functions that torch.compile leaves out of its graphs. torch's compiler is imported on use: its import is slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@torch.compiler.disable(
    reason="rk.table_layout checks lists of numbers in Python: make layouts outside of compiled code"
)
def make_layout(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls ``make`` with these arguments."""
    return make(*args, **kwargs)
