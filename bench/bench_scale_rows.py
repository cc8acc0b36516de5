"""The template op beside plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import rec_kernels as rk

SIZES = [(4096, 16), (65_536, 128)]


def _run(benchmark, function: Callable[[], object], rounds: int) -> None:
    benchmark.pedantic(function, rounds=rounds, warmup_rounds=3)


@pytest.mark.parametrize("name", ["ours", "torch"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_forward(benchmark, size: tuple[int, int], name: str, rounds: int) -> None:
    """Bytes: the rows read and written, and the factors."""
    x, scale = torch.randn(size), torch.randn(size[0])
    benchmark.group = f"scale_rows {size[0]}x{size[1]}"
    benchmark.extra_info["bytes"] = 8 * x.numel() + 4 * scale.numel()
    _run(benchmark, (lambda: rk.scale_rows(x, scale)) if name == "ours" else (lambda: x * scale[:, None]), rounds)


@pytest.mark.parametrize("name", ["ours", "torch"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_backward(benchmark, size: tuple[int, int], name: str, rounds: int) -> None:
    """Bytes: the gradient and x read (the gradient twice), grad_x written."""
    x = torch.randn(size, requires_grad=True)
    scale = torch.randn(size[0], requires_grad=True)
    y = rk.scale_rows(x, scale) if name == "ours" else x * scale[:, None]
    grad = torch.randn_like(y)
    benchmark.group = f"scale_rows backward {size[0]}x{size[1]}"
    benchmark.extra_info["bytes"] = 16 * x.numel() + 8 * scale.numel()
    _run(benchmark, lambda: torch.autograd.grad(y, (x, scale), grad, retain_graph=True), rounds)
