"""dot_interaction, factorization_machine and grouped_projection on the CPU: threads, gradients, compilation, errors.

test_<op>.py test each op's bits.
"""

from __future__ import annotations

import dot_interaction_cases
import factorization_machine_cases
import grouped_projection_cases
import pytest
import torch
from product_checks import check_empty, check_refused, check_sums
from tiers import full
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels.reference import dot_interaction, factorization_machine, grouped_projection

ops = torch.ops.rec_kernels
CASES = {
    "dot_interaction": dot_interaction_cases,
    "factorization_machine": factorization_machine_cases,
    "grouped_projection": grouped_projection_cases,
}
REFERENCES = dict(zip(CASES, (dot_interaction, factorization_machine, grouped_projection), strict=True))
every_op = pytest.mark.parametrize("name", CASES)
each_call = {
    kind: [(name, call) for name, cases in CASES.items() for call in getattr(cases, kind)]
    for kind in ("COMPARED", "SHARED_OUT", "EMPTY", "BAD_CALLS")
}


@pytest.mark.parametrize(("name", "made"), each_call["SHARED_OUT"], ids=str)
def test_threads_share_the_work(name: str, made: tuple) -> None:
    """With enough work for all threads, results do not depend on their number."""
    call, expected = CASES[name].make_call(*made), None
    for isa in testing.cpu_isas()[1:]:
        for threads in (1, 2, 5):
            with testing.use_cpu_isa(isa), testing.use_threads(threads):
                found = call.each(ops)
            expected = expected or found
            assert all(map(testing.same_bits, found, expected)), (isa, threads)


@pytest.mark.parametrize(("name", "made"), each_call["COMPARED"], ids=str)
def test_matches_torch(name: str, made: tuple) -> None:
    """Results and gradients differ from torch's products in float64 by at most rounding."""
    call = CASES[name].make_call(*made)
    given = [t.clone().requires_grad_() for t in call[:2]]
    out = getattr(rk, name)(*given, *call.options)
    check_sums((out.detach(), *torch.autograd.grad(out, given, call.grad)), call)


@pytest.mark.parametrize(("name", "made"), each_call["EMPTY"], ids=str)
def test_empty(name: str, made: tuple) -> None:
    """Results are empty, and gradients of unused arguments are zeros."""
    check_empty(CASES[name].make_call(*made), ops)


@every_op
def test_gradients_of_what_is_wanted(name: str) -> None:
    """One gradient alone or none may be required; second derivatives raise."""
    op, call = getattr(rk, name), CASES[name].typical(12)
    both = call.each(ops)[1:]
    for number in range(2):
        given = [t.clone() for t in call[:2]]
        given[number].requires_grad_()
        out = op(*given, *call.options)
        assert testing.same_bits(torch.autograd.grad(out, given[number], call.grad)[0], both[number])
    assert not op(*call[:2], *call.options).requires_grad
    given = [t.clone().requires_grad_() for t in call[:2]]
    out = op(*given, *call.options)
    for reduced in (out.square().sum(), out.sum()):
        (first,) = torch.autograd.grad(reduced, given[0], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            first.sum().backward(retain_graph=True)


@every_op
@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiles_once(name: str, backend: str) -> None:
    """The op and its gradients compile to one graph; a second batch size compiles once more, further ones not."""
    torch._dynamo.reset()
    counter, op, options = CompileCounterWithBackend(backend), getattr(rk, name), CASES[name].typical(1).options

    def loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return op(first * 2, second.flatten().view(second.shape), *options).square().sum()

    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for batch in (4, 9, 33, 70):
        first, second = (t.requires_grad_() for t in CASES[name].typical(batch)[:2])
        results = [torch.autograd.grad(f(first, second), (first, second)) for f in (compiled, loss)]
        if backend == "aot_eager":
            assert all(map(testing.same_bits, *results))
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 2


@every_op
@pytest.mark.parametrize("isa", testing.cpu_isas())
def test_denormals(name: str, isa: str) -> None:
    """torch.set_flush_denormal changes nothing, also with several chunks of samples."""
    for batch in (20, 70, 200):
        tiny = CASES[name].tiny(batch)
        expected = tiny.each(REFERENCES[name])
        assert 0 < expected[0][:, -1].abs().max() < torch.finfo(torch.float32).tiny
        with testing.use_cpu_isa(isa), testing.flush_denormals():
            found = tiny.each(ops)
        assert all(map(testing.same_bits, found, expected))


@pytest.mark.parametrize(("name", "bad"), each_call["BAD_CALLS"])
def test_bad_arguments(name: str, bad: tuple[str, str]) -> None:
    """Errors have the argument, its index and value, and what is allowed."""
    op, message = bad
    good, wrong = CASES[name].bad_arguments(op, message)
    getattr(ops, op)(*good)
    check_refused(getattr(ops, op), wrong, message)


@every_op
def test_another_device(name: str) -> None:
    """Tensors on different devices are rejected."""
    call = CASES[name].typical(3)
    with pytest.raises(ValueError, match="same device"):
        getattr(rk, name)(call[0], call[1].to("meta"), *call.options)


@pytest.mark.parametrize(
    ("name", "shapes", "options", "message"),
    [
        ("dot_interaction", ((4,), (3, 8, 4)), (), "dense must have 2"),
        ("dot_interaction", ((3, 4), (3, 8)), (), "sparse must have 3"),
        ("dot_interaction", ((3, 4), (3, 2, 5)), (), r"sparse must have shape \[3, 2, 4\], got \[3, 2, 5\]"),
        ("factorization_machine", ((3, 4), (2, 5)), (), "x must have 3"),
        ("factorization_machine", ((3, 2, 4), (5,)), (), "y must have 2 or 3 dimensions"),
        ("factorization_machine", ((3, 2, 4), (4, 5)), (), r"y must have shape \[2, 5\], got \[4, 5\]"),
        ("factorization_machine", ((3, 2, 4), (2, 2, 5)), (), r"y must have shape \[3, 2, 5\], got \[2, 2, 5\]"),
        ("grouped_projection", ((3, 7), (14,)), ([7], [2], [3]), r"outputs\[0\] = 3 must be 0"),
        ("grouped_projection", ((3, 7), (14,)), ([7], [2], [0, 0]), "outputs must have one element for each of the 1"),
        (
            "grouped_projection",
            ((3, 2), (14,)),
            ([7], [2]),
            r"x must have sum\(in_dims\) = 7 columns, got shape \[3, 2\]",
        ),
        ("grouped_projection", ((3, 7), (13,)), ([7], [2]), "weights must have 14 elements, the .* identity, got 13"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_without_numbers(name: str, shapes: tuple, options: tuple, message: str, device: str) -> None:
    """Meta and fake tensors raise the errors of real ones."""
    with pytest.raises(ValueError, match=message):
        getattr(rk, name)(*(torch.zeros(shape, device=device) for shape in shapes), *options)
