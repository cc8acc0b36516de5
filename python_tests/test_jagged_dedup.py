"""jagged_dedup: reference, hash collisions, weights, groups."""

from __future__ import annotations

import pytest
import torch
from backends import device_backends, every_backend
from hypothesis import given
from hypothesis import strategies as st
from jagged_cases import (
    BAD_LAYOUT,
    BAD_OFFSETS,
    ODD,
    Batch,
    batch_of,
    batches,
    check_tensors,
    good_rows,
    make_batch,
)

import rec_kernels as rk
from rec_kernels.reference.jagged_dedup import jagged_dedup as reference

ops = torch.ops.rec_kernels
HASH_BITS = [64, 4, 0]


def check_dedup(batch: Batch, groups: list[int]) -> None:
    """Checks the op with weights and without, and with hashes that collide."""
    for weights in (None, batch.weights):
        expected = reference(batch.values, batch.offsets, groups, weights)
        for backend in every_backend():
            for bits in HASH_BITS:
                found = backend.ops.jagged_dedup(batch.values, batch.offsets, groups, weights, bits)
                check_tensors(backend, found, expected)


def groupings(features: int) -> list[list[int]]:
    """One group, one per feature, some of both with features left out, and none."""
    mixed = [[-1, 1, 0, 1][f % 4] if features > 2 else -1 for f in range(features)]
    return [[0] * features, list(range(features)), mixed, [-1] * features]


@pytest.mark.parametrize("name", ODD)
def test_odd_batches(name: str) -> None:
    batch = ODD[name]()
    for groups in groupings(len(batch.strides)):
        check_dedup(batch, groups)


@given(batches(), st.data())
def test_any_batch(batch: Batch, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(-1, 2), min_size=len(batch.strides), max_size=len(batch.strides)))
    used = sorted({g for g in groups if g >= 0})
    check_dedup(batch, [used.index(g) if g >= 0 else -1 for g in groups])


def test_looks() -> None:
    """Order, lengths, features of ids, and ids above 32 bits distinguish samples; id 0 differs from none."""
    rows = [
        ([1, 2], [3]),
        ([2, 1], [3]),
        ([1, 2, 3], []),
        ([1], [2, 3]),
        ([], [1, 2, 3]),
        ([1, 2], [3]),
        ([0], []),
        ([], [0]),
        ([], []),
        ([0, 0], []),
        ([2**32 + 1, 2], [3]),
        ([-1, 2], [3]),
        ([], []),
    ]
    batch = batch_of([[list(r[f]) for r in rows] for f in range(2)])
    _, inverse, counts = rk.jagged_dedup(batch.values, batch.offsets, [0, 0])
    assert inverse.tolist() == [[0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10, 7]]
    assert counts.tolist() == [11]
    check_dedup(batch, [0, 0])


def test_more_features_than_lanes() -> None:
    """Samples may differ in a feature far beyond the number of lanes."""
    rows = [[[f] for f in range(9)] for _ in range(5)]
    rows[1][8], rows[2][8], rows[3][5] = [], [9], [5, 5]
    batch = batch_of([[row[f] for row in rows] for f in range(9)])
    check_dedup(batch, [0] * 9)
    for backend in every_backend():
        _, inverse, *_ = backend.ops.jagged_dedup(batch.values, batch.offsets, [0] * 9)
        assert inverse.tolist() == [[0, 1, 2, 3, 0]]


def test_bits_of_weights() -> None:
    """0 and -0 differ; equal NaN bits are equal."""
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    batch = batch_of([[[4]] * 7])
    batch.weights = torch.cat([torch.tensor([0.0, -0.0, 1.0, 0.0]), nan[[0, 1, 0]]])
    _, inverse, _ = rk.jagged_dedup(batch.values, batch.offsets, [0], batch.weights)
    assert inverse.tolist() == [[0, 1, 2, 0, 3, 4, 3]]
    check_dedup(batch, [0])


def test_sessions_are_found() -> None:
    """The distinct samples are the sessions, unless two sessions happen to be equal."""
    batch = make_batch(3, 64, session=8, rows=1000, mean_length=10, empty=0.0)
    rows, inverse, counts = rk.jagged_dedup(batch.values, batch.offsets, [0, 0, 0])
    assert counts.tolist() == [8]
    assert rows[0, :8].tolist() == list(range(0, 64, 8))
    assert torch.equal(inverse[0], torch.arange(64) // 8)


def test_many_groups() -> None:
    """More groups than one launch has arguments for."""
    check_dedup(make_batch(150, 3, session=2, seed=8), [(7 * f) % 75 for f in range(150)])


def test_strided_inputs() -> None:
    values, offsets = torch.tensor([[1, 0], [2, 0], [1, 0], [2, 0]])[:, 0], torch.tensor([0, 9, 2, 9, 4, 9])[::2]
    assert rk.jagged_dedup(values, offsets, [0])[1].tolist() == [[0, 0]]


def test_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda b: rk.jagged_dedup(b[0], b[1], [0, 1, 0]), fullgraph=True, backend="aot_eager")
    for size in (5, 9):
        batch = make_batch(3, size, session=2)
        found, expected = (
            compiled((batch.values, batch.offsets)),
            rk.jagged_dedup(batch.values, batch.offsets, [0, 1, 0]),
        )
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("offsets", "first"), BAD_OFFSETS)
def test_bad_offsets(offsets: list[int], first: int) -> None:
    """Bad offsets raise on the CPU; on a device such a bag is empty, and the status has the first bad offset."""
    values, bounds = torch.tensor([1, 2, 2, 1, 1, 2, 3]), torch.tensor(offsets)
    for groups in ([0, 0], [-1, 0], [-1, -1]):
        with pytest.raises(ValueError, match=rf"offsets\[{first}\] = {offsets[first]} must be in "):
            ops.jagged_dedup(values, bounds, groups)
        bags = [values[a:b].tolist() for a, b in good_rows(offsets, 7)]
        expected = reference(*(lambda b: (b.values, b.offsets))(batch_of([bags[:3], bags[3:]])), groups)
        for backend in device_backends():
            found = backend.ops.jagged_dedup(values, bounds, groups)
            assert all(map(torch.equal, found[:3], expected)), backend.name
            assert found[3].tolist() == [BAD_LAYOUT + 1 + first, 0], backend.name


def test_a_bad_offset_of_no_bag() -> None:
    for groups in ([], [0]):
        offsets = torch.tensor([1])
        with pytest.raises(ValueError, match=r"offsets\[0\] = 1 must be in \[0, 0\]"):
            ops.jagged_dedup(torch.zeros(0, dtype=torch.int64), offsets, groups)
        for backend in device_backends():
            status = backend.ops.jagged_dedup(torch.zeros(0, dtype=torch.int64), offsets, groups)[3]
            assert status.tolist() == [BAD_LAYOUT + 1, 0], backend.name
