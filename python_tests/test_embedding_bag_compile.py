"""torch.compile of rk.embedding_bag makes one graph, compiled once, with eager's results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiers import full
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk
from rec_kernels.testing import jagged_batch, same_bits

ROWS, DIM = 30, 12


def _pooled(weight: Tensor, factors: Tensor | None, arguments: dict) -> Tensor:
    return rk.embedding_bag(weight=weight, per_sample_weights=factors, **arguments)


def _compiled(function: Callable, backend: str = "aot_eager", **options) -> tuple[Callable, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def _arguments(batch: int, seed: int, *, last: bool = True) -> dict:
    """Bags of five ids each: only the ids differ from seed to seed."""
    values, offsets = torch.randint(ROWS, (5 * batch,)), torch.arange(0, 5 * batch + 1, 5)
    values = (values + seed) % ROWS
    return {"input": values, "offsets": offsets if last else offsets[:-1], "include_last_offset": last, "mode": "sum"}


CALLS = {
    "starts only": lambda: _arguments(6, 0, last=False),
    "mean": lambda: _arguments(6, 0) | {"mode": "mean", "padding_idx": -2},
    "2-D": lambda: {"input": torch.randint(ROWS, (6, 4)), "mode": "sum"},
    "weighted": lambda: _arguments(6, 0) | {"weighted": True},
    "jagged": lambda: dict(
        zip(("input", "offsets"), jagged_batch([ROWS], 9, seed=1), strict=True), mode="sum", include_last_offset=True
    ),
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [*(("aot_eager", name) for name in CALLS), ("inductor", "weighted"), *full(("inductor", "jagged"))],
)
def test_equal_to_eager(backend: str, name: str) -> None:
    """Output and all gradients have eager's bits; a constant output gradient avoids other roundings."""
    arguments = CALLS[name]()
    weight = torch.randn(ROWS, DIM)
    factors = torch.randn(arguments["input"].shape) if arguments.pop("weighted", False) else None
    compiled, counter = _compiled(_pooled, backend)
    results = []
    for function in (_pooled, compiled):
        mine = [None if t is None else t.clone().requires_grad_() for t in (weight, factors)]
        output = function(*mine, arguments)
        output.backward(torch.arange(output.numel(), dtype=torch.float32).view(output.shape))
        results.append([output, *(t.grad for t in mine if t is not None)])
    assert counter.frame_count == 1
    assert all(map(same_bits, *results))


def test_inference() -> None:
    """The compiled function works under no_grad, where the eager one takes a shorter path."""
    compiled, counter = _compiled(_pooled)
    weight, arguments = torch.randn(ROWS, DIM), _arguments(6, 0)
    with torch.no_grad():
        assert same_bits(compiled(weight, None, arguments), _pooled(weight, None, arguments))
    assert counter.frame_count == 1


def test_fifty_steps_one_compilation() -> None:
    """Ids, weights and learning rate change in every step without recompilation."""

    def loss(weight: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        return rk.embedding_bag(values, weight, offsets, mode="sum", include_last_offset=True).square().sum()

    compiled, counter = _compiled(loss)
    weights = [torch.nn.Parameter(torch.full((ROWS, DIM), 0.1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=0.01) for w in weights]
    for step in range(50):
        arguments = _arguments(6, step)
        for function, weight, optimizer in zip((loss, compiled), weights, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
            optimizer.zero_grad()
            function(weight, arguments["input"], arguments["offsets"]).backward()
            optimizer.step()
    assert counter.frame_count == 1
    assert same_bits(*(w.detach() for w in weights))


def _weight(kind: str) -> tuple[Tensor, dict]:
    """Rows of a kind, and the arguments that describe them."""
    rows = torch.randn(ROWS, DIM)
    if kind in ("float32", "float16"):
        return rows.to(getattr(torch, kind)), {}
    return rk.quantize_rows(rows, kind), {"format": kind, "embedding_dim": DIM}


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "bf16"])
def test_dynamic_sizes(kind: str, backend: str) -> None:
    """Another batch size and number of ids compile once more, with symbols; then no more."""
    compiled, counter = _compiled(_pooled, backend)
    weight, options = _weight(kind)
    for batch in (4, 4, 7, 9, 12, 33):
        arguments = _arguments(batch, 0) | options
        assert same_bits(compiled(weight, None, arguments), _pooled(weight, None, arguments))
        assert counter.frame_count == (1 if batch == 4 else 2)


def test_compiled_errors() -> None:
    """A compiled call raises the eager error."""
    compiled, _ = _compiled(_pooled)
    arguments = _arguments(2, 0)
    arguments["input"][7] = ROWS
    with pytest.raises(IndexError, match=r"values\[7\] = 30 \(feature 0, bag 1\)"):
        compiled(torch.randn(ROWS, DIM), None, arguments)


def test_compiled_autograd() -> None:
    """Compiled autograd has equal gradients, also of a lookup outside of the graph."""
    weight = torch.randn(10, 4, requires_grad=True)

    @torch.compiler.disable
    def lookup() -> Tensor:
        return rk.embedding_bag(torch.tensor([1, 2, 3]), weight, torch.tensor([0, 2]))

    def step(x: Tensor) -> None:
        (lookup() * x).sum().backward()

    x = torch.randn(2, 4)
    step(x)
    expected, weight.grad = weight.grad, None
    counters = torch._dynamo.utils.counters["compiled_autograd"]
    counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(x)
    assert counters["captures"] == 1
    assert torch.equal(weight.grad, expected)
