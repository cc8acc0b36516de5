"""The trainer with a compiled dense part."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from dlrm_cases import OPTIONS

from rec_kernels.dlrm import Batch, TrainConfig, train
from rec_kernels.dlrm.config import MODELS
from rec_kernels.dlrm.synthetic import Synthetic
from rec_kernels.dlrm.train import build_model

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize("model", MODELS)
def test_compiled(model: str, data: Synthetic, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model is one graph, keeps names of weights, and has equal logits and gradients up to rounding."""
    calls, compiler = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: calls.append(more) or compiler(f, backend="eager"))
    eager, compiled = (build_model(TrainConfig(**OPTIONS, model=model, compile=c), data) for c in ("no", "default"))
    assert calls == [{"mode": "default", "fullgraph": True, "dynamic": False}]
    assert eager.state_dict().keys() == compiled.state_dict().keys()
    for made in (eager, compiled):
        made(batch).square().sum().backward()
    for one, other in zip(eager.dense_parameters(), compiled.dense_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for made in (eager, compiled):
        again = copy.deepcopy(made)
        again.top[-1].bias.data.add_(1)
        torch.testing.assert_close(again(batch), made(batch) + 1)  # the copy has its own layers


@pytest.mark.full
def test_a_compiled_run(data: Synthetic, tmp_path: Path) -> None:
    """A run with Inductor has equal scores up to rounding."""
    given = {"runs_dir": str(tmp_path)}
    found = [train(TrainConfig(**OPTIONS | given, compile=c), data, progress=False) for c in ("no", "default")]
    assert found[1]["log_loss"] == pytest.approx(found[0]["log_loss"], abs=1e-3)
    assert found[1]["flops_per_example"] == found[0]["flops_per_example"] > 0
    assert found[1]["directory"].endswith("-compiled-default-b500-seed0")
