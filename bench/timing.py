"""Timing of benchmarks: calls cycle through their inputs, and implementations take turns in going first."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

# The first calls after the tables were built are slower: threads wake, memory settles, clocks rise.
WARMUP_CALLS, WARMUP_SECONDS = 10, 0.3
# Calls per turn; the median of fewer is not meaningful.
LEAST_CALLS = 3

Call = Callable[[int], object]


def turned(names: Iterable[str], turn: int) -> list[str]:
    """Returns ``names`` rotated by the turn, since the first implementation finds the machine still idle."""
    names = list(names)
    first = turn % len(names)
    return names[first:] + names[:first]


def timed(function: Call, number: int) -> float:
    """Returns the seconds of a call; drops its result at once.

    glibc would find no freed memory that fits if it were kept during the next call: every page of the next result would
    cost a page fault, which is no matter of the kernels (0.3 ms for 2 MB).
    """
    start = time.perf_counter()
    function(number)
    return time.perf_counter() - start


def time_calls(function: Call, inputs: int, rounds: int) -> list[float]:
    """Returns seconds of ``rounds`` calls of ``function``, cycling through inputs 0 .. inputs - 1, after a warm-up."""
    numbers, calls, end = itertools.cycle(range(inputs)), 0, time.perf_counter() + WARMUP_SECONDS
    while calls < WARMUP_CALLS or time.perf_counter() < end:
        function(next(numbers))
        calls += 1
    return [timed(function, next(numbers)) for _ in range(rounds)]


def take_turns(
    functions: dict[str, Call], inputs: int, *, turns: int, seconds: float, first: int = 0
) -> dict[str, list[float]]:
    """Returns seconds of the calls of several functions of input indices 0 .. inputs - 1, which take turns.

    Args:
        functions: name -> function; each goes through the inputs in turn.
        turns: how often each has its turn, one function after the other.
        seconds: how long a turn lasts, at the least; it has at least ``LEAST_CALLS`` calls.
        first: the number of the function that begins; every turn begins with the next one.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    numbers = {name: itertools.cycle(range(inputs)) for name in functions}
    for turn in range(first, first + turns):
        for name in turned(functions, turn):
            # Untimed: it finds the caches full of the previous function's data.
            functions[name](next(numbers[name]))
            end, calls = time.perf_counter() + seconds, []
            while len(calls) < LEAST_CALLS or time.perf_counter() < end:
                calls.append(timed(functions[name], next(numbers[name])))
            found[name] += calls
    return found
