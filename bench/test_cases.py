"""The cases of ``bench.run`` under pytest-benchmark: its statistics, histograms, and comparisons of saved runs.

pytest bench/test_cases.py --op scale_rows --benchmark-autosave --benchmark-compare
"""

from __future__ import annotations

import itertools

import pytest
import torch

from bench.cases import Case, Pass
from bench.timing import WARMUP_CALLS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test for each implementation of each case; the inputs of all selected cases are in memory at once."""
    chosen = {name: metafunc.config.getoption(f"--{name}") for name in ("op", "case", "implementation")}
    if not chosen["op"]:
        raise pytest.UsageError("--op must be given: python -m bench.run --help lists the ops")
    what = Pass(chosen["op"], only=chosen["case"], names=chosen["implementation"])
    found = [(case, name) for case in what.cases() for name in what.names_of(case)]
    metafunc.parametrize("case, name", found, ids=[f"{case.title}-{name}" for case, name in found])


def test_case(benchmark, case: Case, name: str, request: pytest.FixtureRequest) -> None:
    """Benchmarks one implementation, cycling through the inputs."""
    call, numbers = case.call(name), itertools.cycle(range(case.inputs))
    benchmark.group = case.title

    def drop_result(number: int) -> None:  # as bench.timing.timed()
        call(number)

    with torch.set_grad_enabled(case.gradients):
        for _ in range(WARMUP_CALLS):
            drop_result(next(numbers))
        rounds = request.config.getoption("--rounds")
        benchmark.pedantic(drop_result, setup=lambda: ((next(numbers),), {}), rounds=rounds)
