"""Measurable cases: embedding_bag, scale_rows (the template op), grouped_projection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import rec_kernels as rk
from bench.gpu.cases import ADAM, bytes_moved, operations, unique_rows
from bench.gpu.checks import check_forward, check_update
from bench.gpu.implementations import ONLY, WITH_ADAM, Implementation, Make, Tables
from bench.shapes import Workload


class Subject(NamedTuple):
    """One operation of one implementation, built only by ``build``, which may fail."""

    implementation: str
    operation: str
    optimizer: str | None
    moved: dict[str, float]  # bytes, by the counts "all" and "unique"
    build: Callable[[], Built]


class Built(NamedTuple):
    """A timed call, with its untimed preparation and check."""

    call: Callable[[], object]
    prepare: Callable[[int], None]  # before call number i, not timed
    check: Callable[[], None]  # raises if results are wrong
    captures: bool  # a CUDA graph can capture the call


class Differentiable:
    """Calls of a differentiable function: the forward under no_grad, and the backward of an earlier forward.

    Args:
        function: what is called.
        given: its arguments; the gradients are of those that require one.

    Attributes:
        grad: random, of the function's result.
    """

    def __init__(self, function: Callable[..., Tensor], *given: Tensor) -> None:
        self._function, self._given, self._output = function, given, function(*given)
        self._trained = [t for t in given if t.requires_grad]
        self.grad = torch.randn_like(self._output)

    def forward(self) -> Tensor:
        """Runs the forward; returns the result."""
        with torch.no_grad():
            return self._function(*self._given)

    def backward(self) -> tuple[Tensor, ...]:
        """Runs the backward; returns the gradients."""
        return torch.autograd.grad(self._output, self._trained, self.grad, retain_graph=True)

    def built(self, operation: str, check: Callable[[], None]) -> Built:
        """Builds the call "forward" or "backward"."""
        # With autograd, the graph would need to contain the forward.
        return Built(getattr(self, operation), lambda turn: None, check, operation == "forward")


class Case(Protocol):
    """Several subjects over the same memory."""

    name: str

    def about(self) -> dict[str, object]:
        """Sizes, for the JSON file."""

    def subjects(self, device: torch.device) -> Iterator[Subject]:
        """Allocates the memory, then yields the subjects that use it, one implementation's at a time."""


class EmbeddingBag:
    """Forward, backward and step of a workload, for every available implementation and optimizer."""

    def __init__(self, workload: Workload, available: dict[str, Make]) -> None:
        self.workload, self.available = workload, available
        self.name = workload.name
        self._about = dataclasses.asdict(workload) | {"op": "embedding_bag"}

    def about(self) -> dict[str, object]:
        """T, B, E, D, L, the Zipf exponent, and the number of distinct rows of a batch once it is known."""
        return self._about

    def subjects(self, device: torch.device) -> Iterator[Subject]:
        data = Tables(self.workload, device)
        unique = unique_rows(self.workload, data.batches)
        self._about["unique_rows"] = unique
        for name, make in self.available.items():
            for optimizer, timed in operations(self.workload).items():
                if optimizer == ADAM and name not in WITH_ADAM:
                    continue
                # Built once for all its operations, and freed before the next one is built.
                built = functools.lru_cache(maxsize=1)(functools.partial(make, data, optimizer))
                for operation in (o for o in timed if o in ONLY.get(name, timed)):
                    moved = bytes_moved(self.workload, operation, optimizer, unique)
                    build = functools.partial(_operation, data, built, operation)
                    yield Subject(name, operation, None if operation == "forward" else optimizer, moved, build)


def _operation(data: Tables, built: Callable[[], Implementation], operation: str) -> Built:
    implementation = built()

    def prepare(turn: int) -> None:
        data.use(turn)
        implementation.before(operation)

    def update() -> None:
        implementation.before(operation)
        call()

    def check() -> None:
        if operation == "forward":
            check_forward(data, implementation)
        else:
            check_update(data, implementation, update)

    call = getattr(implementation, operation)
    return Built(call, prepare, check, operation in implementation.captures)


