"""Gradients that have no gradients of their own, and say so."""

from __future__ import annotations

from typing import NoReturn

import torch

#: Ops whose derivative is refused.
REFUSED: set[str] = set()


def refuse_second(op: str) -> None:
    """Has the second derivative through ``rec_kernels::<op>``, a backward op, raise RuntimeError.

    ``once_differentiable`` does so only where the gradient that comes in is differentiable, too, and leaves out the
    derivative in the forward's inputs silently where it is not: of a sum, say.
    """

    def backward(ctx, *_) -> NoReturn:
        raise RuntimeError(f"rec_kernels::{op} has no derivative: its op is differentiable once")

    torch.library.register_autograd(f"rec_kernels::{op}", backward)
    REFUSED.add(op)
