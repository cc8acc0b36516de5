"""Tests that are marked ``full`` run in `make test-all`, all others also in `make test` (CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def full(*values: object) -> list:
    """Parameters that only the full tier has, for pytest.mark.parametrize; a tuple has one for each name."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.full) for v in values]


def cross(kinds: Sequence, cases: Sequence, typical: object) -> list:
    """Pairs (kind, case) for pytest.mark.parametrize, such as dtypes and sizes; most are left to the full tier.

    The default tier has the first kind with all cases, and all kinds with the ``typical`` case.
    """
    assert typical in cases
    pairs = [(kind, case) for kind in kinds for case in cases]
    default = [(kind, case) for kind, case in pairs if kind == kinds[0] or case == typical]
    return default + full(*(pair for pair in pairs if pair not in default))
