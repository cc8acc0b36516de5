"""bench.gpu's cases of the dense side, without a GPU: bytes by hand, and a check that fails where it should."""

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


def test_wrong_results_are_found() -> None:
    """A result that is off by more than rounding, and a gradient."""
    case, given = DenseSide("dot_interaction", 5, 3, 4), (torch.randn(5, 4), torch.randn(5, 3, 4))
    given = tuple(t.requires_grad_() for t in given)
    right = next(s for s in case.subjects(CPU) if s.implementation == "ours").build.args[0]
    for operation in ("forward", "backward"):
        case._build(right, operation, given).check()
        with pytest.raises(AssertionError):
            case._build(lambda *x: right(*x) * (1 + 1e-3), operation, given).check()
