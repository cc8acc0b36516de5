"""Functions that torch.compile runs outside of its graphs, as one node, or only while it traces.

Callers import this module lazily: the decorators load torch's compiler, which takes as long to import as torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from rec_kernels.ops.embedding_bag_autograd import look_up_with_updates


def _outside_graphs(reason: str) -> Callable[..., Any]:
    """A function that calls its first argument with the others, outside of graphs; torch's messages have the reason."""

    @torch.compiler.disable(reason=reason)
    def run(call: Callable, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run


make_layout = _outside_graphs(
    "rk.table_layout checks lists of numbers in Python: make layouts outside of compiled code"
)
check_version = _outside_graphs("version counters are read when the backward runs")
prepare_prefetched = _outside_graphs("prefetch() keeps its batch in a Python object")
pin_file_rows = _outside_graphs("tables on disk are read in Python, lookup by lookup")
record_lookup = _outside_graphs("accumulate() collects gradients in a Python list")


@torch._dynamo.allow_in_graph
def look_up_and_update(updates: Sequence[dict[str, Any]], args: tuple, kwargs: dict[str, Any]) -> Any:
    """``look_up_with_updates`` as one node; its Python runs when AOT autograd traces the forward and backward."""
    return look_up_with_updates(updates, args, kwargs)


@torch.compiler.assume_constant_result
def warn_while_traced(warn: Callable, *args: object) -> bool:
    """``warn(*args)`` while a lookup is traced; compiled code never calls it."""
    warn(*args)
    return True


@torch._dynamo.dont_skip_tracing
def scale_while_traced(scaler: GradScaler, one: Tensor) -> Tensor:
    """``scaler.scale(one)`` inside the graph; torch keeps all of torch.amp out of graphs by default."""
    return scaler.scale(one)
