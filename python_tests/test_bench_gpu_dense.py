"""bench.gpu's cases of dense ops without a GPU: bytes computed by hand, and checks that find errors."""

from __future__ import annotations

import pytest
import torch
from test_bench_gpu import COPY, CPU, Ticks, effort

from bench.gpu import measure
from bench.gpu.dense_side import FACTORS, DenseSide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_by_hand(dtype: torch.dtype) -> None:
    """B = 5, F = 3, D = 4: 6 pairs, and a projection of 3 rows."""
    sizes = {"dot_interaction": (5 * 16, 5 * 10), "factorization_machine": (5 * 12 + 3 * FACTORS, 5 * 3 * FACTORS)}
    for op, (given, out) in sizes.items():
        found = measure.measure_case(DenseSide(op, 5, 3, 4, dtype), CPU, Ticks(), effort(), COPY)
        assert not any("error" in row for row in found["results"])
        moved = [dtype.itemsize * (given + out), dtype.itemsize * (2 * given + out)]
        assert [row["bytes"]["all"] for row in found["results"]] == moved * 2


def cut_to_tf32(t: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to the 11 significant bits of TF32, toward zero."""
    return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("op", ["dot_interaction", "factorization_machine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_results_are_found(op: str, dtype: torch.dtype) -> None:
    """Results and gradients with errors above rounding are found, also in a large batch."""
    case = DenseSide(op, 8192, 3, 4, dtype)
    name, right, _, given = next(s for s in case.subjects(CPU) if s.implementation == "ours").build.args
    for operation in ("forward", "backward"):
        case._build(name, right, operation, given).check()
        error = 1e-3 if dtype == torch.float32 else 1.5e-2
        with pytest.raises(AssertionError):
            case._build(name, lambda *x, by=error: right(*x) * (1 + by), operation, given).check()


@pytest.mark.parametrize("op", ["dot_interaction", "factorization_machine"])
def test_tf32_is_no_ieee(op: str) -> None:
    """The check of full precision finds factors cut to TF32."""
    case = DenseSide(op, 8192, 3, 4)
    name, right, operation, given = next(s for s in case.subjects(CPU) if s.implementation == "ours").build.args

    def cut(*x: torch.Tensor) -> torch.Tensor:
        return right(*(t + (cut_to_tf32(t.detach()) - t.detach()) for t in x))

    with pytest.raises(AssertionError):
        case._build(name, cut, operation, given).check()
