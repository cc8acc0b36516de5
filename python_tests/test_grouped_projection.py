"""grouped_projection on the CPU: bits of the reference, gradients, compilation, autocast, errors."""

from __future__ import annotations

import re

import pytest
import torch
from backends import cpu_backends
from grouped_projection_cases import (
    BAD_CALLS,
    DIMS,
    LARGE,
    Call,
    Dims,
    bad_arguments,
    by_torch,
    each_by_torch,
    magnitudes,
    make_call,
    most_terms,
)
from tiers import full
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels.reference import grouped_projection as reference

ops = torch.ops.rec_kernels
TRAINED = Dims([3, 5, 4, 16], [5, 16], [0, 0, 1, 1])


def check(call: Call) -> None:
    """All three ops on every instruction set and number of threads, bit for bit."""
    expected = call.each(reference)
    for backend in cpu_backends():
        for found, right in zip(call.each(backend.ops), expected, strict=True):
            assert testing.same_bits(found, right), backend.name


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("batch", [1, 7, 64, 131])
def test_matches_reference(dims: Dims, batch: int) -> None:
    """Tiles of every height, one chunk of samples and several."""
    check(make_call(dims, batch))


def test_large_dimensions() -> None:
    """300 to 512 columns, and the identity of as many."""
    check(make_call(LARGE, 9))


def test_many_samples() -> None:
    """Chunks of chunks: more samples than 64 * 64, shared out among the threads."""
    check(make_call(Dims([3, 2], [2], [0, 0]), 64 * 64 + 70))


@pytest.mark.parametrize("dims", [DIMS[3], DIMS[6]], ids=str)
def test_threads_share_the_work(dims: Dims) -> None:
    """Enough work for each of them to get some, in pieces of rows and of panels; nothing depends on who does it."""
    call, expected = make_call(dims, 1500), None
    for isa in testing.cpu_isas()[1:]:
        for threads in (1, 2, 5):
            with testing.use_cpu_isa(isa), testing.use_threads(threads):
                found = call.each(ops)
            expected = expected or found
            assert all(map(testing.same_bits, found, expected)), (isa, threads)


def test_without_rows_or_groups() -> None:
    """An empty batch has a gradient, zeros; without groups the result has no columns."""
    for dims in DIMS:
        call = make_call(dims, 0)
        out, grad_x, grad_weights = call.each(ops)
        assert out.shape == call.grad.shape
        assert grad_x.shape == call.x.shape
        assert testing.same_bits(grad_weights, torch.zeros_like(call.weights))
    for batch in (0, 5):
        call = make_call(Dims([], [], []), batch)
        assert [tuple(t.shape) for t in call.each(ops)] == [(batch, 0), (batch, 0), (0,)]


def test_identity_only() -> None:
    """Copies; weights of no elements."""
    x = torch.randn(50, 12)
    assert torch.equal(rk.grouped_projection(x, torch.ones(0), [4, 8], [4, 8]), x)
    assert torch.equal(rk.grouped_projection(x, torch.ones(0), [6, 6], [6], [0, 0]), x[:, :6] + x[:, 6:])


def test_strided_inputs_are_read_right() -> None:
    """Non-contiguous arguments mean what they say, and nothing is written to."""
    call = make_call(DIMS[4], 40)
    x, weights, grad = (torch.randn(*(2 * n for n in t.shape)) for t in call[:3])
    strided = Call(x[::2, ::2], weights[::2], grad[1::2, 1::2], call.dims)
    plain = Call(*(t.contiguous() for t in strided[:3]), call.dims)
    before = [t.clone() for t in (x, weights, grad)]
    assert all(map(testing.same_bits, strided.each(ops), plain.each(ops)))
    assert all(map(testing.same_bits, (x, weights, grad), before))
    expanded = plain._replace(grad=torch.ones(1, 1).expand(40, sum(call.dims.out_dims)))
    again = expanded._replace(grad=expanded.grad.contiguous())
    assert all(map(testing.same_bits, expanded.each(ops), again.each(ops)))


@pytest.mark.parametrize("dims", [*DIMS, LARGE], ids=str)
def test_matches_torch(dims: Dims) -> None:
    """F.linear and torch.cat in float64, and torch's gradients of them: apart by no more than rounding."""
    call = make_call(dims, 70)
    x, weights = call.x.clone().requires_grad_(), call.weights.clone().requires_grad_()
    out = rk.grouped_projection(x, weights, *dims)
    found = out.detach(), *torch.autograd.grad(out, (x, weights), call.grad)
    compared = zip(found, each_by_torch(call), magnitudes(call), most_terms(call), strict=True)
    for mine, right, magnitude, terms in compared:
        testing.assert_same_sum(mine, right, magnitude, terms + 1)


