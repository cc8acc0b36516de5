"""Options of the benchmarks."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """--rounds: how often every implementation takes its turn."""
    parser.addoption("--rounds", type=int, default=20, help="turns per implementation (default 20)")
    parser.addoption("--turn", type=int, default=0, help="which implementation goes first (default 0: ours)")
    parser.addoption("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """Turns per implementation."""
    return request.config.getoption("--rounds")


@pytest.fixture(scope="session", autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    import torch

    if request.config.getoption("--threads"):
        torch.set_num_threads(request.config.getoption("--threads"))
