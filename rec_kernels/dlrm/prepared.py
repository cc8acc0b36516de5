"""The prepared data on disk: one ``.npy`` file per array and a manifest that says what they must be.

Files are memory-mapped and never unpickled. A directory appears under its final name only when complete, and
is rebuilt when a file is missing, truncated or altered, or was written for another format or data package.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rec_kernels.dlrm import completejourney
from rec_kernels.dlrm.completejourney import LAST_WEEK, Prepared

FORMAT = 1  # raise it whenever completejourney.build gives other arrays
MANIFEST = "manifest.json"
ARRAYS = tuple(field.name for field in fields(Prepared) if field.type == "np.ndarray")


class PreparedError(RuntimeError):
    """A prepared directory cannot be used as it is."""


def load_completejourney(
    weeks: int | None = None, data_dir: str | Path | None = None, *, progress: bool = False
) -> Prepared:
    """Complete Journey as prepared arrays, built on the first call (seconds) and memory-mapped afterwards.

    Args:
        weeks: None for the whole year, or 1 to 52, the first weeks only (``completejourney.build``).
        data_dir: folder of the prepared data, ``~/.cache/rec_kernels`` by default (125 MB for all weeks).
        progress: show a progress bar while building.

    Raises:
        ValueError: ``weeks`` is out of range.
        DataError: the data package is missing or not the supported version.
    """
    if weeks is not None and not 1 <= weeks < LAST_WEEK:
        raise ValueError(f"weeks is {weeks}, allowed are 1 to {LAST_WEEK - 1}, or None for the whole year")
    base = Path(data_dir) if data_dir is not None else Path.home() / ".cache" / "rec_kernels"
    directory = base / ("completejourney" if weeks is None else f"completejourney-weeks{weeks}")
    if directory.exists():
        try:
            return read_prepared(directory, weeks)
        except PreparedError as error:
            tqdm.write(f"prepared data is rebuilt: {error}", file=sys.stderr)
    data = completejourney.build(*completejourney.read_source(weeks), weeks=weeks, progress=progress)
    write_prepared(data, directory, weeks)
    return read_prepared(directory, weeks)


def write_prepared(data: Prepared, directory: Path, weeks: int | None) -> None:
    """Write ``data`` as ``directory``, replacing what is there; no reader ever sees a part of it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        manifest = _identity(weeks) | {
            "train_rows": data.train_rows,
            "num_embeddings": data.num_embeddings,
            "files": {},
        }
        for name in ARRAYS:
            np.save(_file(fresh, name), getattr(data, name), allow_pickle=False)
            manifest["files"][name] = _fingerprint(_file(fresh, name))
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        fresh.rename(directory)


def read_prepared(directory: Path, weeks: int | None) -> Prepared:
    """Memory-map the arrays of ``directory`` after checking every byte of them against the manifest.

    Raises:
        PreparedError: names the file and what is wrong with it.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files, num_embeddings, train_rows = (manifest[key] for key in ("files", "num_embeddings", "train_rows"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PreparedError(f"{path} cannot be read: {error!r}") from error
    for key, expected in _identity(weeks).items():
        if manifest.get(key) != expected:
            raise PreparedError(f"{path}: {key} is {manifest.get(key)!r}, expected {expected!r}")
    arrays = {}
    for name in ARRAYS:
        file = _file(directory, name)
        try:
            found = _fingerprint(file)
            if found != files.get(name):
                raise PreparedError(f"{file} holds {found}, the manifest says {files.get(name)}")
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise PreparedError(f"{file} cannot be read: {error!r}") from error
    return Prepared(**arrays, num_embeddings=num_embeddings, train_rows=train_rows, weeks=weeks)


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name}.npy"


def _identity(weeks: int | None) -> dict:
    return {
        "format": FORMAT,
        "package": completejourney.PACKAGE,
        "package_version": completejourney.PACKAGE_VERSION,
        "weeks": weeks,
    }


def _fingerprint(file: Path) -> dict:
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
