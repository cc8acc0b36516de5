"""Prepared data on disk: one ``.npy`` file per array and a manifest that says what they must be.

Files are memory-mapped and never unpickled. A directory appears under its final name only when complete, and
is rebuilt when a file is missing, truncated or altered, or was written for another format or source.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from rec_kernels.dlrm.data import DataError

MANIFEST = "manifest.json"
CHUNK = 1 << 20  # bytes

#: Makes what a directory is to hold, by name: arrays, and facts, which are JSON values of the manifest. Arrays that do
#: not fit into memory it may write by itself, as ``<name>.npy`` into the folder that it is given.
Build = Callable[[Path], dict[str, Any]]


class PreparedError(DataError):
    """A prepared directory cannot be used as it is."""


def base_directory(data_dir: str | Path | None) -> Path:
    """Folder of the prepared data: ``data_dir``, or ``~/.cache/rec_kernels``."""
    return Path(data_dir) if data_dir is not None else Path.home() / ".cache" / "rec_kernels"


def open_directory(directory: Path, identity: dict[str, Any], build: Build) -> dict[str, Any]:
    """Opens the arrays in ``directory``, which is written first if it is missing or not usable.

    Args:
        directory: of the prepared data.
        identity: what it was made of, as JSON values (lists, no tuples): of anything else it is made anew.
        build: makes it.

    Returns:
        The arrays, memory-mapped and read-only, and the facts, by name.

    Raises:
        OSError: they could not be written; what was there before is untouched.
    """
    if directory.exists():
        try:
            return read_directory(directory, identity)
        except PreparedError as error:
            tqdm.write(f"prepared data is rebuilt: {error}", file=sys.stderr)
    write_directory(directory, identity, build)
    return read_directory(directory, identity)


def write_directory(directory: Path, identity: dict[str, Any], build: Build) -> None:
    """Write what ``build`` makes as ``directory``, replacing what is there; no reader ever sees a part of it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        manifest = dict(identity)
        for name, value in build(fresh).items():
            if isinstance(value, np.ndarray):
                np.save(fresh / f"{name}.npy", value, allow_pickle=False)
            else:
                manifest[name] = value
        manifest["files"] = {file.stem: _fingerprint(file) for file in sorted(fresh.glob("*.npy"))}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        fresh.rename(directory)


def read_directory(directory: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Arrays, memory-mapped after checking every byte of them against the manifest, and facts, by name.

    Raises:
        PreparedError: names the file and what is wrong with it.
    """
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text())
        files = dict(values.pop("files"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreparedError(f"{path} cannot be read: {error!r}") from error
    for key, expected in identity.items():
        if (found := values.pop(key, None)) != expected:
            raise PreparedError(f"{path}: {key} is {found!r}, expected {expected!r}")
    for name, expected in files.items():
        file = directory / f"{name}.npy"
        try:
            if (found := _fingerprint(file)) != expected:
                raise PreparedError(f"{file} holds {found}, the manifest says {expected}")
            mapped = np.load(file, mmap_mode="r", allow_pickle=False)
            values[name] = np.asarray(mapped)  # a plain view: slices of np.memmap take three times as long
        except (OSError, ValueError) as error:
            raise PreparedError(f"{file} cannot be read: {error!r}") from error
    return values


def fingerprint(directory: Path) -> str:
    """Fingerprint of a prepared directory's contents, independent of its place and of its source."""
    files = json.loads((directory / MANIFEST).read_text())["files"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _fingerprint(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def ids_by_appearance(values: np.ndarray, train_rows: int) -> tuple[np.ndarray, int]:
    """Ids 1, 2, ... of values [N] in order of first appearance; 0 for one whose first appearance is a test row.

    Rows [0, train_rows) are for training, 1 or more. Returns int64 [N], and the rows of the table, row 0 included.
    """
    codes = pd.factorize(values)[0]
    seen = int(codes[:train_rows].max()) + 1
    return np.where(codes < seen, codes + 1, 0), seen + 1


def mix64(keys: np.ndarray) -> np.ndarray:
    """A well-mixed 64-bit number for each key: the output of SplitMix64 whose state is the key.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014. Keys and numbers are uint64
    of any shape; different keys give different numbers.
    """
    # Arrays of integers wrap around without a warning, as the method wants it.
    mixed = np.asarray(keys, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
