"""Checks of calls of dot_interaction, factorization_machine and grouped_projection.

A ``Call`` of <op>_cases.py has two differentiable tensors, the gradient of the result, and the other arguments.
"""

from __future__ import annotations

import re

import pytest
import torch
from backends import cpu_backends
from torch import Tensor

from rec_kernels import testing

UNITS = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def each_by_torch(call: object) -> tuple[Tensor, Tensor, Tensor]:
    """The result and both gradients by torch's autograd, in float64."""
    given = [t.detach().double().requires_grad_() for t in call[:2]]
    out = call.by_torch(*given)
    return out.detach(), *torch.autograd.grad(out, given, call.grad.double(), materialize_grads=True)


def magnitudes(call: object) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the absolute values of each element's terms, in float64."""
    return each_by_torch(call.map(torch.abs))


def check_bits(call: object, reference: object) -> None:
    """Compares all ops of a call with the reference bit for bit, on every instruction set and number of threads."""
    expected = call.each(reference)
    for backend in cpu_backends():
        for found, right in zip(call.each(backend.ops), expected, strict=True):
            assert testing.same_bits(found, right), backend.name


def check_sums(found: tuple[Tensor, ...], call: object) -> None:
    """The result and both gradients differ from float64 by at most the rounding of their sums."""
    compared = zip(found, each_by_torch(call), magnitudes(call), call.most_terms(), strict=True)
    for mine, right, magnitude, terms in compared:
        testing.assert_same_sum(mine, right, magnitude, terms + 1)


def check_tiles(found: tuple[Tensor, ...], call: object, precision: str = "ieee") -> None:
    """The result and both gradients, summed by tiles, differ from float64 by at most the bound of docs/numerics.md.

    Args:
        found: result and gradients, on the CPU.
        call: the call; ``bound()`` returns the number of additions beyond ``most_terms()``, and the relative error of a
            term whose factors are cut to TF32.
        precision: the op's argument.
    """
    more_terms, cut = call.bound(precision)
    compared = zip(found, each_by_torch(call), magnitudes(call), call.most_terms(), strict=True)
    for mine, right, magnitude, terms in compared:
        assert mine.shape == right.shape
        assert mine.dtype == call.grad.dtype
        assert mine.is_contiguous()
        allowed = ((terms + more_terms) * 2.0**-22 + cut) * magnitude
        allowed += UNITS[mine.dtype] * (right.abs() + allowed) + (2.0**-25 if mine.dtype == torch.float16 else 0.0)
        assert bool(((mine.double() - right).abs() <= allowed).all())


def check_refused(op: object, arguments: tuple, message: str, device: str = "cpu") -> None:
    """Asserts that an op raises exactly this message for the arguments."""
    there = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        op(*there)


def check_empty(call: object, ops: object) -> None:
    """A call without samples, vectors or groups has an empty result and zero gradients."""
    out, *grads = call.each(ops)
    assert out.shape == call.grad.shape
    assert out.numel() == 0
    for grad, given in zip(grads, call[:2], strict=True):
        assert testing.same_bits(grad, torch.zeros_like(given))


def on_device(call: object, device: str) -> object:
    """The call with its tensors on a device."""
    return call.map(lambda t: t.to(device))


def check_repeats(call: object, ops: object) -> None:
    """A second call has equal bits, and arguments are unchanged."""
    before = [t.clone() for t in call[:3]]
    assert all(map(testing.same_bits, call.each(ops), call.each(ops)))
    assert all(map(testing.same_bits, call[:3], before))
