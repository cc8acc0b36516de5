"""Argument checks of both collections, and attributes that cannot be set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import nn

from rec_kernels.nn.arguments import check_choice
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.parameters import Tables, refuse_replacing
from rec_kernels.nn.tables.row_cache import RowCache
from rec_kernels.nn.training.fused_update import FusedUpdate
from rec_kernels.ops.row_formats import FLOAT_DTYPES
from rec_kernels.ops.tracing import is_exporting


class CollectionOptions(TypedDict, total=False):
    """Options of tables that all tables of a module share: arguments of ``rk.EmbeddingBagCollection``, and a format."""

    optimizer: Optimizer | None
    format: str
    cache: RowCache | None
    output_dtype: torch.dtype
    bounds_check: str
    rounding: str
    seed: int


def check_names(function: str, options: Mapping[str, object], kind: type) -> None:
    """Raises TypeError, as Python does, for an option of a function that is no key of the TypedDict ``kind``."""
    if unknown := sorted(set(options) - set(kind.__annotations__)):
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}")


#: Attributes that cannot be set, and how to change them.
_SETTERS = {
    "lr": "set param_groups[0]['lr'] of the collection's fused_optimizer, which writes it where kernels read it",
    "step": "write the tensor that it is, with step.fill_()",
    **dict.fromkeys(("optimizer", "rounding", "output_dtype", "seed"), "it is fixed when the collection is made"),
}


def refuse_setting(collection: nn.Module, holder: str, name: str, value: object) -> None:
    """Raises an error for an assignment to an attribute that kernels read, to a fixed option, or to the tables.

    Args:
        holder: name of the module that holds the tables.

    Raises:
        AttributeError or RuntimeError: the attribute cannot be set.
    """
    own = collection.__dict__
    exists = name in own or name in own.get("_buffers", ())
    if name in _SETTERS and exists and not (name == "step" and value is collection.step):  # step += 1 is fine
        raise AttributeError(f"{name} cannot be set to {value!r}: {_SETTERS[name]}")
    refuse_replacing(collection, name, value, holder)


def is_traced(tables: Tables, update: FusedUpdate | None) -> bool:
    """True inside ``torch.compile`` or ``torch.export``.

    Args:
        tables: the collection's tables. update: its fused optimizer, which trains rows of every format.

    Raises:
        RuntimeError: trainable tables are exported. Rows and their parameters share memory here, but would be two
            tensors in a program, which would train neither.
    """
    if not torch.compiler.is_compiling():
        return False
    if is_exporting() and torch.is_grad_enabled():
        grad_flags: list[Any] = update.dense.grad_flags if update is not None else []
        if any(t.requires_grad for t in (*tables.parameters(), *grad_flags)):
            raise RuntimeError(
                "a program of torch.export cannot train tables: export the collection's for_serving(), or "
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
    """Raises ValueError for an invalid argument of ``rk.EmbeddingBagCollection``."""
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
            f"cache must be None, or an rk.RowCache in a collection with a fused optimizer, got {cache!r} and "
            f"optimizer {optimizer!r}"
        )
