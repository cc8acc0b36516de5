"""Functions that torch.compile runs outside of its graphs or only while it traces, and one that it would leave out.

Callers import this module lazily: the decorators load torch's compiler, which takes as long to import as torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.amp import GradScaler


@torch.compiler.disable(reason="prefetch() keeps its batch in a Python object")
def prepare_prefetched(prepare: Callable, *args: object) -> object:
    """``prepare(*args)``: work for a prefetched batch, such as finding its cache slots."""
    return prepare(*args)


@torch.compiler.disable(reason="tables on disk are read in Python, lookup by lookup")
def pin_file_rows(pin: Callable) -> object:
    """``pin()``: a context in which the rows of a file stay in memory."""
    return pin()


@torch.compiler.disable(reason="accumulate() collects gradients in a Python list")
def record_lookup(record: Callable, *args: object) -> object:
    """``record(*args)``: records a lookup whose backward contributes to an accumulated update."""
    return record(*args)


@torch.compiler.assume_constant_result
def warn_while_traced(warn: Callable, *args: object) -> bool:
    """``warn(*args)`` while a lookup is traced; compiled code never calls it."""
    warn(*args)
    return True


@torch._dynamo.dont_skip_tracing
def scale_while_traced(scaler: GradScaler, one: Tensor) -> Tensor:
    """``scaler.scale(one)`` inside the graph; torch keeps all of torch.amp out of graphs by default."""
    return scaler.scale(one)
