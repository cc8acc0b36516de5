"""Partitioned features: shared tables, wide rows, frozen features, any ids, and what is noted on a device."""

from __future__ import annotations

import pytest
import torch
from backends import device_backends, every_backend
from embedding_bag_cases import LR, OPTIMIZERS, Case, make_case
from embedding_bag_checks import check_gradients, check_lookups, check_update
from embedding_bag_format_cases import EncodedCase
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_calls import OPS, forged, make_layout

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import same_bits

BAD_LAYOUT, INT64_MAX = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
NUMBERS = st.integers(1, 9) | st.sampled_from([2**31 - 1, 2**32, 2**32 + 1, 2**62 - 1, 2**62, INT64_MAX])


def _shared_tables(lengths: list[int], **options) -> Case:
    """Tables that are factors of one feature, summands, neighbours and all of others, in several orders."""
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
    """Runs of one chunk, of several and of several levels, whose terms are products or not."""
    case = _shared_tables(lengths, weighted=weighted, mean=[weighted] * 3 + [True, False, True], seed=sum(lengths))
    encoded = EncodedCase(case, ["bf16", "bf16", "bf16", "int4"])
    check_gradients(case, every_backend)
    check_lookups(encoded, every_backend)
    for optimizer in (*OPTIMIZERS, "adam"):
        check_update(encoded, optimizer, "nearest", every_backend)


def test_products_of_many_tables() -> None:
    """The first table is multiplied with the last one, and read alone by another feature."""
    features = [*range(70), Parts([0, 69], [(1, 3), (3, 3)], 9, "mult")]
    case = make_case([(3, 4)] * 70, features, [2] * 71, seed=70)
    check_gradients(case, every_backend)
    for optimizer in OPTIMIZERS:
        check_update(EncodedCase(case, ["fp32"] * 70), optimizer, "nearest", every_backend)


@pytest.mark.parametrize("format", BAG_FORMATS)
@pytest.mark.parametrize(("dim", "combine"), [(516, "mult"), (516, "concat"), (1030, "add"), (1030, "mult")])
def test_wide_rows(dim: int, combine: str, format: str) -> None:
    """Rows that are taken block by block, of four parts."""
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
    """(id // divisor) % modulus for all of int64: the output is the row's number."""
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


def test_ignored_ids() -> None:
    """Ids out of range and padding are left out of output and gradients, once each."""
    case = _shared_tables([4, 0, 3], mean=[True] * 6, weighted=True, padding_idx=2, seed=5)
    case.values[[0, 2, 9, 15, 16]] = torch.tensor([35, -1, 12, 30, 2**40])
    encoded = EncodedCase(case, ["fp32", "fp32", "fp32", "mx6"])
    check_lookups(encoded, every_backend, bounds_check="ignore")
    check_gradients(case, every_backend, bounds_check="ignore")
    check_update(encoded, "sgd", "nearest", every_backend, bounds_check="ignore")


@pytest.mark.parametrize("frozen", [[True] + 5 * [False], 5 * [False] + [True], 6 * [True], [False, True] * 3])
def test_frozen_features(frozen: list[bool]) -> None:
    """Frozen features give no gradient to any of their parts; the others go on."""
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


BAD_NUMBERS = [
    ("divisor", 1, 0),
    ("modulus", 0, 0),
    ("modulus", 0, 9),  # more rows than there are
    ("modulus", 1, -1),
    ("id_limit", 0, -1),
    ("id_limit", 1, 51),
    ("num_embeddings", 1, 6),
    ("combine", 0, 3),
    ("combine", 0, -1),
    ("combine", 0, 0),  # whose columns would be side by side
    ("embedding_dim", 1, 4),
    ("row_offset", 1, 0),
    ("column", 1, 5),
    ("part_start", 0, 1),
    ("feature", 1, 1),
    ("multiplied", 0, 0),
]


def _two_parts() -> Case:
    return make_case([(8, 5), (7, 5)], [Parts([0, 1], [(1, 8), (8, 7)], 50, "mult")], [1, 2], seed=1)


@pytest.mark.parametrize(("column", "part", "value"), BAD_NUMBERS)
def test_bad_layouts_are_noted(column: str, part: int, value: int) -> None:
    """A device notes them, returns NaN, updates nothing and gives no gradient."""
    case = _two_parts()
    wrong = forged(case.layout, column, part, value)
    for backend in device_backends():
        output, status = backend.ops.embedding_bag(case.weights, *case.jagged, **wrong)
        assert status[0] == BAD_LAYOUT, backend.name
        assert output.isnan().all()
        weights, state, step = case.weights.clone(), case.sum.clone(), torch.tensor(6)
        rate, shape = torch.tensor(LR), list(case.weights.shape)
        backend.ops.embedding_bag_backward_fused_(weights, state, step, rate, case.grad, *case.jagged, **wrong)
        assert same_bits(weights, case.weights)
        assert same_bits(state, case.sum)
        assert step == 6
        given = (case.grad, shape, *case.jagged)
        assert not backend.ops.embedding_bag_backward_dense(*given, **wrong, weights=case.weights).any()
        with pytest.raises((ValueError, RuntimeError), match="the layout, the offsets or inverse are not valid"):
            backend.ops.embedding_bag_backward_sparse(*given, **wrong, weights=case.weights)
        factors = backend.ops.embedding_bag_backward_per_sample_weights(
            case.grad, case.weights, case.values, case.offsets, **wrong
        )
        assert not factors.any()


@pytest.mark.parametrize("offsets", [[0, 4, 0, 8], [0, 8, 4, 8], [8, 8, 0, 8], [0, 4, 4, 2**40]])
def test_bad_offsets_are_noted(offsets: list[int]) -> None:
    """Bags of features with more and fewer parts that have ids in common: nothing outside is touched, or updated."""
    tables = [(4, 5), (2, 5), (3, 5)]
    features = [Parts([0, 1, 2], [(1, 4), (4, 2), (8, 3)], 24, "mult"), Parts([0], [(3, 4)], 24, "concat"), 2]
    case = make_case(tables, features, [4, 2, 2], seed=4)
    case.values %= 3
    case.offsets.copy_(torch.tensor(offsets))
    given = (case.grad, list(case.weights.shape), *case.jagged)
    for backend in device_backends():
        _, status = backend.ops.embedding_bag(case.weights, *case.jagged, **case.layout)
        assert BAD_LAYOUT < status[0] < 0, backend.name
        weights, state, step = case.update("rowwise_adagrad", backend.ops)
        assert same_bits(weights, case.weights)
        assert same_bits(state, case.sum)
        assert step == 6
        assert not backend.ops.embedding_bag_backward_dense(*given, **case.layout, weights=case.weights).any()


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
    """Nothing is multiplied where parts are added or side by side, or where there is one."""
    alone = Parts([2], [(3, 4)], 99, "mult")
    together = alone if combine == "mult" else Parts([0, 1], [(1, 5), (5, 3)], 15, combine)
    case = make_case([(5, 8), (3, 8), (4, 8)], [together, alone, 1], [2, 0, 3, 1, 2, 1], seed=1)
    expected = case.expected_dense_gradient()
    for backend in every_backend():
        given = (case.grad, list(case.weights.shape), *case.jagged)
        found = backend.ops.embedding_bag_backward_dense(*given, **case.layout)
        assert same_bits(found, expected), backend.name
