"""embedding_bag with a fused optimizer: when the backward updates, when it must not, and autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from backends import cpu_backends, every_backend
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_cases import EPS, LR, OPTIMIZERS, Case, make_case
from embedding_bag_checks import before_update, updated
from embedding_bag_format_cases import STEP, EncodedCase, every_format_once
from layout_calls import OPS

import rec_kernels as rk
from rec_kernels.ops.autograd import call
from rec_kernels.testing import flush_denormals, same_bits

ops = OPS
INT64_MAX = torch.iinfo(torch.int64).max


def _case(**options) -> Case:
    arguments = {"mean": [False, True, False], "weighted": True, "seed": 3, "gaps": [0, 4]} | options
    return make_case([(5, 18), (3, 130)], [0, 1, 0], [2, 0, 3, 1, 4, 2], **arguments)


def _encoded() -> EncodedCase:
    """A table in every format, the first with two features."""
    tables = [(3, dim) for dim in (18, 5, 33, 16, 7, 40, 3, 64)]
    lengths = [3, 0, 2, *[1 + i % 3 for i in range(24)]]
    return every_format_once(make_case(tables, [*range(8), 0], lengths, weighted=True, seed=2), 2)


def _of_floats(optimizer: str) -> tuple[Callable, tuple]:
    case = _case()
    return functools.partial(case.update, optimizer), (case.weights, case.sum, torch.tensor(6))


def _of_bytes(optimizer: str) -> tuple[Callable, tuple]:
    encoded = _encoded()
    return functools.partial(updated, encoded, optimizer, "stochastic"), before_update(encoded, optimizer)


@pytest.mark.parametrize(
    ("made", "optimizer"), [*((_of_floats, o) for o in OPTIMIZERS), *((_of_bytes, o) for o in ALL_OPTIMIZERS)]
)
def test_skipped_updates(made: Callable, optimizer: str) -> None:
    """found_inf or a bad id in the forward skips the update; with "ignore", bad ids count as absent."""
    update, before = made(optimizer)
    plain = update(OPS)
    assert not all(map(same_bits, plain, before))
    good, bad = torch.tensor([INT64_MAX, 0]), torch.tensor([3, 1])
    for backend in every_backend():
        for options in ({"found_inf": torch.tensor(1.0)}, {"status": bad}):
            assert all(map(same_bits, update(backend.ops, **options), before)), (backend.name, options)
        for options in (
            {"found_inf": torch.tensor(0.0), "status": good},
            {"found_inf": torch.zeros(1)},
            {"status": bad, "bounds_check": "ignore"},
        ):
            assert all(map(same_bits, update(backend.ops, **options), plain)), (backend.name, options)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("exponent", [-3, 1, 16])
def test_grad_scale_power_of_two(optimizer: str, exponent: int) -> None:
    """A gradient scaled by 2^k with grad_scale = 2^k gives the bits of the unscaled gradient."""
    case, scale = _case(), 2.0**exponent
    plain = case.update(optimizer)
    scaled = case.update(optimizer, grad=case.grad * scale, grad_scale=torch.tensor(scale))
    assert all(map(same_bits, scaled, plain))


@pytest.mark.parametrize("dim", [3, 12, 15, 16, 20, 33, 130])
@pytest.mark.parametrize("factor", [torch.inf, -torch.inf, torch.nan])
def test_bad_factors_stay_in_their_rows(dim: int, factor: float) -> None:
    """An infinite or NaN weight affects the row of its id only, with equal bits everywhere."""
    case = make_case([(40, dim)], [0], [1, 3, 1, 1], weighted=True, seed=dim)
    case.values.copy_(torch.tensor([7, 0, 11, 5, 30, 2]))
    case.per_sample_weights[2] = factor
    clean = make_case([(40, dim)], [0], [1, 3, 1, 1], weighted=True, seed=dim)
    clean.values.copy_(case.values)
    output, _ = ops.embedding_bag(case.weights, *case.jagged, **case.layout)
    assert not output[1].isfinite().any()
    assert same_bits(output, case.expected_output())
    assert same_bits(output[[0, 2, 3]], clean.expected_output()[[0, 2, 3]])
    others = torch.arange(40) != 11
    for optimizer in OPTIMIZERS:
        weights, state = case.expected_update(optimizer)
        clean_weights = clean.expected_update(optimizer)[0].view(40, dim)
        for backend in every_backend():
            found, found_state, _ = case.update(optimizer, backend.ops)
            assert same_bits(found, weights), (backend.name, optimizer)
            assert same_bits(found_state, case.sum if optimizer == "sgd" else state), (backend.name, optimizer)
            assert same_bits(found.view(40, dim)[others], clean_weights[others]), (backend.name, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_flush_denormal_changes_nothing(optimizer: str) -> None:
    """Results depend neither on threads nor on torch.set_flush_denormal(True), which sets the calling thread only."""
    case = make_case([(300, 7), (20, 40)], [0, 1], [9] * 2000, seed=4)
    case.weights.mul_(2.0**-136)  # mostly denormal
    case.grad.mul_(2.0**-134)
    case.sum.mul_(0)
    shape = list(case.weights.shape)
    small = (case.weights != 0) & (case.weights.abs() < torch.finfo(torch.float32).tiny)
    assert small.float().mean() > 0.5

    scaled = {"grad": case.grad * 2.0**100, "grad_scale": torch.tensor(2.0**127)}  # the inverse is denormal

    def everything(ops) -> list[torch.Tensor]:
        output, _ = ops.embedding_bag(case.weights, *case.jagged, **case.layout)
        dense = ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **case.layout)
        return [output, dense, *case.update(optimizer, ops), *case.update(optimizer, ops, **scaled)]

    expected = everything(ops)
    for backend in every_backend():
        with flush_denormals():
            found = everything(backend.ops)
        assert all(map(same_bits, found, expected)), backend.name


def test_denormal_options_are_kept() -> None:
    """torch.set_flush_denormal does not flush options: gradients are clipped to a denormal."""
    case = make_case([(9, 5)], [0], [2, 1, 0, 3])
    case.weights.zero_()
    case.grad.fill_(1.0)
    clipped = {"clip_grad_value": 1e-40, "lr": torch.tensor(2.0**100)}
    expected = case.update("sgd", ops, **clipped)
    assert expected[0].min() < 0
    for backend in cpu_backends():
        with flush_denormals():
            found = case.update("sgd", backend.ops, **clipped)
        assert all(map(same_bits, found, expected)), backend.name


@pytest.mark.parametrize("kind", ["floats", "bytes"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_autograd(optimizer: str, kind: str) -> None:
    """The backward of embedding_bag_fused updates in place; the token's gradient is empty, weights get theirs."""
    encoded = _encoded() if kind == "bytes" else None
    case = encoded.case if encoded else _case()
    before, layout = (encoded.flat, encoded.layout | encoded.noise) if encoded else (case.weights, case.layout)
    weights, state, step = before.clone(), case.sum.clone(), torch.tensor(STEP if encoded else 6)
    token = torch.empty(0, requires_grad=True)
    values, offsets, factors = case.jagged
    factors = factors.clone().requires_grad_()
    given = (weights, None if optimizer == "sgd" else state, step, torch.tensor(LR), token, values, offsets, factors)
    output, _ = ops.embedding_bag_fused(*given, **layout, optimizer=optimizer, eps=EPS)
    assert same_bits(output, case.expected_output())
    assert same_bits(weights, before)
    output.backward(case.grad)
    expected = encoded.update(optimizer, "stochastic") if encoded else case.update(optimizer)
    assert all(map(same_bits, (weights, state, step), expected))
    assert token.grad.shape == (0,)
    # The gradient uses the rows that were looked up, not the updated ones.
    assert same_bits(factors.grad, case.expected_factor_gradient())


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_autograd_of_a_scaled_loss(optimizer: str, shape: tuple[int, ...]) -> None:
    """The update divides by grad_scale at that time, or is skipped; the token's gradient, 0 or inf, shows it."""
    case, scale = _case(), torch.tensor(8.0)
    state = (case.weights.clone(), None if optimizer == "sgd" else case.sum.clone(), torch.tensor(6))
    token = torch.zeros(shape, requires_grad=True)
    options = case.layout | {"optimizer": optimizer, "eps": EPS, "grad_scale": scale}
    for bad in (torch.inf, -torch.inf, torch.nan, None):
        output, _ = ops.embedding_bag_fused(*state, torch.tensor(LR), token, *case.jagged, **options)
        assert same_bits(output, case.expected_output())
        scale.fill_(2.0)
        grad, token.grad = case.grad * 2, None
        if bad is not None:
            grad[-1, -1] = bad
        output.backward(grad)
        assert same_bits(token.grad, torch.full(shape, 0.0 if bad is None else torch.inf))
        assert state[2].item() == (7 if bad is None else 6)
    weights, sums, _ = case.update(optimizer)
    assert same_bits(state[0], weights)
    assert optimizer == "sgd" or same_bits(state[1], sums)


