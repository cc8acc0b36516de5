"""jagged_overlaps: reference; windows of its output restore the rows; which sequences are found."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from backends import ROOT, cpu_backends
from hypothesis import given
from hypothesis import strategies as st
from jagged_cases import BAD_OFFSETS, INTEGERS, NOTHING_BAD, ODD, check_tensors, make_batch, offsets_of

import rec_kernels as rk
from rec_kernels.reference.jagged_overlaps import ANCHOR, TRIES
from rec_kernels.reference.jagged_overlaps import jagged_overlaps as reference
from rec_kernels.testing import same_bits

ops = torch.ops.rec_kernels


def jagged(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=torch.int64), offsets_of([*map(len, rows)])


def check_overlaps(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Checks buffer and starts against the reference, restores the rows from windows, and returns the buffer."""
    expected = reference(values, offsets)
    for backend in cpu_backends():
        found = backend.ops.jagged_overlaps(values, offsets)
        check_tensors(backend, found, expected)
    again, bounds = rk.jagged_windows(*expected, offsets.diff())
    assert same_bits(again, values[int(offsets[0]) : int(offsets[-1])])
    assert same_bits(bounds, offsets - offsets[0])
    return expected[0]


def sizes(*rows: list[int]) -> int:
    """Number of ids stored for these rows."""
    return len(check_overlaps(*jagged(list(rows))))


def histories(sequence: list[int], ends: list[int], longest: int) -> list[list[int]]:
    return [sequence[max(end - longest, 0) : end] for end in ends]


@pytest.mark.parametrize("name", ODD)
def test_odd_batches(name: str) -> None:
    batch = ODD[name]()
    check_overlaps(batch.values, batch.offsets)


@st.composite
def users(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Interleaved histories of a few users, with rare or frequent repetitions of ids."""
    rows, most = draw(st.sampled_from([1, 2, 9, 1000])), draw(st.sampled_from([0, 3, 4, 5, 20]))
    sequences = draw(st.lists(st.lists(st.integers(0, rows), max_size=60), min_size=1, max_size=3))
    steps = draw(st.lists(st.tuples(st.integers(0, len(sequences) - 1), st.integers(0, 9)), max_size=25))
    ends, found = [0] * len(sequences), []
    for user, step in steps:
        ends[user] = min(ends[user] + step, len(sequences[user]))
        found += histories(sequences[user], [ends[user]], most)
    values, offsets = jagged(found)
    return values.to(draw(st.sampled_from(INTEGERS))), offsets.to(draw(st.sampled_from(INTEGERS)))


@given(users())
def test_any_histories(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    check_overlaps(*case)


def test_each_id_of_a_sequence_is_stored_once() -> None:
    """Growing and sliding histories, of two users in turn and repeated, are stored once."""
    one, other = list(range(100, 200)), list(range(500, 600))
    assert sizes(*histories(one, [4, 9, 20, 20, 33, 40, 76], 40)) == 76
    mixed = zip(histories(one, [10, 25, 40], 20), histories(other, [50, 55, 64], 20), strict=True)
    assert sizes(*itertools.chain.from_iterable(mixed)) == 40 + (64 - 30)
    values, offsets = jagged(histories(one, [10, 12, 11, 12], 10))  # an older window: it is stored
    assert len(check_overlaps(values, offsets)) == 12 + 10
    assert sizes(one[:10], one[3:10], one[5:13]) == 13  # a shorter one, within the other
    # Offsets need not start at 0 or end with the values.
    assert len(check_overlaps(torch.arange(30), torch.tensor([3, 9, 9, 30]))) == 27


def test_what_is_not_found_is_stored() -> None:
    """Rows are stored if they share too few ids, if another row continues them, or if they begin too early."""
    ids = list(range(50))
    assert sizes(ids[:10], ids[10 - ANCHOR + 1 : 20]) == 10 + 10 + ANCHOR - 1
    assert sizes(ids[:10], ids[10 - ANCHOR : 20]) == 20
    assert sizes(ids[:10], [*ids[2:10], 77], [*ids[2:10], 88]) == 11 + 9
    assert sizes(ids[10:20], ids[5:15]) == 20


def test_ids_that_are_all_alike_take_no_longer() -> None:
    """Failing comparisons are limited: after too many, even a matching row is not found."""
    same, other = [7] * 30, [9] * (ANCHOR + TRIES)
    first = [*same, *other[:ANCHOR]]
    assert sizes(first, [*same[:20], *other[1:]]) == len(first) + TRIES - 1
    assert sizes(first, [*same[:20], *other]) == len(first) + 20 + len(other)
    assert sizes(same, same, [*same, 5]) == 31


def test_many_rows() -> None:
    """Hash collisions in the table, and rows of users far apart."""
    sequence = torch.randint(1 << 40, (50, 300), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [sequence[i % 50][i // 50 : i // 50 + 40] for i in range(50 * 60)]
    assert sizes(*rows) == 50 * (40 + 59)


def test_rows_that_differ_in_one_id_spread_over_the_table(tmp_path: Path) -> None:
    """The search for a row probes a constant number of slots, whichever of the last ids distinguishes rows."""
    library = tmp_path / "probes.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, ROOT / "python_tests" / "suffix_table_probes.cpp", "-o", library], check=True)
    count = ctypes.CDLL(str(library)).slots_looked_at
    count.argtypes, count.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
    rows = 1 << 12
    for place, step in itertools.product(range(ANCHOR), (1, 1 << 12, 1 << 40)):
        ids = torch.full((rows, ANCHOR), 7)
        ids[:, place] = step * torch.arange(rows)
        assert 2 * rows <= count(ids.data_ptr(), rows) < 4 * rows, (place, step)


def test_strided_inputs() -> None:
    batch = make_batch(3, 30, session=4, mean_length=9, seed=2)
    doubled = [torch.stack([t, t], dim=1)[:, 0] for t in (batch.values, batch.offsets)]
    assert not doubled[0].is_contiguous()
    check_overlaps(*doubled)


@pytest.mark.parametrize(("bounds", "first"), BAD_OFFSETS)
def test_bad_offsets(bounds: list[int], first: int) -> None:
    with pytest.raises(ValueError, match=rf"offsets\[{first}\] = {bounds[first]} must be in "):
        ops.jagged_overlaps(torch.arange(7), torch.tensor(bounds))


def test_compiled() -> None:
    """One graph finds the windows and uses them."""

    def again(values, offsets):
        found, starts = rk.jagged_overlaps(values, offsets)
        return rk.jagged_windows(found, starts, offsets.diff())[0]

    torch._dynamo.reset()
    values, offsets = jagged(histories(list(range(40)), [5, 9, 30, 33], 10))
    assert same_bits(torch.compile(again, fullgraph=True, backend="aot_eager")(values, offsets), values)
    assert ops.jagged_overlaps(values, offsets)[2].tolist() == NOTHING_BAD
