"""Functions that torch.compile leaves out of its graphs, here or by itself.

Imported where it is called, not before: the decorators take torch's compiler, whose import lasts as long as torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.amp import GradScaler


@torch.compiler.disable(reason="prefetch() keeps its batch in a Python object")
def take_ahead(take: Callable, *args: object) -> object:
    """``take(*args)``: what is to be done for a batch that was announced, as finding its slots."""
    return take(*args)


@torch.compiler.disable(reason="tables on disk are read in Python, lookup by lookup")
def hold_file(hold: Callable) -> object:
    """``hold()``: a context in which rows of a file stay in memory."""
    return hold()


@torch.compiler.disable(reason="accumulate() collects gradients in a Python list")
def record_lookup(record: Callable, *args: object) -> object:
    """``record(*args)``: a lookup whose backward becomes part of an update."""
    return record(*args)


@torch.compiler.assume_constant_result
def warn_while_traced(warn: Callable, *args: object) -> bool:
    """``warn(*args)`` when a lookup is traced, and never when the graph runs."""
    warn(*args)
    return True


@torch._dynamo.dont_skip_tracing
def scale_while_traced(scaler: GradScaler, one: Tensor) -> Tensor:
    """``scaler.scale(one)`` as part of the graph: torch leaves all of torch.amp out of graphs."""
    return scaler.scale(one)
