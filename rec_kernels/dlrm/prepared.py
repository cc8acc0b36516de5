"""The prepared data on disk: one ``.npy`` file per array and a manifest that says what they must be.

Files are memory-mapped and never unpickled. A directory appears under its final name only when complete, and
is rebuilt when a file is missing, truncated or altered, or was written for another format or source.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from rec_kernels.dlrm.data import DataError

MANIFEST = "manifest.json"
CHUNK = 1 << 20  # bytes


class PreparedError(DataError):
    """A prepared directory cannot be used as it is."""


class Contents(NamedTuple):
    """What a prepared directory must hold.

    Args:
        identity: what it was made of, as JSON values (lists, no tuples): of anything else it is made anew.
        arrays: names of the arrays, each in ``<name>.npy``.
        facts: names of further JSON values in the manifest.
    """

    identity: dict[str, Any]
    arrays: tuple[str, ...]
    facts: tuple[str, ...] = ()

    def save(self, data: Any, folder: Path) -> dict[str, Any]:
        """Writes the arrays that ``data`` has as attributes, and returns the facts that it has."""
        for name in self.arrays:
            np.save(_file(folder, name), getattr(data, name), allow_pickle=False)
        return {name: getattr(data, name) for name in self.facts}


def arrays_of(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass that are arrays."""
    return tuple(field.name for field in fields(kind) if field.type == "np.ndarray")


def base_directory(data_dir: str | Path | None) -> Path:
    """Folder of the prepared data: ``data_dir``, or ``~/.cache/rec_kernels``."""
    return Path(data_dir) if data_dir is not None else Path.home() / ".cache" / "rec_kernels"


def open_directory(
    directory: Path, contents: Contents, build: Callable[[Path], dict[str, Any] | None]
) -> dict[str, Any]:
    """What is in ``directory``, which is written first if it is missing or not usable.

    Args:
        directory: of the prepared data.
        contents: what it must hold.
        build: writes every array into the folder it is given, and nothing else, and returns the facts, if any.

    Returns:
        The arrays, memory-mapped and read-only, and the facts, by name.

    Raises:
        OSError: they could not be written; what was there before is untouched.
    """
    if directory.exists():
        try:
            return read_directory(directory, contents)
        except PreparedError as error:
            tqdm.write(f"prepared data is rebuilt: {error}", file=sys.stderr)
    write_directory(directory, contents, build)
    return read_directory(directory, contents)


def write_directory(directory: Path, contents: Contents, build: Callable[[Path], dict[str, Any] | None]) -> None:
    """Write what ``build`` makes as ``directory``, replacing what is there; no reader ever sees a part of it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        manifest = contents.identity | (build(fresh) or {})
        manifest["files"] = {name: _fingerprint(_file(fresh, name)) for name in contents.arrays}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        fresh.rename(directory)


def read_directory(directory: Path, contents: Contents) -> dict[str, Any]:
    """Arrays, memory-mapped after checking every byte of them against the manifest, and facts, by name.

    Raises:
        PreparedError: names the file and what is wrong with it.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files = {name: manifest["files"][name] for name in contents.arrays}
        values = {name: manifest[name] for name in contents.facts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PreparedError(f"{path} cannot be read: {error!r}") from error
    for key, expected in contents.identity.items():
        if manifest.get(key) != expected:
            raise PreparedError(f"{path}: {key} is {manifest.get(key)!r}, expected {expected!r}")
    for name in contents.arrays:
        file = _file(directory, name)
        try:
            found = _fingerprint(file)
            if found != files[name]:
                raise PreparedError(f"{file} holds {found}, the manifest says {files[name]}")
            mapped = np.load(file, mmap_mode="r", allow_pickle=False)
            values[name] = np.asarray(mapped)  # a plain view: slices of np.memmap take three times as long
        except (OSError, ValueError) as error:
            raise PreparedError(f"{file} cannot be read: {error!r}") from error
    return values


def fingerprint(directory: Path) -> str:
    """Of the contents of a prepared directory that was read: the same wherever it is and whatever it was made from."""
    files = json.loads((directory / MANIFEST).read_text())["files"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name}.npy"


def _fingerprint(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def ids_by_appearance(values: np.ndarray, train_rows: int) -> tuple[np.ndarray, int]:
    """Ids 1, 2, ... in order of first appearance; 0 for a value whose first appearance is a test row.

    Args:
        values: [N], any dtype that pandas can factorise.
        train_rows: rows [0, train_rows) are for training, 1 or more.

    Returns:
        int64 [N], and the rows of the table, row 0 included.
    """
    codes = pd.factorize(values)[0]
    seen = int(codes[:train_rows].max()) + 1
    return np.where(codes < seen, codes + 1, 0), seen + 1


def mix64(keys: np.ndarray) -> np.ndarray:
    """A well-mixed 64-bit number for each key: the output of SplitMix64 whose state is the key.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.

    Args:
        keys: uint64, any shape.

    Returns:
        uint64 of the same shape; different keys give different numbers.
    """
    # Arrays of integers wrap around without a warning, as the method wants it.
    mixed = np.asarray(keys, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
