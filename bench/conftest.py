"""Options of bench/test_cases.py, which are those of ``bench.run``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--op``, ``--case``, ``--implementation`` and ``--rounds``."""
    for name, text in (
        ("op", "benchmarks of this"),
        ("case", "those whose title has this"),
        ("implementation", "ours and this"),
    ):
        parser.addoption(f"--{name}", action="append", default=[], help=f"only {text} (repeatable)")
    parser.addoption("--rounds", type=int, default=60, help="timed calls of an implementation (default: 60)")
