"""The CUDA kernels alone: the device finds bad input and notes it in ``status``, and nothing is updated."""

from __future__ import annotations

import pytest
import torch
from backends import device_backends
from embedding_bag_cases import LR, OPTIMIZERS, Case, make_case
from layout_calls import forged

from rec_kernels.testing import same_bits

INT64_MIN, INT64_MAX = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def case_of_two_tables(**changes) -> Case:
    return make_case([(5, 16), (3, 33)], [0, 1, 0], [3, 2, 0, 4, 1, 2] * 1, seed=1, **changes)


def unchanged(case: Case, found: tuple) -> bool:
    weights, state, step = found
    return same_bits(weights, case.weights) and same_bits(state, case.sum) and step.item() == 6


@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**62)])
def test_bad_ids_are_noted_and_skip_the_update(bad: int) -> None:
    """status: the smallest bad position, and how many, of two bags; "ignore" trains the others, "error" nobody."""
    case = case_of_two_tables()
    case.values[[9, 2, 1]] = torch.tensor([bad, bad, bad])
    assert case.offsets.tolist() == [0, 3, 5, 5, 9, 10, 12]
    for backend in device_backends():
        for bounds_check in ("error", "ignore"):
            output, status = backend.ops.embedding_bag(
                case.weights, *case.jagged, **case.layout, bounds_check=bounds_check
            )
            assert status.tolist() == [1, 3], backend.name
            assert output.isfinite().all()
            for optimizer in OPTIMIZERS:
                found = case.update(optimizer, backend.ops, bounds_check=bounds_check, status=status)
                assert unchanged(case, found) == (bounds_check == "error"), (backend.name, optimizer)
                found = case.update(optimizer, backend.ops, bounds_check=bounds_check)
                assert unchanged(case, found) == (bounds_check == "error"), (backend.name, optimizer)


def test_tables_are_checked() -> None:
    """They are only named, but gradients are made for them: rank, dtype and device are looked at."""
    case = case_of_two_tables()
    first, second = case.split(case.weights)
    for backend in device_backends():
        for tables, message in (
            ([first, second.double()], r"tables\[1\] must be float32, got float64"),
            ([first[0], second], r"tables\[0\] must have 2 dimension\(s\), got shape \[16\]"),
        ):
            with pytest.raises(ValueError, match=message):
                backend.ops.embedding_bag_tables(case.weights, tables, *case.jagged, **case.layout)


@pytest.mark.parametrize(
    ("offsets", "noted"),
    [
        ([0, 3, 2, 5, 9, 10, 12], 2),
        ([0, 3, 5, 5, 9, 10, 13], 6),
        ([0, 2**40, 5, 5, 9, 10, 12], 1),
        ([-1, 3, 5, 5, 9, 10, 12], 0),
        ([13, 13, 13, 13, 13, 13, 13], 0),
        ([0, 3, -3, 5, 9, 10, 12], 2),
        ([0, 12, 0, 12, 0, 12, 12], 2),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_bad_offsets_are_noted_and_nothing_outside_is_touched(offsets: list[int], noted: int, weighted: bool) -> None:
    """The first bad one goes before every bad id; the sanitized run of this file watches the memory."""
    case = case_of_two_tables(weighted=weighted)
    case.offsets.copy_(torch.tensor(offsets))
    case.values[0] = 99
    shape = list(case.weights.shape)
    for backend in device_backends():
        for bounds_check in ("error", "ignore"):
            layout = case.layout | {"bounds_check": bounds_check}
            output, status = backend.ops.embedding_bag(case.weights, *case.jagged, **layout)
            assert status[0].item() == INT64_MIN + 1 + noted, backend.name
            assert output.isfinite().all()
            for optimizer in OPTIMIZERS:
                found = case.update(optimizer, backend.ops, bounds_check=bounds_check)
                assert unchanged(case, found), (backend.name, optimizer)
            dense = backend.ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **layout)
            assert not dense.any()
            values, starts, _ = case.jagged
            backend.ops.embedding_bag_backward_per_sample_weights(case.grad, case.weights, values, starts, **layout)
            with pytest.raises((ValueError, RuntimeError), match="the layout, the offsets or inverse are not valid"):
                backend.ops.embedding_bag_backward_sparse(case.grad, shape, *case.jagged, **layout)


@pytest.mark.parametrize(
    ("column", "place", "value"),
    [
        ("weight_offset", 1, -4),
        ("weight_offset", 1, 4 * 81),
        ("weight_offset", 1, 4 * 80 + 1),
        ("weight_offset", 0, 2**62),
        ("num_embeddings", 1, 2**62),
        ("num_embeddings", 0, -1),
        ("embedding_dim", 1, 0),
        ("embedding_dim", 0, 2**40),
        ("row_offset", 2, -1),
        ("row_offset", 1, INT64_MAX),
        ("row_offset", 1, 3),
        ("row_offset", 2, 1),
        ("column", 1, 15),
        ("column", 2, 2**40),
        ("format", 1, 3),
        ("format", 1, -1),
        ("table_id", 0, 65536),
        ("by_row", 1, 1),
        ("part_start", 1, 0),
        ("feature", 2, 7),
    ],
)
def test_bad_layouts_are_noted_and_nothing_is_touched(column: str, place: int, value: int) -> None:
    """Lookups give nothing, updates change nothing, gradients are zero."""
    case = case_of_two_tables()
    layout = forged(case.layout, column, place, value)
    for backend in device_backends():
        _, status = backend.ops.embedding_bag(case.weights, *case.jagged, **layout)
        assert status[0].item() == INT64_MIN, backend.name
        weights, state, step = case.weights.clone(), case.sum.clone(), torch.tensor(6)
        rate = torch.tensor(LR)
        backend.ops.embedding_bag_backward_fused_(weights, state, step, rate, case.grad, *case.jagged, **layout)
        assert unchanged(case, (weights, state, step)), backend.name
        given = {"weights": case.weights, **layout}
        arguments = (case.grad, list(case.weights.shape), *case.jagged)
        assert not backend.ops.embedding_bag_backward_dense(*arguments, **given).any()


@pytest.mark.parametrize("number", [2, 64, 65, 300])
def test_rows_of_any_two_of_many_tables_may_overlap(number: int) -> None:
    """The first and the last, neighbours, or two in the middle: two groups would write what they have in common."""
    case = make_case([(2, 4)] * number, list(range(number)), [1] * number, seed=number)
    rows = case.layout["row_offsets"].tolist()
    for backend in device_backends():
        assert not unchanged(case, case.update("sgd", backend.ops)), backend.name
        for one, other in ((0, number - 1), (number - 2, number - 1), (number // 2 - 1, number // 2)):
            weights, step, rate = case.weights.clone(), torch.tensor(6), torch.tensor(LR)
            layout = forged(case.layout, "row_offset", other, rows[one] + 1)
            bags = (case.grad, *case.jagged)
            backend.ops.embedding_bag_backward_fused_(weights, None, step, rate, *bags, optimizer="sgd", **layout)
            assert unchanged(case, (weights, case.sum, step)), (backend.name, one, other)


def test_num_rows_changes_no_bit() -> None:
    """The least, or larger than needed."""
    case = make_case([(5, 16), (3, 130)], [0, 1, 0], [70, 2, 0, 90, 1, 2], mean=[True, False, False], seed=2)
    expected = case.update("rowwise_adagrad")
    for backend in device_backends():
        for options in ({}, {"num_rows": len(case.sum)}):
            found = case.update("rowwise_adagrad", backend.ops, **options)
            assert all(map(same_bits, found, expected)), (backend.name, options)
