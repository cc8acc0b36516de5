"""Layouts that ``rk.table_layout`` would not make: a CPU names the record, CUDA kernels set status, nothing is updated.

test_embedding_bag_fuzz.py has wrong offsets and ids, test_forged_layouts.py random records.
"""

from __future__ import annotations

import re

import pytest
import torch
from backends import device_backends
from embedding_bag_cases import LR, make_case
from embedding_bag_format_cases import every_format_once
from embedding_bag_moment_cases import ELEMENTWISE
from layout_calls import forged
from test_embedding_bag_bad_input import FAMILY, WRITTEN, adam, arguments, arguments_of, call, with_layout

from rec_kernels.ops.table_layout import Column
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import same_bits

BAD_LAYOUT, INT64_MAX = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
FORWARDS, UPDATE = FAMILY[:3], "embedding_bag_backward_fused_"
#: Errors of a CPU, after the number of the record.
ERRORS = {
    "table": "a table of ",
    "rows": "row_offset and num_embeddings must describe rows below layout_sizes' num_rows",
    "ids": "id_limit, divisor and modulus must lead to rows of the table",
    "by row": "by_row must name the parts by their rows",
    "columns": "column and part_column must be those behind the part before",
    "features": "feature and part_start must name the features in order",
    "width": "embedding_dim must be at least 1, and at most what layout_sizes says",
    "format": "format must be one of those that layout_sizes names",
    "table id": "table_id must be in [0, 65536)",
    "shard": "first_row and table_rows must be those of a shard",
    "first part": "id_limit, padding_idx, combine, mean and frozen must be those of the feature's",
    "state": "the state of a table of ",
}
#: Part, column and value of a record, the part that a CPU names, and its message: of plain tables,
FORGED = [
    (0, "weight_offset", 2**62, 0, "table"),
    *((1, "weight_offset", at, 1, "table") for at in (-4, 4 * 81, 4 * 80 + 1, 4 * 79 + 2, 2**62)),
    (2, "weight_offset", 4, 1, "by row"),
    (0, "num_embeddings", -1, 0, "rows"),
    *((1, "num_embeddings", rows, 1, "rows") for rows in (2**62, -1, 4)),
    (1, "num_embeddings", 2, 1, "ids"),
    (2, "num_embeddings", 4, 1, "by row"),
    *((0, "embedding_dim", columns, 0, "width") for columns in (0, 2**40)),
    *((1, "embedding_dim", columns, 1, "width") for columns in (0, 33)),
    *((1, "row_offset", row, 1, "rows") for row in (-1, 6, INT64_MAX)),
    *((1, "row_offset", row, 2, "by row") for row in (0, 3, 4)),
    (2, "row_offset", -1, 1, "by row"),
    (2, "row_offset", 1, 1, "by row"),
    *((1, "column", column, 1, "columns") for column in (15, 17, -1)),
    (2, "column", 2**40, 2, "columns"),
    *((1, "feature", feature, 1, "features") for feature in (0, 2)),
    (2, "feature", 7, 2, "features"),
    *((1, "part_start", part, 0, "features") for part in (0, 2)),
    *((1, "id_limit", limit, 1, "ids") for limit in (4, -1)),
    (1, "divisor", 2, 1, "ids"),
    *((1, "modulus", modulus, 1, "ids") for modulus in (2, 0)),
    *((1, "format", format, 1, "format") for format in (1, 3, -1)),
    *((1, "by_row", part, 1, "by row") for part in (0, 3, -1)),
    (1, "by_row", 1, 2, "by row"),
    *((1, column, 1, 1, "first part") for column in ("mean", "multiplied")),
    *((part, "table_id", 65536, part, "table id") for part in (0, 1)),
    *((1, *wrong, 1, "shard") for wrong in (("first_row", -1), ("table_rows", 2**44 + 1), ("first_column", 2))),
]
#: of two tables with multiplied rows, of 8 and 7 rows for 50 ids,
FORGED_PARTS = [
    (1, "divisor", 0, 1, "ids"),
    *((0, "modulus", modulus, 0, "ids") for modulus in (0, 9)),
    (1, "modulus", -1, 1, "ids"),
    (0, "id_limit", -1, 0, "ids"),
    (1, "id_limit", 51, 1, "first part"),
    (1, "num_embeddings", 6, 1, "ids"),
    *((0, "combine", combine, 0, "first part") for combine in (3, -1)),
    (0, "combine", 0, 1, "first part"),  # its columns would be concatenated
    (1, "embedding_dim", 4, 1, "columns"),
    (1, "row_offset", 0, 1, "by row"),
    (1, "column", 5, 1, "columns"),
    (0, "part_start", 1, 0, "features"),
    (1, "feature", 1, 1, "features"),
    (0, "multiplied", 0, 0, "first part"),
]
#: of tables in every format,
FORGED_BYTES = [
    *((5, "format", format, 5, "format") for format in (15, -1)),
    *((5, "table_id", table, 5, "table id") for table in (65536, -1)),
]
#: and of plain tables with elementwise state.
FORGED_STATE = [
    *((1, "state_offset", at, 1, "state") for at in (81, 2**62)),
    (0, "state_offset", -1, 0, "state"),
    (2, "state_offset", 16, 1, "by row"),
]


