"""The Triton kernels of dot_interaction, factorization_machine and grouped_projection: repeats, errors, registration.

test_<op>_triton.py test each op's results; triton_device.py describes how the file is run.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from backends import PASSED
from product_checks import check_empty, check_refused, check_repeats, on_device
from test_products import CASES, each_call, every_op
from triton_device import DEVICE, INTERPRETED

from rec_kernels.testing import same_bits

MODULES = {name: importlib.import_module(f"rec_kernels.triton.{name}") for name in CASES}


@every_op
def test_again(name: str) -> None:
    """A second call has equal bits, and arguments are unchanged."""
    cases = CASES[name]
    check_repeats(on_device(cases.make_call(*cases.REPEATED), DEVICE), MODULES[name])


@pytest.mark.parametrize(("name", "made"), each_call["EMPTY"], ids=str)
def test_empty(name: str, made: tuple) -> None:
    """Empty results, and zero gradients."""
    check_empty(on_device(CASES[name].make_call(*made), DEVICE), MODULES[name])
    PASSED["triton"] += 3


@pytest.mark.parametrize(("name", "bad"), each_call["BAD_CALLS"])
def test_bad_arguments(name: str, bad: tuple[str, str]) -> None:
    """Errors are those of the CPU's op."""
    op, message = bad
    check_refused(getattr(MODULES[name], op), CASES[name].bad_arguments(op, message)[1], message, DEVICE)


@every_op
def test_registered(name: str) -> None:
    """GPU tensors reach these kernels."""
    cases = CASES[name]
    for op in {op for op, _ in cases.BAD_CALLS}:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"rec_kernels::{op}", "CUDA")
    if not INTERPRETED:
        call = on_device(cases.make_call(*cases.REPEATED), DEVICE)
        assert all(map(same_bits, call.each(torch.ops.rec_kernels), call.each(MODULES[name])))


def test_three_passes() -> None:
    """A product of split factors is off by at most 2^-21: tile_precision's arithmetic, on float32's integer bits."""

    def cut(t: torch.Tensor, add: int) -> torch.Tensor:
        return ((t.view(torch.int32) + add) & ~0x1FFF).view(torch.float32)

    generator = torch.Generator().manual_seed(1)
    a, b = (1 + torch.rand(2, 1_000_000, generator=generator)).unbind()
    # The hardest factors: all bits below TF32's are set.
    a[0] = b[0] = 1 + 0xFFF * 2.0**-23
    big_a, big_b = cut(a, 0x1000), cut(b, 0x1000)
    rest_a, rest_b = cut(a - big_a, 0).double(), cut(b - big_b, 0).double()
    found = rest_a * big_b + big_a * rest_b + big_a.double() * big_b
    right = a.double() * b
    error = ((found - right).abs() / right).max().item()
    assert 2.0**-22 < error <= 2.0**-21
