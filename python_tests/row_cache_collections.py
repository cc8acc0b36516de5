"""Collections with a row cache, their batches, and copies of their whole state."""

from __future__ import annotations

import copy

import collection_format_cases
import torch
from collection_format_cases import numbers
from torch import Tensor

import rec_kernels as rk
from rec_kernels.testing import same_bits

FORMATS = ("int8", "int4", "bf16", "mx6")
DIMS = {"int8": 6, "int4": 6, "bf16": 16, "mx6": 33, "fp32": 6}
ROWS = 20
OPTIMIZERS = [
    rk.SGD(lr=0.5),
    rk.RowwiseAdagrad(lr=0.5),
    rk.Adam(lr=0.1),
    rk.Adam(lr=0.1, state_dtype=torch.bfloat16),
]
#: A cache so small that every batch evicts rows.
SMALL = rk.RowCache(0.4, ways=4)


def make(optimizer=OPTIMIZERS[1], cache: rk.RowCache | None = SMALL, formats=FORMATS, **options):
    """Tables t0, t1, ... of the formats' DIMS; the first has two features; sum and mean pooling alternate."""
    torch.manual_seed(0)
    tables = [
        rk.EmbeddingBagConfig(
            ROWS + i,
            DIMS[FORMATS[i]],
            name=f"t{i}",
            feature_names=[f"f{i}", f"g{i}"][: 2 - min(i, 1)],
            pooling=["sum", "mean"][i % 2],
            format=format,
        )
        for i, format in enumerate(formats)
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, cache=cache, **options)


def with_floats(collection):
    """A collection with fp32 tables that contain the decoded rows."""
    tables = [t.__class__(**{**_fields(t), "format": "fp32"}) for t in collection.tables]
    other = type(collection)(tables, optimizer=collection.optimizer)
    with torch.no_grad():
        for t in tables:
            other.embedding_bags[t.name].weight.copy_(numbers(collection, t.name))
    return other


def _fields(table) -> dict[str, object]:
    return {name: getattr(table, name) for name in table.__dataclass_fields__ if name != "_"}


def batch(collection, seed: int = 0, size: int = 5, factors: bool = False) -> rk.KeyedJaggedTensor:
    return collection_format_cases.batch(collection, seed, size, factors, ROWS)


def whole(collection) -> rk.KeyedJaggedTensor:
    """A batch that reads every row: bag r of each feature is row r of its table, or empty."""
    rows = [t.num_embeddings for t in collection.tables for _ in t.feature_names]
    lengths = torch.cat([(torch.arange(max(rows)) < n).long() for n in rows])
    values = torch.cat([torch.arange(n) for n in rows])
    return rk.KeyedJaggedTensor(collection.feature_names, values, lengths=lengths)


def train(collection, first: int = 0, steps: int = 4, factors: bool = False) -> list[Tensor]:
    """Trains with a nonlinear loss; returns the outputs, and gradients of per-sample weights."""
    found = []
    for step in range(first, first + steps):
        given = batch(collection, step, factors=factors)
        if factors:
            given.weights_or_none().requires_grad_()
        pooled = collection(given).values()
        pooled.square().sum().backward()
        found += [pooled.detach()] + ([given.weights_or_none().grad] if factors else [])
    return found


def read(collection) -> dict[str, Tensor]:
    """Every table as lookups see it, float32 [E, D]; changes nothing."""
    was, found = collection.training, {}
    collection.eval()
    with torch.no_grad():
        pooled = collection(whole(collection))
    collection.train(was)
    for t in collection.tables:
        found[t.name] = pooled[t.feature_names[0]][: t.num_embeddings]
    return found


def everything(collection) -> dict[str, Tensor]:
    """A copy of all buffers and parameters, persistent or not, without a flush."""
    return {n: t.detach().clone() for n, t in (*collection.named_parameters(), *collection.named_buffers())}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not same_bits(a[name], b[name])]


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A deep copy of a state."""
    return copy.deepcopy(dict(state))
