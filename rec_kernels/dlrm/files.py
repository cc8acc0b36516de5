"""The files of a run's folder, which may have come from somebody else: what is written stays in the folder, what is
read has the types and bounds of its shape.

A file is replaced by a new one, whatever was there under its name: the one before, a link, a name of a file that has
others (hard links, as backups make them). Links are followed for reading only.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

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
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"it cannot be written: {error.strerror}", str(path)) from error
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


class Check(NamedTuple):
    """A check of one value.

    Args:
        allowed: the same as text.
        fits: whether a value is that.
    """

    allowed: str
    fits: Callable[[Any], bool]


class Maybe(NamedTuple):
    """None, or a value of this shape."""

    shape: Any


class Each(NamedTuple):
    """A list, or the values of a dict, of this shape each."""

    shape: Any


def whole(least: int = 0, most: int = 2**63 - 1) -> Check:
    """An int, which is not a bool."""
    allowed = f"a whole number from {least} to {most}"
    return Check(allowed, lambda value: type(value) is int and least <= value <= most)


def number(least: float = -1e300, most: float = 1e300) -> Check:
    """A float or an int; not NaN."""
    allowed = f"a number from {least:g} to {most:g}"
    return Check(allowed, lambda value: type(value) in (int, float) and least <= value <= most)


TEXT = Check("a text", lambda value: isinstance(value, str))
FLAG = Check("true or false", lambda value: isinstance(value, bool))


def mismatch(value: Any, shape: Any, name: str) -> str | None:
    """Describes what is wrong with a value, as "step is -1, allowed is a whole number from 0 to 8"; None: it fits.

    Args:
        value: as read.
        shape: a ``Check``, ``Maybe`` or ``Each``, or a dict of the keys that a dict must have, and their shapes. A key
            that ends with "?" may be missing; others are not looked at.
        name: of the value, for the message; "" of the whole of a file.
    """
    if isinstance(shape, Maybe):
        return None if value is None else mismatch(value, shape.shape, name)
    if isinstance(shape, Check):
        return None if shape.fits(value) else f"{name} is {shown(value)}, allowed is {shape.allowed}"
    if isinstance(shape, Each):
        if not isinstance(value, (list, tuple, dict)):
            return f"{name} is {shown(value)}, allowed is a list or an object"
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (mismatch(part, shape.shape, f"{name}[{key!r}]") for key, part in parts)), None)
    if not isinstance(value, dict):
        return f"{name or 'it'} is {shown(value)}, allowed is an object"
    for key, part in shape.items():
        inner = key.removesuffix("?")
        if inner not in value and inner == key:
            return f"{name or 'it'} has no {key!r}"
        label = f"{name}[{inner!r}]" if name else inner
        if inner in value and (wrong := mismatch(value[inner], part, label)):
            return wrong
    return None


def shown(value: Any, most: int = 80) -> str:
    """The value in one line, shortened to so many characters."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an int of thousands of digits; lists in lists
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= most else f"{text[: most - 3]}..."
