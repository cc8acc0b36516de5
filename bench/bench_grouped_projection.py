"""grouped_projection beside a loop of torch's linear, one batched product of padded groups, and two limits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rec_kernels as rk
from bench.limits import limits
from bench.timing import time_calls

#: Inputs that the calls take in turn.
INPUTS = 6
IMPLEMENTATIONS = ["ours", "torch", "bmm", "bytes", "products"]


@dataclass(frozen=True)
class Groups:
    """B samples; every group has a block of its own, ``out_dim`` columns wide."""

    name: str
    batch: int
    in_dims: tuple[int, ...]
    out_dim: int

    @functools.cached_property
    def out_dims(self) -> list[int]:
        """One for each group."""
        return [self.out_dim] * len(self.in_dims)

    @property
    def products(self) -> int:
        """Multiplications of a forward."""
        return self.batch * sum(d * self.out_dim for d in self.in_dims if d != self.out_dim)

    @property
    def bytes(self) -> int:
        """Input and result of a forward; the matrices are small beside them."""
        return 4 * self.batch * (sum(self.in_dims) + sum(self.out_dims))


# 26 features of widths that rk.mixed_dimensions gives Criteo's; wider ones; few and large ones, a matter of arithmetic.
NARROW = (1, 2, 3, 4, 8, 9, 10, 11, 15, 16)
GROUPS = [
    Groups("26 of 1-16 to 16", 2048, tuple(NARROW[g % 10] for g in range(26)), 16),
    Groups("26 of 4-64 to 64", 2048, tuple(4 + 60 * g // 25 for g in range(26)), 64),
    Groups("4 of 300 to 512", 2048, (300,) * 4, 512),
]


class Subject:
    """The numbers of some groups, and who multiplies them: functions of the number of an input."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.x = [torch.randn(groups.batch, sum(groups.in_dims), requires_grad=True) for _ in range(INPUTS)]
        self.grad = torch.randn(groups.batch, sum(groups.out_dims))
        shapes = [(groups.out_dim, d) for d in groups.in_dims if d != groups.out_dim]
        self.matrices = [torch.randn(shape, requires_grad=True) for shape in shapes]
        self.weights = torch.cat([m.detach().view(-1) for m in self.matrices]).requires_grad_()
        widest = max(groups.in_dims)
        self.padded = torch.randn(len(groups.in_dims), groups.batch, widest, requires_grad=True)
        self.stacked = torch.randn(len(groups.in_dims), widest, groups.out_dim, requires_grad=True)

    def ours(self, i: int) -> Tensor:
        """One call."""
        return rk.grouped_projection(self.x[i], self.weights, self.groups.in_dims, self.groups.out_dims)

    def torch(self, i: int) -> Tensor:
        """The recipe that a user would write: a linear layer for each group that needs one."""
        matrices, out_dim = iter(self.matrices), self.groups.out_dim
        columns = self.x[i].split(self.groups.in_dims, 1)
        return torch.cat([c if c.shape[1] == out_dim else F.linear(c, next(matrices)) for c in columns], 1)

    def bmm(self, i: int) -> Tensor:
        """Every group as wide as the widest, which an embedding would have to fill with zeros; [F, B, out_dim]."""
        return torch.bmm(self.padded, self.stacked)

    def leaves(self, name: str, i: int) -> list[Tensor]:
        """Tensors that need a gradient."""
        return {
            "ours": [self.x[i], self.weights],
            "torch": [self.x[i], *self.matrices],
            "bmm": [self.padded, self.stacked],
        }[name]

    def train(self, name: str, i: int) -> None:
        """Forward and both gradients."""
        out = getattr(self, name)(i)
        torch.autograd.grad(out, self.leaves(name, i), self.grad.view(out.shape))

    def limits(self, passes: int) -> dict[str, Callable[[int], object]]:
        """Limits: the bytes alone and the arithmetic alone of a forward, ``passes`` times."""
        out = torch.empty_like(self.grad)

        def move(i: int) -> None:
            for _ in range(passes):
                self.x[i].detach().sum()
                out.fill_(1)

        return {"bytes": move, "products": lambda i: limits().multiply_add(passes * self.groups.products)}


@pytest.fixture(scope="module", params=GROUPS, ids=lambda g: g.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    """The groups under test."""
    return Subject(request.param)


def test_forward(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Under no_grad."""
    benchmark.group = f"grouped_projection {subject.groups.name}"
    function = subject.limits(1).get(name) or getattr(subject, name)
    with torch.no_grad():
        time_calls(benchmark, function, INPUTS, rounds, subject.groups.bytes)


def test_train(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Forward and backward: three products over the same bytes."""
    benchmark.group = f"grouped_projection, trained, {subject.groups.name}"
    function = subject.limits(3).get(name) or functools.partial(subject.train, name)
    time_calls(benchmark, function, INPUTS, rounds, 3 * subject.groups.bytes)
