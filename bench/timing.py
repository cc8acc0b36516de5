"""Timing of benchmarks: calls cycle through their inputs, implementations take turns at who goes first."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # training steps are timed where there is no pytest, too
    import pytest

# The first calls after the tables were built are slower: threads wake, memory settles, clocks rise.
WARMUP_CALLS, WARMUP_SECONDS = 10, 0.3
# Calls per turn: a median of fewer means nothing.
LEAST_CALLS = 3


def turned(names: Iterable[str], config: pytest.Config) -> list[str]:
    """``names``, beginning with another one in every pass: whoever goes first meets a machine that is not awake yet."""
    names = list(names)
    turn = config.getoption("--turn") % len(names)
    return names[turn:] + names[:turn]


def time_calls(benchmark, function: Callable[[int], object], inputs: int, rounds: int, num_bytes: float) -> None:
    """Times ``function`` of the numbers 0 .. inputs - 1 in turn."""
    turn = itertools.cycle(range(inputs))

    def drop_result(i: int) -> None:
        # pytest-benchmark would keep it during the next call, and glibc then finds no freed memory that fits: every
        # page of the next result costs a page fault, which is no matter of the kernels (0.3 ms for 2 MB).
        function(i)

    end = time.perf_counter() + WARMUP_SECONDS
    for call in itertools.count():
        if call >= WARMUP_CALLS and time.perf_counter() >= end:
            break
        drop_result(next(turn))
    benchmark.extra_info["bytes"] = num_bytes
    benchmark.pedantic(drop_result, setup=lambda: ((next(turn),), {}), rounds=rounds)


def take_turns(
    functions: dict[str, Callable[[int], object]], inputs: int, *, turns: int, seconds: float, first: int = 0
) -> dict[str, list[float]]:
    """Seconds of the calls of several functions of the numbers 0 .. inputs - 1, measured within one another's reach.

    Args:
        functions: name -> function; each goes through the inputs in turn.
        turns: how often each has its turn, one function after the other.
        seconds: how long a turn lasts, at the least; it has at least ``LEAST_CALLS`` calls.
        first: the number of the function that begins; every turn begins with the next one.
    """
    names, found = list(functions), {name: [] for name in functions}
    numbers = {name: itertools.cycle(range(inputs)) for name in names}
    for turn in range(first, first + turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            # Untimed: it finds the caches full of the previous function's data.
            functions[name](next(numbers[name]))
            end, calls = time.perf_counter() + seconds, []
            while len(calls) < LEAST_CALLS or time.perf_counter() < end:
                number, start = next(numbers[name]), time.perf_counter()
                functions[name](number)
                calls.append(time.perf_counter() - start)
            found[name] += calls
    return found
