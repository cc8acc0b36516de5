"""The model against published results: losses printed by the public DLRM, sizes of its Kaggle configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rec_kernels as rk
from bench.workloads import KAGGLE_ROWS
from rec_kernels.dlrm import DLRM, Batch, Feature

RUN = json.loads((Path(__file__).parent / "data" / "dlrm_debug_run.json").read_text())
NAMES = [f"table{i}" for i in range(len(RUN["embeddings"]))]
PRINTED = [0.451893, 0.402002, 0.275460]
FLOAT64 = [0.451891, 0.402002, 0.275457]


def debug_model(optimizer: rk.SGD | None) -> DLRM:
    """The debug run's model with its initial weights; ``None``: tables with torch's gradients."""
    weights = [torch.tensor(table) for table in RUN["embeddings"]]
    features = [Feature(name, len(weight)) for name, weight in zip(NAMES, weights, strict=True)]
    model = DLRM(features, 4, 2, bottom=(3,), top=(4, 2), optimizer=rk.SGD())
    tables = [
        rk.EmbeddingBagConfig(len(weight), 2, name=name, feature_names=[name], init=weight_of(weight))
        for name, weight in zip(NAMES, weights, strict=True)
    ]
    model.embeddings = rk.EmbeddingBagCollection(tables, optimizer=optimizer)
    for mlp, layers in ((model.bottom, RUN["bottom"]), (model.top, RUN["top"])):
        linears = [layer for layer in mlp if isinstance(layer, nn.Linear)]
        for linear, layer in zip(linears, layers, strict=True):
            linear.load_state_dict({name: torch.tensor(numbers) for name, numbers in layer.items()})
    return model


def weight_of(weight: Tensor) -> Callable[[Tensor], object]:
    """An initializer that copies ``weight``."""
    return lambda table: table.copy_(weight)


def batch_of(step: dict) -> Batch:
    bags = [ids for table in step["ids"] for ids in table]
    features = rk.KeyedJaggedTensor(
        NAMES, torch.tensor([i for bag in bags for i in bag]), lengths=torch.tensor([len(bag) for bag in bags])
    )
    return Batch(torch.tensor(step["dense"]), features, torch.tensor(step["target"]).squeeze(1))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch gradients"])
def test_debug_run(fused: bool) -> None:
    """Losses equal those of the public DLRM's debug run, which its README prints with six digits."""
    rate = RUN["learning_rate"]
    model = debug_model(rk.SGD(lr=rate) if fused else None)
    optimizer = torch.optim.SGD(rk.dense_parameters(model), lr=rate)
    losses = []
    for step in RUN["steps"]:
        batch = batch_of(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch).sigmoid(), batch.label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert RUN["losses"] == PRINTED
    assert losses == pytest.approx(PRINTED, rel=0, abs=3e-6)
    assert losses == pytest.approx(FLOAT64, rel=0, abs=1e-6)
    tables = [model.embeddings.embedding_bags[name].weight for name in NAMES]
    assert any(p is tables[0] for p in rk.dense_parameters(model)) is not fused


def test_debug_run_needs_every_update() -> None:
    """The printed digits distinguish runs with and without updates of the tables."""
    model = debug_model(rk.SGD(lr=0.0))
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=RUN["learning_rate"])
    losses = []
    for step in RUN["steps"]:
        batch = batch_of(step)
        optimizer.zero_grad()
        losses.append(nn.functional.mse_loss(model(batch).sigmoid(), batch.label))
        losses[-1].backward()
        optimizer.step()
    assert losses[0].item() == pytest.approx(PRINTED[0], abs=3e-6)
    assert abs(losses[2].item() - PRINTED[2]) > 3e-6


def test_kaggle_sizes() -> None:
    """D = 16, bottom 13-512-256-64-16, top 367-512-256-1, 26 tables: counted by hand, built without memory."""
    assert len(KAGGLE_ROWS) == 26
    assert sum(KAGGLE_ROWS) == 33_762_577
    with torch.device("meta"):
        features = [Feature(f"c{i}", rows) for i, rows in enumerate(KAGGLE_ROWS)]
        model = DLRM(features, 13, 16, bottom=(512, 256, 64), top=(512, 256))
    tables = list(model.embeddings.parameters())
    assert [tuple(table.shape) for table in tables] == [(rows, 16) for rows in KAGGLE_ROWS]
    assert sum(table.numel() for table in tables) == 33_762_577 * 16 == 540_201_232
    assert sum(row["weight_bytes"] for row in model.embeddings.memory_report()) == 4 * 540_201_232
    assert sum(row["state_bytes"] for row in model.embeddings.memory_report()) == 4 * 33_762_577
    interaction = 16 + 27 * 26 // 2
    assert model.top[0].in_features == interaction == 367
    # Inputs and one bias, times outputs, layer by layer.
    bottom = (13 + 1) * 512 + (512 + 1) * 256 + (256 + 1) * 64 + (64 + 1) * 16
    top = (367 + 1) * 512 + (512 + 1) * 256 + (256 + 1) * 1
    assert (bottom, top) == (155_984, 320_001)
    assert sum(p.numel() for p in model.bottom.parameters()) == bottom
    assert sum(p.numel() for p in model.top.parameters()) == top
    assert sum(p.numel() for p in model.parameters()) == 540_201_232 + 475_985
