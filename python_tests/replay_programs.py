"""Replays recorded programs and interrupted runs of the trainer."""

from __future__ import annotations

import io
from pathlib import Path
from unittest import mock

import dlrm_tiny
import torch
import torch._inductor
from torch import Tensor

from rec_kernels.dlrm import TrainConfig, checkpoint, train


def config_of(options: dict[str, object], folder: Path) -> TrainConfig:
    """The config of a run of a few steps, in ``folder / "run"``."""
    small = {"data": "dlrm_tiny:tiny", "batch_size": 50, "epochs": 2, "bottom": (4,), "top": (4,), "threads": 1}
    return TrainConfig(**small | options, run="run", runs_dir=str(folder))


def call(program: dict, folder: Path) -> list[Tensor]:
    """Runs a saved program on its inputs.

    Args:
        program: the decoded recording; its inputs are changed.
        folder: an empty one.
    """
    content = program["file"].numpy().tobytes()
    if program["kind"] == "export":
        loaded = torch.export.load(io.BytesIO(content)).module()
        return list(loaded(*program["inputs"]))
    path = folder / "program.pt2"
    path.write_bytes(content)
    # Otherwise torch would spend seconds detecting the instruction set, for which the package is not compiled.
    with mock.patch("torch._inductor.cpu_vec_isa.valid_vec_isa_list", return_value=[]):
        loaded = torch._inductor.aoti_load_package(str(path))
    return list(loaded(*program["inputs"]))


def resume_run(recorded: dict, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Resumes an interrupted run of the trainer; returns the model before and at the end."""
    directory = folder / "run"
    directory.mkdir()
    for name, content in recorded["files"].items():
        (directory / name).write_bytes(content.numpy().tobytes())
    before = checkpoint.load(directory)["model"]
    train(config_of(recorded["options"], folder), dlrm_tiny.TinyData(), resume=directory, progress=False)
    return before, checkpoint.load(directory)["model"]
