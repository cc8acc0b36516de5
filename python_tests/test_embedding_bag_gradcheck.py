"""Gradients against finite differences in double precision, and gradients of ops against autograd."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import Case, make_case
from torch import Tensor

from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import assert_same_sum


def definition(case: Case, tables: list[Tensor], factors: Tensor | None) -> Tensor:
    """docs/numerics.md, "Pooling", in the tensors' precision and torch's order: [B, sum of D]."""
    columns = []
    for f, t in enumerate(case.features):
        bags = []
        for b in range(case.batch):
            first, last = case.offsets[f * case.batch + b : f * case.batch + b + 2].tolist()
            ids = case.values[first:last]
            rows = _rows(t, tables, ids) if factors is None else _rows(t, tables, ids) * factors[first:last, None]
            bags.append(rows.sum(0) / (max(len(ids), 1) if case.mean[f] else 1))
        columns.append(torch.stack(bags))
    return torch.cat(columns, dim=1)


def _rows(feature: int | Parts, tables: list[Tensor], ids: Tensor) -> Tensor:
    """Rows of ids, as in docs/numerics.md, "Ids to rows"."""
    if not isinstance(feature, Parts):
        return tables[feature][ids]
    first, *others = (
        tables[t][ids // divisor % modulus]
        for t, (divisor, modulus) in zip(feature.tables, feature.partitions, strict=True)
    )
    if feature.combine == "concat":
        return torch.cat([first, *others], dim=1)
    for other in others:
        first = first * other if feature.combine == "mult" else first + other
    return first


PARTS = {
    "plain": [0, 1, 0],
    # Products of two and of three rows, some of both features.
    "mult": [Parts([0, 2], [(1, 5), (5, 4)], 20, "mult"), Parts([2, 0, 3], [(5, 4), (1, 5), (1, 3)], 20, "mult")],
    "mixed": [Parts([0, 1], [(1, 5), (5, 4)], 20, "concat"), 1, Parts([2, 0], [(1, 4), (4, 5)], 20, "add")],
}


def _case(weighted: bool, parts: str) -> Case:
    tables, features = [(5, 3), (4, 2), (4, 3), (3, 3)], PARTS[parts]
    mean, lengths = [False, True, True][: len(features)], [2, 0, 3, 1, 4, 2][: 2 * len(features)]
    return make_case(tables, features, lengths, mean=mean, weighted=weighted, seed=1)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(weighted: bool, parts: str) -> None:
    """The definition's double precision gradients equal finite differences."""
    case = _case(weighted, parts)
    tables = [torch.randn(t, dtype=torch.float64, requires_grad=True) for t in case.tables]
    factors = torch.rand(len(case.values), dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = [*tables, *([factors] if weighted else [])]
    assert torch.autograd.gradcheck(lambda *_: definition(case, tables, factors), inputs)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("weighted", [False, True])
def test_ops_have_these_gradients(weighted: bool, parts: str) -> None:
    """Dense gradients of tables and weights, on every backend, are within the rounding of their sums."""
    case = _case(weighted, parts)
    tables = [t.double().requires_grad_(True) for t in case.split(case.weights)]
    factors = case.per_sample_weights.double().requires_grad_(True) if weighted else None
    inputs = [*tables, *([factors] if weighted else [])]
    exact = torch.autograd.grad(definition(case, tables, factors), inputs, case.grad.double(), materialize_grads=True)
    # Sums of magnitudes, to which their rounding is relative.
    absolute = [t.detach().abs().requires_grad_(True) for t in inputs]
    most = definition(case, absolute[: len(tables)], absolute[-1] if weighted else None)
    magnitude = torch.autograd.grad(most, absolute, case.grad.double().abs(), materialize_grads=True)
    for backend in every_backend():
        dense = backend.ops.embedding_bag_backward_dense(
            case.grad, list(case.weights.shape), *case.jagged, **case.layout, weights=case.weights
        )
        for found, expected, size in zip(case.split(dense), exact, magnitude, strict=False):
            assert_same_sum(found, expected, size, terms=len(case.values) + 3 + 3)  # of up to three rows
        if weighted:
            gradient = backend.ops.embedding_bag_backward_per_sample_weights(
                case.grad, case.weights, case.values, case.offsets, **case.layout
            )
            assert_same_sum(gradient, exact[-1], magnitude[-1], terms=6 + 2 + 3)