def test_the_forward_checks_grad_scale() -> None:
    """The forward checks grad_scale and uses it for nothing else."""
    case = _case()
    state = (case.weights, case.sum, torch.tensor(6), torch.tensor(LR), torch.empty(0))
    for backend in every_backend():
        forward = backend.ops.embedding_bag_fused
        output, _ = forward(*state, *case.jagged, **case.layout, grad_scale=torch.tensor([0.5]))
        assert same_bits(output, case.expected_output()), backend.name
        for bad, text in ((torch.ones(2), "one element, got shape"), (torch.tensor(1), "float32, got int64")):
            with pytest.raises(ValueError, match=f"grad_scale must (have|be) {text}"):
                forward(*state, *case.jagged, **case.layout, grad_scale=bad)


def test_no_gradient_no_update() -> None:
    """Under no_grad, or with a token that requires no gradient, the op only looks up."""
    case = _case()
    weights = case.weights.clone()
    for requires_grad in (True, False):
        token = torch.empty(0, requires_grad=requires_grad)
        state = (weights, None, torch.tensor(6), torch.tensor(LR), token)
        with torch.set_grad_enabled(not requires_grad):
            output, _ = ops.embedding_bag_fused(*state, *case.jagged, **case.layout, optimizer="sgd")
        assert not output.requires_grad
        assert same_bits(output, case.expected_output())
    assert same_bits(weights, case.weights)


