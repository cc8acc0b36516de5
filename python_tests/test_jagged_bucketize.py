"""jagged_bucketize: reference, gradients of weights, ids out of range."""

from __future__ import annotations

import pytest
import torch
from backends import device_backends, every_backend
from hypothesis import given
from hypothesis import strategies as st
from jagged_cases import BAD_LAYOUT, BAD_OFFSETS, ODD, Batch, batches, check_compiled, check_tensors, make_batch

import rec_kernels as rk
from rec_kernels.reference.jagged_bucketize import jagged_bucketize as reference
from rec_kernels.testing import same_bits

ops = torch.ops.rec_kernels


def check_bucketize(batch: Batch, blocks: list[int], buckets: int) -> None:
    """Checks the op with weights and without."""
    sizes = torch.tensor(blocks, dtype=torch.int64)
    for weights in (None, batch.weights):
        args = (batch.values, batch.offsets, sizes, buckets, batch.strides, weights)
        expected = reference(*args)
        for backend in every_backend():
            check_tensors(backend, backend.ops.jagged_bucketize(*args), expected)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("buckets", [1, 2, 7, 64])
def test_odd_batches(name: str, buckets: int) -> None:
    """Block sizes of one row, of all rows, and with a remainder of the table."""
    batch = ODD[name]()
    most = int(batch.values.max()) + 1 if len(batch.values) else 1
    for extra in (0, 1, 2**20):
        blocks = [-(-most // buckets) + extra * f for f in range(len(batch.strides))]
        check_bucketize(batch, blocks, buckets)


@given(batches(strides=True), st.integers(1, 70), st.data())
def test_any_batch(batch: Batch, buckets: int, data: st.DataObject) -> None:
    """Features may have different batch sizes."""
    least = -(-100 // buckets)
    sizes = st.integers(least, 2 * least)
    check_bucketize(batch, [data.draw(sizes) for _ in batch.strides], buckets)


def test_many_buckets() -> None:
    """More buckets than lanes and than a bag has ids; most of them are empty."""
    check_bucketize(make_batch(2, 6, rows=5000, mean_length=90, seed=2), [1, 5], 5000)


def test_wide_ids() -> None:
    """Ids up to the largest integer."""
    batch = make_batch(2, 3, mean_length=6, empty=0.0)
    batch.values = torch.randint(2**62, (len(batch.values),))
    batch.values[:3] = torch.tensor([0, 2**62 - 1, 2**40])
    check_bucketize(batch, [2**61, 2**61 - 1 + 2**59], 2)
    check_bucketize(batch, [2**62 // 1000 + 1, 2**62 // 999 + 1], 1000)


def test_strided_inputs() -> None:
    batch = make_batch(2, 4)
    expected = rk.jagged_bucketize(batch.values, batch.offsets, torch.tensor([20, 30]), 3, batch.strides, batch.weights)
    values, offsets, weights = (t.repeat_interleave(2)[::2] for t in (batch.values, batch.offsets, batch.weights))
    found = rk.jagged_bucketize(values, offsets, torch.tensor([20, 0, 30, 0])[::2], 3, batch.strides, weights)
    assert all(map(same_bits, found, expected))


def test_gradients() -> None:
    """The gradient of a weight is that of its copy."""
    batch = make_batch(3, 5, seed=4)
    weights = batch.weights.clone().requires_grad_()
    out = rk.jagged_bucketize(batch.values, batch.offsets, torch.tensor([9, 25, 50]), 6, batch.strides, weights)
    grad = torch.randn(len(weights))
    (out.weights * grad).sum().backward()
    assert same_bits(weights.grad, grad[out.positions])
    assert same_bits(out.weights.detach()[out.positions], batch.weights)
    assert rk.jagged_bucketize(batch.values, batch.offsets, torch.tensor([50] * 3), 1, batch.strides).weights is None


def test_compiled() -> None:
    def step(values, offsets, weights, size):
        out = rk.jagged_bucketize(values, offsets, torch.tensor([20, 30]), 4, [size] * 2, weights * 2)
        return out.weights.square().sum(), out.values, out.offsets, out.positions

    check_compiled(step, 2)


IDS, OFFSETS, WEIGHTS = (
    torch.tensor([3, 9, 0, 5, 7, 2, 4]),
    torch.tensor([0, 2, 3, 3, 4, 6, 7]),
    torch.linspace(1, 2, 7),
)
STRIDES, BLOCKS = [3, 3], torch.tensor([5, 4])


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_ids_out_of_range(integer: torch.dtype) -> None:
    """Ids out of range raise on the CPU; on a device they go to a bucket whose lookup reports them again."""
    values = torch.tensor([3, 10, 0, 8, 2**31 - 1, -4, 4], dtype=integer)
    message = (
        r"values\[1\] = 10 \(feature 0, bag 0\) must be in \[0, 10\): block_sizes\[0\] = 5 for each of the 2 buckets"
    )
    with pytest.raises(IndexError, match=message):
        ops.jagged_bucketize(values, OFFSETS, BLOCKS, 2, STRIDES)
    with pytest.raises(IndexError, match=r"values\[3\] = 8 \(feature 1, bag 0\) must be in \[0, 8\)"):
        ops.jagged_bucketize(values.index_fill(0, torch.tensor([1]), 0), OFFSETS, BLOCKS, 2, STRIDES)
    for backend in device_backends():
        out, offsets, weights, positions, status = backend.ops.jagged_bucketize(
            values, OFFSETS, BLOCKS, 2, STRIDES, WEIGHTS
        )
        assert out.tolist() == [3, 0, -4, 5, 4, 2**31 - 5, 0], backend.name
        assert offsets.tolist() == [0, 1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7], backend.name
        assert positions.tolist() == [0, 3, 1, 4, 5, 2, 6], backend.name
        assert same_bits(weights[positions], WEIGHTS), backend.name
        assert status.tolist() == [1, 4], backend.name


@pytest.mark.parametrize(("first", "last"), [(1, 7), (0, 6), (2, 3), (4, 4)])
def test_ids_that_no_bag_names(first: int, last: int) -> None:
    """Ids outside of all bags raise on the CPU; on a device the output ends with zeros."""
    offsets = OFFSETS.clamp(first, last)
    got = f"offsets must start at 0 and end at 7, the number of values, got {first} and {last}"
    with pytest.raises(ValueError, match=got):
        ops.jagged_bucketize(IDS, offsets, BLOCKS, 3, STRIDES)
    named = slice(first, last)
    expected = reference(IDS[named], offsets - first, BLOCKS, 3, STRIDES, WEIGHTS[named])
    rest = 7 - (last - first)
    for backend in device_backends():
        out, found, weights, positions, status = backend.ops.jagged_bucketize(IDS, offsets, BLOCKS, 3, STRIDES, WEIGHTS)
        assert same_bits(out, torch.cat([expected[0], IDS.new_zeros(rest)])), backend.name
        assert same_bits(found, expected[1]), backend.name
        assert same_bits(weights, torch.cat([expected[2], torch.zeros(rest)])), backend.name
        assert same_bits(positions[named], expected[3]), backend.name
        assert positions.tolist().count(-1) == rest, backend.name
        assert status.tolist() == [2**63 - 1, 0], backend.name


@pytest.mark.parametrize(("bounds", "first"), BAD_OFFSETS)
def test_bad_offsets(bounds: list[int], first: int) -> None:
    """Bad offsets raise on the CPU; on a device, where bags might overlap, all bags become empty."""
    offsets = torch.tensor(bounds)
    with pytest.raises(ValueError, match=rf"offsets\[{first}\] = {bounds[first]} must be in "):
        ops.jagged_bucketize(IDS, offsets, BLOCKS, 3, STRIDES)
    for backend in device_backends():
        out, found, weights, positions, status = backend.ops.jagged_bucketize(IDS, offsets, BLOCKS, 3, STRIDES, WEIGHTS)
        assert not out.any(), backend.name
        assert not found.any(), backend.name
        assert not weights.any(), backend.name
        assert positions.tolist() == [-1] * 7, backend.name
        assert status.tolist() == [BAD_LAYOUT + 1 + first, 0], backend.name


@pytest.mark.parametrize("size", [0, -3, 2**62, 2**63 - 1])
def test_bad_block_sizes(size: int) -> None:
    """Bad block sizes raise on the CPU; a device reports a bad layout, and all bags are empty."""
    blocks = torch.tensor([5, size])
    with pytest.raises(ValueError, match=rf"block_sizes\[1\] = {size} must be in \[1, {(2**63 - 1) // 3}\]"):
        ops.jagged_bucketize(IDS, OFFSETS, blocks, 3, STRIDES)
    for backend in device_backends():
        out, found, _, positions, status = backend.ops.jagged_bucketize(IDS, OFFSETS, blocks, 3, STRIDES)
        assert not out.any(), backend.name
        assert not found.any(), backend.name
        assert positions.tolist() == [-1] * 7, backend.name
        assert status.tolist() == [BAD_LAYOUT, 0], backend.name
