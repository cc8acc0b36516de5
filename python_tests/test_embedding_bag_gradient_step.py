"""Clipping and weight decay of row gradients, and frozen features, have the reference's bits."""

from __future__ import annotations

import pytest
import torch
from backends import cpu_backends, device_backends, every_backend
from embedding_bag_cases import OPTIMIZERS, make_case
from embedding_bag_checks import check_update
from embedding_bag_format_cases import ROUNDINGS, EncodedCase, encoded_cases, every_format_once
from embedding_bag_moment_cases import ELEMENTWISE, MomentCase
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import cross, drawn

from rec_kernels.reference.gradient_step import GradientStep
from rec_kernels.testing import same_bits

STEPS = [
    GradientStep(weight_decay=0.02),
    GradientStep(weight_decay=0.3, weight_decay_mode="decoupled"),
    GradientStep(clip_grad_value=0.7),
    GradientStep(clip_grad_norm=1.3),
    GradientStep(0.05, "l2", 2.5, 3.0),
    GradientStep(0.05, "decoupled", 40.0, 0.01),
]


@drawn(
    40,
    encoded_cases(),
    st.sampled_from([*OPTIMIZERS, *ELEMENTWISE]),
    st.sampled_from(STEPS),
    st.sampled_from(ROUNDINGS),
)
def test_any_case(encoded: EncodedCase, optimizer: str, step: GradientStep, rounding: str) -> None:
    """Every optimizer, format and kind of step."""
    check_update(encoded, optimizer, rounding, step=step)


@pytest.mark.parametrize(("optimizer", "dim"), cross([*ELEMENTWISE, *OPTIMIZERS], [1, 16, 33, 130, 300, 1030], 33))
def test_widths(optimizer: str, dim: int) -> None:
    """Rows within and beyond a warp's registers; gradients of the latter are summed more than once."""
    formats = ["fp32", "int8", "bf16", "mx6"] if dim < 513 else ["fp32", "int4"]
    case = make_case([(2, dim)] * len(formats), [*range(len(formats))], [2] * len(formats), seed=dim)
    for step in STEPS:
        check_update(EncodedCase(case, formats), optimizer, "stochastic", step=step)
        case = make_case([(2, dim)] * len(formats), [*range(len(formats))], [2] * len(formats), seed=dim)


def test_hot_rows() -> None:
    """Gradients that are sums of chunks."""
    case = make_case([(1, 20), (2, 5)], [0, 1], [4200, 3], weighted=True, seed=7)
    for optimizer in ("rowwise_adagrad", "adam"):
        check_update(EncodedCase(case, ["fp32", "fp32"]), optimizer, "stochastic", step=STEPS[4])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(value: float) -> None:
    """A NaN passes every clip; an Inf is clipped by value, and makes its row NaN when clipped by norm."""
    case = make_case([(3, 20)], [0], [1, 1], seed=2)
    case.values.copy_(torch.tensor([0, 2]))
    case.grad[0, 7] = value
    for step in STEPS:
        check_update(EncodedCase(case, ["fp32"]), "sgd", "nearest", step=step)
    encoded = EncodedCase(case, ["fp32"])
    by_value, _ = encoded.expected_update("sgd", "nearest", step=STEPS[2])
    row = by_value[encoded.starts[0] :][:80].view(torch.float32)
    assert row[7].isnan() == (value != value)


def test_a_limit_changes_nothing_below_it() -> None:
    """Gradients within the limits have the bits of an unclipped step."""
    case = make_case([(5, 18), (3, 130)], [0, 1, 0], [2, 0, 3, 1, 4, 2], seed=3)
    wide = {"clip_grad_value": 1e30, "clip_grad_norm": 1e30, "weight_decay": 0.0}
    for optimizer in OPTIMIZERS:
        plain = case.update(optimizer)
        for backend in every_backend():
            assert all(map(same_bits, case.update(optimizer, backend.ops, **wide), plain)), backend.name


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
        ({"weight_decay": float("nan")}, "weight_decay = nan"),
        ({"weight_decay_mode": "L2"}, 'weight_decay_mode must be "l2" or "decoupled", got "L2"'),
        ({"clip_grad_value": 0.0}, "clip_grad_value = 0 must be above 0"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm = -1 must be above 0"),
    ],
)
def test_bad_numbers(bad: dict, text: str) -> None:
    """Invalid options are rejected before anything changes."""
    encoded = every_format_once(make_case([(5, 18)], [0], [2, 1], seed=3))
    for backend in every_backend():
        with pytest.raises((ValueError, RuntimeError), match=text.replace("(", r"\(")):
            encoded.update("sgd", "nearest", backend.ops, **bad)


@settings(max_examples=30)
@given(encoded_cases(), st.sampled_from(["sgd", "adam"]), st.integers(0, 15))
def test_frozen_features(encoded: EncodedCase, optimizer: str, mask: int) -> None:
    """Frozen features have the bits of a call with empty bags for them."""
    case = encoded.case
    frozen = torch.tensor([bool(mask >> f & 1) for f in range(len(case.features))])
    keep = ~frozen.repeat_interleave(case.batch)
    lengths = case.offsets.diff()
    kept = keep.repeat_interleave(lengths)
    bags = slice(int(case.offsets[0]), int(case.offsets[-1]))
    factors = case.per_sample_weights
    fewer = (
        case.values[bags][kept],
        torch.nn.functional.pad((lengths * keep).cumsum(0), (1, 0)).to(case.offsets.dtype),
        None if factors is None else factors[bags][kept],
    )
    subject = MomentCase(encoded, optimizer) if optimizer == "adam" else encoded
    how = ("nearest",) if optimizer == "adam" else (optimizer, "nearest")
    for backend in every_backend():
        found = subject.update(*how, backend.ops, frozen=frozen)
        whole = case.values, case.offsets, case.per_sample_weights
        case.values, case.offsets, case.per_sample_weights = fewer
        expected = subject.update(*how, backend.ops)
        case.values, case.offsets, case.per_sample_weights = whole
        assert encoded.same_tables(found[0], expected[0]), backend.name


def test_frozen_features_have_no_gradient() -> None:
    """Rows of frozen features alone have no dense or sparse gradient."""
    case = make_case([(5, 18), (3, 7)], [0, 1, 0], [2, 0, 3, 1, 4, 2], seed=3)
    frozen, shape = torch.tensor([True, False, True]), list(case.weights.shape)
    for backend in every_backend():
        dense = backend.ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **case.layout, frozen=frozen)
        whole = backend.ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **case.layout)
        mine, all_of_it = case.split(dense), case.split(whole)
        assert not mine[0].any()
        assert same_bits(mine[1], all_of_it[1])
        rows, _, counts = backend.ops.embedding_bag_backward_sparse(
            case.grad, shape, *case.jagged, **case.layout, frozen=frozen
        )
        assert counts.tolist() == [0, len(rows), 0]


def test_frozen_features_are_checked() -> None:
    """Bad offsets of a frozen feature raise, and nothing is updated."""
    case = make_case([(5, 18), (3, 7)], [0, 1], [2, 1, 3, 1], seed=3)
    case.offsets[1] = 5
    frozen = torch.tensor([True, False])
    for backend in cpu_backends():
        with pytest.raises(ValueError, match=r"offsets\[2\] = 3 \(feature 0, bag 1\) is below"):
            case.update("rowwise_adagrad", backend.ops, frozen=frozen)
    for backend in device_backends():
        weights, state, step = case.update("rowwise_adagrad", backend.ops, frozen=frozen)
        assert same_bits(weights, case.weights)
        assert same_bits(state, case.sum)
        assert step == 6
