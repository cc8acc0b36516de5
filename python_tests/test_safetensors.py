"""States of collections in safetensors files, which execute no code, and huggingface_hub's model mixin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_cases import SIZES, jagged, same_bits, train
from torch import Tensor, nn

import rec_kernels as rk

FORMATS = {"user": "fp32", "item": "int8", "shop": "bf16"}


class Model(nn.Module):
    """A collection followed by a layer."""

    def __init__(self, lr: float = 0.05, beta: float = 0.5) -> None:
        super().__init__()
        tables = [
            rk.EmbeddingBagConfig(*size, name=n, feature_names=[f"{n}f"], format=FORMATS[n])
            for n, size in SIZES.items()
        ]
        self.tables = rk.EmbeddingBagCollection(tables, optimizer=rk.Adam(lr=lr, betas=(beta, 0.75)))
        self.layer = rk.Embedding(30, 28, optimizer=rk.RowwiseAdagrad(lr=lr))
        self.top = nn.Linear(28, 2)

    def forward(self, step: int) -> Tensor:
        batch = jagged(step)
        return self.top(self.tables(batch).values() + self.layer(batch["userf"].values()[::4]))


def trained() -> Model:
    """A model with state of all kinds."""
    torch.manual_seed(0)
    model = Model()
    train(model, range(4))
    return model


def test_a_file_has_all_bits(tmp_path: Path) -> None:
    """save_file and load_file keep weights in every format, optimizer state and step."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, path = trained(), tmp_path / "model.safetensors"
    safetensors.save_file(model.state_dict(), path)
    assert path.stat().st_size < 2 * sum(t.nbytes for t in model.state_dict().values()) + 4096
    again = Model()
    again.load_state_dict(safetensors.load_file(path))
    assert same_bits(dict(model.state_dict()), dict(again.state_dict()))
    assert train(again, range(4, 7)) == train(model, range(4, 7))


def test_models(tmp_path: Path) -> None:
    """save_model and load_model, which search for shared memory, accept tables, which do not overlap."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, again, path = trained(), Model(), tmp_path / "model.safetensors"
    safetensors.save_model(model, str(path))
    missing, unexpected = safetensors.load_model(again, str(path))
    assert (sorted(missing), sorted(unexpected)) == ([], [])
    assert same_bits(dict(model.state_dict()), dict(again.state_dict()))


def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    """A table of another size is rejected before any is written."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, path = trained(), tmp_path / "model.safetensors"
    state = model.tables.state_dict()
    state["embedding_bags.shop.weight"] = state["embedding_bags.shop.weight"][:-1].clone()
    safetensors.save_file(state, path)
    again = Model().tables
    before = {n: t.clone() for n, t in again.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding_bags\.shop\.weight: the state has \[4, 4\]"):
        again.load_state_dict(safetensors.load_file(path))
    assert same_bits(before, again.state_dict())


def test_hub_mixin(tmp_path: Path) -> None:
    """PyTorchModelHubMixin saves the model's arguments and state in a folder, and restores the model."""
    pytest.importorskip("safetensors.torch")
    hub = pytest.importorskip("huggingface_hub.hub_mixin")

    class HubModel(Model, hub.PyTorchModelHubMixin):
        """The model, with save_pretrained and from_pretrained."""

    torch.manual_seed(0)
    model: Any = HubModel(lr=0.125)
    train(model, range(4))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 0.125, "beta": 0.5}
    again: Any = HubModel.from_pretrained(tmp_path)
    assert again.tables.optimizer == model.tables.optimizer
    assert same_bits(dict(model.state_dict()), dict(again.state_dict()))
    assert train(again.train(), range(4, 7)) == train(model, range(4, 7))
