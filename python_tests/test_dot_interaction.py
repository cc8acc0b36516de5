"""dot_interaction on the CPU: bits of the reference, gradients, compilation, errors."""

from __future__ import annotations

import re

import pytest
import torch
from backends import cpu_backends
from dot_interaction_cases import (
    BAD_CALLS,
    FLOATS,
    LONG,
    MANY,
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
from rec_kernels.ops.dot_interaction import num_pairs
from rec_kernels.reference import dot_interaction as reference

ops = torch.ops.rec_kernels


def check(call: Call) -> None:
    """Checks both ops on every instruction set and number of threads, bit for bit."""
    expected = call.each(reference)
    for backend in cpu_backends():
        for found, right in zip(call.each(backend.ops), expected, strict=True):
            assert testing.same_bits(found, right), backend.name


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("self_interaction", [False, True])
@pytest.mark.parametrize("batch", [1, 37, *full(16)])
def test_matches_reference(size: tuple[int, int], self_interaction: bool, batch: int) -> None:
    """Registers of samples and of columns, whole and partial ones."""
    check(make_call(size, batch, self_interaction))


@pytest.mark.parametrize("size", [MANY, LONG], ids=str)
@pytest.mark.parametrize("self_interaction", [False, True])
def test_many_vectors_and_columns(size: tuple[int, int], self_interaction: bool) -> None:
    """70 vectors; 1024 columns."""
    check(make_call(size, 18, self_interaction))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("size", [(0, 3), (4, 16), (13, 10)], ids=str)
def test_half_precision(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Sums are float32 and rounded once."""
    for self_interaction in (False, True):
        check(make_call(size, 35, self_interaction, dtype))


def test_threads_share_the_work() -> None:
    """Enough work for each of them to get some; nothing depends on who does it."""
    call, expected = make_call((27, 64), 1000, False), None
    for isa in testing.cpu_isas()[1:]:
        for threads in (1, 2, 5):
            with testing.use_cpu_isa(isa), testing.use_threads(threads):
                found = call.each(ops)
            expected = expected or found
            assert all(map(testing.same_bits, found, expected)), (isa, threads)


@pytest.mark.parametrize("size", [*SIZES, MANY, LONG], ids=str)
@pytest.mark.parametrize("self_interaction", [False, True])
def test_matches_torch(size: tuple[int, int], self_interaction: bool) -> None:
    """torch.bmm, its triangle and torch.cat in float64, and torch's gradients: apart by no more than rounding."""
    call = make_call(size, 20, self_interaction)
    dense, sparse = call.dense.clone().requires_grad_(), call.sparse.clone().requires_grad_()
    out = rk.dot_interaction(dense, sparse, self_interaction)
    found = out.detach(), *torch.autograd.grad(out, (dense, sparse), call.grad)
    compared = zip(found, each_by_torch(call), magnitudes(call), most_terms(call), strict=True)
    for mine, right, magnitude, terms in compared:
        testing.assert_same_sum(mine, right, magnitude, terms + 1)


def test_order_of_pairs() -> None:
    """Row by row below the diagonal, and with it."""
    dense, sparse = torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0, 1.0], [3.0, 5.0]]])
    assert rk.dot_interaction(dense, sparse).tolist() == [[1, 0, 2, 3, 11]]
    assert rk.dot_interaction(dense, sparse, True).tolist() == [[1, 0, 1, 2, 5, 3, 11, 34]]
    assert [num_pairs(f) for f in (0, 1, 26)] == [0, 1, 351]
    assert [num_pairs(f, True) for f in (0, 1, 26)] == [1, 3, 378]


