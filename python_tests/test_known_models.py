"""Models in the style of recommender libraries have equal losses with torch's layers and with ours.

Models resemble SASRec (an output layer that is the item table), DCN (a table per field, cross layers), a two-tower
retriever (a table shared by both towers) and the public DLRM (a list of bags, dot interactions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rec_kernels as rk

ITEMS, DIM, BATCH, LENGTH, STEPS = 60, 8, 12, 6, 8


class Layers(NamedTuple):
    """The layers of a model."""

    embedding: Callable[..., nn.Module]
    bag: Callable[..., nn.Module]


class SelfAttentive(nn.Module):
    """Predicts next items of sequences padded with item 0; scores are products with the item table."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.item = layers.embedding(ITEMS, DIM, padding_idx=0)
        self.position = layers.embedding(LENGTH, DIM)
        self.block = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)

    def loss(self, sequence: Tensor, positive: Tensor) -> Tensor:
        place = torch.arange(LENGTH).expand_as(sequence)
        hidden = self.item(sequence) * DIM**0.5 + self.position(place)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = self.block(hidden, src_mask=later)[:, -1]
        return F.cross_entropy(hidden @ self.item.weight.T, positive)

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        sequence = torch.randint(1, ITEMS, (BATCH, LENGTH), generator=g)
        sequence[torch.arange(LENGTH) < torch.randint(LENGTH, (BATCH, 1), generator=g)] = 0
        return sequence, torch.randint(1, ITEMS, (BATCH,), generator=g)


class DeepAndCross(nn.Module):
    """Predicts click-through rates of samples with an id in each field."""

    FIELDS = (7, 19, 40)

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.fields = nn.ModuleDict({f"field_{i}": layers.embedding(n, DIM) for i, n in enumerate(self.FIELDS)})
        width = DIM * len(self.FIELDS)
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(width, 16), nn.ReLU())
        self.top = nn.Linear(width + 16, 1)

    def loss(self, ids: Tensor, label: Tensor) -> Tensor:
        first = torch.cat([field(ids[:, i]) for i, field in enumerate(self.fields.values())], dim=1)
        x = first
        for layer in self.cross:
            x = first * layer(x) + x
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, self.deep(first)], 1)).squeeze(1), label)

    @classmethod
    def batch(cls, g: torch.Generator) -> tuple[Tensor, ...]:
        ids = torch.stack([torch.randint(n, (BATCH,), generator=g) for n in cls.FIELDS], 1)
        return ids, torch.randint(2, (BATCH,), generator=g).float()


class TwoTowers(nn.Module):
    """Users are means of their purchases, items table rows; the batch's other items are negatives.

    Both towers read one table, as ``item.weight``, with the bags of padded histories.
    """

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.item = layers.bag(ITEMS, DIM, mode="mean", padding_idx=0)
        self.user = layers.embedding(20, DIM)
        self.tower = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, DIM))

    def loss(self, user: Tensor, history: Tensor, item: Tensor) -> Tensor:
        users = self.tower(torch.cat([self.user(user), self.item(history)], dim=1))
        items = self.item(item[:, None])
        return F.cross_entropy(F.normalize(users, dim=1) @ F.normalize(items, dim=1).T / 0.2, torch.arange(BATCH))

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        user = torch.randint(20, (BATCH,), generator=g)
        return user, torch.randint(ITEMS, (BATCH, LENGTH), generator=g), torch.randint(1, ITEMS, (BATCH,), generator=g)


class PublicDlrm(nn.Module):
    """A list of tables of bags with offsets, dense features, and the dot products of all pairs."""

    TABLES = (9, 30, 17)

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(layers.bag(n, DIM, mode="sum") for n in self.TABLES)
        self.bot_l = nn.Sequential(nn.Linear(4, DIM), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(DIM + 6, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, dense: Tensor, offsets: Tensor, ids: Tensor, label: Tensor) -> Tensor:
        x = self.bot_l(dense)
        pooled = [bag(ids[i] % self.TABLES[i], offsets[i]) for i, bag in enumerate(self.emb_l)]
        vectors = torch.stack([x, *pooled], dim=1)
        below = torch.tril_indices(len(pooled) + 1, len(pooled) + 1, -1)
        pairs = (vectors @ vectors.transpose(1, 2))[:, below[0], below[1]]
        return F.binary_cross_entropy_with_logits(self.top_l(torch.cat([x, pairs], dim=1)).squeeze(1), label)

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        lengths = torch.randint(4, (3, BATCH), generator=g)
        offsets = lengths.cumsum(1) - lengths
        ids = torch.randint(1000, (3, int(lengths.sum(1).max())), generator=g)
        dense = torch.rand(BATCH, 4, generator=g)
        return dense, offsets, ids, torch.randint(2, (BATCH,), generator=g).float()


MODELS = (SelfAttentive, DeepAndCross, TwoTowers, PublicDlrm)
TORCH = Layers(nn.Embedding, nn.EmbeddingBag)
OURS = Layers(rk.Embedding, rk.EmbeddingBag)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, rk.SGD, {"lr": 0.2}),
    "adagrad": (torch.optim.Adagrad, rk.Adagrad, {"lr": 0.1, "eps": 1e-10}),
}


def fused(optimizer: object) -> Layers:
    """Layers with fused optimizers."""

    def with_options(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        return lambda *args, **options: make(*args, optimizer=optimizer, **options)

    return Layers(with_options(rk.Embedding), with_options(rk.EmbeddingBag))


def losses(model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[float]:
    """The losses of some steps; every model gets the same batches."""
    g, found = torch.Generator().manual_seed(5), []
    optimizer = make_optimizer(rk.dense_parameters(model))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(*type(model).batch(g))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_losses_are_torchs(model: type[nn.Module], name: str) -> None:
    """From equal seeds, layers with torch's gradients and with fused updates have torch's losses."""
    theirs, ours, options = OPTIMIZERS[name]
    found = []
    for layers in (TORCH, OURS, fused(ours(**options))):
        torch.manual_seed(0)
        found.append(losses(model(layers), lambda parameters: theirs(parameters, **options)))
    expected, *others = found
    assert len(set(expected)) == STEPS
    for other in others:
        assert other == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_states_go_both_ways(model: type[nn.Module]) -> None:
    """A model's state with torch's layers loads strictly into one with ours, and back."""
    theirs, ours = model(TORCH), model(fused(rk.SGD(lr=0.1)))
    ours.load_state_dict(theirs.state_dict())
    batch = model.batch(torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours.loss(*batch), theirs.loss(*batch))
    state = {name: tensor for name, tensor in ours.state_dict().items() if not name.endswith(".step")}
    theirs.load_state_dict(state)