class GradientCase:
    """An op and its gradients, ours and torch's recipe, both checked against the recipe in float64.

    Derived cases have a ``name`` and ``about()``, and the methods here that say nothing.
    """

    name: str
    #: Relative error of rounding a result once to its dtype.
    unit = 0.0

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """Returns the functions "ours" and "torch" of the arguments."""
        raise NotImplementedError

    def given(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns the arguments; floating-point ones have gradients."""
        raise NotImplementedError

    def moved(self) -> Mapping[str, int | dict[str, int]]:
        """Bytes of "forward" and "backward": by count, or of both counts."""
        raise NotImplementedError

    def bounds(self, name: str) -> Sequence[float]:
        """Largest error of the result and of each gradient before rounding, in sums of their terms' magnitudes."""
        raise NotImplementedError

    def subjects(self, device: torch.device) -> Iterator[Subject]:
        given = self.given(device)
        for name, function in self.functions().items():
            for operation, size in self.moved().items():
                build = functools.partial(self._build, name, function, operation, given)
                moved = size if isinstance(size, dict) else {"all": size, "unique": size}
                yield Subject(name, operation, None, moved, build)

    def _build(self, name: str, function: Callable, operation: str, given: tuple[Tensor, ...]) -> Built:
        op = Differentiable(function, *given)

        def each(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
            wide = [change(t.detach().double()).requires_grad_() if t.is_floating_point() else t for t in given]
            out = self.functions()["torch"](*wide)
            return out, *torch.autograd.grad(out, [t for t in wide if t.requires_grad], change(op.grad.double()))

        def check() -> None:
            results = (op.forward(), *op.backward()), each(lambda t: t), each(torch.abs), self.bounds(name)
            for mine, right, magnitude, bound in zip(*results, strict=True):
                allowed = bound * magnitude
                allowed += self.unit * (right.abs() + allowed)
                assert ((mine.double() - right).abs() - allowed).max().item() <= 0

        return op.built(operation, check)


class ScaleRows(GradientCase):
    """scale_rows compared with plain torch. No row repeats, so both byte counts are equal."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.name = f"scale-rows-{rows}x{columns}"

    def about(self) -> dict[str, object]:
        """Rows and columns."""
        return {"name": self.name, "op": "scale_rows", "rows": self.rows, "dim": self.columns}

    def moved(self) -> dict[str, int]:
        elements = self.rows * self.columns
        # Forward: x read, the output written. Backward: the gradient and x read (the gradient twice), grad_x written.
        return {"forward": 8 * elements + 4 * self.rows, "backward": 16 * elements + 8 * self.rows}

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        return {"ours": rk.scale_rows, "torch": lambda x, scale: x * scale[:, None]}

    def given(self, device: torch.device) -> tuple[Tensor, ...]:
        make = functools.partial(torch.randn, device=device, requires_grad=True)
        return make(self.rows, self.columns), make(self.rows)

    def bounds(self, name: str) -> Sequence[float]:
        return 1e-6, 1e-6, self.columns * 2.0**-23  # FP32 additions in any order


class GroupedProjection(GradientCase):
    """grouped_projection compared with a loop of torch's linear. Both byte counts are equal."""

    def __init__(self, batch: int, in_dims: list[int], out_dim: int) -> None:
        self.batch, self.in_dims, self.out_dim = batch, in_dims, out_dim
        self.sizes = [0 if d == out_dim else d * out_dim for d in in_dims]
        self.name = f"grouped-projection-{batch}x{len(in_dims)}x{out_dim}"

    def about(self) -> dict[str, object]:
        """Samples, the groups' columns, and those of each block."""
        sizes = {"batch": self.batch, "in_dims": self.in_dims, "dim": self.out_dim}
        return {"name": self.name, "op": "grouped_projection"} | sizes

    def moved(self) -> dict[str, int]:
        # Forward: reads x and weights, writes the result. Backward: reads the gradient and the other argument for each
        # of the two gradients, and writes them.
        columns = sum(self.in_dims) + len(self.in_dims) * self.out_dim
        forward = 4 * (self.batch * columns + sum(self.sizes))
        return {"forward": forward, "backward": 2 * forward}

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        return {"ours": self._by_us, "torch": self._by_torch}

    def given(self, device: torch.device) -> tuple[Tensor, ...]:
        make = functools.partial(torch.randn, device=device, requires_grad=True)
        return make(self.batch, sum(self.in_dims)), make(sum(self.sizes))

    def bounds(self, name: str) -> Sequence[float]:
        # The bound of docs/numerics.md, for the longest sum here.
        return [(max(self.batch, self.out_dim, *self.in_dims) + 8) * 2.0**-22] * 3

    def _by_us(self, x: Tensor, weights: Tensor) -> Tensor:
        return rk.grouped_projection(x, weights, self.in_dims, [self.out_dim] * len(self.in_dims))

    def _by_torch(self, x: Tensor, weights: Tensor) -> Tensor:
        pairs = zip(x.split(self.in_dims, 1), weights.split(self.sizes), strict=True)
        return torch.cat([F.linear(c, w.view(self.out_dim, -1)) if len(w) else c for c, w in pairs], 1)
