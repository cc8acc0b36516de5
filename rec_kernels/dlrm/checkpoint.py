"""Checkpoints of a training run: written atomically, and loaded without executing code."""

from __future__ import annotations

import contextlib
import enum
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
from rec_kernels.dlrm.files import FLAG, Check, Each, integer, mismatch, number, short_repr
from rec_kernels.dlrm.runs import MACHINE, PARTS

NAME = "checkpoint.pt"
FORMAT = 2  # 1 had the features in two collections

# Classes in torch.distributed.checkpoint's metadata of tensors, by module.
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
    **dict.fromkeys(("worse", "records"), integer()),
    "seconds": number(0),
    "best": number(0, math.inf),
    "stopped_early": FLAG,
    "machines": Each(MACHINE),
    "window": {
        "steps": integer(),
        "seconds": dict.fromkeys(PARTS, number(-1e9, 1e9)),
        **dict.fromkeys(("logits?", "labels?"), _FLOATS),
    },
}


def check_position(state: dict[str, Any], steps: int) -> None:
    """Raises ValueError if a checkpoint's state, except weights and optimizers, is invalid for a run of ``steps``."""
    if wrong := mismatch(state, {"step": integer(0, steps)} | _POSITION, ""):
        raise ValueError(wrong)
    window = state["window"]
    rows = [len(window[name]) for name in ("logits", "labels") if name in window]
    if window["steps"] and (len(rows) != 2 or rows[0] != rows[1]):
        raise ValueError("window does not have a logit and a label for every row of its steps")
    if (state["step"] == steps or state["stopped_early"]) and not state["seconds"]:
        raise ValueError("seconds is 0 after the last step")


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state and checks it, as fused kernels would access memory beyond tensors that are short.

    Raises:
        ValueError: a tensor has not its parameter's shape and dtype, or an option differs. Others: from torch.
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
    """Writes ``checkpoint.pt`` atomically and durably, then deletes the shards of the previous checkpoint.

    Args:
        state: tensors, numbers, texts, and lists and dicts of them.

    Raises:
        OSError: the disk is full or cannot be written to; the previous checkpoint is unchanged.
    """
    path = directory / NAME
    with files.atomic_write(path, durable=True) as file:
        try:
            torch.save({"format": FORMAT, **state}, file)
        except RuntimeError as error:  # torch does not report that the disk is full
            written, free = os.fstat(file.fileno()).st_size, shutil.disk_usage(directory).free
            space = f"{written:,} bytes of it were, and {free:,} are free on its disk"
            raise OSError(f"{path} could not be written completely: {space}: {error}") from error
    for folder in directory.glob("shards-*"):
        if _SHARDS.fits(folder.name) and folder.name != state.get("shards") and not folder.is_symlink():
            shutil.rmtree(folder)


def load(directory: Path) -> dict[str, Any]:
    """Loads ``checkpoint.pt``; DataError if it is missing, damaged or of another format."""
    path = directory / NAME
    files.refuse_special(path)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not verify the checksums
        if damaged is None:
            state = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise DataError(f"{directory} has no {NAME}: nothing to resume from") from error
    except Exception as error:  # damaged files make zipfile and torch raise errors of many types
        raise DataError(f"{path} is damaged: {error!r}") from error
    if damaged is not None:
        raise DataError(f"{path} is damaged: the checksum of {damaged} is wrong")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise DataError(f"{path} has format {found!r}, expected {FORMAT}: another version wrote it, so start a new run")
    return state


def save_shards(folder: Path, shards: dict[str, Any]) -> None:
    """Writes the table shards of all ranks into a new folder; a collective.

    Raises:
        OSError: on all ranks, a disk is full or cannot be written to; the incomplete folder remains.
    """
    try:
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder))
    except dcp.CheckpointException as error:
        raise OSError(f"{folder} could not be written completely: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The error of the first rank that failed; a CheckpointException's text has the tracebacks of all ranks."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items())
        return f"process {rank}: {type(first).__name__}: {first}"
    return f"{type(error).__name__}: {error}"


def load_shards(folder: Path, tables: dict[str, Any]) -> None:
    """Loads tables, or this rank's shards of them, from ``save_shards`` of any world size; a collective.

    Raises:
        ValueError: a file is missing or damaged, or has tables of other sizes.
    """
    single = not (dist.is_initialized() and dist.get_world_size() > 1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(tables, storage_reader=_ShardReader(folder), no_dist=single)
    except (dcp.CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{folder}: {_reason(error)}") from error


class _ShardReader(dcp.FileSystemReader):
    """A reader that restricts unpickling of the metadata, which torch's reader does not."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata of a checkpoint of tensors."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _member(kind: Any, name: Any) -> Any:
    """A member of an enum, which Python 3.11.0 to 3.11.3 pickle as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f".metadata has {name!r} of {kind!r}, which no table needs")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """An unpickler restricted to the classes in the metadata of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns an allowed class; UnpicklingError for any other."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no table needs")
        return super().find_class(module, name)


def identity(data: DataSet) -> dict:
    """The identity of a data set, which must be equal when a run is resumed."""
    rows = {split: data.num_rows(split) for split in ("train", "test")}
    about = {"name": data.name, "rows": rows, "features": [list(feature) for feature in data.features]}
    return about | {"fingerprint": getattr(data, "fingerprint", None)}


def read(directory: Path, config: TrainConfig, data: DataSet) -> dict[str, Any]:
    """Loads a run's checkpoint; DataError if it is missing, invalid, or was made with other data or options."""
    state = load(directory)
    path, found, expected = directory / NAME, state.get("data"), identity(data)
    with as_data_error(directory):
        if wrong := mismatch(state, {"model": {}, "options?": {}, "shards?": _SHARDS}, ""):
            raise ValueError(wrong)
        options, here = state.get("options"), config.outcome()
        if options is None:  # written by an older version, which saved two options
            options = {"model": state["network"], "format": state["row_format"]}
            here = {name: here[name] for name in options}
        if changed := changes(options, here):
            raise DataError(
                f"{directory} was trained with another config: {'; '.join(changed)}: a run resumes with its own "
                "options, so leave these out, or start a new run without --resume"
            )
        if found != expected:
            raise DataError(f"{path} was written with other data, {short_repr(found, 1000)}, expected {expected}")
    return state


@contextlib.contextmanager
def as_data_error(directory: Path) -> Iterator[None]:
    """Converts errors in the block to DataError: the run's checkpoint does not fit."""
    try:
        yield
    except DataError:
        raise
    except (KeyError, IndexError, AttributeError, RuntimeError, ValueError, TypeError) as error:
        raise DataError(f"{directory / NAME} does not fit the run: {' '.join(str(error).split())}") from error
