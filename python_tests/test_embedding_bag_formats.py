"""embedding_bag over tables in row formats has the reference's bits on every backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from backends import Backend, every_backend
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_cases import LR, OPTIMIZERS, Case, make_case
from embedding_bag_checks import check_lookups, check_updates
from embedding_bag_format_cases import GAP, ROUNDINGS, STEP, EncodedCase, every_format_once
from layout_calls import OPS

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.ops.row_formats import FLOAT_DTYPES
from rec_kernels.reference import row_formats as reference
from rec_kernels.testing import flush_denormals, same_bits

ops = OPS
INTEGERS = ("int8", "int4")


def mixed(dims: list[int], seed: int, **options) -> Case:
    """A table of each width, the first with three features; empty bags, repeated ids in a bag, mean and sum."""
    tables = [(3 + t % 2, d) for t, d in enumerate(dims)]
    features = [0, *range(len(dims)), 0]
    lengths = [3, 0, 2, *[1 + i % 3 for i in range(3 * len(features) - 3)]]
    mean = [f % 3 == 1 for f in range(len(features))]
    return make_case(tables, features, lengths, mean=mean, seed=seed, **options)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shift", range(0, 8, 2))
def test_formats_mixed_in_one_call(shift: int, weighted: bool) -> None:
    """All formats in one call, narrow and wide rows; ids and offsets of 32 bits, unused ids, padding."""
    dims = [1, 16, 33, 3, 130, 8, 100, 17] if weighted else [40, 5, 1, 64, 18, 2, 129, 16]
    options = {"ids_dtype": torch.int32, "offsets_dtype": torch.int32, "padding_idx": 1, "unused": (2, 3)}
    encoded = every_format_once(mixed(dims, shift, weighted=weighted, **(options if weighted else {})), shift)
    check_lookups(encoded)
    check_updates(encoded, [OPTIMIZERS[weighted]])


@pytest.mark.parametrize("format", BAG_FORMATS)
@pytest.mark.parametrize("dim", [513, 600, 1030])
def test_wide_rows(format: str, dim: int) -> None:
    """More columns than a warp's registers hold."""
    encoded = EncodedCase(make_case([(2, dim)], [0], [2, 1], weighted=dim == 600, seed=dim), [format])
    check_lookups(encoded)
    check_updates(encoded)


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 300])
def test_widths(dim: int) -> None:
    """Every width in every format: partial blocks, two codes per byte, tails of vectors."""
    for shift in (0, 4):
        case = make_case([(3, dim)] * 4, [0, 1, 2, 3, 1], [2, 1] * 5, weighted=True, seed=dim + shift)
        encoded = every_format_once(case, shift)
        check_lookups(encoded)
        check_updates(encoded)