def test_two_uses_in_one_graph() -> None:
    """Two forwards and then both backward passes make two consecutive updates."""
    case = _case()
    weights, state, step = case.weights.clone(), case.sum.clone(), torch.tensor(6)
    arguments = (weights, state, step, torch.tensor(LR), torch.empty(0, requires_grad=True), *case.jagged)
    first, _ = ops.embedding_bag_fused(*arguments, **case.layout, eps=EPS)
    second, _ = ops.embedding_bag_fused(*arguments, **case.layout, eps=EPS)
    (first * case.grad + second * (2 * case.grad)).sum().backward()
    assert step.item() == 8
    results = []
    for factors in ((1, 2), (2, 1)):  # autograd's order is undefined
        expected = (case.weights.clone(), case.sum.clone(), torch.tensor(6))
        for factor in factors:
            ops.embedding_bag_backward_fused_(
                *expected, torch.tensor(LR), case.grad * factor, *case.jagged, **case.layout, eps=EPS
            )
        results.append(all(map(same_bits, (weights, state, step), expected)))
    assert any(results)


def test_gradients_of_weights_are_of_the_rows_that_were_looked_up() -> None:
    """The second of two lookups in a graph raises once the first's backward has updated its rows."""
    weights, step, lr = torch.randn(5, 4), torch.zeros((), dtype=torch.int64), torch.tensor(0.5)
    token, ids, offsets = torch.zeros(0, requires_grad=True), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
    factors = [torch.ones(3, requires_grad=True) for _ in range(2)]
    arguments, expected = (weights, None, step, lr, token, ids, offsets), weights[ids].clone()

    def lookup(factors: torch.Tensor) -> torch.Tensor:
        return ops.embedding_bag_fused(*arguments, factors, optimizer="sgd")[0]

    losses = [lookup(f).sum() for f in factors]
    losses[0].backward()
    assert torch.allclose(factors[0].grad, expected.sum(1))
    after = weights.clone()
    with pytest.raises(RuntimeError, match="the tables have changed since this lookup"):
        losses[1].backward()
    assert factors[1].grad is None
    assert same_bits(weights, after)
    assert step == 1


@pytest.mark.parametrize("name", ["weights", "lr", "token"])
def test_whatever_requires_a_gradient(name: str) -> None:
    """The lookup has a backward if any argument requires a gradient, also when called past the dispatcher."""
    overload = torch.ops.rec_kernels.embedding_bag_fused.layout
    for way in (overload, functools.partial(call, overload)):
        weights, token, lr = torch.zeros(6), torch.zeros(0), torch.tensor(0.5)
        {"weights": weights, "lr": lr, "token": token}[name].requires_grad_()
        layout = rk.table_layout([3], [2])
        bags = torch.tensor([1]), torch.tensor([0, 1])
        output, _ = way(weights, None, torch.tensor(0), lr, token, *bags, *layout, optimizer="sgd")
        output.sum().backward()
        assert weights.tolist() == [0.0, 0.0, -0.5, -0.5, 0.0, 0.0]
