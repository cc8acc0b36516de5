"""factorization_machine on the CPU: bits of the reference, gradients, compilation, errors."""

from __future__ import annotations

import re

import pytest
import torch
from backends import cpu_backends
from factorization_machine_cases import (
    BAD_CALLS,
    FLOATS,
    SIZES,
    Call,
    bad_arguments,
    each_by_torch,
    magnitudes,
    make_call,
    most_terms,
)
from tiers import full
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels.reference import factorization_machine as reference

ops = torch.ops.rec_kernels


def check(call: Call) -> None:
    """Checks both ops on every instruction set and number of threads, bit for bit."""
    expected = call.each(reference)
    for backend in cpu_backends():
        for found, right in zip(call.each(backend.ops), expected, strict=True):
            assert testing.same_bits(found, right), backend.name


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("batch", [1, 37])
def test_matches_reference(size: tuple[int, int, int], shared: bool, batch: int) -> None:
    """Registers of columns and of factors, whole and partial ones."""
    check(make_call(size, batch, shared))


@pytest.mark.parametrize("batch", [64, 65, 64 * 64 + 70])
def test_many_samples(batch: int) -> None:
    """The gradient of a shared y: one chunk, two, and chunks of chunks."""
    check(make_call((2, 3, 2), batch, True))


def test_large_columns() -> None:
    """1024 columns, 200 factors, 300 vectors."""
    for size in ((2, 1024, 3), (3, 5, 200), (300, 4, 3)):
        check(make_call(size, 2, True))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_half_precision(dtype: torch.dtype, shared: bool) -> None:
    """Sums, and what is between the products, are float32; results are rounded once."""
    check(make_call((5, 10, 6), 70, shared, dtype))


def test_threads_share_the_work() -> None:
    """Enough work for each of them to get some; nothing depends on who does it."""
    for shared in (False, True):
        call, expected = make_call((27, 64, 16), 1000, shared), None
        for isa in testing.cpu_isas()[1:]:
            for threads in (1, 2, 5):
                with testing.use_cpu_isa(isa), testing.use_threads(threads):
                    found = call.each(ops)
                expected = expected or found
                assert all(map(testing.same_bits, found, expected)), (isa, threads)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_matches_torch(size: tuple[int, int, int], shared: bool) -> None:
    """x (x^T y) in float64, and torch's gradients: apart by no more than rounding; so is (x x^T) y."""
    call = make_call(size, 70, shared)
    given = [t.clone().requires_grad_() for t in (call.x, call.y)]
    out = rk.factorization_machine(*given)
    found = out.detach(), *torch.autograd.grad(out, given, call.grad)
    compared = zip(found, each_by_torch(call), magnitudes(call), most_terms(call), strict=True)
    for mine, right, magnitude, terms in compared:
        testing.assert_same_sum(mine, right, magnitude, terms + 1)
    x = call.x.double()
    square = x @ x.transpose(1, 2) @ call.y.double()
    testing.assert_same_sum(found[0], square, magnitudes(call)[0], sum(size))


