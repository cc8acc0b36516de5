"""Checkpoints of a training run: written whole or not at all, read without executing anything."""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from rec_kernels.dlrm import files
from rec_kernels.dlrm.config import TrainConfig, changes
from rec_kernels.dlrm.data import DataError, DataSet
from rec_kernels.dlrm.files import FLAG, Check, Each, mismatch, number, shown, whole
from rec_kernels.dlrm.runs import MACHINE, PARTS

NAME = "checkpoint.pt"
FORMAT = 2  # 1: features in two collections

# The metadata of torch.distributed.checkpoint for tensors is made of these, by module.
_METADATA = {
    "torch": ("Size", "float32", "float16", "bfloat16", "uint8"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "WindowsPath")),
}


def _is_float32(value: Any) -> bool:
    plain = isinstance(value, Tensor) and value.dtype == torch.float32 and value.layout == torch.strided
    return plain and value.is_contiguous() and not value.is_meta


_FLOATS = Check("a tensor, float32 [N]", lambda v: _is_float32(v) and v.ndim == 1)
_SHARDS = Check("shards-STEP-NUMBER", lambda v: re.fullmatch(r"shards-\d+-\d+", str(v)) is not None)
_POSITION = {
    **dict.fromkeys(("worse", "records"), whole()),
    "seconds": number(0),
    "best": number(0, math.inf),
    "stopped_early": FLAG,
    "machines": Each(MACHINE),
    "window": {
        "steps": whole(),
        "seconds": dict.fromkeys(PARTS, number(-1e9, 1e9)),
        **dict.fromkeys(("logits?", "labels?"), _FLOATS),
    },
}


def check_position(state: dict[str, Any], steps: int) -> None:
    """Raise ValueError if what a run goes on from, its weights and optimizers aside, is none of a run of ``steps``."""
    if wrong := mismatch(state, {"step": whole(0, steps)} | _POSITION, ""):
        raise ValueError(wrong)
    window = state["window"]
    rows = [len(window[name]) for name in ("logits", "labels") if name in window]
    if window["steps"] and (len(rows) != 2 or rows[0] != rows[1]):
        raise ValueError("window has not a logit and a label for every row of its steps")
    if (state["step"] == steps or state["stopped_early"]) and not state["seconds"]:
        raise ValueError("seconds is 0 after the last step")


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict(state)``.

    Raises:
        ValueError: a tensor of the state is not of its parameter's shape and dtype, beyond which fused kernels would
            read and write, or an option is another one. Others: ``state`` is no state.
    """
    before = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, options in zip(optimizer.param_groups, before, strict=True):
        if {k: group.get(k) for k in options} != options:
            raise ValueError(f"the optimizer has other options than {options}")
        for parameter in group["params"]:
            shapes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
            found = optimizer.state.get(parameter, {})
            if not isinstance(found, dict) or (
                found and {k: _is_float32(v) and v.shape for k, v in found.items()} != shapes
            ):
                raise ValueError(f"the optimizer's state is not float32 tensors {shapes}")


def save(directory: Path, state: dict[str, Any]) -> None:
    """Writes ``checkpoint.pt``; the one before stays in place until the new one is on the disk, with its shards.

    Args:
        directory: of the run.
        state: tensors, numbers, texts, and lists and dicts of them.

    Raises:
        OSError: the disk is full or cannot be written to; the checkpoint before is untouched.
    """
    path = directory / NAME
    with files.replacing(path, durable=True) as file:
        try:
            torch.save({"format": FORMAT, **state}, file)
        except RuntimeError as error:  # torch's writer does not say that the disk is full
            written, free = os.fstat(file.fileno()).st_size, shutil.disk_usage(directory).free
            told = f"{written:,} bytes of it were, and {free:,} are free on its disk"
            raise OSError(f"{path} could not be written whole: {told}: {error}") from error
    for folder in directory.glob("shards-*"):
        if _SHARDS.fits(folder.name) and folder.name != state.get("shards") and not folder.is_symlink():
            shutil.rmtree(folder)


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


def new_folder(directory: Path, step: int) -> Path:
    """A name that the run's folder does not have yet, for the shards of its tables after a step."""
    names = (directory / f"shards-{step}-{number}" for number in itertools.count())
    return next(path for path in names if not os.path.lexists(path))


def save_shards(folder: Path, shards: dict[str, Any]) -> None:
    """Writes the shards of all processes' tables into a new folder; a collective.

    Raises:
        OSError: on all processes, a disk is full or cannot be written to; the folder is left, with what was written.
    """
    try:
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder))
    except dcp.CheckpointException as error:
        raise OSError(f"{folder} could not be written whole: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The error of the first process that failed: a CheckpointException's own text has the tracebacks of all."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items())
        return f"process {rank}: {type(first).__name__}: {first}"
    return f"{type(error).__name__}: {error}"


def load_shards(folder: Path, tables: dict[str, Any]) -> None:
    """Overwrites tables, or this process's shards of them, with what ``save_shards`` wrote on any number of processes.

    A collective of them, where there are several.

    Raises:
        ValueError: a file is missing or damaged, or is of tables of other sizes.
    """
    alone = not (dist.is_initialized() and dist.get_world_size() > 1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(tables, storage_reader=_ShardReader(folder), no_dist=alone)
    except (dcp.CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{folder}: {_reason(error)}") from error


class _ShardReader(dcp.FileSystemReader):
    """A reader of shards that executes nothing that is in them: torch's own unpickles whatever is in their metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of a checkpoint of tensors."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _member(kind: Any, name: Any) -> Any:
    """The member of an enum, which Python 3.11.0 to 3.11.3 pickle as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f".metadata has {name!r} of {kind!r}, which no table needs")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """An unpickler of the few classes that the metadata of tensors is made of."""

    def find_class(self, module: str, name: str) -> Any:
        """The class; raises UnpicklingError if it is another one."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no table needs")
        return super().find_class(module, name)


def identity(data: DataSet) -> dict:
    """Identity of a checkpoint's data: a run goes on with no other."""
    rows = {split: data.num_rows(split) for split in ("train", "test")}
    about = {"name": data.name, "rows": rows, "features": [list(feature) for feature in data.features]}
    return about | {"fingerprint": getattr(data, "fingerprint", None)}


def read(directory: Path, config: TrainConfig, data: DataSet) -> dict[str, Any]:
    """The checkpoint of a run with this config and data.

    Raises:
        DataError: it is missing, damaged, of another format, or was made with other data or other options.
    """
    state = load(directory)
    path, found, expected = directory / NAME, state.get("data"), identity(data)
    with fitting(directory):
        if wrong := mismatch(state, {"model": {}, "options?": {}, "shards?": _SHARDS}, ""):
            raise ValueError(wrong)
        options, here = state.get("options"), config.outcome()
        if options is None:  # of an older version, which wrote two of them
            options = {"model": state["network"], "format": state["row_format"]}
            here = {name: here[name] for name in options}
        if changed := changes(options, here):
            raise DataError(
                f"{directory} was trained with another config: {'; '.join(changed)}: a run goes on as it began, so "
                "leave that out, or train anew without --resume"
            )
        if found != expected:
            raise DataError(f"{path} was made with other data: {shown(found, 1000)}, here are {expected}")
    return state


@contextlib.contextmanager
def fitting(directory: Path) -> Iterator[None]:
    """Within it, errors become a DataError that says that the run's checkpoint does not fit it."""
    try:
        yield
    except DataError:
        raise
    except (KeyError, IndexError, AttributeError, RuntimeError, ValueError, TypeError) as error:
        raise DataError(f"{directory / NAME} does not fit the run: {' '.join(str(error).split())}") from error
