"""Files of a run's folder, which may be untrusted: writes stay in the folder, values read are checked against a shape.

Writing replaces the directory entry, so neither symbolic nor hard links are written through; reading follows links.
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
def atomic_write(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """Writes a new file that replaces ``path`` at the end of the block; on an error, ``path`` is unchanged.

    Args:
        durable: sync the file before, and the folder after the rename, so that a power failure loses neither.

    Raises:
        OSError: the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # left by a killed process, or a link
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
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by a file with this text."""
    with atomic_write(path) as file:
        file.write(text.encode(errors="replace"))  # paths may contain bytes that are not UTF-8


def refuse_foreign(path: Path, *, folder: bool = False) -> None:
    """Raises DataError if ``path`` exists and is not a regular file with one hard link, or not a real folder."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        raise DataError(
            f"{path} is a symbolic link, and its target would be changed: replace the link with the file itself"
        )
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(found.st_mode):
        raise DataError(f"{path} is not {'a folder' if folder else 'an ordinary file'}: move it away")
    if not folder and found.st_nlink > 1:
        raise DataError(
            f"{path} has {found.st_nlink} names (hard links), and would be changed under all of them: replace "
            "it with a copy"
        )


def read_text(path: Path, size: int = -1) -> str:
    """Reads a UTF-8 file, or its first ``size`` bytes.

    Raises:
        DataError: it is a special file or not UTF-8. OSError: it cannot be read.
    """
    refuse_special(path)
    try:
        with path.open("rb") as file:
            return file.read(size).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text file: {error}") from error


def refuse_special(path: Path) -> None:
    """Raises DataError if ``path`` exists but is not a regular file: reading a pipe would wait for its writer."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not an ordinary file: move it away")


def parse_json(text: str, where: object) -> Any:
    """Parses JSON; DataError that names ``where`` if the text is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def read_json(path: Path) -> Any:
    """Reads a JSON file; errors as in ``read_text`` and ``parse_json``."""
    return parse_json(read_text(path), path)


class Check(NamedTuple):
    """A check of one value: a description of the allowed values and a predicate."""

    allowed: str
    fits: Callable[[Any], bool]


class Maybe(NamedTuple):
    """None or a value of this shape."""

    shape: Any


class Each(NamedTuple):
    """A list, or a dict, of values of this shape."""

    shape: Any


def integer(least: int = 0, most: int = 2**63 - 1) -> Check:
    """Checks for an int; bools are refused."""
    allowed = f"a whole number from {least} to {most}"
    return Check(allowed, lambda value: type(value) is int and least <= value <= most)


def number(least: float = -1e300, most: float = 1e300) -> Check:
    """Checks for a float or an int that is not NaN."""
    allowed = f"a number from {least:g} to {most:g}"
    return Check(allowed, lambda value: type(value) in (int, float) and least <= value <= most)


TEXT = Check("a text", lambda value: isinstance(value, str))
FLAG = Check("true or false", lambda value: isinstance(value, bool))


def mismatch(value: Any, shape: Any, name: str) -> str | None:
    """Describes the first mismatch, e.g. "step is -1, allowed is a whole number from 0 to 8"; None if the value fits.

    Args:
        shape: a ``Check``, ``Maybe`` or ``Each``, or a dict from required keys to their shapes. A key that ends with
            "?" is optional; other keys of the value are ignored.
        name: of the value, for the message; "" for the content of a file.
    """
    if isinstance(shape, Maybe):
        return None if value is None else mismatch(value, shape.shape, name)
    if isinstance(shape, Check):
        return None if shape.fits(value) else f"{name} is {short_repr(value)}, allowed is {shape.allowed}"
    if isinstance(shape, Each):
        if not isinstance(value, (list, tuple, dict)):
            return f"{name} is {short_repr(value)}, allowed is a list or an object"
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (mismatch(part, shape.shape, f"{name}[{key!r}]") for key, part in parts)), None)
    if not isinstance(value, dict):
        return f"{name or 'it'} is {short_repr(value)}, allowed is an object"
    for key, part in shape.items():
        inner = key.removesuffix("?")
        if inner not in value and inner == key:
            return f"{name or 'it'} has no {key!r}"
        label = f"{name}[{inner!r}]" if name else inner
        if inner in value and (wrong := mismatch(value[inner], part, label)):
            return wrong
    return None


def short_repr(value: Any, most: int = 80) -> str:
    """The repr on one line, shortened to ``most`` characters."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an int of thousands of digits; deeply nested lists
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= most else f"{text[: most - 3]}..."
