"""Partitioned features: shared tables, wide rows, frozen features, any ids, and gradients of products."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import OPTIMIZERS, Case, make_case
from embedding_bag_checks import check_gradients, check_lookups, check_update
from embedding_bag_format_cases import EncodedCase
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_calls import OPS, make_layout

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import same_bits

INT64_MAX = torch.iinfo(torch.int64).max
NUMBERS = st.integers(1, 9) | st.sampled_from([2**31 - 1, 2**32, 2**32 + 1, 2**62 - 1, 2**62, INT64_MAX])


def _shared_tables(lengths: list[int], **options) -> Case:
    """Tables used as factors, as summands, concatenated and alone by different features, in several orders."""
    tables = [(7, 12), (5, 12), (3, 12), (4, 3)]
    features = [
        Parts([0, 1, 2], [(5, 7), (1, 5), (2, 3)], 35, "mult"),
        Parts([1, 0], [(1, 5), (2, 7)], 12, "add"),
        Parts([3, 1, 0], [(9, 4), (3, 5), (1, 7)], 30, "concat"),
        0,
        Parts([2, 1], [(1, 3), (3, 5)], 15, "mult"),
        Parts([0], [(3, 7)], 20, "concat"),
    ]
    return make_case(tables, features, lengths * len(features), gaps=[0, 0, 4, 0], **options)


@pytest.mark.parametrize(
    ("weighted", "lengths"), [(False, [3, 0, 5]), (True, [3, 0, 5]), (False, [70, 9, 0]), (True, [700, 20, 1])]
)
def test_shared_tables(lengths: list[int], weighted: bool) -> None:
    """Gradient sums of one chunk, several chunks and several levels, with and without products."""
    case = _shared_tables(lengths, weighted=weighted, mean=[weighted] * 3 + [True, False, True], seed=sum(lengths))
    encoded = EncodedCase(case, ["bf16", "bf16", "bf16", "int4"])
    check_gradients(case, every_backend)
    check_lookups(encoded, every_backend)
    for optimizer in (*OPTIMIZERS, "adam"):
        check_update(encoded, optimizer, "nearest", every_backend)


def test_products_of_many_tables() -> None:
    """The first table is multiplied with the last one, and used alone by another feature."""
    features = [*range(70), Parts([0, 69], [(1, 3), (3, 3)], 9, "mult")]
    case = make_case([(3, 4)] * 70, features, [2] * 71, seed=70)
    check_gradients(case, every_backend)
    for optimizer in OPTIMIZERS:
        check_update(EncodedCase(case, ["fp32"] * 70), optimizer, "nearest", every_backend)


@pytest.mark.parametrize("format", BAG_FORMATS)
@pytest.mark.parametrize(("dim", "combine"), [(516, "mult"), (516, "concat"), (1030, "add"), (1030, "mult")])
def test_wide_rows(dim: int, combine: str, format: str) -> None:
    """Rows of four parts that are processed in column blocks."""
    partitions = [(1, 3), (3, 2), (6, 2), (12, 2)]
    tables = [(modulus, dim) for _, modulus in partitions]
    feature = Parts([0, 1, 2, 3], partitions, 24, combine)
    case = make_case(tables, [feature, 1], [3, 9, 0, 1], padding_idx=1, mean=[True, False], weighted=True, seed=dim)
    encoded = EncodedCase(case, [format] * 4 if combine != "concat" else [format, "fp32", "int8", format])
    check_lookups(encoded, every_backend)
    check_gradients(case, every_backend)
    check_update(encoded, "rowwise_adagrad", "stochastic", every_backend)


@settings(max_examples=100)
@given(NUMBERS, st.integers(1, 50), NUMBERS, st.lists(st.integers(0, INT64_MAX), min_size=1, max_size=20))
def test_rows_of_any_ids(divisor: int, rows: int, modulus: int, ids: list[int]) -> None:
    """The row is (id // divisor) % modulus for all int64 ids: the output is its index."""
    limit = INT64_MAX
    if modulus > rows:
        limit = min(limit, rows * divisor)
    ids = [min(i, limit - 1) for i in ids] + [limit - 1]
    case = make_case([(rows, 1)], [Parts([0], [(divisor, modulus)], limit, "concat")], [1] * len(ids))
    case.values[:] = torch.tensor(ids)
    numbers = torch.arange(rows).float()
    expected = torch.tensor([[i // divisor % modulus] for i in ids]).float()
    for backend in every_backend():
        output, status = backend.ops.embedding_bag(numbers, *case.jagged, **case.layout)
        assert torch.equal(output, expected), backend.name
        assert status.tolist() == [INT64_MAX, 0]


@pytest.mark.parametrize("frozen", [[True] + 5 * [False], 5 * [False] + [True], 6 * [True], [False, True] * 3])
def test_frozen_features(frozen: list[bool]) -> None:
    """Frozen features give no gradient to any of their parts; the others do."""
    case = _shared_tables([2, 1], weighted=True, seed=8)
    mask = torch.tensor(frozen)
    zero = torch.cat([case.grad.new_full((w,), 1.0 - f) for f, (_, w) in zip(frozen, case.columns, strict=True)])
    given = (list(case.weights.shape), *case.jagged)
    for backend in every_backend():
        dense = backend.ops.embedding_bag_backward_dense(
            case.grad, *given, **case.layout, frozen=mask, weights=case.weights
        )
        backward = OPS.embedding_bag_backward_dense
        expected = backward(case.grad * zero, *given, **case.layout, weights=case.weights)
        assert torch.equal(dense, expected), backend.name
        found = case.update("sgd", backend.ops, frozen=mask)
        assert all(map(same_bits, found, case.update("sgd", frozen=mask))), backend.name


def _two_parts() -> Case:
    return make_case([(8, 5), (7, 5)], [Parts([0, 1], [(1, 8), (8, 7)], 50, "mult")], [1, 2], seed=1)


def test_gradients_need_the_rows() -> None:
    """Gradients of products need the other parts' rows."""
    case = _two_parts()
    layout = make_layout(case.layout)
    few, double = case.weights[1:].clone(), case.weights.double()
    for backend in every_backend():
        dense, sparse = (
            getattr(backend.ops.ops, f"embedding_bag_backward_{kind}").layout for kind in ("dense", "sparse")
        )
        for backward, weights, message in (
            (dense, double, "must be float32"),
            (sparse, double, "must be float32"),
            (sparse, few, "does not fit in weights|are not valid"),
        ):
            with pytest.raises((ValueError, RuntimeError), match=message):
                backward(case.grad, weights, *case.jagged[:2], *layout)


@pytest.mark.parametrize("combine", ["concat", "add", "mult"])
def test_others_need_no_rows(combine: str) -> None:
    """Gradients of sums, concatenations and single parts need no rows."""
    alone = Parts([2], [(3, 4)], 99, "mult")
    together = alone if combine == "mult" else Parts([0, 1], [(1, 5), (5, 3)], 15, combine)
    case = make_case([(5, 8), (3, 8), (4, 8)], [together, alone, 1], [2, 0, 3, 1, 2, 1], seed=1)
    expected = case.expected_dense_gradient()
    for backend in every_backend():
        given = (case.grad, list(case.weights.shape), *case.jagged)
        found = backend.ops.embedding_bag_backward_dense(*given, **case.layout)
        assert same_bits(found, expected), backend.name