def _parts() -> dict[str, object]:
    feature = Parts([0, 1], [(1, 8), (8, 7)], 50, "mult")
    return arguments_of(make_case([(8, 5), (7, 5)], [feature], [1, 2], seed=1))


def _bytes() -> dict[str, object]:
    encoded = every_format_once(make_case([(4, 19)] * 8, list(range(8)), [2, 1] * 8, seed=11))
    return arguments_of(encoded.case) | encoded.layout | encoded.noise | {"weights": encoded.flat}


def _state(optimizer: str) -> dict[str, object]:
    if optimizer == "adagrad":
        return arguments() | {"sum": torch.ones(176), "optimizer": optimizer, "moment_offsets": [0, 80, 0]}
    second = {"exp_avg_sq": torch.ones(8)} if optimizer == "rowwise_adam" else {}
    return arguments() | adam(optimizer=optimizer, **second)


#: Every forged record with a call, and the ops that use it.
CALLS = [
    *((arguments, FAMILY, record) for record in FORGED),
    *((_parts, [op for op in FAMILY if op != "embedding_bag_tables"], record) for record in FORGED_PARTS),
    *((_bytes, [*FORWARDS[::2], UPDATE, FAMILY[-1]], record) for record in FORGED_BYTES),
    (
        lambda: arguments() | {"lr": torch.ones(3)},
        [UPDATE],
        (1, "table_id", 3, 1, "table id"),
    ),  # without a learning rate
    *((lambda o=o: _state(o), [UPDATE], record) for o in ELEMENTWISE for record in FORGED_STATE),
]


@pytest.mark.parametrize(("made", "ops", "record"), CALLS, ids=lambda x: str(x) if isinstance(x, tuple) else "")
def test_forged_records(made, ops: list[str], record: tuple[int, str, int, int, str]) -> None:
    """The CPU raises; a device returns NaN, zero gradients or an error status; no state changes."""
    part, column, number, named, reason = record
    given = with_layout(made())
    given["layout"][part, Column[column]] = number
    written = {name: given[name].clone() for name in WRITTEN if isinstance(given.get(name), torch.Tensor)}
    for op in ops:
        with pytest.raises(ValueError, match=re.escape(f"layout[{named}]: {ERRORS[reason]}")):
            call(op, given)
    for backend in device_backends():
        for op in ops:
            if op == "embedding_bag_backward_sparse":
                with pytest.raises((ValueError, RuntimeError), match="the layout, the offsets or inverse are not"):
                    call(op, given, backend.ops)
                continue
            found = call(op, given, backend.ops)
            if op in FORWARDS:
                assert found[1][0].item() == BAD_LAYOUT, (backend.name, op)
                assert found[0].isnan().all(), (backend.name, op)
            elif op != UPDATE:
                assert not found.any(), (backend.name, op)
        assert all(same_bits(given[name], t) for name, t in written.items()), backend.name


@pytest.mark.parametrize("number", [2, 64, 65, 300])
def test_rows_of_any_two_of_many_tables_may_overlap(number: int) -> None:
    """Overlapping rows of any two tables are found: both groups would write the common rows."""
    case = make_case([(2, 4)] * number, list(range(number)), [1] * number, seed=number)
    rows = case.layout["row_offsets"].tolist()
    for backend in device_backends():
        assert not same_bits(case.update("sgd", backend.ops)[0], case.weights), backend.name
        for one, other in ((0, number - 1), (number - 2, number - 1), (number // 2 - 1, number // 2)):
            weights, step, rate = case.weights.clone(), torch.tensor(6), torch.tensor(LR)
            layout = forged(case.layout, "row_offset", other, rows[one] + 1)
            bags = (case.grad, *case.jagged)
            backend.ops.embedding_bag_backward_fused_(weights, None, step, rate, *bags, optimizer="sgd", **layout)
            assert same_bits(weights, case.weights), (backend.name, one, other)
            assert step == 6


def test_num_rows_changes_no_bit() -> None:
    """num_rows may be any upper bound."""
    case = make_case([(5, 16), (3, 130)], [0, 1, 0], [70, 2, 0, 90, 1, 2], mean=[True, False, False], seed=2)
    expected = case.update("rowwise_adagrad")
    for backend in device_backends():
        for options in ({}, {"num_rows": len(case.sum)}):
            found = case.update("rowwise_adagrad", backend.ops, **options)
            assert all(map(same_bits, found, expected)), (backend.name, options)
