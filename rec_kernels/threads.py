"""CPU threads in training: single-threaded workers, and shorter OpenMP spinning while other programs need the cores.

A waiting OpenMP thread spins before it sleeps; libgomp, torch's OpenMP runtime on Linux, spins for 300,000 iterations,
which take milliseconds. On idle cores that is faster than waking a thread. While another program occupies a core it is
harmful: one thread of the team waits for a core, and the threads waiting for it spin on the cores it could use.
``ShortWaits`` therefore shortens the spinning while another program uses a core. It keeps the number of threads,
because the last bits of some matrix products depend on it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

INTERVAL = 0.1  # seconds between two samples
# Consecutive samples that must agree before waits become short, and before they become long again.
BEGIN, END = 2, 5
TOLERATED = 0.3  # cores: usage by other programs that is ignored
PER_THREAD = 32_768  # elements: torch's grain size, its minimum work per thread
STAT = Path("/proc/stat")

#: Protects the default thread count of new threads while compute_with() changes and restores it.
_default_lock = threading.Lock()


def compute_with(count: int) -> None:
    """Sets the number of torch threads for the calling thread only. Call it first in a new thread.

    torch.set_num_threads also changes the default of threads started later. A helper thread restores that default,
    because restoring it from the calling thread would undo the change there.
    """
    with _default_lock:
        threads = torch.get_num_threads()  # the default: this thread has not set its own
        torch.set_num_threads(count)
        restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
        restore.start()
        restore.join()


class CpuTimes(NamedTuple):
    """Processor times at one moment, in seconds."""

    clock: float
    cores: float  # used by all programs on this process's cores
    own: float  # used by this process

    def others(self, before: CpuTimes) -> float:
        """Mean number of cores that other programs used since ``before``."""
        return (self.cores - before.cores - (self.own - before.own)) / (self.clock - before.clock)


def read_cpu_times() -> CpuTimes:
    """Reads the processor times used so far from ``/proc/stat``. Raises OSError if it does not exist."""
    allowed = os.sched_getaffinity(0)
    ticks = 0
    for line in STAT.read_text().splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in allowed:
            user, nice, system, _idle, _iowait, interrupts, soft_interrupts = map(int, fields[:7])
            ticks += user + nice + system + interrupts + soft_interrupts
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class ShortWaits:
    """Context in which OpenMP threads spin only briefly while other programs use cores that they need.

    libgomp spins for 100 iterations instead of 300,000 while a process has more OpenMP threads than cores
    (GOMP_SPINCOUNT in libgomp's manual). The context therefore starts surplus, sleeping OpenMP threads while another
    program is busy, and ends them afterwards. It does nothing if the environment configures waiting (OMP_WAIT_POLICY,
    GOMP_SPINCOUNT), if torch has one thread, or if ``/proc/stat`` does not exist.

    Args:
        read_times: reads the processor times; tests pass their own.
    """

    def __init__(self, read_times: Callable[[], CpuTimes] = read_cpu_times):
        self._read_times, self._stop = read_times, threading.Event()
        self._cores, self._threads = 0, torch.get_num_threads()
        self._monitor: threading.Thread | None = None
        self._surplus: tuple[threading.Thread, threading.Event] | None = None

    def __enter__(self) -> ShortWaits:
        configured = any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
        if not configured and self._threads > 1 and STAT.exists():
            self._cores = len(os.sched_getaffinity(0))
            self._monitor = threading.Thread(target=self._monitor_others, name="neighbours", daemon=True)
            self._monitor.start()
        return self

    def __exit__(self, *_) -> None:
        if self._monitor is not None:
            self._stop.set()
            self._monitor.join()
            self._set_short(False)

    @property
    def short(self) -> bool:
        """True while waits are short."""
        return self._surplus is not None

    def _monitor_others(self) -> None:
        agreeing, before = 0, self._read_times()
        while not self._stop.wait(INTERVAL):
            now = self._read_times()
            crowded = now.others(before) + self._threads > self._cores + TOLERATED
            before = now
            agreeing = agreeing + 1 if crowded != self.short else 0
            if agreeing == (BEGIN if crowded else END):
                self._set_short(crowded)
                agreeing = 0

    def _set_short(self, short: bool) -> None:
        if short and self._surplus is None:
            count = max(self._cores - self._threads + 1, 1) + 1  # the new thread itself is not an OpenMP worker
            leave, ready = threading.Event(), threading.Event()
            thread = threading.Thread(target=_hold_team, args=(count, ready, leave), name="surplus", daemon=True)
            thread.start()
            ready.wait()
            self._surplus = thread, leave
        elif not short and self._surplus is not None:
            thread, leave = self._surplus
            leave.set()
            thread.join()
            self._surplus = None


def _hold_team(count: int, ready: threading.Event, leave: threading.Event) -> None:
    """Starts an OpenMP team of ``count`` threads, including this one, and keeps it alive until ``leave`` is set."""
    try:
        compute_with(count)
        torch.ones(count * PER_THREAD)
    finally:
        ready.set()
    leave.wait()
