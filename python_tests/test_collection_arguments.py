"""Arguments of collections, tables, caches and optimizers: accepted kinds, and errors that name the argument."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import rec_kernels as rk


def config(name: str = "t", features=("a",), **options) -> rk.EmbeddingBagConfig:
    """A small table."""
    return rk.EmbeddingBagConfig(10, 4, name=name, feature_names=list(features), **options)


@pytest.mark.parametrize(
    "compression", [rk.MixedDimension(2), rk.QuotientRemainder(2, compose="pooled")], ids=lambda c: type(c).__name__
)
def test_compressions_for_bags(compression) -> None:
    """Sequence lookups reject compressions that need pooling, with either config class."""
    rk.EmbeddingBagCollection([config(compression=compression)])
    message = re.escape(f"table 't': compression = {compression} must be None or have compose 'per_id'")
    with pytest.raises(ValueError, match=message):
        rk.EmbeddingCollection([config(compression=compression)])


def test_compressions_for_every_id() -> None:
    """EmbeddingCollection has equal rows with EmbeddingConfig and EmbeddingBagConfig."""
    batch = rk.KeyedJaggedTensor(["a"], torch.tensor([1, 2, 9]), lengths=torch.tensor([1, 2]))
    for compression in (None, rk.Hash(3), rk.QuotientRemainder(2), rk.QuotientRemainder(2, "concat")):
        outputs = []
        for kind in (rk.EmbeddingConfig, rk.EmbeddingBagConfig):
            torch.manual_seed(0)
            table = kind(10, 4, name="t", feature_names=["a"], compression=compression)
            outputs.append(rk.EmbeddingCollection([table])(batch)["a"].values())
        assert torch.equal(*outputs)


@pytest.mark.parametrize("rate", [torch.tensor([0.1], requires_grad=True), np.float32(0.1), torch.tensor(0.1)])
def test_rates_are_read_once(rate) -> None:
    """A tensor learning rate is read at construction; later writes to it have no effect."""
    optimizer = rk.SGD(lr=rate, weight_decay=rate)
    if isinstance(rate, torch.Tensor):
        rate.detach().fill_(9.0)
    assert optimizer == rk.SGD(lr=optimizer.lr, weight_decay=optimizer.lr)
    assert float(rk.EmbeddingBagCollection([config()], optimizer=optimizer).lr) == np.float32(0.1)


@pytest.mark.parametrize(
    ("name", "given"),
    [("step", number) for number in (-1, 2.5, float("nan"), 2.0**63, float("inf"))]
    + [("beta_powers", powers) for powers in ([1.5, 0.5], [0.5, -0.1], [float("nan"), 1.0])],
)
def test_counts_of_a_state(name: str, given) -> None:
    """Impossible steps and beta powers in a state are rejected, and nothing is loaded."""
    collection = rk.EmbeddingBagCollection([config()], optimizer=rk.Adam(lr=0.1))
    before = {name: t.clone() for name, t in collection.state_dict().items()}
    state = {key: torch.full_like(t, 0.5) for key, t in before.items() if t.dim() == 2}
    loaded = before | state | {name: torch.tensor(given)}
    with pytest.raises(RuntimeError, match=rf"^{name} must be .*, the state has .*none of the collection's tables"):
        collection.load_state_dict(loaded)
    assert all(torch.equal(t, before[key]) for key, t in collection.state_dict().items())
    collection.load_state_dict(before | {"step": torch.tensor(3.0)})
    assert int(collection.step) == 3


def test_sizes_of_other_kinds() -> None:
    """Sizes of numpy and torch are stored as ints."""
    table = rk.EmbeddingConfig(np.int64(10), torch.tensor(4), name="t", feature_names=["a"])
    assert (table.num_embeddings, table.embedding_dim) == (10, 4)
    assert type(table.num_embeddings) is type(table.embedding_dim) is int


@pytest.mark.parametrize("kind", [rk.EmbeddingBagCollection, rk.EmbeddingCollection])
def test_tables(kind) -> None:
    """Tables may be any iterable of configs."""
    assert len(kind(config(name) for name in "tu").embedding_bags) == 2


@pytest.mark.parametrize("kind", [np.float32, np.float64, int, float])
def test_fractions_of_other_kinds(kind) -> None:
    """Cache fractions of any real type are stored as floats."""
    for fraction in (kind(1), {"t": kind(1)}):
        module = rk.EmbeddingBagCollection([config()], optimizer=rk.SGD(), cache=rk.RowCache(fraction))
        assert module.row_cache.fractions == [1.0]
        assert type(module.row_cache.fractions[0]) is float


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_good_betas(default: str) -> None:
    """Betas may be any sequence, also while the default device is meta."""
    with torch.device(default):
        for betas in ((0.9, 0.999), [0, 0.5], np.array([0.5, 0.25])):
            assert rk.Adam(betas=betas).options()["beta1"] == betas[0]


def test_rates_by_union() -> None:
    """``|=`` on a parameter group sets the kernels' learning rate, as ``update`` does."""
    module = rk.EmbeddingBagCollection([config()], optimizer=rk.SGD(lr=1.0))
    group = module.fused_optimizer.param_groups[0]
    group |= {"lr": 7.0, "more": 1}
    assert group is module.fused_optimizer.param_groups[0]
    module.fused_optimizer.param_groups[0] |= [("lr", 8)]
    assert (group["lr"], group["more"], float(module.lr)) == (8.0, 1, 8.0)
