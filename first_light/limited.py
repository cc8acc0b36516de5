"""A command under a time limit: its whole group of processes ends with it, and its log stays small."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from first_light import ROOT

#: Bytes of a command's output that are kept: the first, as they come, and the last, when it has ended.
HEAD, TAIL = 3 * 2**18, 2**18
#: Bytes of a log, of all commands together, above which it begins anew.
LOG = 12 * 2**20
#: Seconds that a command has between being asked to end and being killed: pytest prints what it knows meanwhile.
GRACE = 12.0


@dataclass(frozen=True)
class Ended:
    """The end of a command. ``status`` is its exit status, None where it was stopped at its limit."""

    status: int | None
    seconds: float
    tail: str


class Output:
    """Writes what a command prints: the first ``HEAD`` bytes at once, and of the rest the last ``TAIL``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._written, self._left_out = file, 0, 0
        self._last: deque[bytes] = deque()
        self._kept = 0

    def write(self, some: bytes) -> None:
        """Keeps it; what is written is in the file when this returns."""
        now = some[: max(0, HEAD - self._written)]
        self._file.write(now)
        self._file.flush()
        self._written += len(now)
        self._last.append(some)
        self._kept += len(some)
        self._left_out += len(some) - len(now)
        while self._kept - len(self._last[0]) >= TAIL:
            self._kept -= len(self._last.popleft())

    def close(self) -> str:
        """Writes the end of what was too long; returns the last of what was printed."""
        last = b"".join(self._last)[-TAIL:]
        if self._left_out:
            shown = last[-self._left_out :]
            self._file.write(b"\n... %d bytes left out ...\n" % (self._left_out - len(shown)) + shown)
        self._file.flush()
        return last.decode(errors="replace")


def run(
    command: Sequence[str], log: Path, seconds: float, environment: dict[str, str] | None = None, grace: float = GRACE
) -> Ended:
    """Runs a command in the checkout's root.

    Args:
        command: the program and its arguments.
        log: the file to which what it prints is appended as it comes; never more than ``HEAD + TAIL`` bytes.
        seconds: after which it has ended. ``grace`` seconds before, it is asked to, as by Ctrl-C.
        environment: variables that it gets beside this process's.

    Returns:
        How it ended; one that cannot be started has status 127.
    """
    start = time.monotonic()
    with log.open("wb" if log.exists() and log.stat().st_size > LOG else "ab") as file:
        output = Output(file)
        output.write(f"\n$ {' '.join(map(str, command))}\n".encode())
        try:
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT,
                env=os.environ | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=_be_asked,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{error}\n".encode())
            return Ended(127, time.monotonic() - start, output.close())
        try:
            in_time = _read(process, output, start + max(seconds - grace, 1.0), start + seconds)
        finally:
            _kill(process)
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a device cannot be killed
            process.wait(3)
        return Ended(process.returncode if in_time else None, time.monotonic() - start, output.close())


def _read(process: subprocess.Popen, output: Output, ask: float, kill: float) -> bool:
    """Copies output until the process ends or the time ``kill`` comes; returns False if it had to be asked to end."""
    asked = False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < kill:
            if selector.select(0.2):
                some = os.read(process.stdout.fileno(), 2**16)
                output.write(some)
                if not some:  # every process of the group has closed it
                    return _has_ended(process, kill) and not asked
            elif process.poll() is not None:
                return not asked
            if not asked and time.monotonic() > ask:
                asked = True
                _suppress(lambda: process.send_signal(signal.SIGINT))
    return False


def _has_ended(process: subprocess.Popen, until: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.monotonic()))
    return process.poll() is not None


def _kill(process: subprocess.Popen) -> None:
    """The process and all that it has started."""
    _suppress(lambda: os.killpg(process.pid, signal.SIGKILL))


def _be_asked() -> None:
    """A shell's background jobs, and what they start, do not hear of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _suppress(act: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        act()
