"""Shared parts of the dense side's benchmarks: an op, torch's recipe, also compiled, and two limits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.limits import limits
from bench.timing import time_calls

#: Inputs that the calls take in turn.
INPUTS = 6
#: Ours, of the same numbers in bfloat16.
HALF = "bfloat16"
#: Implementations: "torch" is the plain recipe, "compiled" torch.compile of it; "bytes" and "products" are the limits.
NAMES = ["ours", HALF, "torch", "compiled", "bytes", "products"]
#: torch's best: a recipe with a backward of its own, where there is one.
TUNED = "tuned"


class DenseSubject:
    """Some inputs of a shape, and who computes something of them: functions of the number of an input.

    Args:
        name: of the shape.
        ours, recipe: functions of as many tensors as ``make`` gives.
        make: gives the tensors of one input, which all have a gradient.
        products: multiplications of a forward that no implementation can do without, and of a forward and a backward.
        tuned: the same as the recipe, for ``TUNED``.
    """

    def __init__(
        self,
        name: str,
        ours: Callable[..., Tensor],
        recipe: Callable[..., Tensor],
        make: Callable[[], tuple[Tensor, ...]],
        products: tuple[int, int],
        tuned: Callable[..., Tensor] | None = None,
    ) -> None:
        self.name = name
        # Another shape is another subject, whose graph must not be one of sizes that are not known.
        torch._dynamo.reset()
        self.functions = {"ours": ours, HALF: ours, "torch": recipe, "compiled": torch.compile(recipe, dynamic=False)}
        self.functions |= {} if tuned is None else {TUNED: tuned}
        self.inputs = [tuple(t.requires_grad_() for t in make()) for _ in range(INPUTS)]
        self.halves = [tuple(t.detach().bfloat16().requires_grad_() for t in given) for given in self.inputs]
        self.products = dict(zip(("forward", "train"), products, strict=True))
        with torch.no_grad():
            self.grad = torch.randn_like(ours(*self.inputs[0]))
        self.half_grad = self.grad.bfloat16()

    @property
    def bytes(self) -> dict[str, int]:
        """Forward: inputs read, the result written. Backward: its gradient and the inputs read, theirs written."""
        given, out = 4 * sum(t.numel() for t in self.inputs[0]), 4 * self.grad.numel()
        return {"forward": given + out, "train": 3 * given + 2 * out}

    def forward(self, name: str, i: int) -> None:
        """Under no_grad."""
        with torch.no_grad():
            self.functions[name](*self._given(name)[i])

    def train(self, name: str, i: int) -> None:
        """Forward and all gradients."""
        given, grad = self._given(name)[i], self.half_grad if name == HALF else self.grad
        torch.autograd.grad(self.functions[name](*given), given, grad)

    def _given(self, name: str) -> list[tuple[Tensor, ...]]:
        return self.halves if name == HALF else self.inputs

    def move(self, operation: str, i: int) -> None:
        """Reads and writes as many bytes by torch's sums and fills."""
        for _ in range(1 if operation == "forward" else 2):
            for t in self.inputs[i]:
                t.detach().sum()
        torch.empty_like(self.grad).fill_(1)
        if operation == "train":
            self.grad.sum()
            for t in self.inputs[i]:
                torch.empty_like(t).fill_(1)

    def time(self, benchmark, operation: str, name: str, rounds: int) -> None:
        """One implementation's turn, or a limit's; operation: "forward" or "train"."""
        function = {
            "bytes": functools.partial(self.move, operation),
            "products": lambda i: limits().multiply_add(self.products[operation]),
        }.get(name) or functools.partial(getattr(self, operation), name)
        size = self.bytes[operation] // (2 if name == HALF else 1)
        time_calls(benchmark, function, INPUTS, rounds, size)
