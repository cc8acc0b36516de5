"""jagged_windows: reference, windows outside of the values; test_jagged_copies.py tests gradients and totals."""

from __future__ import annotations

import pytest
import torch
from backends import device_backends, every_backend
from hypothesis import given
from hypothesis import strategies as st
from jagged_cases import INTEGERS, check_tensors

import rec_kernels as rk
from rec_kernels.reference.jagged_windows import jagged_windows as reference
from rec_kernels.testing import same_bits

ops = torch.ops.rec_kernels


def check_windows(values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> None:
    """Checks the op with the total and without."""
    expected = reference(values, starts, lengths)
    for backend in every_backend():
        for total in (None, len(expected[0])):
            check_tensors(backend, backend.ops.jagged_windows(values, starts, lengths, total), expected)


#: N, starts, lengths.
ODD = {
    "no windows": (5, [], []),
    "no values": (0, [0, 0], [0, 0]),
    "empty ones": (4, [4, 0, 2], [0, 0, 0]),
    "all of it, often": (6, [0, 0, 0], [6, 6, 6]),
    "one after the other": (9, [0, 2, 2, 5, 9], [2, 0, 3, 4, 0]),
    "backwards": (9, [6, 3, 0], [3, 3, 3]),
    "sliding": (40, list(range(30)), [10] * 30),
    "a long one": (3000, [1, 0, 2999], [1, 2999, 1]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_windows(name: str) -> None:
    size, starts, lengths = ODD[name]
    for starts_dtype in INTEGERS:
        for lengths_dtype in INTEGERS:
            places = torch.tensor(starts, dtype=starts_dtype), torch.tensor(lengths, dtype=lengths_dtype)
            check_windows(torch.arange(size), *places)


@given(st.data(), st.sampled_from(INTEGERS), st.sampled_from(INTEGERS), st.sampled_from([None, 0, 1, 5]))
def test_any_windows(data: st.DataObject, wide: torch.dtype, other: torch.dtype, columns: int | None) -> None:
    size = data.draw(st.integers(0, 30))
    bounds = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)
    pairs = data.draw(st.lists(bounds, max_size=40))
    values = torch.arange(size) if columns is None else torch.randn(size, columns).half()
    starts = torch.tensor([a for a, _ in pairs], dtype=wide)
    check_windows(values, starts, torch.tensor([b - a for a, b in pairs], dtype=other))


def test_many_windows() -> None:
    """Enough windows for every thread; strided inputs."""
    starts = torch.randint(9000, (2 * 20000,))[::2]
    lengths = torch.randint(30, (2 * 20000,))[::2]
    check_windows(torch.randn(2 * 9030)[::2], starts, lengths)


def test_the_order_of_a_sum() -> None:
    """Windows are summed in order: large terms cancel first, so that a small one is not lost."""
    values = torch.zeros(3, requires_grad=True)
    out, _ = rk.jagged_windows(values, torch.tensor([0, 1, 1]), torch.tensor([2, 1, 2]))
    out.backward(torch.tensor([1.0, 2.0**30, -(2.0**30), 0.25, 5.0]))
    assert values.grad.tolist() == [1, 0.25, 5]


IDS = torch.arange(7)


BIG = 2**63 - 1
#: starts, lengths, indices of bad ones, and the CPU's message for the first.
BAD = [
    ([0, 8, 2], [7, 0, 1], [1], r"starts\[1\] = 8 must be in \[0, 7\], the number of values"),
    ([0, -1, 2], [7, 1, 1], [1], r"starts\[1\] = -1 must be in \[0, 7\]"),
    ([6, 3, 2], [2, 4, 6], [0, 2], r"lengths\[0\] = 2 must be in \[0, 1\]: the window begins at 6 of 7 values"),
    ([0, 3, 2], [7, -1, 1], [1], r"lengths\[1\] = -1 must be in \[0, 4\]"),
    ([1, 7, BIG, -BIG - 1], [BIG, BIG, BIG, BIG], [0, 1, 2, 3], rf"lengths\[0\] = {BIG} must be in \[0, 6\]"),
    ([3, BIG, 1], [4, 1, -BIG - 1], [1, 2], rf"starts\[1\] = {BIG} must be in \[0, 7\]"),
]


@pytest.mark.parametrize(("starts", "lengths", "bad", "message"), BAD)
def test_windows_that_are_not_within_the_values(starts: list, lengths: list, bad: list, message: str) -> None:
    """Windows outside of the values, also by overflow, raise on the CPU; a device makes them empty and sets status."""
    given_starts, given_lengths = torch.tensor(starts), torch.tensor(lengths)
    with pytest.raises(IndexError, match=message):
        ops.jagged_windows(IDS, given_starts, given_lengths)
    repaired = given_lengths.index_fill(0, torch.tensor(bad), 0)
    expected = reference(IDS, given_starts.clamp(0, 7), repaired)
    for backend in device_backends():
        for total in (None, len(expected[0])):
            *found, status = backend.ops.jagged_windows(IDS, given_starts, given_lengths, total)
            assert all(map(same_bits, found, expected)), backend.name
            assert status.tolist() == [bad[0], len(bad)], backend.name


def test_the_first_bad_one_of_many() -> None:
    """The first bad window is reported, whichever thread finds it."""
    starts, lengths = torch.zeros(100_000, dtype=torch.int64), torch.ones(100_000, dtype=torch.int32)
    starts[[70_001, 70_002, 99_999]] = 9
    for backend in every_backend():
        if backend.kind == "cpu":
            with pytest.raises(IndexError, match=r"starts\[70001\] = 9"):
                backend.ops.jagged_windows(IDS, starts, lengths)
        else:
            assert backend.ops.jagged_windows(IDS, starts, lengths)[2].tolist() == [70_001, 3], backend.name


def test_too_many_for_the_lengths() -> None:
    """int32 offsets can address at most 2^31 - 1 values."""
    values, starts = torch.zeros(2**15, dtype=torch.bool), torch.zeros(2**16, dtype=torch.int64)
    for backend in every_backend():
        with pytest.raises((ValueError, RuntimeError), match="int32 offsets can name: give int64 lengths"):
            backend.ops.jagged_windows(values, starts, torch.full((2**16,), 2**15, dtype=torch.int32))
