"""LowRankCrossNet beside the formula as it is written, the same compiled, a backward by hand, and two limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

import rec_kernels as rk
from bench.cases import Case, dense_cases

VECTORS, LAYERS = 27, 3


def formula(x0: Tensor, *parameters: Tensor) -> Tensor:
    """Every W, every V, every bias."""
    x = x0
    for w, v, bias in zip(*(parameters[i : i + LAYERS] for i in range(0, 3 * LAYERS, LAYERS)), strict=True):
        x = x0 * (functional.linear(functional.linear(x, v), w) + bias) + x
    return x


class ByHand(torch.autograd.Function):
    """The fewest passes that torch's operations allow: sums are made in place, or by the products."""

    @staticmethod
    def forward(ctx, x0: Tensor, *parameters: Tensor) -> Tensor:
        x, inputs, narrow, products = x0, [], [], []
        w, v, bias = (parameters[i : i + LAYERS] for i in range(0, 3 * LAYERS, LAYERS))
        for layer in range(LAYERS):
            inputs.append(x)
            narrow.append(x @ v[layer].T)
            products.append(torch.addmm(bias[layer], narrow[-1], w[layer].T))
            x = torch.addcmul(x, x0, products[-1])
        ctx.save_for_backward(*inputs, *narrow, *products, *w, *v)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        saved = ctx.saved_tensors
        inputs, narrow, products, w, v = (saved[i : i + LAYERS] for i in range(0, 5 * LAYERS, LAYERS))
        grad, grad_x0 = grad.clone(), torch.zeros_like(grad)
        grads: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer in reversed(range(LAYERS)):
            grad_product = grad * inputs[0]
            grad_x0.addcmul_(grad, products[layer])
            grad_narrow = grad_product @ w[layer]
            grads.insert(0, (grad_product.T @ narrow[layer], grad_narrow.T @ inputs[layer], grad_product.sum(0)))
            grad.addmm_(grad_narrow, v[layer])
        return grad_x0.add_(grad), *itertools.chain(*zip(*grads, strict=True))


def cases() -> Iterator[Case]:
    """Each input has parameters of its own."""
    for batch, dim, rank in [*itertools.product((2048,), (16, 64, 128), (64, 256, 512)), (8192, 64, 64)]:
        yield from _cases(batch, VECTORS * dim, rank)


def _cases(batch: int, columns: int, rank: int) -> Iterator[Case]:
    net = rk.LowRankCrossNet(columns, LAYERS, rank)
    names = [name for name, _ in net.named_parameters()]

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (x,))

    def make() -> tuple[Tensor, ...]:
        fresh = rk.LowRankCrossNet(columns, LAYERS, rank).parameters()
        return torch.randn(batch, columns), *(p.detach() for p in fresh)

    products = 2 * LAYERS * batch * columns * rank
    size = f"B={batch} N={columns} r={rank}"
    return dense_cases("low_rank_cross", size, ours, formula, make, (products, 3 * products), ByHand.apply)
