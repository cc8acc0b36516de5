"""Lookups of bags with few ids: a lane group of the CUDA kernels processes four together, or one after the other."""

from __future__ import annotations

import pytest
import torch
from backends import device_backends, every_backend
from embedding_bag_cases import Case, make_case
from embedding_bag_checks import check_lookups, expected_status
from embedding_bag_format_cases import EncodedCase
from test_embedding_bag_strides import Strided

from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import same_bits

FORMATS = ["fp32", "fp16", "bf16"]
BATCH = 9
ONES = [1] * 27
# Bags in fours: empty ones before, between and after others; only empty ones; across features; all ids in one bag;
# more ids than a narrow row has lanes; three left over. The average is below one id, the limit for four-lane groups.
FEW = [
    *([0, 1, 2, 0], [0, 0, 0, 0], [1, 1, 0, 2], [0, 4, 0, 0], [1, 1, 1, 1], [6, 0, 2, 1], [0, 2, 0]),
]


def short_bags(dim: int, format: str, lengths: list[int] = ONES, last: int | None = None, **options) -> EncodedCase:
    """Three features over tables of ``dim`` columns, the last of ``last``; rows start at aligned addresses."""
    tables = [(5, dim), (3, dim), (4, last or dim)]
    case = make_case(tables, [0, 1, 2], lengths, seed=dim, **options)
    case.weights[:2] = -0.0  # a sum starts from 0, and is 0 again
    return EncodedCase(case, [format] * 3, gaps=[0, 0, 0])


def some_bad(case: Case) -> Case:
    """Puts ids out of range into a whole group of bags and into single ones."""
    bad = [0, 1, 2, 3, 9, 14]
    case.values[bad] = torch.tensor([-1, 5, 2**31 - 1, -7, 99, -(2**31)], dtype=case.values.dtype)
    return case


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [4, 16, 20, 64, 100, 128])
def test_sums(dim: int, format: str) -> None:
    """One id per bag, and few; ignored ids, weights, means; the last table's rows aligned or not."""
    few = [n for bags in FEW for n in bags]
    narrow = {"ids_dtype": torch.int32, "offsets_dtype": torch.int32}
    for lengths in (ONES, few):
        for last, options in (
            (dim, {}),
            (dim - 1, {"weighted": True, "padding_idx": 1}),
            (max(dim - 4, 4), {"mean": [True, False, True], "padding_idx": 0} | narrow),
            (dim, {"weighted": True, "mean": [False, True, True], "unused": (0, 0 if lengths is ONES else 1)}),
        ):
            encoded = short_bags(dim, format, lengths, last, **options)
            check_lookups(encoded, every_backend)
            encoded.case = some_bad(encoded.case)
            check_lookups(encoded, every_backend, bounds_check="ignore")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mean", [False, True])
def test_rows_of_their_own(dtype: torch.dtype, mean: bool) -> None:
    """Each bag has an output row of any dtype, with zeros after its feature's columns, also with a cache."""
    few = [n for bags in FEW for n in bags]
    for dim, last, lengths in ((20, 4, few), (20, 4, ONES), (32, 10, ONES), (128, 128, few)):
        strided = Strided(short_bags(dim, "fp32", lengths, last, mean=[mean, False, mean]), [BATCH] * 3)
        expected = strided.outputs(strided.case.expected_output()).to(dtype)
        in_no_slot = {"cache_rows": torch.zeros(0), "cache_slots": torch.full((len(strided.case.values),), -1)}
        for backend in every_backend():
            for cache in ({}, in_no_slot):
                given = strided.arguments | cache
                found, _ = backend.ops.embedding_bag(strided.encoded.flat, **given, output_dtype=dtype)
                assert same_bits(found, expected), (backend.name, dim)


@pytest.mark.parametrize(
    ("place", "offset", "noted"),
    [(1, 3, 2), (1, -1, 1), (4, -2, 4), (7, 2**40, 7), (26, 0, 26), (27, 28, 27), (0, -1, 0)],
)
def test_bad_offsets(place: int, offset: int, noted: int) -> None:
    """The first bad offset is reported before bad ids; the other bags' sums are correct."""
    encoded = short_bags(128, "fp32")  # a lane group is a warp
    case = encoded.case
    fine, smallest = case.expected_output(), torch.iinfo(torch.int64).min
    case.offsets[place] = offset
    case.values[8] = 99
    # Compares bag number b of a feature; bags next to the bad offset are not compared.
    others = [b for b in range(27) if b not in (place - 1, place, 8)]
    for backend in device_backends():
        output, status = backend.ops.embedding_bag(encoded.flat, *case.jagged, **encoded.layout)
        assert status[0].item() == smallest + 1 + noted, backend.name
        assert output.isfinite().all()
        rows, expected = (x.view(BATCH, 3, 128).transpose(0, 1).reshape(27, 128)[others] for x in (output, fine))
        assert same_bits(rows, expected), backend.name


@pytest.mark.parametrize("formats", [["fp32", "fp16", "int8"], ["bf16", "fp32", "bf16"]])
def test_formats_and_features_of_several_tables_beside_them(formats: list[str]) -> None:
    """Bags of other formats and of partitioned features are left to other kernels; output columns may be unaligned."""
    both = Parts([1, 0], [(1, 3), (3, 5)], 15, "concat")
    for features in ([0, 1, 2], [0, both, 1], [3, 0, 3]):
        case = make_case([(5, 64), (3, 64), (4, 64), (2, 62)], features, 3 * ONES, weighted=True, seed=7)
        check_lookups(EncodedCase(case, [*formats, "fp32"], gaps=[0] * 4), every_backend)


def test_long_bags_among_them() -> None:
    """Bags average few ids, with hundreds in some: those, and their neighbours, are processed one by one."""
    lengths = [0] * 300
    lengths[5], lengths[6], lengths[7], lengths[150], lengths[299] = 31, 32, 1, 33, 200
    encoded = EncodedCase(make_case([(5, 128)], [0], lengths, weighted=True, seed=3), ["fp32"], gaps=[0])
    check_lookups(encoded, every_backend)
    assert expected_status(encoded.case)[1] == 0
