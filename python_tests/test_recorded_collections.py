"""Runs of recorded_collections.zip: every module has the recorded bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recording import Reader
from replay_collections import replay
from torch.utils._python_dispatch import TorchDispatchMode

from rec_kernels._library import build_info
from rec_kernels.testing import use_threads

RECORDING = Reader("recorded_collections.zip")
RUNS = {entry["of"]["name"]: entry for entry in RECORDING.index["runs"]}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, tmp_path: Path) -> None:
    """Outputs, gradients, states, reports and errors of every step are equal, bit for bit."""
    run = RECORDING.decode(RUNS[name])
    if "files" in run and build_info()["host_library"] is None:
        pytest.skip("built without row files")
    with use_threads(1 + list(RUNS).index(name) % 3):
        assert replay(run, tmp_path) == []


class RoundedOtherwise(TorchDispatchMode):
    """Computes matrix products in float64 and rounds them, as another processor might."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            return op(*args, **(kwargs or {}))
        return op(*(t.double() for t in args)).float()


@pytest.mark.parametrize("name", [name for name in RUNS if not RUNS[name]["of"]["exact"]])
def test_products_of_another_processor(name: str, tmp_path: Path) -> None:
    """Runs with torch's matrix products pass with any last bits; a row off by two quantization steps fails."""
    run = RECORDING.decode(RUNS[name])
    with RoundedOtherwise():
        assert replay(run, tmp_path) == []
    rows = [t for t in run["results"][-1]["state"].values() if t.dtype == torch.uint8 and t.dim() == 2]
    for t in rows:
        t[0, 0] ^= 2
    assert len(replay(run, tmp_path)) == len(rows)


def test_another_bit_is_found(tmp_path: Path) -> None:
    """A replay detects a changed bit of an output and of a state."""
    run = RECORDING.decode(RUNS["bags, Adam 3"])
    found = [run["results"][0]["outputs"]["values"], run["results"][-1]["state"]["embedding_bags.t0.exp_avg"]]
    for t in found:
        t.detach().view(torch.uint8).view(-1)[0] ^= 1
    differing = replay(run, tmp_path)
    assert len(differing) == 2, differing