def test_without_samples_or_sparse_vectors() -> None:
    """Empty results; a dense vector alone is copied, and its gradient, too."""
    call = make_call((4, 6), 0, False)
    assert [t.shape for t in call.each(ops)] == [call.grad.shape, call.dense.shape, call.sparse.shape]
    call = make_call((0, 6), 5, False)
    out, grad_dense, grad_sparse = call.each(ops)
    assert torch.equal(out, call.dense)
    assert torch.equal(grad_dense, call.grad)
    assert grad_sparse.shape == (5, 0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_are_read_right(dtype: torch.dtype) -> None:
    """Samples at any distance, arguments that are copied; nothing is written to."""
    call = make_call((5, 7), 20, True, dtype)
    wide = call.map(lambda t: torch.randn(2 * len(t), *(2 * n for n in t.shape[1:])).to(dtype))
    before = [t.clone() for t in wide[:3]]
    pairs = call.grad.shape[1]
    rows = Call(wide.dense[::2, :7], wide.sparse.view(40, -1)[::2, 3:38].view(20, 5, 7), wide.grad[::2, :pairs], True)
    assert not any(t.is_contiguous() for t in rows[:3])
    strided = Call(wide.dense[:20, ::2], wide.sparse[:20, ::2, 1::2], wide.grad[:20, ::2], True)
    expanded = Call(*(t[:1].expand(20, *t.shape[1:]) for t in call[:3]), True)._replace(
        grad=torch.ones(1, 1, dtype=dtype).expand(20, pairs)
    )
    for given in (rows, strided, expanded):
        plain = given.map(torch.Tensor.contiguous)
        assert all(map(testing.same_bits, given.each(ops), plain.each(ops)))
    assert all(map(testing.same_bits, wide[:3], before))


def test_gradients_of_what_is_wanted() -> None:
    """One of them alone, or none; a second derivative says that there is none."""
    call = make_call((4, 6), 12, False)
    both = call.each(ops)[1:]
    for number in range(2):
        given = [call.dense.clone(), call.sparse.clone()]
        given[number].requires_grad_()
        out = rk.dot_interaction(*given)
        assert testing.same_bits(torch.autograd.grad(out, given[number], call.grad)[0], both[number])
    assert not rk.dot_interaction(call.dense, call.sparse).requires_grad
    dense = call.dense.clone().requires_grad_()
    out = rk.dot_interaction(dense, call.sparse.clone().requires_grad_())
    for reduced in (out.square().sum(), out.sum()):
        (first,) = torch.autograd.grad(reduced, dense, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            first.sum().backward(retain_graph=True)


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiles_once(backend: str) -> None:
    """One graph, trained; another batch size is compiled for once, and none after it."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def loss(dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return rk.dot_interaction(dense * 2, pooled.view(len(dense), 5, 8), True).square().sum()

    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for batch in (4, 9, 33, 70):
        given = torch.randn(batch, 8, requires_grad=True), torch.randn(batch, 40, requires_grad=True)
        results = [torch.autograd.grad(f(*given), given) for f in (compiled, loss)]
        for mine, right in zip(*results, strict=True):
            torch.testing.assert_close(mine, right)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("isa", testing.cpu_isas())
def test_denormals(isa: str) -> None:
    """torch.set_flush_denormal changes nothing."""
    call = make_call((4, 6), 20, True)
    tiny = Call(call.dense * 2.0**-70, call.sparse * 2.0**-70, call.grad * 2.0**-70, True)
    expected = tiny.each(reference)
    assert 0 < expected[0][:, 6:].abs().max() < torch.finfo(torch.float32).tiny
    with testing.use_cpu_isa(isa), testing.flush_denormals():
        found = tiny.each(ops)
    assert all(map(testing.same_bits, found, expected))


def test_nan_and_inf_stay_in_their_places() -> None:
    """NaN and Inf reach only their sample and their vector's pairs; the vector's own gradient has them, too."""
    call = make_call((3, 5), 20, False)
    call.sparse[1, 1, 2] = torch.nan
    call.dense[6, 0] = torch.inf
    out, grad_dense, grad_sparse = call.each(ops)
    bad = torch.zeros(out.shape, dtype=torch.bool)
    bad[1, [5 + 1, 5 + 2, 5 + 5]] = True  # pairs (2, 0), (2, 1), (3, 2)
    bad[6, [0, 5, 6, 8]] = True  # the copied column, pairs (1, 0), (2, 0), (3, 0)
    assert torch.equal(~out.isfinite(), bad)
    assert torch.equal((~grad_dense.isfinite()).nonzero(), torch.tensor([[1, 2], [6, 0]]))
    bad = torch.zeros(grad_sparse.shape, dtype=torch.bool)
    bad[1, :, 2], bad[6, :, 0] = True, True
    assert torch.equal(~grad_sparse.isfinite(), bad)


@pytest.mark.parametrize(("op", "message"), BAD_CALLS)
def test_bad_arguments(op: str, message: str) -> None:
    """The argument, its value, and what is allowed."""
    good, bad = bad_arguments(op, message)
    getattr(ops, op)(*good)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        getattr(ops, op)(*bad)


def test_another_device() -> None:
    """Tensors in different places are refused."""
    call = make_call((4, 6), 3, False)
    with pytest.raises(ValueError, match="same device"):
        rk.dot_interaction(call.dense, call.sparse.to("meta"))


def test_torch_agrees_with_itself() -> None:
    """The tests' formula has correct gradients, and precision changes nothing on the CPU."""
    call = make_call((3, 2), 3, True, torch.float64)
    given = call.dense.requires_grad_(), call.sparse.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: reference.interaction_reference(*x, True), given)
    call = make_call((3, 2), 3, True)
    assert all(map(testing.same_bits, call.each(ops, "tf32"), call.each(ops, "ieee")))
