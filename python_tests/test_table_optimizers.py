"""Optimizers of single tables: each table is trained as in a collection whose tables all have its optimizer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rec_kernels as rk
from rec_kernels.testing import same_bits

ROWS, STEPS = 12, 3
ALL = [
    rk.SGD(lr=0.05, weight_decay=0.1),
    rk.RowwiseAdagrad(lr=0.3),
    rk.Adagrad(lr=0.2, state_dtype=torch.bfloat16),
    rk.Adam(lr=0.1),
    rk.AdamW(lr=0.1, clip_grad_norm=0.5),
    rk.RowwiseAdam(lr=0.1, betas=(0.5, 0.9)),
    rk.LAMB(lr=0.05),
]
#: The table of each name has the optimizer that is there; None: the collection's, ``ALL[0]``.
OWN = {"a": None, "b": ALL[3], "c": ALL[1], "d": ALL[2], "e": ALL[5], "f": rk.Adam(lr=0.3), "g": ALL[1]}
DIMS = {"a": 8, "b": 4, "c": 8, "d": 5, "e": 8, "f": 4, "g": 16}
FEATURES = [*DIMS, "a2"]


def configs(own: dict[str, Any], kind: type = rk.EmbeddingBagConfig, **options: Any) -> list[rk.EmbeddingConfig]:
    """Tables of several widths; the first has two features, two are compressed."""
    compressions = {"d": rk.QuotientRemainder(4, compose="per_id"), "g": rk.Hash(7)}
    return [
        kind(
            ROWS,
            dim,
            name=name,
            feature_names=[name, "a2"] if name == "a" else [name],
            compression=compressions.get(name),
            optimizer=own[name],
            **options,
        )
        for name, dim in DIMS.items()
    ]


def made(own: dict[str, Any], default: Any = ALL[0], kind: Any = rk.EmbeddingBagCollection, **options: Any) -> Any:
    """A collection that begins with the same rows, whatever its optimizers."""
    torch.manual_seed(0)
    config = rk.EmbeddingBagConfig if kind is rk.EmbeddingBagCollection else rk.EmbeddingConfig
    tables = configs(own, config, format=options.pop("format", "fp32"))
    return kind(tables, optimizer=default, seed=7, **options)


def uniform(optimizer: Any, **options: Any) -> Any:
    """All tables with one optimizer."""
    return made(dict.fromkeys(DIMS), optimizer, **options)


def batch(step: int, *, weights: Tensor | None = None) -> rk.KeyedJaggedTensor:
    """Bags of three ids, equal ones among them."""
    ids = torch.randint(ROWS, (len(FEATURES) * 4 * 3,), generator=torch.Generator().manual_seed(step))
    return rk.KeyedJaggedTensor(FEATURES, ids, weights, lengths=torch.full((len(FEATURES) * 4,), 3))


def by_feature(output: Any) -> dict[str, Tensor]:
    """The outputs of features, whatever the collection returns."""
    output = output if isinstance(output, dict) else output.to_dict()
    return {name: t if isinstance(t, Tensor) else t.values() for name, t in output.items()}


def loss_of(output: Any) -> Tensor:
    """A loss whose gradient of a feature depends on that feature alone."""
    return sum(t.square().sum() for t in by_feature(output).values())


def plainly(collection: Any) -> None:
    """A backward a step."""
    for step in range(STEPS):
        loss_of(collection(batch(step))).backward()


def check(way: Callable[[Any], Any] = plainly, **options: Any) -> Any:
    """Trains all in one way: each table has the bits of the collection of its optimizer; returns that of several."""
    mixed = made(OWN, **options)
    found = way(mixed)
    state, seen = mixed.state_dict(), set()
    for optimizer in dict.fromkeys(OWN.values()):
        other = uniform(optimizer or ALL[0], **options)
        before = {name: t.clone() for name, t in other.state_dict().items()}
        results = way(other)
        tables = [name for name, own in OWN.items() if own == optimizer]
        seen |= compare(state, other.state_dict(), before, tables)
        for name, result in (results or {}).items():
            if name.split("_")[0] in tables:
                assert same_bits(found[name], result), name
    left = {name for name in state if not name.startswith(("beta_powers", "row_cache.", "file_")) and name != "step"}
    assert left == seen
    assert int(mixed.step) == int(other.step) > 0
    return mixed


def compare(state: dict, other: dict, before: dict, tables: list[str]) -> set[str]:
    """Asserts that tables and their state are the same in two states, and other than before; their names."""
    names = [n for n in other if re.fullmatch(rf"embedding\w*\.({'|'.join(tables)})(_\d)?\.\w+", n)]
    for name in names:
        assert same_bits(state[name], other[name]), name
        if not name.endswith(".format"):
            assert not same_bits(state[name], before[name]), name
    return set(names)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "mx6"])
def test_formats(format: str) -> None:
    """Also with noise, which is that of step, table, row and column."""
    check(format=format)


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(range(len(ALL)), 2)))
def test_pairs(a: int, b: int) -> None:
    """One table of each, in both orders; the second has a rate of its own."""
    optimizers = {"x": ALL[a], "y": ALL[b]}

    def of(given: dict[str, Any], default: Any) -> Any:
        torch.manual_seed(1)
        sizes = {"x": 6, "y": 8}
        tables = [
            rk.EmbeddingBagConfig(
                ROWS, d, name=n, feature_names=[n], optimizer=given.get(n), lr=0.25 if n == "y" else None
            )
            for n, d in sizes.items()
        ]
        collection = rk.EmbeddingBagCollection(tables, optimizer=default)
        for step in range(2):
            ids = torch.randint(ROWS, (5, 2), generator=torch.Generator().manual_seed(step))
            loss_of(collection({"x": ids, "y": ids.flip(0)})).backward()
        return collection

    mixed = of(optimizers, None).state_dict()
    for name, optimizer in optimizers.items():
        alone = of({}, optimizer).state_dict()
        for key in [k for k in alone if k.startswith(f"embedding_bags.{name}.")]:
            assert same_bits(mixed[key], alone[key]), key
