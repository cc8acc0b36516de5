"""Collections with tables on disk and equal ones in memory: batches, steps and comparisons."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rec_kernels as rk
from rec_kernels._library import host
from rec_kernels.nn.tables.file_store import FileStore
from rec_kernels.testing import same_bits

#: Name, rows, columns, format, features: 740 KB together.
TABLES = [
    ("a", 12_000, 16, "int8", ["a", "a2"]),
    ("b", 10_000, 16, "int4", ["b"]),
    ("c", 6_000, 8, "fp32", ["c"]),
    ("d", 8_000, 8, "bf16", ["d"]),
]
BUDGET = 200_000
LRU = rk.RowCache(0.02, ways=8)
LFU = rk.RowCache(0.02, ways=8, policy="lfu", decay_every=3)
NONE = rk.RowCache(0.0)
OPTIMIZERS = [rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5), rk.Adam(lr=0.1)]


def skip_without_host() -> None:
    """Skips the calling module if row files were not built, or the page size is not the one of the budgets."""
    if mmap.PAGESIZE != 4096:
        pytest.skip(f"the tests are for pages of 4096 bytes, not {mmap.PAGESIZE}", allow_module_level=True)
    try:
        host()
    except ImportError as error:
        pytest.skip(str(error), allow_module_level=True)


def on_disk(cache: rk.RowCache, path: Path, budget: int = BUDGET, generation: int | None = None) -> rk.RowCache:
    """The row cache for tables in a file."""
    return replace(cache, backing="disk", path=path, memory_budget=budget, generation=generation)


def make(
    cache: rk.RowCache | None, optimizer=OPTIMIZERS[1], tables=TABLES, *, init=None, combine: str = "add", **options
):
    """The tables, and one of two parts."""
    torch.manual_seed(3)
    pooling = ["sum", "mean"]
    configs = [
        rk.EmbeddingBagConfig(
            rows, dim, name=name, feature_names=features, format=format, pooling=pooling[i % 2], init=init
        )
        for i, (name, rows, dim, format, features) in enumerate(tables)
    ]
    compression = rk.QuotientRemainder(4, combine)
    parts = rk.EmbeddingBagConfig(4_000, 16, name="q", feature_names=["q"], compression=compression, format="int8")
    return rk.EmbeddingBagCollection([*configs, parts], optimizer=optimizer, cache=cache, **options)


def pair(cache: rk.RowCache, path: Path, optimizer=OPTIMIZERS[1], **options):
    """Two equal collections, one in memory and one on disk."""
    return make(cache, optimizer, **options), make(on_disk(cache, path), optimizer, **options)


def batch(collection, seed: int = 0, size: int = 2, factors: bool = False) -> rk.KeyedJaggedTensor:
    """Bags of 0 to 2 ids for each feature, small ids more often."""
    generator = torch.Generator().manual_seed(seed)
    rows = {f: t.num_embeddings for t in collection.tables for f in t.feature_names}
    keys = collection.feature_names
    lengths = torch.randint(0, 3, (len(keys), size), generator=generator)
    values = torch.cat(
        [
            (rows[key] ** torch.rand(int(n.sum()), generator=generator)).long() - 1
            for key, n in zip(keys, lengths, strict=True)
        ]
    )
    weights = torch.rand(len(values), generator=generator).requires_grad_() if factors else None
    return rk.KeyedJaggedTensor(keys, values, lengths=lengths.flatten(), weights=weights)


def step(collection, seed: int, prefetch: int | None = None) -> Tensor:
    """One update with a nonlinear loss; returns the output. ``prefetch``: the batch to prefetch before the backward."""
    pooled = collection(batch(collection, seed)).values()
    if prefetch is not None:
        collection.prefetch(batch(collection, prefetch))
    pooled.square().sum().backward()
    check_budget(collection)
    return pooled.detach()


def train(collection, first: int = 0, steps: int = 6) -> list[Tensor]:
    """Trains, prefetching each next batch."""
    return [step(collection, i, i + 1) for i in range(first, first + steps)]


def trained_pair(cache: rk.RowCache, path: Path):
    """Two equal collections after steps 0 to 5, one in memory and one on disk."""
    memory, disk = pair(cache, path)
    train(memory)
    train(disk)
    return memory, disk


def check_budget(collection) -> None:
    """Asserts that resident memory is within the budget."""
    store = collection._store
    if isinstance(store, FileStore):
        resident = store.file.row_file.stats()["resident_bytes"] + collection.row_cache.num_bytes()
        assert resident <= collection.row_cache.cache.memory_budget


def state_without_tables(collection) -> dict[str, Tensor]:
    """A copy of everything but the tables: slots, their counters, and the optimizer's state."""
    skipped = ("_weights", "file_generation", "file_identity")
    return {n: t.detach().clone() for n, t in collection.named_buffers() if n not in skipped}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A deep copy of a state."""
    return {name: t.clone() for name, t in state.items()}


def tables_of(collection) -> dict[str, Tensor]:
    """The tables' bytes, uint8 [E, row bytes], read block by block."""
    found, first, store = {}, 0, collection._store
    for i, table in enumerate(collection._features.stored):
        rows = collection.embedding_bags[table.name].weight.detach()
        if not isinstance(store, FileStore):
            found[table.name] = rows.view(torch.uint8).clone()
        else:
            chunks, none = [], torch.empty(0, dtype=torch.int64)
            for some in torch.arange(table.num_embeddings).split(store.file.rows_at_once(i)):
                store.file.load(first + some, none)
                chunks.append(rows[some].view(torch.uint8).clone())
            found[table.name] = torch.cat(chunks)
        first += table.num_embeddings
    return found


def assert_unchanged(collection, before: dict[str, Tensor]) -> None:
    """Asserts that state_without_tables() equals ``before``."""
    assert not [name for name, t in state_without_tables(collection).items() if not same_bits(t, before[name])]


def assert_equal_training(memory, disk, first: int = 6, steps: int = 6) -> None:
    """Asserts equal outputs of further steps, then ``assert_equal_state``."""
    for a, b in zip(train(memory, first, steps), train(disk, first, steps), strict=True):
        assert same_bits(a, b)
    assert_equal_state(memory, disk)


def assert_equal_state(one, other, where: object = "") -> None:
    """Asserts equal slots, counters, state and, after a flush, tables."""
    a, b = state_without_tables(one), state_without_tables(other)
    assert a.keys() == b.keys()
    assert not [name for name in a if not same_bits(a[name], b[name])], where
    for collection in (one, other):
        collection.flush()
    a, b = tables_of(one), tables_of(other)
    assert not [name for name in a if not torch.equal(a[name], b[name])], where
    check_budget(one)
    check_budget(other)
