"""Prepared data on disk: a directory of memory-mapped ``.npy`` files and a manifest with their checksums.

A directory gets its name when it is complete, and is rebuilt if a file is missing or altered, or the source or format
differs. Nothing is unpickled.
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

#: Returns arrays and facts (JSON values for the manifest) by name; may write arrays that do not fit into memory to the
#: given folder as ``<name>.npy`` instead.
Build = Callable[[Path], dict[str, Any]]


class PreparedError(DataError):
    """A prepared directory is not usable and must be rebuilt."""


def base_directory(data_dir: str | Path | None) -> Path:
    """The folder of prepared data: ``data_dir``, or ``~/.cache/rec_kernels``."""
    return Path(data_dir) if data_dir is not None else Path.home() / ".cache" / "rec_kernels"


def open_directory(directory: Path, identity: dict[str, Any], build: Build) -> dict[str, Any]:
    """Reads ``directory``; builds it first if it is missing, not usable or has another identity.

    Args:
        identity: identifies the source and options, as JSON values (lists, not tuples).

    Returns:
        The arrays, memory-mapped and read-only, and the facts, by name.

    Raises:
        OSError: the directory could not be written; a previous one is unchanged.
    """
    if directory.exists():
        try:
            return read_directory(directory, identity)
        except PreparedError as error:
            tqdm.write(f"prepared data is rebuilt: {error}", file=sys.stderr)
    write_directory(directory, identity, build)
    return read_directory(directory, identity)


def write_directory(directory: Path, identity: dict[str, Any], build: Build) -> None:
    """Builds ``directory`` under a temporary name, then replaces it by renaming."""
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
    """Verify all checksums and return arrays, memory-mapped, and facts; PreparedError names an invalid file."""
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
            values[name] = np.asarray(mapped)  # slicing an np.memmap takes three times as long
        except (OSError, ValueError) as error:
            raise PreparedError(f"{file} cannot be read: {error!r}") from error
    return values


def fingerprint(directory: Path) -> str:
    """A fingerprint of a prepared directory's arrays, independent of its path and source."""
    files = json.loads((directory / MANIFEST).read_text())["files"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _fingerprint(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def ids_by_appearance(values: np.ndarray, train_rows: int) -> tuple[np.ndarray, int]:
    """Maps values [N] to ids 1, 2, ... in order of first appearance; 0 for values not in the first ``train_rows`` rows.

    Returns int64 [N], and the number of table rows, including row 0. ``train_rows`` is 1 or more.
    """
    codes = pd.factorize(values)[0]
    seen = int(codes[:train_rows].max()) + 1
    return np.where(codes < seen, codes + 1, 0), seen + 1


def mix64(keys: np.ndarray) -> np.ndarray:
    """Hashes keys by SplitMix64, a bijection; uint64 of any shape.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    # Integer arrays wrap around without a warning, as the hash requires.
    mixed = np.asarray(keys, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
