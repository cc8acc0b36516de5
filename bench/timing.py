"""How the benchmarks time: calls that take turns at their inputs, implementations that take turns at who goes first."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

import pytest

# The first calls after the tables were built are slower: threads wake, memory settles, clocks rise.
WARMUP_CALLS, WARMUP_SECONDS = 10, 0.3


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
