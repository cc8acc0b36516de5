"""The arguments that both kinds of collections take, what becomes of them, and what cannot be set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rec_kernels.nn.arguments import check_choice
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.parameters import Tables, refuse_replacing
from rec_kernels.nn.tables.row_cache import RowCache
from rec_kernels.nn.training.fused_update import FusedUpdate
from rec_kernels.ops.exporting import is_exporting
from rec_kernels.ops.row_formats import FLOAT_DTYPES


def read_only(name: str, count: int) -> Iterator[Any]:
    """Properties that read the items of a tuple: options that are given once, when a collection is made."""

    def of_item(item: int) -> Any:
        return property(lambda self: getattr(self, name)[item])

    return map(of_item, range(count))


#: Numbers that the kernels read, and how they are written.
_WAYS = {
    "lr": "set param_groups[0]['lr'] of the collection's fused_optimizer, which writes it where kernels read it",
    "step": "write the tensor that it is, with step.fill_()",
}


def refuse_setting(collection: nn.Module, holder: str, name: str, value: object) -> None:
    """Raises AttributeError or RuntimeError if an attribute that is set is read by kernels, or holds the tables.

    Args:
        holder: name of the module that has the tables.
    """
    held = collection.__dict__.get("_buffers", {})
    if name in _WAYS and name in held and (name == "lr" or value is not held[name]):  # step += 1 has written it
        raise AttributeError(f"{name} cannot be set to {value!r}: {_WAYS[name]}")
    refuse_replacing(collection, name, value, holder)


def is_traced(tables: Tables, update: FusedUpdate | None) -> bool:
    """True of a lookup inside ``torch.compile`` or ``torch.export``.

    Args:
        tables: what the collection holds. update: its fused optimizer, which trains rows of every format.

    Raises:
        RuntimeError: tables that train are exported. Rows and their parameters are one memory here and two in a
            program, which would train neither.
    """
    if not torch.compiler.is_compiling():
        return False
    if is_exporting() and torch.is_grad_enabled():
        wanted: list[Any] = update.dense.wanted if update is not None else []
        if any(given.requires_grad for given in (*tables.parameters(), *wanted)):
            raise RuntimeError(
                "tables cannot be trained by a program of torch.export: export the collection's for_serving(), or "
                "lookups under torch.no_grad()"
            )
    return True


def check_options(
    optimizer: Optimizer | None,
    output_dtype: torch.dtype,
    bounds_check: str,
    rounding: str,
    seed: int,
    cache: RowCache | None,
    is_weighted: bool | None,
) -> None:
    """Raises ValueError for an argument that is out of its range; they are ``rk.EmbeddingBagCollection``'s."""
    check_choice("bounds_check", bounds_check, ("error", "ignore", "none"))
    check_choice("rounding", rounding, ("stochastic", "nearest"))
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an int in [-2^63, 2^63), got {seed!r}")
    if is_weighted is not None and not isinstance(is_weighted, bool):
        raise ValueError(f"is_weighted must be True, False or None, got {is_weighted!r}")
    if output_dtype not in FLOAT_DTYPES.values():
        raise ValueError(f"output_dtype must be torch.float32, float16 or bfloat16, got {output_dtype}")
    if cache is not None and (not isinstance(cache, RowCache) or optimizer is None):
        raise ValueError(
            f"cache must be an rk.RowCache, and the collection have a fused optimizer, or None, got {cache!r} and "
            f"optimizer {optimizer!r}"
        )
