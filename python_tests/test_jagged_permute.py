"""jagged_permute: reference, gradients of weights, known and wrong totals."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from backends import Backend, device_backends, every_backend
from hypothesis import given
from hypothesis import strategies as st
from jagged_cases import (
    BAD_LAYOUT,
    BAD_OFFSETS,
    ODD,
    Batch,
    batches,
    check_compiled,
    check_tensors,
    good_rows,
    make_batch,
)

import rec_kernels as rk
from rec_kernels.reference.jagged_permute import jagged_permute as reference
from rec_kernels.testing import assert_same_sum, same_bits

ops = torch.ops.rec_kernels


def torch_backend() -> Iterator[Backend]:
    """The op for GPUs without the compiled library, which runs without a GPU; Triton's module imports it."""
    if importlib.util.find_spec("triton") is not None:
        module = importlib.import_module("rec_kernels.triton.jagged_permute")
        yield Backend("torch", SimpleNamespace(jagged_permute=module.jagged_permute))


def check_permute(batch: Batch, permute: list[int]) -> None:
    """Checks the op with and without the total, with and without weights."""
    for weights in (None, batch.weights):
        expected = reference(batch.values, batch.offsets, permute, batch.strides, weights)
        for backend in itertools.chain(every_backend(), torch_backend()):
            for total in (None, len(expected[0])):
                args = (batch.values, batch.offsets, permute, batch.strides, weights, total)
                check_tensors(backend, backend.ops.jagged_permute(*args), expected)


@pytest.mark.parametrize("name", ODD)
def test_odd_batches(name: str) -> None:
    """Features may be reversed, left out, repeated, or none at all."""
    batch = ODD[name]()
    features = list(range(len(batch.strides)))
    for permute in (features[::-1], features[1:], features + features[:1], features[:1] * len(features), []):
        check_permute(batch, permute)


@given(batches(strides=True), st.data())
def test_any_batch(batch: Batch, data: st.DataObject) -> None:
    """Features may have different batch sizes; lists of features may be permutations or not."""
    features = list(range(len(batch.strides)))
    any_list = st.lists(st.sampled_from(features), max_size=7) if features else st.just([])
    check_permute(batch, data.draw(st.permutations(features)))
    check_permute(batch, data.draw(any_list))


def test_many_features() -> None:
    """More features than one launch has arguments for, some without a sample."""
    batch = make_batch(600, 3, mean_length=1, seed=5)
    batch.strides = [3, 0, 6, 3] * 150
    permute = list(range(600))
    random.Random(0).shuffle(permute)
    check_permute(batch, permute)
    check_permute(batch, permute[:254])


def test_features_that_several_threads_copy() -> None:
    """A thread's part may begin within a feature: its values and weights follow those of the previous part."""
    batch = make_batch(2, 4000, mean_length=8, seed=6)
    check_permute(batch, [1, 0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float64, torch.complex128], ids=str)
def test_values_of_any_kind(dtype: torch.dtype) -> None:
    """Bits are copied, also of infinities and zeros, which a multiplication would change."""
    batch = make_batch(3, 5)
    batch.values = torch.randint(-9, 9, batch.values.shape).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        batch.values[::2], batch.values[1::3] = float("inf"), -0.0
    expected = reference(batch.values, batch.offsets, [2, 0, 1], batch.strides)[0]
    for backend in itertools.chain(every_backend(), torch_backend()):
        out = backend.ops.jagged_permute(batch.values, batch.offsets, [2, 0, 1], batch.strides)[0]
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), backend.name


def test_gradients() -> None:
    """Gradients of weights are summed over repeated features."""
    batch = make_batch(4, 6, seed=2)
    weights, permute = batch.weights.clone().requires_grad_(), [3, 0, 3, 1, 3]
    _, _, out = rk.jagged_permute(batch.values, batch.offsets, permute, batch.strides, weights)
    grad = torch.randn(out.shape)
    (out * grad).sum().backward()
    places = torch.arange(len(weights))
    sources = reference(places, batch.offsets, permute, batch.strides)[0]
    expected, magnitude = (torch.zeros(len(weights), dtype=torch.float64) for _ in range(2))
    expected.index_add_(0, sources, grad.double())
    magnitude.index_add_(0, sources, grad.double().abs())
    assert_same_sum(weights.grad, expected, magnitude, terms=3)
    assert rk.jagged_permute(batch.values, batch.offsets, permute, batch.strides)[2] is None


def test_the_gradient_of_a_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight's gradient returns to its position to the bit, in features of several batch sizes."""
    batch = make_batch(6, 3, seed=4)
    batch.strides, permute = [2, 0, 5, 1, 3, 7], [3, 5, 0, 2, 1, 4]
    places, offsets = reference(torch.arange(len(batch.values)), batch.offsets, permute, batch.strides)[:2]
    grad = torch.randn(len(places)).index_fill(0, torch.tensor([1]), -0.0)
    expected = torch.empty_like(grad).index_copy(0, places, grad)
    module = importlib.import_module("rec_kernels.ops.jagged_permute")
    size = {"size": len(grad), "total": len(grad), "covers": True}
    ctx = SimpleNamespace(saved_tensors=(batch.offsets, offsets), permute=permute, strides=batch.strides, **size)
    for backend in every_backend():
        monkeypatch.setattr(module, "_ops", backend.ops)
        assert same_bits(module._backward(ctx, None, None, grad, None)[4], expected), backend.name


