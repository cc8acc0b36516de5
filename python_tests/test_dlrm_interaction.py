"""The trainer's model with the fused interaction learns what it learns with the plain recipe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rec_kernels as rk
from rec_kernels.dlrm import DLRM, Batch, Feature
from rec_kernels.reference.dot_interaction import interaction_reference

FEATURES = [Feature(f"f{i}", 40 + i) for i in range(7)]
STEPS, ROWS = 200, 64


def batches() -> list[Batch]:
    """Rows whose label depends on a product of two features' secrets and on the dense columns."""
    secrets, found = torch.randn(len(FEATURES), 50), []
    for _ in range(STEPS):
        dense, ids = torch.randn(ROWS, 4), torch.randint(40, (len(FEATURES), ROWS))
        signal = secrets[0][ids[0]] * secrets[1][ids[1]] + dense[:, 0]
        offsets = torch.arange(ids.numel() + 1)
        features = rk.KeyedJaggedTensor([f.name for f in FEATURES], ids.flatten(), offsets=offsets)
        found.append(Batch(dense, features, (signal > 0).float()))
    return found


def losses(steps: list[Batch]) -> torch.Tensor:
    """Loss of each step of a model that begins with the same weights every time."""
    model = DLRM(FEATURES, 4, 12, bottom=(16,), top=(32,), optimizer=rk.RowwiseAdagrad(lr=0.1))
    optimizer, found = torch.optim.Adam(model.dense_parameters(), lr=0.01), []
    for batch in steps:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def test_losses_are_those_of_the_plain_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step over 200 steps, while the loss falls."""
    steps = batches()
    fused = losses(steps)
    monkeypatch.setattr(rk, "dot_interaction", interaction_reference)
    plain = losses(steps)
    assert not torch.equal(fused, plain)  # the recipe was in use
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-4)
    assert fused[-20:].mean() < 0.85 * fused[:20].mean()
