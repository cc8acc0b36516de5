"""Collections with a table whose weight is used beside lookups, batches, and a loss of both uses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import rec_kernels as rk

E, D, B = 40, 8, 6


def start(seed: int = 0) -> Tensor:
    """Initial rows of the table, [E, D]."""
    return torch.randn(E, D, generator=torch.Generator().manual_seed(seed))


def make(optimizer: object, **options: object) -> rk.EmbeddingBagCollection:
    """A table with two features that is used beside lookups, and another table."""
    config = {"format": options.pop("format", "fp32"), "compression": options.pop("compression", None)}
    tables = [
        rk.EmbeddingBagConfig(E, D, name="item", feature_names=["a", "b"], init=lambda w: w.copy_(start()), **config),
        rk.EmbeddingBagConfig(30, 12, name="other", feature_names=["c"], init=lambda w: w.fill_(0.5)),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def batch(seed: int, *, weights: bool = False, variable: bool = False) -> rk.KeyedJaggedTensor:
    """Bags of the three features, some empty; with weights, some ids are outside of all bags."""
    random = torch.Generator().manual_seed(seed)
    sizes = [B, B - 2, B] if variable else [B] * 3
    lengths = torch.randint(0, 4, (sum(sizes),), generator=random)
    values = torch.randint(0, 30, (int(lengths.sum()) + 3 * weights,), generator=random)
    offsets = 2 * weights + F.pad(lengths.cumsum(0), (1, 0))
    factors = torch.rand(len(values), generator=random) if weights else None
    strides = sizes if variable else None
    return rk.KeyedJaggedTensor(["a", "b", "c"], values, offsets=offsets, weights=factors, stride_per_key=strides)


def loss_of(found: dict[str, Tensor], item: Tensor, step: int) -> Tensor:
    """A softmax over all items, and a term of the other table."""
    hidden, labels = found["a"], torch.arange(len(found["a"])) * 3 + step
    return F.cross_entropy(hidden @ item.T, labels) + (found["b"] ** 2).sum() / 7 + (found["c"] ** 2).sum() / 9
