"""The Triton kernels of embedding_bag equal the reference within the rounding of their sums.

triton_device.py describes how the file is run.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from backends import PASSED, OnDevice
from embedding_bag_cases import EPS, LR, OPTIMIZERS, Case, cases, make_case
from hypothesis import strategies as st
from layout_calls import ListOps
from test_embedding_bag_bad_input import LAYOUT
from tiers import cross, drawn, full
from torch import Tensor
from triton_device import DEVICE, INTERPRETED

import rec_kernels as rk
from rec_kernels import triton
from rec_kernels.ops import in_triton
from rec_kernels.testing import assert_same_sum, rounding_bound, same_bits
from rec_kernels.triton import inputs

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INT64_MAX, BAD_LAYOUT = 2**63 - 1, -(2**63)
# The reference's own sum of magnitudes is rounded, by less than this for the at most 5,000 terms of these tests.
SLACK = 1 + 1e-3


ops = ListOps(OnDevice(triton, lambda t: t.to(DEVICE), Tensor.cpu))


def _rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case with tables that ``dtype`` represents exactly."""
    case.weights = case.weights.to(dtype).float()
    return case


def _absolute(case: Case) -> Case:
    """A case with the magnitudes of this one's terms."""
    factors = case.per_sample_weights
    other = dataclasses.replace(case, per_sample_weights=None if factors is None else factors.abs())
    other.weights, other.grad = case.weights.abs(), case.grad.abs()
    return other


def _compare(actual: Tensor, expected: Tensor, magnitude: Tensor, terms: int) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert_same_sum(actual, expected, magnitude.double() * SLACK, terms)
    PASSED["triton"] += 1


def _check_forward(case: Case, dtype: torch.dtype) -> None:
    case = _rounded(case, dtype)
    output, status = ops.embedding_bag(case.weights.to(dtype), *case.jagged, **case.layout)
    # One addition per id, a multiplication, a division.
    terms = int(case.offsets.diff().max()) + 2 if len(case.offsets) > 1 else 2
    _compare(output, case.expected_output(), _absolute(case).expected_output(), terms)
    assert status.tolist() == [INT64_MAX, 0]


def _check_gradients(case: Case) -> None:
    magnitude, shape, terms = _absolute(case), list(case.weights.shape), len(case.values) + 3
    dense = ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **case.layout)
    _compare(dense, case.expected_dense_gradient(), magnitude.expected_dense_gradient(), terms)
    rows, row_grads, counts = ops.embedding_bag_backward_sparse(case.grad, shape, *case.jagged, **case.layout)
    touched = sorted(case.row_gradients)
    assert rows.tolist() == [row for _, row in touched]
    assert counts.tolist() == [sum(t == table for t, _ in touched) for table in case.features]
    expected, most = (
        torch.cat([torch.zeros(0), *(c.row_gradients[key] for key in touched)]) for c in (case, magnitude)
    )
    _compare(row_grads, expected, most, terms)
    values, offsets, _ = case.jagged
    found = ops.embedding_bag_backward_per_sample_weights(case.grad, case.weights, values, offsets, **case.layout)
    terms = max(d for _, d in case.tables) + 3
    _compare(found, case.expected_factor_gradient(), magnitude.expected_factor_gradient(), terms)


