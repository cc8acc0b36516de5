"""Partitioned features: unused ids, id dtypes, half-precision outputs, wide and empty tables."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import Case, make_case
from embedding_bag_checks import check_gradients, check_lookups, check_update
from embedding_bag_format_cases import EncodedCase
from layout_calls import OPS

from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import same_bits

ops = OPS
KINDS = ["concat", "add", "mult"]


def _parts(combine: str, first: int = 0) -> Parts:
    """Partitions of the tables ``first`` (5 rows) and ``first + 1`` (3 rows)."""
    return Parts([first, first + 1], [(1, 5), (5, 3)], 15, combine)


def _check(case: Case, optimizer: str = "rowwise_adagrad") -> None:
    encoded = EncodedCase(case, ["fp32"] * len(case.tables), gaps=[0] * len(case.tables))
    check_lookups(encoded, every_backend)
    check_gradients(case, every_backend)
    check_update(encoded, optimizer, "nearest", every_backend)


@pytest.mark.parametrize("combine", KINDS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_ids_that_no_bag_has(combine: str, ids_dtype: torch.dtype, weighted: bool) -> None:
    """Ids before the first and after the last bag belong to no feature."""
    tables, features = [(5, 6), (3, 6)], [_parts(combine), 1, _parts("mult"), Parts([0], [(2, 5)], 99, "concat")]
    lengths = [2, 3, 1, 0, 70, 2, 1, 4]
    _check(make_case(tables, features, lengths, weighted=weighted, ids_dtype=ids_dtype, unused=(2, 3), seed=7))


@pytest.mark.parametrize("combine", KINDS)
@pytest.mark.parametrize("dim", [3, 40, 2052])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_outputs(combine: str, dim: int, dtype: torch.dtype) -> None:
    """Sums of composed rows are float32, and rounded once."""
    features = [_parts(combine), 0, Parts([1], [(2, 3)], 50, "concat")]
    case = make_case([(5, dim), (3, dim)], features, [2, 0, 5, 1, 3, 1], mean=[True, False, False], seed=dim)
    expected = case.expected_output().to(dtype)
    for backend in every_backend():
        output, _ = backend.ops.embedding_bag(case.weights, *case.jagged, **case.layout, output_dtype=dtype)
        assert same_bits(output, expected), backend.name


@pytest.mark.parametrize("combine", KINDS)
def test_rows_of_more_than_2048_columns(combine: str) -> None:
    """Rows exceed the kernels' buffers of sums and of updated rows, and other features' widths."""
    tables = [(5, 2052), (3, 2052), (4, 3)]
    _check(make_case(tables, [_parts(combine), 2, 0], [3, 0, 1, 2, 1, 1], seed=2))


def test_wide_table_beside_a_narrow_product() -> None:
    """The scratch for products is as wide as the multiplied tables."""
    tables = [(3, 600), (5, 8), (3, 8), (4, 20), (2, 20)]
    wider = Parts([3, 4], [(1, 4), (4, 2)], 8, "mult")
    _check(make_case(tables, [0, _parts("mult", 1), wider], [90, 70, 9, 80, 3, 70], seed=3))


@pytest.mark.parametrize("place", ["of its own", "of another"])
def test_empty_tables(place: str) -> None:
    """A table without rows, alone, hashed or as a factor, beside a product; another table may share its row offset."""
    tables = [(5, 6), (3, 6), (0, 6)]
    nothing = [Parts([2], [(3, 1)], 0, "concat"), 2, Parts([0, 2], [(1, 5), (5, 1)], 0, "mult")]
    case = make_case(tables, [_parts("mult"), *nothing, 1], [3, 2, *[0] * 6, 1, 4], seed=4)
    if place == "of another":
        rows = case.layout["row_offsets"]
        rows[[part == 2 for part in case.parts]] = case.first_rows[0]
    dense, given = case.expected_dense_gradient(), (case.grad, list(case.weights.shape), *case.jagged)
    for backend in every_backend():
        output, _ = backend.ops.embedding_bag(case.weights, *case.jagged, **case.layout)
        assert same_bits(output, case.expected_output()), backend.name
        found = backend.ops.embedding_bag_backward_dense(*given, **case.layout, weights=case.weights)
        assert same_bits(found, dense), backend.name
        weights, _, step = case.update("sgd", backend.ops)
        assert same_bits(weights, case.expected_update("sgd")[0]), backend.name
        assert step == 7


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_tables_that_parts_share(sparse: bool) -> None:
    """embedding_bag_tables sums each table's gradient over all parts that use it."""
    shapes = [(5, 4), (3, 4), (6, 4)]
    features = [_parts("mult"), 2, Parts([1, 0], [(1, 3), (3, 5)], 15, "add"), Parts([0], [(2, 5)], 30, "concat")]
    case = make_case(shapes, features, [2, 3, 1, 0, 4, 2, 1, 1], gaps=[0, 12, 4], seed=6)  # multiples of 16
    case.layout["row_offsets"] = torch.tensor([[0, 5, 8][table] for table in case.parts])
    weights = torch.cat([case.weights, torch.zeros(8)])
    tables = [view.requires_grad_() for view in case.split(weights)]
    output, _ = ops.embedding_bag_tables(weights, tables, *case.jagged, **case.layout, sparse=sparse)
    grads = torch.autograd.grad(output, tables, case.grad)
    for grad, expected in zip(grads, case.split(case.expected_dense_gradient()), strict=True):
        assert grad.is_sparse == sparse
        assert not sparse or grad.is_coalesced()
        assert same_bits(grad.to_dense(), expected)