@pytest.mark.parametrize("occurrences", [65, 4200])
@pytest.mark.parametrize("shift", [0, 4])
def test_hot_rows(occurrences: int, shift: int) -> None:
    """Rows with more than 64, and more than 64 * 64, occurrences beside rows with few."""
    tables = [(1, 3), (2, 20), (1, 5), (2, 17)]
    lengths = [occurrences // 2, occurrences - occurrences // 2, 3, 4, 1, 70, 2, 0]
    case = make_case(tables, [0, 1, 2, 3], lengths, weighted=shift > 0, seed=occurrences)
    check_updates(every_format_once(case, shift), ALL_OPTIMIZERS)


@pytest.mark.parametrize("shift", [0, 4])
def test_hot_rows_that_are_wide(shift: int) -> None:
    """Sums of chunks, and more columns than a warp's registers hold."""
    tables = [(1, 600), (2, 130), (1, 1030), (1, 513)]
    encoded = every_format_once(make_case(tables, [0, 1, 2, 3], [40, 30] * 4, weighted=True, seed=shift), shift)
    check_updates(encoded)


def test_hot_rows_of_shared_tables() -> None:
    """The occurrences of a row come from features with different columns of the gradient, and different pooling."""
    case = make_case([(2, 5), (3, 18)], [0, 1, 0, 1], [40, 30, 0, 50, 60, 20, 9, 7], mean=[True, False] * 2, seed=5)
    for formats in (["int8", "mx6"], ["int4", "int4"], ["mx4", "bf16"]):
        check_updates(EncodedCase(case, formats), ["sgd"], ["stochastic"])


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rows_not_looked_up_keep_their_bytes(rounding: str) -> None:
    """Other rows and bytes between tables do not change, even if they are no encoder's output."""
    tables = [(9, 13)] * len(BAG_FORMATS)
    encoded = every_format_once(make_case(tables, list(range(8)), [1, 2] * 8, seed=8))
    touched = set(encoded.case.row_gradients)
    for table, view in enumerate(encoded.split(encoded.flat)):
        others = [row for row in range(9) if (table, row) not in touched]
        view[others] = torch.randint(256, view[others].shape, dtype=torch.uint8)
    for backend in every_backend():
        found, _, _ = encoded.update("sgd", rounding, backend.ops)
        for table, view in enumerate(encoded.split(found)):
            before = encoded.split(encoded.flat)[table]
            changed = (view != before).any(1).nonzero().flatten().tolist()
            assert changed, (backend.name, encoded.formats[table])
            assert {(table, row) for row in changed} <= touched, (backend.name, encoded.formats[table])
            view.fill_(GAP)
        assert bool((found == GAP).all()), backend.name


@pytest.mark.parametrize("format", INTEGERS)
def test_linear_rows_from_afar(format: str) -> None:
    """Row offsets may start at 2^40: an update never computes the address of linear row 0."""
    encoded = EncodedCase(make_case([(4, 8)], [0], [1]), [format])
    layout = {"row_offsets": torch.tensor([2**40]), "num_rows": 2**40 + 4}
    expected, _ = encoded.expected_update("sgd", "nearest")
    for backend in every_backend():
        found, _, _ = encoded.update("sgd", "nearest", backend.ops, **layout)
        assert torch.equal(found, expected), backend.name


@pytest.mark.parametrize("format", ["mx9", "mx6", "mx4"])
@pytest.mark.parametrize("bytes_of_rows", ["written", "any"])
def test_aligned_rows_of_shared_exponents(format: str, bytes_of_rows: str) -> None:
    """A lane reads eight columns of rows aligned to four bytes; a row's remainder has fewer, or none."""
    for dim in (17, 24, 31, 56, 64, 77, 100, 120, 128, 150, 160, 249, 256):
        case = make_case([(12, dim)], [0], [6, 7, 0, 1], weighted=dim % 2 == 0, mean=[dim % 4 == 0], seed=dim)
        any_bytes = torch.randint(256, (12, reference.row_bytes(format, dim)), dtype=torch.uint8)
        rows = [any_bytes] if bytes_of_rows == "any" else None
        check_lookups(EncodedCase(case, [format], gaps=[0], rows=rows))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_any_bytes(rounding: str) -> None:
    """Rows that no encoder writes: NaN or negative scales, exponents of 255, infinities."""
    for dim in (6, 40):
        case = make_case([(12, dim)] * 8, list(range(8)), [6, 7] * 8, seed=dim)
        for shift in (0, 3):
            formats = [*BAG_FORMATS[shift:], *BAG_FORMATS[:shift]]
            rows = [torch.randint(256, (12, reference.row_bytes(f, dim)), dtype=torch.uint8) for f in formats]
            encoded = EncodedCase(case, formats, rows=rows)
            check_lookups(encoded)
            check_updates(encoded, ["sgd"], [rounding])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_bad_gradients_reach_their_rows_only(number: float) -> None:
    """A NaN or Inf in the gradient reaches only its row, as far as the format can represent it."""
    case = make_case([(5, 20)] * 8, list(range(8)), [1, 1, 1] * 8, seed=9)
    case.values.copy_(torch.tensor([0, 3, 4]).repeat(8))
    encoded = every_format_once(case)
    case.grad[1, 7::20] = number
    check_updates(encoded)
    for rounding in ROUNDINGS:
        found, _, _ = encoded.update("sgd", rounding)
        for format, numbers in zip(encoded.formats, encoded.decode(encoded.split(found)), strict=True):
            assert numbers[[0, 1, 2, 4]].isfinite().all(), format
            assert not numbers[3, 7].isfinite(), format
            assert numbers[3].isnan().all() or format not in INTEGERS


def flushed() -> Iterator[Backend]:
    """Every backend, called from a thread that flushes denormals."""
    for backend in every_backend():
        with flush_denormals():
            yield backend


@pytest.mark.parametrize("dim", [7, 40])
@pytest.mark.parametrize(("exponent", "grad_exponent"), [(-136, -134), (-120, -110), (-20, -20), (100, 90), (114, 118)])
def test_very_small_and_very_large_numbers(exponent: int, grad_exponent: int, dim: int) -> None:
    """Denormal rows, scales and updates, and rows that overflow their format, are equal from any thread."""
    case = make_case([(6, dim)] * 8, list(range(8)), [2, 3, 1] * 8, weighted=True, seed=dim)
    case.weights.mul_(2.0**exponent)
    case.grad.mul_(2.0**grad_exponent)
    encoded = every_format_once(case)
    check_lookups(encoded, flushed)
    check_updates(encoded, ["sgd"], backends=flushed)
    check_updates(encoded, ["rowwise_adagrad"], ["stochastic"], backends=flushed)


@pytest.mark.parametrize("format", BAG_FORMATS)
def test_one_table_without_layout(format: str) -> None:
    """weights [E, row_bytes] with embedding_dim equals a layout of one table, with the noise of table 0."""
    case = make_case([(6, 21)], [0], [3, 0, 4, 2], weighted=True, padding_idx=2, seed=9)
    encoded = EncodedCase(case, [format], gaps=[0])
    encoded.table_id = lambda table: 0
    (table,) = encoded.split(encoded.flat)
    options = {"formats": [format], "embedding_dim": 21, "padding_idx": 2}
    values, offsets, factors = case.jagged
    expected, of_factors = case.expected_output(), case.expected_factor_gradient()
    updated, _ = encoded.expected_update("sgd", "stochastic")
    for backend in every_backend():
        if backend.name == "cuda, unaligned" and format == "fp32":
            # ``unaligned`` moves byte rows by one byte, to addresses that no float32 may have.
            with pytest.raises(
                ValueError, match="weights must start at a multiple of 4 bytes, as its rows are float32"
            ):
                backend.ops.embedding_bag(table, *case.jagged, **options)
            continue
        assert same_bits(backend.ops.embedding_bag(table, *case.jagged, **options)[0], expected), backend.name
        if format in FLOAT_DTYPES:  # a tensor of the format's dtype needs no format
            floats = table.view(FLOAT_DTYPES[format])
            assert same_bits(backend.ops.embedding_bag(floats, *case.jagged, padding_idx=2)[0], expected), backend.name
            bags = (case.grad, floats, values, offsets)
            found = backend.ops.embedding_bag_backward_per_sample_weights(*bags, padding_idx=2)
            assert same_bits(found, of_factors), backend.name
        starts, last = offsets[:-1], {"include_last_offset": False}
        assert same_bits(backend.ops.embedding_bag(table, values, starts, factors, **options, **last)[0], expected)
        bags = (case.grad, table, values, offsets)
        found = backend.ops.embedding_bag_backward_per_sample_weights(*bags, **options)
        assert same_bits(found, of_factors), backend.name
        mine, noise = table.clone(), {"seed": encoded.noise["seed"], "rounding": "stochastic"}
        state = (mine, None, torch.tensor(STEP), torch.tensor(LR))
        backend.ops.embedding_bag_backward_fused_(*state, case.grad, *case.jagged, **options, **noise, optimizer="sgd")
        assert torch.equal(mine, encoded.split(updated)[0]), backend.name
