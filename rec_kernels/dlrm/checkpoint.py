"""Checkpoints of a training run: written whole or not at all, read without executing anything."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from rec_kernels.dlrm import files
from rec_kernels.dlrm.data import DataError

NAME = "checkpoint.pt"
FORMAT = 2  # 1: features in two collections


def save(directory: Path, state: dict[str, Any]) -> None:
    """Writes ``checkpoint.pt``; the one before stays in place until the new one is on the disk.

    Args:
        directory: of the run.
        state: tensors, numbers, texts, and lists and dicts of them.

    Raises:
        OSError: the disk is full or cannot be written to; the checkpoint before is untouched.
    """
    path = directory / NAME
    try:
        with files.replacing(path) as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # torch's writer says so when the disk is full
        raise OSError(f"{path} could not be written: {error}") from error
    _sync_directory(directory)


def load(directory: Path) -> dict[str, Any]:
    """The state that ``save`` wrote last.

    Raises:
        DataError: there is no checkpoint, or it is damaged or of another format.
    """
    path = directory / NAME
    files.refuse_special(path)
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not check the checksums
            if (damaged := archive.testzip()) is not None:
                raise DataError(f"{path} is damaged: the checksum of {damaged} is wrong")
        state = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise DataError(f"{directory} has no {NAME}: nothing to go on from") from error
    except DataError:
        raise
    except Exception as error:  # what the bytes of a file can make a reader raise has no end
        raise DataError(f"{path} is damaged: {error!r}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise DataError(f"{path} has format {found!r}, expected {FORMAT}: another version wrote it, so train anew")
    return state


def _sync_directory(directory: Path) -> None:
    # The rename itself must reach the disk, too.
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
