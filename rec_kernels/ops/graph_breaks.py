"""Functions that torch.compile leaves out of its graphs, or has as one node. It is imported on use, which is slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from rec_kernels.ops.embedding_bag_autograd import look_up_with_updates

P = ParamSpec("P")
T = TypeVar("T")


@torch.compiler.disable(
    reason="rk.table_layout checks lists of numbers in Python: make layouts outside of compiled code"
)
def make_layout(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls ``make`` with these arguments."""
    return make(*args, **kwargs)


@torch.compiler.disable(reason="version counters are read when the backward runs")
def check_in_python(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls ``check`` with these arguments."""
    check(*args, **kwargs)


@torch._dynamo.allow_in_graph
def look_up_and_update(updates: Sequence[dict[str, Any]], args: tuple, kwargs: dict[str, Any]) -> Any:
    """``look_up_with_updates``, whose Python runs when the node is traced into ops, and those of its backward."""
    return look_up_with_updates(updates, args, kwargs)
