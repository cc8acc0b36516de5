"""Saved programs that call one op, and stopped runs of the trainer: what they are made of, and how they go on."""

from __future__ import annotations

import io
from pathlib import Path
from unittest import mock

import dlrm_tiny
import torch
import torch._inductor
from recording import Reader
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rec_kernels.dlrm import TrainConfig, checkpoint, train

#: Options of the trainer: a plain run, and one with as much state as there is.
TRAINED = (
    {"embedding_dim": 4},
    {"embedding_dim": 6, "format": "int8", "cache": 0.3, "optimizer": "adam", "accumulate": 2, "warmup_steps": 3},
)


def sample_of(op: str) -> dict[str, object]:
    """The arguments of the first recorded call of an op that has a layout of several tables."""
    reader = Reader("recorded_calls.zip")
    for entry in reader.index["calls"]:
        if entry["op"] == op and entry["arguments"]["of"].get("row_offsets") is not None:
            return tree_map_only(Tensor, Tensor.detach, reader.decode(entry["arguments"]))
    raise ValueError(f"no call of {op} with a layout is recorded")


class Program(nn.Module):
    """A call of an op: what is a tensor is an input, all else is fixed.

    The outputs are the op's, and the inputs that it changes.
    """

    def __init__(self, op: str, arguments: dict[str, object]) -> None:
        super().__init__()
        self.op, self.arguments = getattr(torch.ops.rec_kernels, op), arguments
        self.names = [name for name, a in arguments.items() if isinstance(a, (Tensor, list)) and _is_tensors(a)]
        self.written = [a.name for a in self.op.default._schema.arguments if a.alias_info and a.alias_info.is_write]

    def inputs(self) -> tuple[object, ...]:
        """The arguments that are tensors."""
        return tuple(self.arguments[name] for name in self.names)

    def forward(self, *inputs: object) -> tuple[Tensor, ...]:
        """Calls the op."""
        given = dict(zip(self.names, inputs, strict=True))
        results = self.op(**{**self.arguments, **given})
        results = () if results is None else results if isinstance(results, (tuple, list)) else (results,)
        return (*results, *(given[name].clone() for name in self.written if given.get(name) is not None))


def _is_tensors(argument: object) -> bool:
    return isinstance(argument, Tensor) or all(isinstance(a, Tensor) for a in argument)


def config_of(options: dict[str, object], folder: Path) -> TrainConfig:
    """A run of a few steps, in ``folder / "run"``."""
    small = {"data": "dlrm_tiny:tiny", "batch_size": 50, "epochs": 2, "bottom": (4,), "top": (4,), "threads": 1}
    return TrainConfig(**small | options, run="run", runs_dir=str(folder))


def call(program: dict, folder: Path) -> list[Tensor]:
    """Runs a saved program on its inputs.

    Args:
        program: as it was recorded, decoded; its inputs are changed.
        folder: an empty one.
    """
    content = program["file"].numpy().tobytes()
    if program["kind"] == "export":
        loaded = torch.export.load(io.BytesIO(content)).module()
        return list(loaded(*program["inputs"]))
    path = folder / "program.pt2"
    path.write_bytes(content)
    # torch would otherwise ask a compiler, for seconds, what this machine has, which the package was not compiled for.
    with mock.patch("torch._inductor.cpu_vec_isa.valid_vec_isa_list", return_value=[]):
        loaded = torch._inductor.aoti_load_package(str(path))
    return list(loaded(*program["inputs"]))


def go_on(recorded: dict, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model that a stopped run of the trainer has, and the one that it ends with."""
    directory = folder / "run"
    directory.mkdir()
    for name, content in recorded["files"].items():
        (directory / name).write_bytes(content.numpy().tobytes())
    before = checkpoint.load(directory)["model"]
    train(config_of(recorded["options"], folder), dlrm_tiny.TinyData(), resume=directory, progress=False)
    return before, checkpoint.load(directory)["model"]
