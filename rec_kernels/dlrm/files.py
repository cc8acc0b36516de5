"""The files of a run's folder, which may have come from somebody else: what is written stays in the folder.

A file is replaced by a new one, whatever was there under its name: the one before, a link, a name of a file that has
others (hard links, as backups make them). One that is added to is replaced by a copy first, where it is a link or has
other names. Links are followed for reading only.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rec_kernels.dlrm.data import DataError


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` at the end of the block; if that fails, what was there stays.

    Args:
        path: of the file. durable: it is on the disk before it has its name, and with it afterwards, whenever the
            machine stops.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # what a process that was killed has left, or a link
    try:
        with fresh.open("xb") as file:  # exclusive: never through a link
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself must reach the disk, too
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by a file of this text."""
    with replacing(path) as file:
        file.write(text.encode(errors="replace"))  # a path may have bytes that are no text


def make_own(path: Path) -> None:
    """Replaces a link, or a file that has other names, by a copy, which can then be added to."""
    if path.is_symlink() or (path.exists() and path.stat().st_nlink > 1):
        with replacing(path, durable=True) as file:
            file.write(path.read_bytes() if path.exists() else b"")


def refuse_foreign(path: Path, *, folder: bool = False) -> None:
    """Raise DataError if ``path`` is there and not an ordinary file that has no other names, or not a real folder."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        raise DataError(f"{path} is a symbolic link, and what it leads to would be changed: put the file itself there")
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(found.st_mode):
        raise DataError(f"{path} is not {'a folder' if folder else 'an ordinary file'}: move it away")
    if not folder and found.st_nlink > 1:
        raise DataError(
            f"{path} has {found.st_nlink} names (hard links), and would be changed under each: put a copy there"
        )


def read_text(path: Path, size: int = -1) -> str:
    """The text of a file, or of its first ``size`` bytes.

    Raises:
        DataError: it is a pipe, a device or the like, or not UTF-8. OSError: it cannot be read.
    """
    refuse_special(path)
    try:
        with path.open("rb") as file:
            return file.read(size).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text: {error}") from error


def refuse_special(path: Path) -> None:
    """Raise DataError if ``path`` is there and leads to no ordinary file: reading a pipe would wait for its writer."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not an ordinary file: move it away")


def parse_json(text: str, where: object) -> Any:
    """Parses a text of JSON; ``where`` it stands, for the message.

    Raises:
        DataError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def read_json(path: Path) -> Any:
    """Reads a file of JSON; errors are those of ``read_text`` and ``parse_json``."""
    return parse_json(read_text(path), path)
