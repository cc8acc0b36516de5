"""Gradients that have no gradients of their own, and say so.

``torch.autograd.function.once_differentiable`` says so only where the gradient that comes in is differentiable, too,
and silently leaves out the derivative in the forward's inputs where it is not: of a sum, say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rec_kernels.ops.forward_mode import register_autograd

#: Ops whose derivative is refused.
REFUSED: set[str] = set()


def refuse_second(op: str) -> None:
    """Has the second derivative through ``rec_kernels::<op>``, a backward op, raise RuntimeError."""

    def backward(ctx, *_) -> NoReturn:
        _refuse(op)

    register_autograd(op, backward)
    REFUSED.add(op)


def differentiable_once(op: str, backward: Callable) -> Callable:
    """``backward`` of ``rec_kernels::<op>``, whose results raise RuntimeError where they are differentiated.

    For backward ops that cannot afford an autograd of their own. ``ctx.depends`` says whether results depend on inputs
    of the forward that require gradients.
    """

    @functools.wraps(backward)
    def refusing(ctx, *grads) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        depends = ctx.depends or any(isinstance(grad, Tensor) and grad.requires_grad for grad in grads)
        if not torch.is_grad_enabled() or not depends:
            return results
        anchor = torch.empty(0, requires_grad=True)  # what makes the results require gradients
        return pytree.tree_map_only(Tensor, lambda result: _Refusal.apply(op, anchor, result), results)

    return refusing


class _Refusal(torch.autograd.Function):
    """A tensor as it is, whose derivative is refused."""

    @staticmethod
    def forward(ctx, op: str, _anchor: Tensor, result: Tensor) -> Tensor:
        ctx.op = op
        return result.detach()

    @staticmethod
    def backward(ctx, *_) -> NoReturn:
        _refuse(ctx.op)


def _refuse(op: str) -> NoReturn:
    raise RuntimeError(f"rec_kernels::{op} has no second derivative: its op is differentiable once")
