"""Benchmark cases: implementations that do the same work, and the timing of a pass over them.

Every ``bench_<op>.py`` has ``cases()``, which yields its cases; those of embedding bags take workloads.
"""

from __future__ import annotations

import functools
import gc
import importlib
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bench.limits import limits
from bench.shapes import Shape
from bench.timing import Call, time_calls, turned

#: Inputs that the calls cycle through.
INPUTS = 6
#: Ours, with the same values in bfloat16.
HALF = "bfloat16"


@dataclass(frozen=True)
class Case:
    """One group of the result table: implementations of the same work.

    Args:
        title: of the group.
        names: of implementations and limits, ours first.
        call: builds what a name's calls need, and gives the function of the number of an input.
        moved: bytes of a call, or of a name's.
        inputs: how many inputs there are.
        gradients: whether autograd is on.
        slow: names that have a third of the rounds.
        note: what the JSON file has of a name besides its time and bytes.
    """

    title: str
    names: Sequence[str]
    call: Callable[[str], Call]
    moved: float | Callable[[str], float]
    inputs: int = INPUTS
    gradients: bool = False
    slow: Sequence[str] = ()
    note: Callable[[str], dict] = field(default=lambda name: {})

    def measure(self, name: str, rounds: int) -> dict[str, object]:
        """The result row of an implementation: "ms", "min_ms", "bytes", and its note."""
        gc.collect()
        rounds = max(rounds // 3, 3) if name in self.slow else rounds
        with torch.set_grad_enabled(self.gradients):
            seconds = time_calls(self.call(name), self.inputs, rounds)
        size = self.moved(name) if callable(self.moved) else self.moved
        times = {"ms": statistics.median(seconds) * 1e3, "min_ms": min(seconds) * 1e3}
        return times | {"bytes": size} | self.note(name)


class Pass(NamedTuple):
    """A pass over the benchmarks of some ops.

    Args:
        ops: their stems.
        workloads: instead of the ops' own; none: these.
        rounds: calls of an implementation that are timed.
        threads: of torch; 0: its choice.
        only: texts; cases whose titles have none of them are left out.
        names: implementations, ours besides; none: all.
    """

    ops: Sequence[str]
    workloads: Sequence[Shape] = ()
    rounds: int = 60
    threads: int = 0
    only: Sequence[str] = ()
    names: Sequence[str] = ()

    def cases(self) -> Iterator[Case]:
        """Yields the cases; each is made only after the previous one was measured."""
        for op in self.ops:
            module = importlib.import_module(f"bench.bench_{op}")
            for case in module.cases(self.workloads) if self.workloads else module.cases():
                if not self.only or any(text in case.title for text in self.only):
                    yield case

    def names_of(self, case: Case) -> list[str]:
        """The selected implementations of a case, and ours."""
        return [name for name in case.names if not self.names or name in ("ours", *self.names)]

    def measure(self, turn: int) -> dict[str, dict[str, dict]]:
        """Returns title -> implementation -> row; ``turn``, the pass number, decides which goes first."""
        if self.threads:
            torch.set_num_threads(self.threads)
        warnings.filterwarnings("ignore", message="Sparse invariant checks")  # of torch's own sparse gradients
        found = {}
        for case in self.cases():
            print(f"pass {turn + 1}: {case.title}", file=sys.stderr, flush=True)
            found[case.title] = {name: case.measure(name, self.rounds) for name in turned(self.names_of(case), turn)}
        return found


class Way(NamedTuple):
    """An implementation of an op: a function of tensors, and the arguments of each call."""

    function: Callable[..., object]
    given: Sequence[tuple]


def op_case(
    title: str, ways: Mapping[str, Way], moved: float | Callable[[str], float], limits: Mapping[str, Call] | None = None
) -> Case:
    """Makes a case of calls under no_grad; ``limits``: functions of an input's index."""
    limits = limits or {}

    def call(name: str) -> Call:
        if name in limits:
            return limits[name]
        function, given = ways[name]
        return lambda i: function(*given[i])

    return Case(title, [*ways, *limits], call, moved, len(ways["ours"].given))


def trained_case(
    title: str, ways: Mapping[str, Way], moved: float | Callable[[str], float], limits: Mapping[str, Call] | None = None
) -> Case:
    """Makes a case of the forward and the gradients of all arguments that require them."""
    limits = limits or {}

    def call(name: str) -> Call:
        if name in limits:
            return limits[name]
        function, given = ways[name]
        with torch.no_grad():
            outputs = [function(*tensors) for tensors in given]
        grads = {out.shape: torch.randn_like(out) for out in outputs}
        of_call = [grads[out.shape] for out in outputs]
        leaves = [[t for t in tensors if isinstance(t, Tensor) and t.requires_grad] for tensors in given]
        del outputs
        return lambda i: torch.autograd.grad(function(*given[i]), leaves[i], of_call[i])

    return Case(title, [*ways, *limits], call, moved, len(ways["ours"].given), gradients=True)


def dense_cases(
    op: str,
    size: str,
    ours: Callable[..., Tensor],
    recipe: Callable[..., Tensor],
    make: Callable[[], tuple[Tensor, ...]],
    products: tuple[int, int],
    tuned: Callable[..., Tensor] | None = None,
) -> Iterator[Case]:
    """The cases of an op of the dense side, forward and trained: ours, also in bfloat16, torch's recipe, and limits.

    Args:
        op, size: of the titles.
        ours, recipe: functions of as many tensors as ``make`` gives; the recipe is also compiled.
        make: gives the tensors of one input, which all have a gradient.
        products: multiplications of a forward that no implementation can do without, and of a forward and a backward.
        tuned: torch's best, with a backward of its own, where there is one.
    """
    # Reset, so that another shape is not compiled with dynamic sizes.
    torch._dynamo.reset()
    inputs = [tuple(t.requires_grad_() for t in make()) for _ in range(INPUTS)]
    halves = [tuple(t.detach().bfloat16().requires_grad_() for t in given) for given in inputs]
    ways = {"ours": Way(ours, inputs), HALF: Way(ours, halves), "torch": Way(recipe, inputs)}
    ways["compiled"] = Way(torch.compile(recipe, dynamic=False), inputs)
    if tuned is not None:
        ways["tuned"] = Way(tuned, inputs)
    with torch.no_grad():
        out = torch.empty_like(ours(*inputs[0]))
    # Forward: reads inputs, writes the result. Backward: reads its gradient and the inputs, writes theirs.
    given, written = 4 * sum(t.numel() for t in inputs[0]), 4 * out.numel()

    def move(trains: bool, i: int) -> None:
        for t in inputs[i] * (1 + trains):
            t.detach().sum()
        torch.empty_like(out).fill_(1)
        if trains:
            out.sum()
            for t in inputs[i]:
                torch.empty_like(t).fill_(1)

    for trains, title in enumerate((f"{op} {size}", f"{op}, trained, {size}")):
        moved = (given + written, 3 * given + 2 * written)[trains]
        count = products[trains]
        least = {"bytes": functools.partial(move, trains), "products": lambda i, n=count: limits().multiply_add(n)}
        yield (trained_case if trains else op_case)(title, ways, lambda n, m=moved: m / 2 if n == HALF else m, least)
