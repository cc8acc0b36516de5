"""Functions that torch.compile runs outside of its graphs, or as one node. Imported on use: the import is slow."""

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
    """``look_up_with_updates`` as one node; its Python runs when AOT autograd traces the forward and backward."""
    return look_up_with_updates(updates, args, kwargs)
