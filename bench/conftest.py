"""Options of the benchmarks."""

from __future__ import annotations

import pytest

from bench.shapes import Shape
from bench.timing import turned
from bench.workloads import NAMED


def pytest_addoption(parser: pytest.Parser) -> None:
    """--rounds: how often every implementation takes its turn; --workload: what it is given."""
    parser.addoption("--rounds", type=int, default=20, help="turns per implementation (default 20)")
    parser.addoption("--turn", type=int, default=0, help="which implementation goes first (default 0: ours)")
    parser.addoption("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.addoption("--workload", action="append", default=[], help="only these named workloads (default: none)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The ``IMPLEMENTATIONS`` of a benchmark take turns at who goes first; one with a hook of its own chooses there."""
    names, own = (getattr(metafunc.module, name, None) for name in ("IMPLEMENTATIONS", "pytest_generate_tests"))
    if names is not None and own is None:
        metafunc.parametrize("name", turned(names, metafunc.config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the workloads of --workload; without it, the workloads that belong to an op's benchmark alone."""
    wanted = set(config.getoption("--workload")) or {None}
    config.hook.pytest_deselected(items=[item for item in items if _named_workload(item) not in wanted])
    items[:] = [item for item in items if _named_workload(item) in wanted]


def _named_workload(item: pytest.Item) -> str | None:
    subject = item.callspec.params.get("subject") if hasattr(item, "callspec") else None
    return subject.name if isinstance(subject, Shape) and subject.name in NAMED else None


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """Turns per implementation."""
    return request.config.getoption("--rounds")


@pytest.fixture(scope="session", autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    import torch

    if request.config.getoption("--threads"):
        torch.set_num_threads(request.config.getoption("--threads"))
