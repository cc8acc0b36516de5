"""The template op beside plain torch."""

from __future__ import annotations

import pytest
import torch

import rec_kernels as rk

SIZES = [(4096, 16), (65_536, 128)]


def _run(benchmark, function, device: str, rounds: int) -> None:
    def synchronised():
        function()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(synchronised, rounds=rounds, warmup_rounds=3)


@pytest.mark.parametrize("name", ["ours", "torch"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_forward(benchmark, request: pytest.FixtureRequest, size: tuple[int, int], name: str, rounds: int) -> None:
    """Bytes: the rows read and written, and the factors."""
    device = request.config.getoption("--device")
    x, scale = torch.randn(size, device=device), torch.randn(size[0], device=device)
    benchmark.group = f"scale_rows {size[0]}x{size[1]} {device}"
    benchmark.extra_info["bytes"] = 8 * x.numel() + 4 * scale.numel()
    _run(
        benchmark, (lambda: rk.scale_rows(x, scale)) if name == "ours" else (lambda: x * scale[:, None]), device, rounds
    )


@pytest.mark.parametrize("name", ["ours", "torch"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_backward(benchmark, request: pytest.FixtureRequest, size: tuple[int, int], name: str, rounds: int) -> None:
    """Bytes: the gradient and x read (the gradient twice), grad_x written."""
    device = request.config.getoption("--device")
    x = torch.randn(size, device=device, requires_grad=True)
    scale = torch.randn(size[0], device=device, requires_grad=True)
    y = rk.scale_rows(x, scale) if name == "ours" else x * scale[:, None]
    grad = torch.randn_like(y)
    benchmark.group = f"scale_rows backward {size[0]}x{size[1]} {device}"
    benchmark.extra_info["bytes"] = 16 * x.numel() + 8 * scale.numel()
    _run(benchmark, lambda: torch.autograd.grad(y, (x, scale), grad, retain_graph=True), device, rounds)