def test_ids_in_no_bag() -> None:
    """Weights of ids outside of all bags have zero gradients, in the op and in lookups of reordered features."""
    offsets, factors = torch.tensor([1, 2, 4]), torch.tensor([5.0, 6.0, 7.0])
    for backend in every_backend():
        out = backend.ops.jagged_permute(torch.arange(5), offsets, [1, 0], [1, 1], torch.arange(5.0), 3)
        assert (out[0].tolist(), out[2].tolist()) == ([2, 3, 1], [2, 3, 1]), backend.name
    weights = torch.ones(5, requires_grad=True)
    (rk.jagged_permute(torch.arange(5), offsets, [1, 0], [1, 1], weights, total=3)[2] * factors).sum().backward()
    assert weights.grad.tolist() == [0, 7, 5, 6, 0]
    tables = [rk.EmbeddingBagConfig(9, 4, name=n, feature_names=[n]) for n in "ba"]
    module, weights = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.1)), torch.ones(5, requires_grad=True)
    sums = {n: module.embedding_bags[n].weight.detach().sum(1) for n in "ab"}
    batch = rk.KeyedJaggedTensor(["a", "b"], torch.arange(5), weights=weights, offsets=torch.tensor([0, 2, 4]))
    module(batch).values().sum().backward()
    torch.testing.assert_close(weights.grad, torch.stack([*sums["a"][:2], *sums["b"][2:4], torch.tensor(0.0)]))
    assert int(module.step) == 1


@pytest.mark.parametrize("permute", [[2, 0, 1], [1, 1]], ids=str)
def test_compiled(permute: list[int]) -> None:
    """One graph for totals known from sizes and for data-dependent ones."""

    def step(values, offsets, weights, size):
        out = rk.jagged_permute(values, offsets, permute, [size] * 3, weights * 2)
        return out[2].square().sum(), *out[:2]

    check_compiled(step, 3)


def test_compiled_with_a_total_that_depends_on_data() -> None:
    """Ids may exist after the last bag, or not."""

    def step(values, offsets, weights, size):
        total = int(offsets[-1])
        out = rk.jagged_permute(values, offsets, [2, 0, 1], [size] * 3, weights * 2, total=total)
        return out[2].square().sum(), *out[:2]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check_compiled(step, 3)


IDS, OFFSETS, WEIGHTS = torch.arange(7), torch.tensor([0, 2, 3, 3, 4, 6, 7]), torch.linspace(1, 2, 7)


@pytest.mark.parametrize("total", [0, 1, 3, 5, 100])
def test_a_wrong_total(total: int) -> None:
    """On a device, ids and weights beyond the total are left out, and missing ones are zeros."""
    with pytest.raises(ValueError, match=f"total = {total}, and the features of permute have 4 values"):
        ops.jagged_permute(IDS, OFFSETS, [2, 1], [2] * 3, WEIGHTS, total)
    order = torch.tensor([4, 5, 6, 3])[:total]
    zeros = torch.zeros(total - len(order))
    for backend in itertools.chain(device_backends(), torch_backend()):
        out, offsets, weights, status = backend.ops.jagged_permute(IDS, OFFSETS, [2, 1], [2] * 3, WEIGHTS, total)
        assert out.tolist() == [*order.tolist(), *zeros.tolist()], backend.name
        assert same_bits(weights, torch.cat([WEIGHTS[order], zeros])), backend.name
        assert offsets.tolist() == [min(i, total) for i in [0, 2, 3, 3, 4]], backend.name
        assert status.tolist() == [4, 0], backend.name


def test_the_gradient_with_a_wrong_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zeros after the last bag give no gradient."""
    module = importlib.import_module("rec_kernels.ops.jagged_permute")
    ctx = SimpleNamespace(saved_tensors=(OFFSETS, None), size=7, total=9, covers=False, permute=[2, 1], strides=[2] * 3)
    for backend in device_backends():
        monkeypatch.setattr(module, "_ops", backend.ops)
        found = module._backward(ctx, None, None, torch.arange(1.0, 10), None)[4]
        assert found.tolist() == [0, 0, 0, 4, 1, 2, 3], backend.name


@pytest.mark.parametrize(("bounds", "first"), BAD_OFFSETS)
def test_bad_offsets(bounds: list[int], first: int) -> None:
    """Bad offsets raise on the CPU; on a device such a bag is empty, and the output keeps the values' size."""
    offsets = torch.tensor(bounds)
    with pytest.raises(ValueError, match=rf"offsets\[{first}\] = {bounds[first]} must be in "):
        ops.jagged_permute(IDS, offsets, [1, 0], [3, 3])
    rows = good_rows(bounds, 7)
    lengths = torch.tensor([b - a for a, b in rows[3:] + rows[:3]])
    expected = torch.cat([IDS[a:b] for a, b in rows[3:] + rows[:3]] + [torch.zeros(7, dtype=torch.int64)])[:7]
    for backend in itertools.chain(device_backends(), torch_backend()):
        out, found, _, status = backend.ops.jagged_permute(IDS, offsets, [1, 0], [3, 3])
        assert same_bits(out, expected), backend.name
        assert torch.equal(found[1:], lengths.cumsum(0).clamp(max=7)), backend.name
        assert status.tolist() == [BAD_LAYOUT + 1 + first, 0], backend.name
        some, _, _, status = backend.ops.jagged_permute(IDS, offsets, [1], [3, 3])
        assert same_bits(some, torch.cat([IDS[a:b] for a, b in rows[3:]])), backend.name
        assert status.tolist() == [BAD_LAYOUT + 1 + first, 0], backend.name
