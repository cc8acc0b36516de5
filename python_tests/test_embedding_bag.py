"""embedding_bag has the reference's bits on every backend."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import OPTIMIZERS, Case, cases, make_case, wide_floats
from embedding_bag_checks import check_gradients
from layout_calls import OPS, make_layout
from tiers import cross, drawn
from torch.utils._python_dispatch import TorchDispatchMode

from rec_kernels.reference.numerics import chunked_sum
from rec_kernels.testing import same_bits

ops = OPS
INT64_MAX = torch.iinfo(torch.int64).max


def check(case: Case, *, updates: bool = True) -> None:
    """Checks output, gradients and updates of float tables; NaN between tables stays."""
    check_gradients(case)
    (values, offsets, _), layout = case.jagged, case.layout
    output, factors = case.expected_output(), case.expected_factor_gradient()
    for backend in every_backend():
        found, status = backend.ops.embedding_bag(case.weights, *case.jagged, **layout)
        assert same_bits(found, output), backend.name
        assert status.tolist() == [INT64_MAX, 0]
        backward = backend.ops.embedding_bag_backward_per_sample_weights
        assert same_bits(backward(case.grad, case.weights, values, offsets, **layout), factors), backend.name
    for optimizer in OPTIMIZERS if updates else ():
        weights, state = case.expected_update(optimizer)
        for backend in every_backend():
            found, found_state, step = case.update(optimizer, backend.ops)
            assert same_bits(found, weights), (backend.name, optimizer)
            assert same_bits(found_state, case.sum if optimizer == "sgd" else state), (backend.name, optimizer)
            assert step.item() == 7


@drawn(60, cases())
def test_any_case(case: Case) -> None:
    """Any tables, features, pooling, weights, integer widths, padding and unused ids; other rows keep their bits."""
    check(case)


@pytest.mark.parametrize("dim", [1, 3, 15, 16, 17, 64, 100, 128, 129, 256, 300, 4096])
@pytest.mark.parametrize("mean", [False, True])
def test_dimensions(dim: int, mean: bool) -> None:
    """Each width, with duplicate ids in a bag, an empty bag, weights, and 32-bit ids."""
    case = make_case(
        [(3, dim)], [0], [5, 0, 1, 4], mean=[mean], weighted=True, ids_dtype=torch.int32, seed=dim, gaps=[1]
    )
    check(case)


@pytest.mark.parametrize(("weighted", "occurrences"), cross([True, False], [64, 65, 128, 129, 4096, 4097], 65))
def test_hot_row(weighted: bool, occurrences: int) -> None:
    """Rows with more than 64, and more than 64 * 64, occurrences: chunk sums of one level and of two."""
    lengths = [occurrences // 2, occurrences - occurrences // 2, 3, 4]
    case = make_case([(1, 3), (2, 20)], [0, 1], lengths, weighted=weighted, seed=occurrences)
    check(case)


@pytest.mark.full
@pytest.mark.parametrize(("dim", "occurrences"), [(516, 64 * 64 * 8 + 70), (3, 64**3 + 70)])
def test_hottest_row(dim: int, occurrences: int) -> None:
    """More chunk sums than one GPU block adds, in steps of columns; and sums of three levels."""
    grad = torch.randn(occurrences, dim)
    expected = torch.stack([torch.zeros(dim), chunked_sum(grad)])
    values, offsets = torch.ones(occurrences, dtype=torch.int64), torch.arange(occurrences + 1)
    for backend in every_backend():
        found = backend.ops.embedding_bag_backward_dense(grad, [2, dim], values, offsets)
        assert same_bits(found, expected), backend.name


@pytest.mark.parametrize("dim", [1, 4, 16, 20, 128, 300])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_one_id_each(dim: int, offsets_dtype: torch.dtype) -> None:
    """Every bag has exactly one id, as in most click logs, except one bag of the second feature."""
    lengths = [1] * 33 + [1] * 20 + [2] + [1] * 12
    ids_dtype = torch.int64 if dim % 8 else torch.int32
    sizes = {"ids_dtype": ids_dtype, "offsets_dtype": offsets_dtype, "unused": (2, 1)}
    for options in ({}, {"padding_idx": 1}, {"weighted": True}, {"mean": [True, False]}):
        case = make_case([(5, dim), (3, 7)], [0, 1], lengths, gaps=[1, 2], seed=dim, **sizes, **options)
        case.weights[case.starts[0] : case.starts[0] + 2] = -0.0  # a sum starts from 0, and is 0 again
        check(case, updates=False)


def test_one_id_each_out_of_range() -> None:
    """Bad ids among bags of one id each are left out and counted, or named."""
    table, offsets = wide_floats(6, 20, seed=1), torch.arange(40)
    values = torch.arange(40) % 6
    values[[11, 17, 31]] = torch.tensor([6, -1, 2**40])
    expected = table[values.clamp(0, 5)]
    expected[[11, 17, 31]] = 0
    for backend in every_backend():
        output, status = backend.ops.embedding_bag(
            table, values, offsets, include_last_offset=False, bounds_check="ignore"
        )
        assert same_bits(output, expected + 0.0), backend.name
        assert status.tolist() == [11, 3], backend.name
    with pytest.raises(IndexError, match=r"6.*bag 11"):
        ops.embedding_bag(table, values, offsets, include_last_offset=False)


def test_hot_row_among_features() -> None:
    """The occurrences of a shared table's row come from two features with different columns of the gradient."""
    lengths = [40, 30, 0, 50, 60, 20]
    for mean in ([False, False, False], [True, False, True]):
        case = make_case([(2, 5), (3, 2)], [0, 1, 0], lengths, mean=mean, seed=5)
        check(case)


