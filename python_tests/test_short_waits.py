"""Short waits beside other programs: start and end, threads, and unchanged settings."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rec_kernels import threads
from rec_kernels.testing import use_threads
from rec_kernels.threads import CpuTimes, ShortWaits, compute_with, read_cpu_times


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)  # conftest.py sets it
    monkeypatch.setattr(threads, "INTERVAL", 0.001)
    with use_threads(2):
        yield


class Neighbour:
    """Another program's CPU time, sampled at intervals of one second; counts the samples."""

    def __init__(self, cores: float):
        self.cores, self.looks = cores, 0
        self._used = 0.0

    def __call__(self) -> CpuTimes:
        self.looks += 1
        self._used += self.cores
        return CpuTimes(float(self.looks), self._used + self.looks, float(self.looks))


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.001)


def all_threads() -> set[str]:
    """The process's threads by number, including OpenMP's: those of other tests may end at any time."""
    return set(os.listdir("/proc/self/task"))


def test_a_busy_neighbour_makes_waits_short_until_it_is_gone(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    neighbour = Neighbour(cores=0.2)
    torch.ones(1 << 20)  # creates the thread team of this thread
    before = all_threads()
    with ShortWaits(neighbour) as waits:
        wait_for(lambda: neighbour.looks > 20)
        assert not waits.short  # a fifth of a core is tolerated
        neighbour.cores = 0.9
        wait_for(lambda: waits.short)
        started = all_threads() - before
        assert len(started) == 3  # the monitoring thread, the surplus thread and its OpenMP worker
        assert torch.get_num_threads() == 2
        neighbour.cores = 0.0
        wait_for(lambda: not waits.short)
        neighbour.cores = 2.0
        wait_for(lambda: waits.short)
    assert not waits.short
    wait_for(lambda: all_threads() <= before)
    assert torch.get_num_threads() == 2


def test_a_short_burst_changes_nothing(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    neighbour = Neighbour(cores=0.0)
    busy_at = {10, 20, 30}  # samples with a busy neighbour, never two in a row

    def looks() -> CpuTimes:
        neighbour.cores = 1.0 if neighbour.looks + 1 in busy_at else 0.0
        return neighbour()

    began = []
    monkeypatch.setattr(ShortWaits, "_set_short", lambda self, short: began.append(short))
    with ShortWaits(looks):
        wait_for(lambda: neighbour.looks > 40)
    assert began == [False]  # the call of __exit__


def test_idle_cores_are_left_to_the_neighbour(monkeypatch):
    """Two threads on eight cores: six may be taken before one of the two has to wait."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    neighbour = Neighbour(cores=6.0)
    with ShortWaits(neighbour) as waits:
        wait_for(lambda: neighbour.looks > 20)
        assert not waits.short
        neighbour.cores = 7.0
        wait_for(lambda: waits.short)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_environment_wins(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    with ShortWaits(Neighbour(cores=2.0)):
        assert "neighbours" not in [thread.name for thread in threading.enumerate()]


def test_one_thread_waits_for_nobody():
    with use_threads(1), ShortWaits(Neighbour(cores=2.0)):
        assert "neighbours" not in [thread.name for thread in threading.enumerate()]


def test_without_proc_stat(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    with ShortWaits(Neighbour(cores=2.0)):
        assert "neighbours" not in [thread.name for thread in threading.enumerate()]


def test_look_counts_this_process_s_cores(monkeypatch, tmp_path: Path):
    """Columns: user, nice, system, idle, iowait, irq, softirq; idle and iowait are not use."""
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 0\ncpu0 1 2 4 1000 1000 8 16 0 0 0\ncpu1 100 0 0 7 7 0 0 0\ncpu2 5000 0 0 0 0 0 0\nintr 5\n"
    )
    monkeypatch.setattr(threads, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert read_cpu_times().cores == pytest.approx((31 + 100) / os.sysconf("SC_CLK_TCK"))


def test_others_are_all_but_this_process():
    assert CpuTimes(12.0, 8.0, 5.0).others(CpuTimes(10.0, 4.0, 3.0)) == pytest.approx(1.0)


def test_compute_with_sets_its_own_thread_only():
    found: dict[str, int] = {}

    def later() -> None:
        found["later"] = torch.get_num_threads()

    def alone() -> None:
        compute_with(1)
        found["alone"] = torch.get_num_threads()
        thread = threading.Thread(target=later)
        thread.start()
        thread.join()

    thread = threading.Thread(target=alone)
    thread.start()
    thread.join()
    assert found == {"alone": 1, "later": 2}
    assert torch.get_num_threads() == 2