def test_gradients_of_what_is_wanted() -> None:
    """One of them alone, or none; a second derivative says that there is none."""
    call = make_call(TRAINED, 12)
    both = call.each(ops)[1:]
    for number in range(2):
        given = [call.x.clone(), call.weights.clone()]
        given[number].requires_grad_()
        out = rk.grouped_projection(*given, *call.dims)
        assert testing.same_bits(torch.autograd.grad(out, given[number], call.grad)[0], both[number])
    assert not rk.grouped_projection(call.x, call.weights, *call.dims).requires_grad
    x = call.x.clone().requires_grad_()
    out = rk.grouped_projection(x, call.weights.clone().requires_grad_(), *call.dims)
    for reduced in (out.square().sum(), out.sum()):
        (first,) = torch.autograd.grad(reduced, x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            first.sum().backward(retain_graph=True)


def test_every_group_has_a_block_of_its_own() -> None:
    """Every group has its own block without outputs; lists may be any sequence of numbers."""
    call = make_call(DIMS[3], 5)
    found = rk.grouped_projection(call.x, call.weights, tuple(call.dims.in_dims), tuple(call.dims.out_dims))
    assert torch.equal(found, call.each(ops)[0])


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiles_once(backend: str) -> None:
    """One graph, trained; another batch size is compiled for once, and none after it."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def loss(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rk.grouped_projection(x * 2, weights, *TRAINED).square().sum()

    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    weights = make_call(TRAINED, 1).weights.requires_grad_()
    for batch in (4, 9, 33, 70):
        x = torch.randn(batch, sum(TRAINED.in_dims), requires_grad=True)
        results = [torch.autograd.grad(f(x, weights), (x, weights)) for f in (compiled, loss)]
        assert all(map(testing.same_bits, *results))
    assert counter.frame_count <= 2


def test_autocast() -> None:
    """Half-precision arguments are widened, and their gradients have their dtype."""
    call = make_call(TRAINED, 6)
    x, weights = (t.bfloat16().requires_grad_() for t in (call.x, call.weights))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rk.grouped_projection(x, weights, *TRAINED)
    assert testing.same_bits(
        out.detach(), rk.grouped_projection(x.detach().float(), weights.detach().float(), *TRAINED)
    )
    out.sum().backward()
    assert x.grad.dtype == weights.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("isa", testing.cpu_isas())
def test_denormals(isa: str) -> None:
    """torch.set_flush_denormal changes nothing."""
    call = make_call(TRAINED, 70)
    tiny = Call(call.x * 2.0**-130, call.weights, call.grad * 2.0**-10, call.dims)
    expected = tiny.each(reference)
    assert 0 < expected[0].abs().max() < torch.finfo(torch.float32).tiny
    with testing.use_cpu_isa(isa), testing.flush_denormals():
        found = tiny.each(ops)
    assert all(map(testing.same_bits, found, expected))


def test_nan_and_inf_stay_in_their_places() -> None:
    """NaN and Inf reach only their sample and block, and the columns of the matrices that they meet."""
    call = make_call(Dims([3, 2], [4, 4], [0, 1]), 10)
    call.x[4, 1], call.x[6, 3] = torch.nan, torch.inf
    out, _, grad_weights = call.each(ops)
    bad = torch.zeros(10, 8, dtype=torch.bool)
    bad[4, :4], bad[6, 4:] = True, True
    assert torch.equal(~out.isfinite(), bad)
    first, second = grad_weights.split([12, 8])
    assert torch.equal(~first.view(4, 3).isfinite(), torch.tensor([False, True, False]).expand(4, 3))
    assert torch.equal(~second.view(4, 2).isfinite(), torch.tensor([True, False]).expand(4, 2))


@pytest.mark.parametrize(("op", "message"), BAD_CALLS)
def test_bad_arguments(op: str, message: str) -> None:
    """The argument, its place and value, and what is allowed."""
    good, bad = bad_arguments(op, message)
    getattr(ops, op)(*good)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        getattr(ops, op)(*bad)


def test_another_device() -> None:
    """Tensors in different places are refused."""
    call = make_call(TRAINED, 3)
    with pytest.raises(ValueError, match="same device"):
        rk.grouped_projection(call.x, call.weights.to("meta"), *TRAINED)


def test_torch_agrees_with_itself() -> None:
    """The tests' formula has correct gradients."""
    call = make_call(Dims([2, 3, 3], [3, 2], [0, 0, 1]), 3, torch.float64)
    given = call.x.requires_grad_(), call.weights.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weights: by_torch(x, weights, call.dims), given)