def test_without_samples_or_vectors() -> None:
    """Empty results; a shared y that nobody used has a gradient of zeros."""
    for size, batch in (((4, 6, 3), 0), ((0, 6, 3), 5)):
        for shared in (False, True):
            call = make_call(size, batch, shared)
            out, grad_x, grad_y = call.each(ops)
            assert (out.shape, grad_x.shape) == (call.grad.shape, call.x.shape)
            assert testing.same_bits(grad_y, torch.zeros_like(call.y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_are_read_right(dtype: torch.dtype) -> None:
    """Samples at any distance, arguments that are copied; nothing is written to."""
    call = make_call((5, 7, 3), 20, False, dtype)
    wide = call.map(lambda t: torch.randn(2 * len(t), *(2 * n for n in t.shape[1:])).to(dtype))
    before = [t.clone() for t in wide]
    rows = Call(*(t.flatten(1)[::2, 1 : 1 + a[0].numel()].view(a.shape) for t, a in zip(wide, call, strict=True)))
    assert not any(t.is_contiguous() for t in rows)
    strided = Call(wide.x[:20, ::2, ::2], wide.y[:20, ::2, 1::2], wide.grad[:20, ::2, ::2])
    shared = strided._replace(y=wide.y[0, ::2, ::2])
    expanded = call._replace(
        y=call.y[:1].expand(call.y.shape), grad=torch.ones((), dtype=dtype).expand(call.grad.shape)
    )
    for given in (rows, strided, shared, expanded):
        plain = given.map(torch.Tensor.contiguous)
        assert all(map(testing.same_bits, given.each(ops), plain.each(ops)))
    assert all(map(testing.same_bits, wide, before))


def test_gradients_of_what_is_wanted() -> None:
    """One of them alone, or none; a second derivative says that there is none."""
    call = make_call((4, 6, 3), 12, True)
    both = call.each(ops)[1:]
    for number in range(2):
        given = [call.x.clone(), call.y.clone()]
        given[number].requires_grad_()
        out = rk.factorization_machine(*given)
        assert testing.same_bits(torch.autograd.grad(out, given[number], call.grad)[0], both[number])
    assert not rk.factorization_machine(call.x, call.y).requires_grad
    x = call.x.clone().requires_grad_()
    out = rk.factorization_machine(x, call.y.clone().requires_grad_())
    for reduced in (out.square().sum(), out.sum()):
        (first,) = torch.autograd.grad(reduced, x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            first.sum().backward(retain_graph=True)


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiles_once(backend: str) -> None:
    """One graph, trained; another batch size is compiled for once, and none after it."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def loss(pooled: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return rk.factorization_machine(pooled.view(len(pooled), 5, 8) * 2, y).square().sum()

    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    y = torch.randn(5, 3, requires_grad=True)
    for batch in (4, 9, 33, 70):
        given = torch.randn(batch, 40, requires_grad=True), y
        results = [torch.autograd.grad(f(*given), given) for f in (compiled, loss)]
        for mine, right in zip(*results, strict=True):
            torch.testing.assert_close(mine, right)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("isa", testing.cpu_isas())
def test_denormals(isa: str) -> None:
    """torch.set_flush_denormal changes nothing; with several chunks of samples, too."""
    for batch, shared in ((20, True), (200, True), (70, False)):
        tiny = make_call((4, 6, 3), batch, shared).map(lambda t: t * 2.0**-46)
        expected = tiny.each(reference)
        assert 0 < expected[0].abs().max() < torch.finfo(torch.float32).tiny
        with testing.use_cpu_isa(isa), testing.flush_denormals():
            found = tiny.each(ops)
        assert all(map(testing.same_bits, found, expected))


def test_products_that_underflow() -> None:
    """-0 where the rule gives -0: the gradient of a sample's own factors is no sum that starts at +0."""
    call = make_call((1, 1, 1), 2, False)
    call.x[:], call.y[:], call.grad[:] = 1e-20, 1.0, -1e-10
    expected = call.each(reference)
    assert torch.signbit(expected[2]).all()
    assert all(map(testing.same_bits, call.each(ops), expected))


def test_nan_stays_in_its_sample() -> None:
    """NaN stays in its sample, and reaches the factors that it meets."""
    call = make_call((3, 5, 4), 20, True)
    call.x[1, 2, 0] = torch.nan
    call.y[1, 3] = torch.nan
    bad = torch.zeros(20, 3, 4, dtype=torch.bool)
    bad[1], bad[:, :, 3] = True, True
    assert torch.equal(call.each(ops)[0].isnan(), bad)


@pytest.mark.parametrize(("op", "message"), BAD_CALLS)
def test_bad_arguments(op: str, message: str) -> None:
    """The argument, its value, and what is allowed."""
    good, bad = bad_arguments(op, message)
    getattr(ops, op)(*good)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        getattr(ops, op)(*bad)


def test_another_device() -> None:
    """Tensors in different places are refused."""
    call = make_call((4, 6, 3), 3, True)
    with pytest.raises(ValueError, match="same device"):
        rk.factorization_machine(call.x, call.y.to("meta"))


def test_precision_is_the_gpus() -> None:
    """It changes nothing on the CPU."""
    call = make_call((3, 4, 2), 3, True)
    assert all(map(testing.same_bits, call.each(ops, "tf32"), call.each(ops, "ieee")))
