"""Tests marked ``full`` run in `make test-all`, all others also in `make test` (CONTRIBUTING.md)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings


def full(*values: object) -> list:
    """Parameters of the full tier only, for pytest.mark.parametrize; a tuple has one for each name."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.full) for v in values]


def fewer(value: object) -> object:
    """A parameter of the default tier instead of the full tier's, such as a smaller number of examples."""
    return pytest.param(value, marks=pytest.mark.fewer)


def cross(kinds: Sequence, cases: Sequence, typical: object) -> list:
    """Pairs (kind, case) for pytest.mark.parametrize, such as dtypes and sizes; most are in the full tier only.

    The default tier has the first kind with all cases, and all kinds with the ``typical`` case.
    """
    assert typical in cases
    pairs = [(kind, case) for kind in kinds for case in cases]
    default = [(kind, case) for kind, case in pairs if kind == kinds[0] or case == typical]
    return default + full(*(pair for pair in pairs if pair not in default))


def drawn(examples: int, *strategies: object, **named: object) -> Callable[[Callable], Callable]:
    """Decorates a test with hypothesis examples: a third of them in the default tier, all in the full one.

    Args:
        examples: number. strategies, named: as for hypothesis.given.
    """

    def decorate(test: Callable) -> Callable:
        def fresh() -> Callable:  # settings apply to a test once
            return given(*strategies, **named)(test)

        @pytest.mark.parametrize("examples", [fewer(-(-examples // 3)), *full(examples)])
        @functools.wraps(test)
        def run(examples: int, **others: object) -> None:
            settings(max_examples=examples)(fresh())(**others)

        others = inspect.signature(fresh()).parameters.values()  # parameters and fixtures
        count = inspect.Parameter("examples", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*others, count])
        return run

    return decorate
