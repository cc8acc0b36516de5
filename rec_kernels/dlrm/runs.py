"""A run: its folder, which has its name and its records, and what ends it early: errors, Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rec_kernels.dlrm import devices, files
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.files import FLAG, TEXT, Each, Maybe, mismatch, number, shown, whole

RUN_NAMES = "at most 200 letters, digits, '.', '_' and '-', starting with a letter or digit"
CONFIG, METRICS = "config.json", "metrics.jsonl"

#: The parts of a step whose seconds are told apart; "other" is what no part accounts for.
PARTS = ("data", "forward", "backward", "optimizer", "evaluation", "other")

_TABLE = {
    **dict.fromkeys(("name", "format"), TEXT),
    **dict.fromkeys(("num_embeddings", "embedding_dim", "weight_bytes", "state_bytes", "cache_bytes?"), whole()),
}
MACHINE = {"cpu": TEXT, "threads": whole(), "gpu": Maybe(TEXT), "processes?": whole(2)}
_SCORES = dict.fromkeys(("auc", "log_loss"), Maybe(number()))
# Fields that are read, by kind of record, without the report's tiers and profile.
_RECORDS = {
    "train": {
        **dict.fromkeys(("step", "examples"), whole()),
        **dict.fromkeys(("loss", "auc"), Maybe(number())),
        "lr": number(),
        "seconds": dict.fromkeys(PARTS, number()),
    },
    "eval": {"step": whole(), "split": TEXT, **_SCORES},
    "failed": {"step": whole(), "error": TEXT},
    "test": {
        **_SCORES,
        **dict.fromkeys(("normalized_entropy", "calibration"), Maybe(number())),
        **dict.fromkeys(("accuracy", "base_rate", "examples_per_second", "train_seconds"), number()),
        **dict.fromkeys(("step", "examples", "train_examples", "peak_memory_bytes", "dense_parameters"), whole()),
        "flops_per_example": whole(),
        "stopped_early": FLAG,
        "device": TEXT,
        "tables": Each(_TABLE),
        "ranks?": Each(dict.fromkeys(("table_bytes", "peak_memory_bytes"), whole())),
        "machines": Each(MACHINE),
        "counted_from?": whole(),
        "dedup?": FLAG,
        "dedup_factor?": Maybe(number()),
    },
}


class TrainingError(RuntimeError):
    """The training cannot go on."""


class NotFiniteError(TrainingError):
    """A loss or a prediction is not finite: the same config comes to it again, whatever else is changed."""


class RunInterruptedError(Exception):
    """Ctrl-C or SIGTERM; a checkpoint has been written to ``directory``."""

    def __init__(self, message: str, directory: Path):
        super().__init__(message)
        self.directory = directory


class RunExistsError(RuntimeError):
    """A run of that name is there already; nothing is overwritten."""


def is_run_name(name: str) -> bool:
    """True if ``name`` can be a run's folder."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,199}", name) is not None


def refuse_existing(runs_dir: str, name: str) -> None:
    """Raise RunExistsError if ``runs_dir`` has a run ``name``."""
    if (Path(runs_dir) / name).exists():
        raise RunExistsError(f"run {name!r} exists in {runs_dir}: choose another name, resume it or delete it")


def create_run(runs_dir: str, name: str | None, default: str) -> Path:
    """Create the folder of run ``name``, or of the first free of ``default``, ``default-2``, ..."""
    for attempt in itertools.count(1):
        if name is not None:
            refuse_existing(runs_dir, name)
        directory = Path(runs_dir) / (name or (default if attempt == 1 else f"{default}-{attempt}"))
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            break
    return directory


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Keeps other trainings away from a run's folder; the claim ends with the process and those that it has forked.

    Nobody is kept away where the file system locks no folders, as those of networks may.
    """
    folder = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunExistsError(f"another process trains {directory}: wait for it, or stop it") from error
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(folder)


def write_config(directory: Path, config: dict, dedup: dict, gpu: str | None = None) -> None:
    """Write ``config.json``; ``dedup``: what the option came to. ``gpu``: that the run begins on, if any."""
    versions = devices.versions() | ({} if gpu is None else {"gpu": gpu})
    settings = {"config": config, "versions": versions, "dedup": dedup}
    files.write_text(directory / CONFIG, json.dumps(settings, indent=2) + "\n")


class Records:
    """``metrics.jsonl`` of a run: one JSON object per line, written anew with every record where they are ``kept``.

    DataError: of all members, the file is not what it should be.
    """

    def __init__(self, directory: Path, *, kept: bool = True):
        self.path, self._kept, self._text = directory / METRICS, kept, ""

    def append(self, record: dict) -> None:
        """Appends a record; it is on the disk when this returns."""
        self._text += json.dumps(record) + "\n"
        self._write()

    def _write(self) -> None:
        if self._kept:
            with files.replacing(self.path, durable=True) as file:
                file.write(self._text.encode())

    def mark(self) -> int:
        """End of the file, in bytes."""
        return len(self._text.encode())

    def rewind(self, mark: int) -> None:
        """Drops what was appended after ``mark``: a resumed run records it again.

        ValueError: the file is shorter than that, or no record ends there. It then stays as it was.
        """
        files.refuse_special(self.path)
        text = files.read_text(self.path, mark) if self.path.exists() else ""
        if (end := len(text.encode())) < mark:
            raise ValueError(f"{self.path} has {end} bytes, expected {mark} or more")
        self._parsed(text)
        if mark and not text.endswith("\n"):
            raise ValueError(f"records is {mark}, where no line of {self.path} ends")
        self._text = text
        self._write()

    def read(self) -> list[dict]:
        """All records; not a last one that was cut short. DataError names the line that is no record."""
        return self._parsed(files.read_text(self.path) if self.path.exists() else "")

    def _parsed(self, text: str) -> list[dict]:
        lines = text.split("\n")[:-1]  # after the last "\n" there is nothing, or what was cut short
        return [_record(line, f"{self.path}, line {at}") for at, line in enumerate(lines, 1)]


def _record(line: str, where: str) -> dict:
    record = files.parse_json(line, where)
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _RECORDS:
        raise DataError(f"{where} is no record: its kind is {shown(kind)}, allowed are {', '.join(_RECORDS)}")
    if wrong := mismatch(record, _RECORDS[kind], ""):
        raise DataError(f"{where} is no record: {wrong}")
    return record


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory was not enough; the CPU's have no type of their own."""
    texts = ("DefaultCPUAllocator", "(out of memory?)")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in texts)


@contextlib.contextmanager
def stop_at_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, so that a step ends before the run does. A second one ends it at once."""
    event = threading.Event()

    def stop(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)
        event.set()

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
