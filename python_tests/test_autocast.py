"""dot_interaction and factorization_machine under autocast cast as torch.bmm does, also compiled and exported."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tiers import full
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk
from rec_kernels.testing import same_bits

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)
#: The ops with the shapes of their tensors.
OPS = {
    "dot_interaction": (rk.dot_interaction, (9, 6), (9, 4, 6)),
    "factorization_machine": (rk.factorization_machine, (9, 4, 6), (4, 3)),
}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor], Tensor]:
    return OPS[request.param][0]


@pytest.fixture
def given(op: Callable) -> tuple[Tensor, Tensor]:
    """The case's tensors, float32."""
    return next(tuple(map(torch.randn, shapes)) for found, *shapes in OPS.values() if found is op)


@pytest.mark.parametrize("lower", HALVES, ids=str)
def test_casts_every_mixture(op: Callable, given: tuple[Tensor, Tensor], lower: torch.dtype) -> None:
    """Result and gradients equal those of explicitly cast tensors; a gradient has its tensor's dtype."""
    for dtypes in itertools.product(FLOATS, FLOATS):
        tensors = [t.to(dtype).requires_grad_() for t, dtype in zip(given, dtypes, strict=True)]
        with torch.autocast("cpu", dtype=lower):
            found = op(*tensors)
            assert found.dtype == torch.bmm(*(torch.ones(1, 1, 1, dtype=dtype) for dtype in dtypes)).dtype
        expected = op(*(t.to(lower) for t in tensors))
        assert same_bits(found, expected)
        grads = [torch.autograd.grad(out, tensors, torch.ones_like(expected)) for out in (found, expected)]
        assert [g.dtype for g in grads[0]] == list(dtypes)
        assert all(map(same_bits, *grads))


def test_elsewhere_nothing_is_cast(op: Callable, given: tuple[Tensor, Tensor]) -> None:
    """Autocast of another device or disabled autocast casts nothing, nor is float64 cast, as in torch."""
    expected = op(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert same_bits(op(*given), expected)
        with pytest.raises(ValueError, match="must be float32, float16 or bfloat16, got float64"):
            op(given[0].double(), given[1])
        meta = op(*(t.to("meta") for t in given))
        assert meta.dtype == torch.float32


class Model(torch.nn.Module):
    """The op between two layers, all under autocast."""

    def __init__(self, op: Callable, given: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.op = op
        self.bottom, self.top = torch.nn.Linear(6, 6), torch.nn.Linear(op(*given).shape[-1], 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.top(self.op(self.bottom(x), y)).float().squeeze(-1)


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiles(op: Callable, given: tuple[Tensor, Tensor], backend: str) -> None:
    """The compiled graph has eager's result and gradients, up to roundings that Inductor omits."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    torch.manual_seed(0)
    model = Model(op, given)
    given = tuple(t.requires_grad_() for t in given)
    inputs = (*model.parameters(), *given)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    results = []
    for function in (compiled, model):
        out = function(*given)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    tolerance = 0.0 if backend == "aot_eager" else 2**-6
    for mine, right in zip(*results, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)
    assert counter.frame_count == 1


def test_exports(op: Callable, given: tuple[Tensor, Tensor]) -> None:
    """An exported program that contains the autocast region has the model's bits."""
    model = Model(op, given).eval()
    with torch.no_grad():
        program = torch.export.export(model, given)
        for exported in (program, program.run_decompositions()):
            assert same_bits(exported.module()(*given), model(*given))


def test_passes_opcheck(op: Callable, given: tuple[Tensor, Tensor]) -> None:
    overload = getattr(torch.ops.rec_kernels, op.__name__).default
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.library.opcheck(overload, tuple(t.requires_grad_() for t in given))
