"""embedding_bag on inputs too large for the reference: equal among backends, close to torch."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import Case, make_case, wide_floats
from layout_calls import OPS
from tiers import full

from rec_kernels import testing
from rec_kernels.testing import assert_same_sum, same_bits

ops = OPS
TABLES = [(3000, 16), (700, 64), (50, 128), (5000, 100), (90, 3), (40, 300)]
FEATURES = [0, 1, 2, 3, 4, 5, 1, 3]
BATCH = 384


def _large(*, mean: bool, weighted: bool, session: int = 1) -> Case:
    """Eight features over six tables, a tenth of the bags empty, a third of the ids one hot row."""
    rows = [TABLES[t][0] for t in FEATURES]
    values, offsets = testing.jagged_batch(rows, BATCH, mean_length=12, ids="zipf", hot=0.3, session=session, seed=1)
    case = make_case(TABLES, FEATURES, [0] * len(FEATURES), mean=[mean] * len(FEATURES), seed=2)
    case.values, case.offsets = values.int(), offsets
    case.per_sample_weights = wide_floats(len(values), seed=3) if weighted else None
    return case


def _everything(case: Case, ops=ops) -> list[torch.Tensor]:
    """Results of every op of the family for a case."""
    shape, (values, offsets, _) = list(case.weights.shape), case.jagged
    return [
        *ops.embedding_bag(case.weights, *case.jagged, **case.layout),
        ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **case.layout),
        *ops.embedding_bag_backward_sparse(case.grad, shape, *case.jagged, **case.layout),
        ops.embedding_bag_backward_per_sample_weights(case.grad, case.weights, values, offsets, **case.layout),
        *case.update("sgd", ops),
        *case.update("rowwise_adagrad", ops),
    ]


@pytest.mark.parametrize(("mean", "weighted", "session"), [(False, True, 4), *full((True, False, 1))])
def test_backends_agree(mean: bool, weighted: bool, session: int) -> None:
    """Every backend has equal bits in every run."""
    case = _large(mean=mean, weighted=weighted, session=session)
    expected = _everything(case)
    for backend in every_backend():
        assert all(map(same_bits, _everything(case, backend.ops), expected)), backend.name


def test_dense_and_sparse_gradients_are_the_same() -> None:
    """The sparse gradient, made dense, has the bits of the dense one."""
    case = _large(mean=True, weighted=True)
    shape = list(case.weights.shape)
    dense = ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **case.layout)
    rows, row_grads, counts = ops.embedding_bag_backward_sparse(case.grad, shape, *case.jagged, **case.layout)
    found, row, at = torch.zeros_like(case.weights), 0, 0
    for table, view in enumerate(case.split(found)):
        count, dim = counts[FEATURES.index(table)].item(), view.shape[1]
        view[rows[row : row + count]] = row_grads[at : at + count * dim].view(count, dim)
        row, at = row + count, at + count * dim
    assert (row, at) == (len(rows), len(row_grads))
    assert same_bits(found, dense)


def _of_feature(case: Case, feature: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and offsets [B + 1] of one feature."""
    offsets = case.offsets[feature * BATCH : (feature + 1) * BATCH + 1]
    return case.values[offsets[0] : offsets[-1]].long(), offsets - offsets[0]


@pytest.mark.parametrize("mean", [False, True])
def test_dense_gradient_against_index_add(mean: bool) -> None:
    """Row gradients against a sum in float64."""
    case, column = _large(mean=mean, weighted=True), 0
    dense = ops.embedding_bag_backward_dense(case.grad, [len(case.weights)], *case.jagged, **case.layout)
    exact, magnitude = torch.zeros(len(dense)).double(), torch.zeros(len(dense)).double()
    terms = torch.zeros(len(dense))
    for f, table in enumerate(FEATURES):
        ids, offsets = _of_feature(case, f)
        bags = torch.repeat_interleave(torch.arange(BATCH), offsets.diff())
        start, dim = case.offsets[f * BATCH], TABLES[table][1]
        factor = case.per_sample_weights[start : start + len(ids)].double()
        if mean:
            factor = factor / offsets.diff()[bags]
        term = case.grad[bags, column : column + dim].double() * factor[:, None]
        case.split(exact)[table].index_add_(0, ids, term)
        case.split(magnitude)[table].index_add_(0, ids, term.abs())
        case.split(terms)[table].index_add_(0, ids, torch.ones(len(ids), dim))
        column += dim
    assert 64 * 16 < terms.max() <= 64 * 64  # chunks of chunks: a term goes through two sums of up to 64
    # Three roundings for 1 / n, weight / n and the product with the gradient.
    assert_same_sum(dense, exact, magnitude, terms=2 * 64 + 3)
