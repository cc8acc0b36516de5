"""Collections with a table in every row format."""

from __future__ import annotations

import torch
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables.config import BAG_FORMATS

OPTIMIZERS = [rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5)]
WITH_MOMENTS = [rk.Adagrad(lr=0.1), rk.Adam(lr=0.1), rk.RowwiseAdam(lr=0.1), rk.LAMB(lr=0.1)]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DIMS = dict(zip(BAG_FORMATS, [6, 7, 16, 20, 9, 33, 16, 5], strict=True))
ROWS = 12


def make(optimizer=None, formats=BAG_FORMATS, dims: dict[str, int] = DIMS, **options) -> rk.EmbeddingBagCollection:
    """Tables t0, t1, ... of the formats; the first has two features, and every other one pools by the mean."""
    torch.manual_seed(0)
    tables = [
        rk.EmbeddingBagConfig(
            ROWS + i,
            dims[f],
            name=f"t{i}",
            feature_names=[f"f{i}", f"g{i}"][: 2 - min(i, 1)],
            pooling=["sum", "mean"][i % 2],
            format=f,
        )
        for i, f in enumerate(formats)
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def batch(collection, seed: int = 0, size: int = 6, factors: bool = False, rows: int = ROWS):
    """Bags of 0 to 3 ids below ``rows`` for each feature."""
    generator, keys = torch.Generator().manual_seed(seed), collection.feature_names
    lengths = torch.randint(0, 4, (size * len(keys),), generator=generator)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if factors else None
    return rk.KeyedJaggedTensor(keys, values, lengths=lengths, weights=weights)


def train(collection: rk.EmbeddingBagCollection, steps: int = 3) -> None:
    """Runs a few backward passes of a nonlinear loss."""
    for step in range(steps):
        collection(batch(collection, step)).values().square().sum().backward()


def numbers(collection: rk.EmbeddingBagCollection, name: str) -> Tensor:
    """Dequantizes a table to float32 [E, D]."""
    table = next(t for t in collection.tables if t.name == name)
    rows = collection.embedding_bags[name].weight.detach()
    return rows.float() if table.format in DTYPES else rk.dequantize_rows(rows, table.format, table.embedding_dim)
