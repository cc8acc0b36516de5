"""Autograd of ops that have no forward-mode derivative, and say so.

Below autograd, tangents are dropped: the derivative would be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_tangents(op: str, inputs: Iterable[object]) -> None:
    """Raises NotImplementedError if an argument of ``rec_kernels::<op>``, or a tensor in a list, has a tangent."""
    if forward_ad._current_level < 0:
        return
    for given in inputs:
        for t in given if isinstance(given, list | tuple) else (given,):
            if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError(
                    f"rec_kernels::{op} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad): "
                    "take it in reverse mode (torch.autograd)"
                )


class _Refusing(torch.library.Library):
    """What torch.library registers here refuses tangents first."""

    def impl(self, op_name: Any, fn: Callable, *arguments: Any, **options: Any) -> Any:
        def kernel(keyset: torch.DispatchKeySet, *inputs: Any) -> Any:
            refuse_tangents(op_name, inputs)
            return fn(keyset, *inputs)

        return super().impl(op_name, kernel, *arguments, **options)


_library = _Refusing("rec_kernels", "FRAGMENT")


def register_autograd(op: str, backward: Callable, *, setup_context: Callable | None = None) -> None:
    """``torch.library.register_autograd`` for ``rec_kernels::<op>``, which then refuses tangents.

    Without it, torch refuses them only where an argument requires a gradient, and not in ``torch.func.jvp``.
    """
    torch.library.register_autograd(f"rec_kernels::{op}", backward, setup_context=setup_context, lib=_library)
