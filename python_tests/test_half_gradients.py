"""Gradients of tables in torch's dtypes: those of float32 tables, rounded once; and torch's optimizers train them."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from collection_format_cases import DTYPES, batch
from embedding_bag_cases import Case, Parts, make_case
from embedding_bag_format_cases import EncodedCase
from torch import Tensor

import rec_kernels as rk
from rec_kernels.reference import row_formats as reference
from rec_kernels.testing import same_bits

FLOATS = list(DTYPES)


def mixture(shift: int, weighted: bool) -> Case:
    """Narrow, wide and very wide rows; rows with 70 and with 4200 occurrences; features that share a table."""
    tables = [(1, 5), (4, 37), (2, 130), (3, 600), (1, 1030), (5, 16), (1, 3)]
    lengths = [40, 30, 3, 0, 2, 70, 1, 2, 2, 3, 9, 80, 4, 0, 2200, 2000]
    options = {"mean": [f % 3 == 1 for f in range(8)], "weighted": weighted, "padding_idx": [None] * 7 + [1]}
    return make_case(tables, [0, 1, 2, 3, 4, 1, 5, 6], lengths, seed=shift, **options)


def products(shift: int) -> Case:
    """Parts that are multiplied, two and three of them, added, and concatenated; hot rows among them."""
    tables = [(4, 20), (5, 20), (3, 20), (3, 20), (4, 20), (2, 6), (5, 9)]
    two = Parts([0, 1], [(5, 4), (1, 5)], 20, "mult")
    three = Parts([2, 3, 4], [(1, 3), (3, 3), (9, 4)], 36, "mult")
    apart = Parts([5, 6], [(5, 2), (1, 5)], 10, "concat")
    return make_case(tables, [two, three, apart, 1], [70, 3, 5, 90, 2, 8, 1, 1], seed=shift, weighted=shift == 1)


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("kind", ["plain", "weighted", "products"])
def test_dense_gradients_in_the_tables_dtypes(kind: str, shift: int) -> None:
    """Each row's sum in float32 is rounded once to nearest, at the table's bytes; all other bytes are 0."""
    case = products(shift) if kind == "products" else mixture(shift, kind == "weighted")
    formats = [FLOATS[(shift + t) % 3] for t in range(len(case.tables))]
    if kind == "products":
        formats = [FLOATS[(shift + n) % 3] for n in (0, 0, 1, 1, 1, 2, 0)]
    encoded = EncodedCase(case, formats)
    expected = torch.zeros_like(encoded.flat)
    views = encoded.split(expected)
    for (table, row), g in case.row_gradients.items():
        views[table][row] = reference.quantize_rows(g[None], formats[table], raise_not_finite=False)[0]
    given = {**encoded.layout, "weights": encoded.flat}
    for backend in every_backend():
        found = backend.ops.embedding_bag_backward_dense(case.grad, [len(encoded.flat)], *case.jagged, **given)
        assert same_bits(found, expected), backend.name
        _, floats, _ = backend.ops.embedding_bag_backward_sparse(case.grad, [0], *case.jagged, **given)
        assert same_bits(floats, torch.cat([case.row_gradients[key] for key in sorted(case.row_gradients)]))


ROWS = 30
MIXTURES = [["fp16", "bf16", "fp32"], ["bf16"] * 3, ["fp16"] * 3]
KINDS = {"bags": rk.EmbeddingBagConfig, "rows": rk.EmbeddingConfig, "compressed": rk.EmbeddingBagConfig}


def make(formats: list[str], kind: str = "bags", **options) -> rk.EmbeddingBagCollection | rk.EmbeddingCollection:
    """Three tables of 6, 37 and 300 columns, the first with two features; compressed: hashed, added, multiplied."""
    torch.manual_seed(0)
    rules = [rk.Hash(7), rk.QuotientRemainder(4, combine="add"), rk.QuotientRemainder(5, combine="mult")]
    tables = []
    for i, format in enumerate(formats):
        own = {} if kind == "rows" else {"pooling": ["sum", "mean"][i % 2]}
        own |= {"compression": rules[i]} if kind == "compressed" else {}
        features = [f"f{i}", f"g{i}"][: 2 - min(i, 1)]
        tables.append(KINDS[kind](ROWS, [6, 37, 300][i], name=f"t{i}", feature_names=features, format=format, **own))
    return (rk.EmbeddingCollection if kind == "rows" else rk.EmbeddingBagCollection)(tables, **options)


def twins(formats: list[str], kind: str = "bags") -> tuple[torch.nn.Module, torch.nn.Module]:
    """A collection in these formats, and one with the same numbers in float32."""
    found, floats = make(formats, kind), make(["fp32"] * 3, kind)
    with torch.no_grad():
        for own, other in zip(found.parameters(), floats.parameters(), strict=True):
            other.copy_(own)
    return found, floats


def backward(module: torch.nn.Module, given: rk.KeyedJaggedTensor) -> Tensor | None:
    """The gradients of a loss that is not linear, which arrive at the module; returns those of the batch's weights."""
    output = module(given)
    tensors = [output.values()] if isinstance(output, rk.KeyedTensor) else [t.values() for t in output.values()]
    sum(t.square().sum() for t in tensors).backward()
    return None if given.weights_or_none() is None else given.weights().grad


def check_rounded(found: torch.nn.Module, floats: torch.nn.Module) -> None:
    """The gradients are those of the float32 tables in the tables' dtypes."""
    for (name, own), other in zip(found.named_parameters(), floats.parameters(), strict=True):
        assert own.grad.any(), name
        assert same_bits(own.grad, other.grad.to(own.dtype)), name


@pytest.mark.parametrize("formats", MIXTURES, ids=str)
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_float32_tables_rounded_once(kind: str, factors: bool, formats: list[str]) -> None:
    """Also of two lookups in one graph, which torch adds up in the table's dtype."""
    found, floats = twins(formats, kind)
    results = []
    for module in (found, floats):
        given = batch(module, factors=factors)
        if factors:
            given.weights().requires_grad_()
        results.append(backward(module, given))
    check_rounded(found, floats)
    assert results[0] is None or same_bits(*results)


@pytest.mark.parametrize("formats", MIXTURES, ids=str)
def test_gradients_are_torchs(formats: list[str]) -> None:
    """torch.nn.functional.embedding_bag of the same numbers in float64, in every table."""
    collection = make(formats)
    given = batch(collection)
    collection(given).values().square().sum().backward()
    for i, p in enumerate(collection.parameters()):
        weight = p.detach().double().requires_grad_()
        for feature in [f"f{i}", f"g{i}"][: 2 - min(i, 1)]:
            jagged = given[feature]
            bags = torch.nn.functional.embedding_bag(
                jagged.values(), weight, jagged.offsets(), mode=["sum", "mean"][i % 2], include_last_offset=True
            )
            bags.square().sum().backward()
        torch.testing.assert_close(p.grad, weight.grad.to(p.dtype))