def test_no_features() -> None:
    """With zero tables everything is empty."""
    none = torch.zeros(0, dtype=torch.int64)
    layout = dict.fromkeys(("weight_offsets", "row_offsets", "num_embeddings", "embedding_dims"), none)
    offsets, weights = torch.zeros(1, dtype=torch.int64), torch.zeros(0)
    output, status = ops.embedding_bag(weights, none, offsets, **layout)
    assert output.shape == (0, 0)
    assert status.tolist() == [INT64_MAX, 0]
    assert ops.embedding_bag_backward_dense(output, [0], none, offsets, **layout).shape == (0,)
    assert [t.shape[0] for t in ops.embedding_bag_backward_sparse(output, [0], none, offsets, **layout)] == [0, 0, 0]


@pytest.mark.parametrize("order", [[0, 1, 1], [1, 0, 1], [1, 1, 0]])
def test_empty_table(order: list[int]) -> None:
    """A table without rows, which shares its row offset with the next one, does not affect that table."""
    dims = torch.tensor([2, 3])[order]
    lengths = torch.tensor([0, 2])[order]
    layout = {
        "weight_offsets": torch.zeros(3, dtype=torch.int64),
        "row_offsets": torch.zeros(3, dtype=torch.int64),
        "num_embeddings": torch.tensor([0, 4])[order],
        "embedding_dims": dims,
    }
    jagged = torch.tensor([1, 3, 3, 3]), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    output, _ = ops.embedding_bag(torch.arange(12.0), *jagged, **layout)
    blocks = output[0].split(dims.tolist())
    assert torch.equal(blocks[order.index(0)], torch.zeros(2))
    assert torch.equal(
        torch.cat([b for b, t in zip(blocks, order, strict=True) if t]), torch.tensor([12.0, 14, 16, 18, 20, 22])
    )

    grad = torch.ones(1, 8)
    dense = ops.embedding_bag_backward_dense(grad, [12], *jagged, **layout)
    assert torch.equal(dense.view(4, 3), torch.tensor([[0.0], [1], [0], [3]]).expand(4, 3))
    rows, row_grads, counts = ops.embedding_bag_backward_sparse(grad, [12], *jagged, **layout)
    assert rows.tolist() == [1, 3]
    assert torch.equal(row_grads, torch.tensor([1.0] * 3 + [3.0] * 3))
    assert counts.tolist() == [2 * t for t in order]


def test_one_table_without_layout() -> None:
    """weights [E, D] without a layout equals a layout of one table; include_last_offset=False appends the end."""
    case = make_case([(6, 20)], [0], [3, 0, 4, 2], weighted=True, padding_idx=2, seed=9)
    table = case.weights.view(6, 20)
    for pooling in ("sum", "mean"):
        case.mean[0] = pooling == "mean"
        expected = case.expected_output()
        options = {"pooling": pooling, "padding_idx": 2}
        assert torch.equal(ops.embedding_bag(table, *case.jagged, **options)[0], expected)
        values, offsets, factors = case.jagged
        for starts in (offsets[:-1], offsets[:-1].int()):
            output, _ = ops.embedding_bag(table, values, starts, factors, **options, include_last_offset=False)
            assert torch.equal(output, expected)


class _Allocations(TorchDispatchMode):
    """Copies of every tensor that aten::new_empty returned, made before it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[torch.Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.new_empty.default:
            self.fresh.append(result.clone())
        return result


def test_outputs_are_poisoned_before_they_are_written() -> None:
    """conftest.py poisons the buffers of a compiled op, too."""
    case = make_case([(5, 4)], [0], [2, 1])
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with _Allocations() as seen:
        # Called without the mode; calls by the kernel still pass through it.
        lookup = torch.ops.rec_kernels.embedding_bag.layout
        output, status = lookup.redispatch(cpu, case.weights, *case.jagged[:2], *make_layout(case.layout))
    assert [t.shape for t in seen.fresh] == [output.shape, status.shape]
    assert seen.fresh[0].isnan().all()
    assert (seen.fresh[1] == INT64_MAX).all()
    assert not output.isnan().any()