def _row_limits(case: Case, key: tuple[int, int], optimizer: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(w, error of w, v, error of v) of one row after a step, in float64, for any rounding of its gradient."""
    (table, row), g, unit = key, case.row_gradients[key].double(), rounding_bound(4)
    error = 2 * rounding_bound(len(case.values) + 3) * SLACK * _absolute(case).row_gradients[key].double()
    w, v = case.split(case.weights)[table][row].double(), case.sum[case.first_rows[table] + row].double()
    if optimizer == "sgd":
        return w - LR * g, LR * error + unit * (w.abs() + LR * (g.abs() + error)), v, v * 0
    low, high = (g.abs() - error).clamp(min=0), g.abs() + error
    wide = 2 * rounding_bound(len(g) + 4)
    v_low, v_high = v + low.square().mean() * (1 - wide), v + high.square().mean() * (1 + wide)
    v_low, v_high = v_low * (1 - unit), v_high * (1 + unit)
    f_low, f_high = LR / (v_high.sqrt() + EPS), LR / (v_low.sqrt() + EPS)
    middle = (f_low + f_high) / 2
    error_w = g.abs() * (f_high - f_low) / 2 + error * f_high + 2 * unit * (w.abs() + f_high * high)
    return w - middle * g, error_w, (v_low + v_high) / 2, (v_high - v_low) / 2


def _rounding(w: Tensor, dtype: torch.dtype) -> Tensor:
    """The maximum change of a row by storing it, beyond float32's rounding."""
    if dtype == torch.float32:
        return torch.zeros_like(w)
    info = torch.finfo(dtype)
    # Compiled kernels round to nearest; Triton's interpreter truncates BF16.
    return (w + info.tiny) * info.eps * (1 if INTERPRETED and dtype == torch.bfloat16 else 0.5)


def _check_update(case: Case, dtype: torch.dtype = torch.float32) -> None:
    case, exact = _rounded(case, dtype), case.weights
    for optimizer in OPTIMIZERS:
        case.weights = exact.to(dtype)
        found, state, step = case.update(optimizer, ops, rounding="nearest")
        case.weights = case.weights.float()
        expected, allowed = case.weights.double(), torch.zeros(case.weights.shape, dtype=torch.float64)
        expected_state, allowed_state = case.sum.double(), torch.zeros(case.sum.shape, dtype=torch.float64)
        views, limits = case.split(expected), case.split(allowed)
        for table, row in case.row_gradients:
            w, error, v, error_v = _row_limits(case, (table, row), optimizer)
            views[table][row], limits[table][row] = w, error + _rounding(w.abs() + error, dtype)
            at = case.first_rows[table] + row
            expected_state[at], allowed_state[at] = v, error_v
        # Gaps between tables are NaN, and other rows unchanged: no error is allowed in both.
        same = found.isnan() & expected.isnan()
        assert (((found.double() - expected).abs() <= allowed) | same).all(), optimizer
        assert ((state.double() - expected_state).abs() <= allowed_state).all(), optimizer
        assert step.item() == 7
        assert found.dtype == dtype
        PASSED["triton"] += 1


@drawn(40, cases(), st.sampled_from(FLOATS))
def test_forward(case: Case, dtype: torch.dtype) -> None:
    """Any tables, features, pooling, weights, integer widths, padding and unused ids, in every table dtype."""
    _check_forward(case, dtype)


@drawn(25, cases())
def test_gradients(case: Case) -> None:
    """Dense and sparse gradients of the weights, and the gradient of per_sample_weights."""
    _check_gradients(case)


@drawn(25, cases(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_fused_updates(case: Case, dtype: torch.dtype) -> None:
    """SGD and row-wise Adagrad update weights and state; rows without ids keep their bits."""
    _check_update(case, dtype)


@pytest.mark.parametrize(
    ("mean", "dim"), [*cross([True, False], [1, 300, 2100], 300), *full(*itertools.product([True, False], [100, 1025]))]
)
def test_dimensions(dim: int, mean: bool) -> None:
    """Rows may be wider than a block; ids repeat within a bag, a bag is empty, and ids have 32 bits."""
    case = make_case(
        [(3, dim)], [0], [5, 0, 1, 4], mean=[mean], weighted=True, ids_dtype=torch.int32, seed=dim, gaps=[1]
    )
    _check_forward(case, torch.float32)
    _check_gradients(case)
    _check_update(case)


@pytest.mark.parametrize(("weighted", "most"), [(True, 130), *full((False, 400))])
def test_hot_row(weighted: bool, most: int) -> None:
    """A row with very many occurrences, of two features with different columns of the gradient."""
    case = make_case([(1, 3), (2, 20)], [0, 1, 0], [most, most - 40, 3, 4, 70, 0], weighted=weighted, seed=1)
    _check_forward(case, torch.float32)
    _check_gradients(case)
    _check_update(case)


def test_many_features() -> None:
    """More features than are checked at a time; those of a table are far apart."""
    case = make_case([(2, 3)] * 70, [*range(70), *reversed(range(70))], [1, 0, 2, 1] * 35, seed=5)
    _check_forward(case, torch.float32)


def test_half_precision_update() -> None:
    """FP16 rows are rounded to nearest once."""
    _check_update(make_case([(6, 33), (4, 9)], [0, 1], [3, 2, 0, 4], mean=[True, False], seed=2), torch.float16)


@pytest.mark.parametrize("batch", [0, 3])
def test_empty_bags_only(batch: int) -> None:
    """Without ids: zeros, empty gradients, and an update that counts the step and changes nothing else."""
    case = make_case([(4, 5), (2, 3)], [0, 1], [0] * 2 * batch)
    _check_forward(case, torch.float32)
    _check_gradients(case)
    _check_update(case)


def test_no_features() -> None:
    """With zero tables everything is empty."""
    none = torch.zeros(0, dtype=torch.int64)
    layout, offsets = dict.fromkeys(LAYOUT, none), torch.zeros(1, dtype=torch.int64)
    output, status = ops.embedding_bag(torch.zeros(0), none, offsets, **layout)
    assert output.shape == (0, 0)
    assert status.tolist() == [INT64_MAX, 0]
    assert [len(t) for t in ops.embedding_bag_backward_sparse(output, [0], none, offsets, **layout)] == [0, 0, 0]


def test_one_table_without_layout() -> None:
    """weights [E, D] without a layout equals a layout of one table; include_last_offset=False appends the end."""
    case = make_case([(6, 20)], [0], [3, 0, 4, 2], weighted=True, padding_idx=2, seed=9)
    table, (values, offsets, factors) = case.weights.view(6, 20), case.jagged
    for pooling in ("sum", "mean"):
        layout = case.layout | {"mean": torch.tensor([pooling == "mean"])}
        expected, _ = ops.embedding_bag(case.weights, *case.jagged, **layout)
        options = {"pooling": pooling, "padding_idx": 2}
        for last, starts in ((True, offsets), (False, offsets[:-1].int())):
            output, _ = ops.embedding_bag(table, values, starts, factors, **options, include_last_offset=last)
            assert same_bits(output, expected)
        dense = ops.embedding_bag_backward_dense(case.grad, [6, 20], *case.jagged, **options)
        flat = ops.embedding_bag_backward_dense(case.grad, [120], *case.jagged, **layout)
        assert same_bits(dense, flat.view(6, 20))
    with pytest.raises(ValueError, match="padding_idx = -2 must be an id of the table, or -1: none"):
        ops.embedding_bag(table, *case.jagged, padding_idx=-2)


@pytest.mark.parametrize("mode", ["error", "ignore"])
def test_bad_ids(mode: str) -> None:
    """Bad ids are left out of sums, counts and gradients, and reported; their NaN weights reach nothing."""
    values, offsets = torch.tensor([1, 7, 2, -1, 9, 3]), torch.tensor([0, 3, 5, 6])
    factors = torch.tensor([1.0, torch.nan, 2.0, torch.nan, torch.nan, 3.0])
    keep = torch.tensor([0, 2, 5])
    kept = (values[keep], torch.tensor([0, 2, 2, 3]), factors[keep])
    table, grad = torch.randn(4, 130), torch.randn(3, 130)
    for pooling in ("sum", "mean"):
        options = {"pooling": pooling, "bounds_check": mode}
        output, status = ops.embedding_bag(table, values, offsets, factors, **options)
        assert status.tolist() == [1, 3]
        expected, _ = ops.embedding_bag(table, *kept, pooling=pooling)
        assert torch.allclose(output, expected, rtol=1e-6, atol=1e-6)
        dense = ops.embedding_bag_backward_dense(grad, [4, 130], values, offsets, factors, **options)
        assert same_bits(dense, ops.embedding_bag_backward_dense(grad, [4, 130], *kept, pooling=pooling))
        found = ops.embedding_bag_backward_per_sample_weights(grad, table, values, offsets, **options)
        expected = ops.embedding_bag_backward_per_sample_weights(grad, table, *kept[:2], pooling=pooling)
        assert not found[[1, 3, 4]].any()
        assert torch.allclose(found[keep], expected, rtol=1e-6, atol=1e-5)
        state = (table.clone(), torch.ones(4), torch.tensor(0))
        ops.embedding_bag_backward_fused_(*state, torch.tensor(0.1), grad, values, offsets, factors, **options)
        changed = (state[0] != table).any(dim=1).tolist()
        # Row 0 is never trained instead of another; an error skips the whole step.
        assert changed == [False, mode == "ignore", mode == "ignore", mode == "ignore"]
        assert state[2].item() == int(mode == "ignore")


def test_unchecked_ids() -> None:
    """bounds_check="none" has equal results for valid ids."""
    case = make_case([(5, 18), (3, 130)], [0, 1], [2, 0, 3, 1], seed=3)
    results = [ops.embedding_bag(case.weights, *case.jagged, **case.layout, bounds_check=m) for m in ("none", "error")]
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skipped_updates(optimizer: str) -> None:
    """found_inf, or under "error" a status with a bad id, skips the update; otherwise both are ignored."""
    case = make_case([(5, 18), (3, 130)], [0, 1, 0], [2, 0, 3, 1, 4, 2], weighted=True, seed=3, gaps=[0, 4])
    before, plain = (case.weights, case.sum, torch.tensor(6)), case.update(optimizer, ops)
    assert not same_bits(plain[0], case.weights)
    good, bad, offset = (torch.tensor([p, n]) for p, n in ((INT64_MAX, 0), (3, 1), (BAD_LAYOUT + 2, 0)))
    for options, expected in (
        ({"found_inf": torch.tensor(1.0)}, before),
        ({"found_inf": torch.tensor(torch.nan)}, before),
        ({"found_inf": torch.zeros(1)}, plain),
        ({"status": good}, plain),
        ({"status": bad}, before),
        ({"status": bad, "bounds_check": "ignore"}, plain),
        ({"status": offset, "bounds_check": "ignore"}, before),
    ):
        assert all(map(same_bits, case.update(optimizer, ops, **options), expected)), options


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_grad_scale(optimizer: str) -> None:
    """A gradient scaled by 2^k with grad_scale = 2^k gives the bits of the unscaled gradient."""
    case = make_case([(5, 18), (3, 1030)], [0, 1], [2, 0, 3, 1], mean=[True, False], seed=3)
    plain = case.update(optimizer, ops)
    scaled = case.update(optimizer, ops, grad=case.grad * 8, grad_scale=torch.tensor(8.0))
    assert all(map(same_bits, scaled, plain))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_learning_rate_for_each_table(optimizer: str) -> None:
    """Each table uses its own learning rate; without one for a table, no table changes."""
    case = make_case([(5, 18), (3, 1030)], [0, 1, 0], [2, 0, 3, 1, 1, 2], mean=[True, False, False], seed=3)
    rates, numbers = torch.tensor([9.0, 0.25, 9.0, 0.5]), {"table_ids": [3, 1, 3]}
    found = case.update(optimizer, ops, lr=rates, **numbers)[0]
    alone = [case.update(optimizer, ops, lr=rates[i])[0] for i in (3, 1)]
    for table, rows in enumerate(case.split(found)):
        assert same_bits(rows, case.split(alone[table])[table])
    assert not same_bits(alone[0], alone[1])
    assert same_bits(case.update(optimizer, ops, lr=rates[:3], **numbers)[0], case.weights)


def _train() -> list[Tensor]:
    """Weights and state of a module after two updates, and the gradients of one with torch's."""
    torch.manual_seed(1)
    tables = [
        rk.EmbeddingBagConfig(5, 3, name="a", feature_names=["f"]),
        rk.EmbeddingBagConfig(4, 20, name="b", feature_names=["g", "h"], pooling="mean"),
    ]
    batch = rk.KeyedJaggedTensor(["f", "g", "h"], torch.randint(4, (36,)), lengths=torch.full((18,), 2)).to(DEVICE)
    fused = rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad(lr=0.5)).to(DEVICE)
    plain = rk.EmbeddingBagCollection(tables).to(DEVICE)
    for _ in range(2):
        fused(batch).values().square().sum().backward()
    plain(batch).values().square().sum().backward()
    return [*fused.state_dict().values(), *(p.grad for p in plain.parameters())]


@pytest.mark.filterwarnings("ignore:.*[Oo]verrid")
def test_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels of a dispatch key, the functions are called by autograd and by modules."""
    expected, calls, read_input = _train(), [], inputs.read_input
    monkeypatch.setattr(inputs, "read_input", lambda *given_: calls.append(1) or read_input(*given_))
    library = torch.library.Library("rec_kernels", "IMPL")
    try:
        in_triton.register_stand_ins(library, "CPU" if DEVICE == "cpu" else "CUDA")
        found = _train()
    finally:
        library._destroy()
    assert len(calls) == 6  # three forwards, three backwards
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-6)
