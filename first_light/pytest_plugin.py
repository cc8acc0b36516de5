"""A pytest plugin for a GPU that may fail in any way: nothing that one test does costs the others.

A failure is printed at once, because the run may be cut. A test that lasts too long, or leaves the context on the GPU
broken, ends its process; pytest-xdist starts another one, which goes on.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest

from bench.gpu.context import BROKEN, context_works


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --test-seconds, the longest that a test may take."""
    parser.addoption("--test-seconds", type=float, default=100, help="a process with a longer test ends (default: 100)")


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist, and whoever prints."""
    config.pluginmanager.register(Worker(config) if hasattr(config, "workerinput") else Printer())


class Printer:
    """Prints failures at once; runs in the process that prints."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The end of what a failed test says."""
        if report.failed:
            print(f"\nFAILED AT ONCE {report.nodeid} ({report.when})\n{report.longreprtext[-2500:]}", flush=True)


class Worker:
    """Ends its process when a test takes too long or breaks the GPU's context; runs in pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds, self._failed = config.getoption("--test-seconds"), False
        self._stderr = os.dup(sys.stderr.fileno())  # before pytest takes it

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Says where a test is that lasts too long, and ends the process."""
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remembers a failure."""
        self._failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """After a failure, whose report has been sent: ends the process if the GPU no longer answers."""
        failed, self._failed = self._failed, False
        if failed and not context_works():
            os.write(self._stderr, b"the CUDA context is broken: this process ends, another one goes on\n")
            os._exit(BROKEN)
