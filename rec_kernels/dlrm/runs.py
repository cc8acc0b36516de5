"""A run's folder, config and records, and the errors and signals that end it early."""

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
from rec_kernels.dlrm.files import FLAG, TEXT, Each, Maybe, integer, mismatch, number, short_repr

RUN_NAMES = "at most 200 letters, digits, '.', '_' and '-', starting with a letter or digit"
CONFIG, METRICS = "config.json", "metrics.jsonl"

#: Timed parts of a step; "other" is the remaining time.
PARTS = ("data", "forward", "backward", "optimizer", "evaluation", "other")

_TABLE = {
    **dict.fromkeys(("name", "format"), TEXT),
    **dict.fromkeys(("num_embeddings", "embedding_dim", "weight_bytes", "state_bytes", "cache_bytes?"), integer()),
}
MACHINE = {"cpu": TEXT, "threads": integer(), "gpu": Maybe(TEXT), "processes?": integer(2)}
_SCORES = dict.fromkeys(("auc", "log_loss"), Maybe(number()))
# Fields that readers use, by kind of record.
_RECORDS = {
    "train": {
        **dict.fromkeys(("step", "examples"), integer()),
        **dict.fromkeys(("loss", "auc"), Maybe(number())),
        "lr": number(),
        "seconds": dict.fromkeys(PARTS, number()),
    },
    "eval": {"step": integer(), "split": TEXT, **_SCORES},
    "failed": {"step": integer(), "error": TEXT},
    "test": {
        **_SCORES,
        **dict.fromkeys(("normalized_entropy", "calibration"), Maybe(number())),
        **dict.fromkeys(("accuracy", "base_rate", "examples_per_second", "train_seconds"), number()),
        **dict.fromkeys(("step", "examples", "train_examples", "peak_memory_bytes", "dense_parameters"), integer()),
        "flops_per_example": integer(),
        "stopped_early": FLAG,
        "device": TEXT,
        "tables": Each(_TABLE),
        "ranks?": Each(dict.fromkeys(("table_bytes", "peak_memory_bytes"), integer())),
        "machines": Each(MACHINE),
        "counted_from?": integer(),
        "dedup?": FLAG,
        "dedup_factor?": Maybe(number()),
    },
}


class TrainingError(RuntimeError):
    """The training cannot continue."""


class NotFiniteError(TrainingError):
    """A loss or a prediction is not finite; a run of the same config will fail in the same way."""


class RunInterruptedError(Exception):
    """Ctrl-C or SIGTERM stopped the run, which has written a checkpoint to ``directory``."""

    def __init__(self, message: str, directory: Path):
        super().__init__(message)
        self.directory = directory


class RunExistsError(RuntimeError):
    """A run of this name exists already, or is being trained."""


def is_run_name(name: str) -> bool:
    """True if ``name`` is valid for a run's folder."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,199}", name) is not None


def refuse_existing(runs_dir: str, name: str) -> None:
    """Raises RunExistsError if ``runs_dir`` has a run ``name``."""
    if (Path(runs_dir) / name).exists():
        raise RunExistsError(f"run {name!r} exists in {runs_dir}: choose another name, resume it or delete it")


def create_run(runs_dir: str, name: str | None, default: str) -> Path:
    """Creates the folder ``name``, or the first unused of ``default``, ``default-2``, ..."""
    for attempt in itertools.count(1):
        if name is not None:
            refuse_existing(runs_dir, name)
        directory = Path(runs_dir) / (name or (default if attempt == 1 else f"{default}-{attempt}"))
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            break
    return directory


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a run's folder against other trainings; the lock ends with the process and its forks.

    File systems without locks of folders, such as some network file systems, are not locked.
    """
    folder = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunExistsError(f"another process trains {directory}: wait for it, or stop it") from error
        except OSError:
            pass  # not supported by the file system
        yield
    finally:
        os.close(folder)


def write_config(directory: Path, config: dict, dedup: dict, gpu: str | None = None) -> None:
    """Writes ``config.json``: options, versions (with the GPU's name, if any) and the outcome of option ``dedup``."""
    versions = devices.versions() | ({} if gpu is None else {"gpu": gpu})
    settings = {"config": config, "versions": versions, "dedup": dedup}
    files.write_text(directory / CONFIG, json.dumps(settings, indent=2) + "\n")


class Records:
    """``metrics.jsonl`` of a run: one JSON object per line; not written unless ``writes``.

    Raises:
        DataError: from all methods, the file is invalid.
    """

    def __init__(self, directory: Path, *, writes: bool = True):
        self.path, self._writes, self._text = directory / METRICS, writes, ""

    def append(self, record: dict) -> None:
        """Appends a record and syncs the file."""
        self._write(self._text + json.dumps(record) + "\n")

    def _write(self, text: str) -> None:
        self._text = text
        if self._writes:
            with files.atomic_write(self.path, durable=True) as file:
                file.write(text.encode())

    def mark(self) -> int:
        """The size of the file in bytes."""
        return len(self._text.encode())

    def rewind(self, mark: int) -> None:
        """Truncates the file to ``mark`` bytes; ValueError, without a change, unless a record ends there."""
        files.refuse_special(self.path)
        text = files.read_text(self.path, mark) if self.path.exists() else ""
        if (end := len(text.encode())) < mark:
            raise ValueError(f"{self.path} has {end} bytes, expected {mark} or more")
        self._parsed(text)
        if mark and not text.endswith("\n"):
            raise ValueError(f"records is {mark}, which is not the end of a line of {self.path}")
        self._write(text)

    def read(self) -> list[dict]:
        """Reads all records except a truncated last one; DataError names an invalid line."""
        return self._parsed(files.read_text(self.path) if self.path.exists() else "")

    def _parsed(self, text: str) -> list[dict]:
        lines = text.split("\n")[:-1]  # the last part is empty or a truncated record
        return [_record(line, f"{self.path}, line {at}") for at, line in enumerate(lines, 1)]


def _record(line: str, where: str) -> dict:
    record = files.parse_json(line, where)
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _RECORDS:
        raise DataError(f"{where} is not a record: its kind is {short_repr(kind)}, allowed are {', '.join(_RECORDS)}")
    if wrong := mismatch(record, _RECORDS[kind], ""):
        raise DataError(f"{where} is not a record: {wrong}")
    return record


def peak_memory_bytes() -> int:
    """The peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory; torch has no error type for the CPU's."""
    texts = ("DefaultCPUAllocator", "(out of memory?)")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in texts)


@contextlib.contextmanager
def stop_at_signal() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one raises KeyboardInterrupt."""
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
