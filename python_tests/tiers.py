"""Tests that are marked ``full`` run in `make test-all`, all others also in `make test` (CONTRIBUTING.md)."""

from __future__ import annotations

import pytest


def full(*values: object) -> list:
    """Parameters that only the full tier has, for pytest.mark.parametrize; a tuple has one for each name."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.full) for v in values]
