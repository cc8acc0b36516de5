"""jagged_index_select: reference, invalid indices and offsets; test_jagged_copies.py tests gradients and totals."""

from __future__ import annotations

import pytest
import torch
from backends import device_backends, every_backend
from hypothesis import given
from hypothesis import strategies as st
from jagged_cases import (
    BAD_LAYOUT,
    BAD_OFFSETS,
    INTEGERS,
    ODD,
    Batch,
    batches,
    check_tensors,
    good_rows,
    offsets_of,
)

from rec_kernels.reference.jagged_index_select import jagged_index_select as reference
from rec_kernels.testing import same_bits

ops = torch.ops.rec_kernels


def check_select(values: torch.Tensor, offsets: torch.Tensor, index: torch.Tensor) -> None:
    """Checks the op with the total and without."""
    expected = reference(values, offsets, index)
    for backend in every_backend():
        for total in (None, len(expected[0])):
            check_tensors(backend, backend.ops.jagged_index_select(values, offsets, index, total), expected)


@pytest.mark.parametrize("name", ODD)
def test_odd_batches(name: str) -> None:
    batch = ODD[name]()
    index = torch.arange(batch.bags).flip(0).repeat(2)[1:] if batch.bags else torch.zeros(0, dtype=torch.int32)
    check_select(batch.values, batch.offsets, index)
    check_select(batch.values, batch.offsets, index[:0])


@given(batches(), st.data(), st.sampled_from(INTEGERS), st.sampled_from([None, 0, 1, 5]))
def test_any_batch(batch: Batch, data: st.DataObject, integer: torch.dtype, columns: int | None) -> None:
    rows = st.lists(st.integers(0, batch.bags - 1), max_size=40) if batch.bags else st.just([])
    values = batch.values if columns is None else torch.randn(len(batch.values), columns).half()
    check_select(values, batch.offsets, torch.tensor(data.draw(rows), dtype=integer))


def test_many_rows() -> None:
    """Enough rows for every thread, with a very long one."""
    lengths = [(7 * i) % 5 for i in range(3000)]
    lengths[1234] = 5000
    offsets = offsets_of(lengths, torch.int32)
    check_select(torch.randn(int(offsets[-1])), offsets, torch.randint(3000, (5000,)))


def test_rows_that_nothing_names_and_strided_inputs() -> None:
    """Offsets need not start at 0 or end with the values."""
    offsets = torch.tensor([2, 9, 3, 9, 3, 9, 6, 9])[::2]
    check_select(torch.arange(20)[::2], offsets, torch.tensor([2, 0, 2, 0, 1, 0])[::2])
    check_select(torch.arange(21)[1:].view(10, 2), offsets, torch.tensor([2, 0]))


IDS, OFFSETS = torch.arange(7), torch.tensor([0, 2, 2, 7])


def test_numbers_out_of_range() -> None:
    """Indices out of range raise on the CPU; a device returns empty rows, and their first and number in status."""
    index = torch.tensor([0, 3, 2, -1, 2**40])
    with pytest.raises(IndexError, match=r"index\[1\] = 3 must be in \[0, 3\), the rows that offsets describe"):
        ops.jagged_index_select(IDS, OFFSETS, index)
    for backend in device_backends():
        for total in (None, 7):
            out, offsets, status = backend.ops.jagged_index_select(IDS, OFFSETS, index, total)
            assert out.tolist() == [0, 1, 2, 3, 4, 5, 6], backend.name
            assert offsets.tolist() == [0, 2, 2, 7, 7, 7], backend.name
            assert status.tolist() == [1, 3], backend.name
        status = backend.ops.jagged_index_select(IDS, OFFSETS[:1], torch.tensor([0]))[2]
        assert status.tolist() == [0, 1], backend.name


@pytest.mark.parametrize(("bounds", "first"), BAD_OFFSETS)
def test_bad_offsets(bounds: list[int], first: int) -> None:
    """Bad offsets are reported whether the row is selected or not; it is empty."""
    offsets, index = torch.tensor(bounds), torch.tensor([5, 0, 1, 2, 3, 4, 3])
    with pytest.raises(ValueError, match=rf"offsets\[{first}\] = {bounds[first]} must be in "):
        ops.jagged_index_select(IDS, offsets, index)
    rows = good_rows(bounds, 7)
    expected = torch.cat([IDS[:0], *(IDS[slice(*rows[i])] for i in index)])
    for backend in device_backends():
        out, found, status = backend.ops.jagged_index_select(IDS, offsets, index)
        assert same_bits(out, expected), backend.name
        assert torch.equal(found.diff(), torch.tensor([rows[i][1] - rows[i][0] for i in index])), backend.name
        assert status.tolist() == [BAD_LAYOUT + 1 + first, 0], backend.name
        assert backend.ops.jagged_index_select(IDS, offsets, index[:0])[2].tolist() == [BAD_LAYOUT + 1 + first, 0]


def test_too_many_for_the_offsets() -> None:
    """int32 offsets can address at most 2^31 - 1 values."""
    offsets = torch.tensor([0, 2**15], dtype=torch.int32)
    for backend in every_backend():
        with pytest.raises((ValueError, RuntimeError), match=r"2147483648 values, more than int32 offsets can name"):
            backend.ops.jagged_index_select(
                torch.zeros(2**15, dtype=torch.bool), offsets, torch.zeros(2**16, dtype=torch.int32)
            )
