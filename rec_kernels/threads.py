"""Threads of a training on the CPU: one that computes alone, and short waits while other programs need the same cores.

Waiting OpenMP threads spin before they sleep; libgomp, torch's OpenMP on Linux, spins for 300,000 turns, which take
milliseconds. That is right on idle cores, because waking a thread takes longer than most waits. Beside another program
it is wrong: one thread waits for a core, and the thread that waits for it spins on the core it could use. So
``ShortWaits`` shortens the spinning while another program takes a core. The number of threads stays as it is, because
the last bits of some matrix products depend on it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

INTERVAL = 0.1  # seconds between two looks
BEGIN, END = 2, 5  # consecutive looks that must agree before waits become short, and before they become long again
TOLERATED = 0.3  # cores that may be missing: some other program always takes a little
PER_THREAD = 32_768  # elements: torch's grain size, the least work it gives a thread
STAT = Path("/proc/stat")

#: Held while a thread of ours changes the number of threads that new threads start with.
_default = threading.Lock()


def compute_with(count: int) -> None:
    """Sets the number of torch threads of the calling thread alone. Call it first thing in a new thread.

    torch.set_num_threads also sets what threads that start later begin with. A second thread restores that default,
    because restoring it from this one would undo the change here.
    """
    with _default:
        threads = torch.get_num_threads()  # the default: this thread has never set its own
        torch.set_num_threads(count)
        restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
        restore.start()
        restore.join()


class Look(NamedTuple):
    """Processor time at one moment, in seconds."""

    clock: float
    cores: float  # that all programs have used on this process's cores
    own: float  # that this process has used

    def others(self, before: Look) -> float:
        """The number of cores that other programs used between two looks."""
        return (self.cores - before.cores - (self.own - before.own)) / (self.clock - before.clock)


def look() -> Look:
    """The processor time used so far, from ``/proc/stat``. Raises OSError where there is none."""
    own = os.sched_getaffinity(0)
    ticks = 0
    for line in STAT.read_text().splitlines():
        name, *numbers = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in own:
            user, nice, system, _idle, _iowait, interrupts, soft_interrupts = map(int, numbers[:7])
            ticks += user + nice + system + interrupts + soft_interrupts
    return Look(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class ShortWaits:
    """A context in which OpenMP threads spin only briefly while other programs take cores they need.

    libgomp spins for 100 turns instead of 300,000 while a process has more OpenMP threads than cores (GOMP_SPINCOUNT in
    libgomp's manual). So the context starts surplus OpenMP threads, which sleep, while another program is busy, and
    ends them when it is gone. It does nothing where the environment already says how to wait (OMP_WAIT_POLICY,
    GOMP_SPINCOUNT), where one thread computes, and where there is no ``/proc/stat``.

    Args:
        look: reads the processor time; tests pass their own.
    """

    def __init__(self, look: Callable[[], Look] = look):
        self._look, self._end = look, threading.Event()
        self._cores, self._threads = 0, torch.get_num_threads()
        self._watch: threading.Thread | None = None
        self._surplus: tuple[threading.Thread, threading.Event] | None = None

    def __enter__(self) -> ShortWaits:
        told = any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
        if not told and self._threads > 1 and STAT.exists():
            self._cores = len(os.sched_getaffinity(0))
            self._watch = threading.Thread(target=self._watch_others, name="neighbours", daemon=True)
            self._watch.start()
        return self

    def __exit__(self, *_) -> None:
        if self._watch is not None:
            self._end.set()
            self._watch.join()
            self._set(False)

    @property
    def short(self) -> bool:
        """True while waits are short."""
        return self._surplus is not None

    def _watch_others(self) -> None:
        agreeing, before = 0, self._look()
        while not self._end.wait(INTERVAL):
            now = self._look()
            crowded = now.others(before) + self._threads > self._cores + TOLERATED
            before = now
            agreeing = agreeing + 1 if crowded != self.short else 0
            if agreeing == (BEGIN if crowded else END):
                self._set(crowded)
                agreeing = 0

    def _set(self, short: bool) -> None:
        if short and self._surplus is None:
            count = max(self._cores - self._threads + 1, 1) + 1  # the new thread itself is no OpenMP worker
            leave, there = threading.Event(), threading.Event()
            thread = threading.Thread(target=_sleep, args=(count, there, leave), name="surplus", daemon=True)
            thread.start()
            there.wait()
            self._surplus = thread, leave
        elif not short and self._surplus is not None:
            thread, leave = self._surplus
            leave.set()
            thread.join()
            self._surplus = None


def _sleep(count: int, there: threading.Event, leave: threading.Event) -> None:
    """Starts an OpenMP team of ``count`` threads, this one included; it ends with this thread when ``leave`` is set."""
    try:
        compute_with(count)
        torch.ones(count * PER_THREAD)
    finally:
        there.set()
    leave.wait()
