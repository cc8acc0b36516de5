"""bench.gpu's cases with published figures: their ids, factors and Adam's check."""

from __future__ import annotations

import pytest
import torch
from test_bench_gpu import CPU

from bench.gpu import cases, checks
from bench.gpu import implementations as imp

OPERATIONS = {cases.SGD: ("forward", "backward"), cases.ADAM: ("backward",)}
SMALL = cases.GpuWorkload("small", 2, 40, 30, 8, 2, power=1.05, weighted=True, operations=OPERATIONS)


def test_the_published_ids() -> None:
    """Batches have the published run's average number of distinct rows: 350,280 of 1,048,570 ids."""
    w = cases.PUBLISHED[0]
    upper = cases.shares(w)
    share = torch.diff(upper, prepend=torch.zeros(1, dtype=torch.float64))
    distinct = w.tables * (1 - (w.batch * w.bag * torch.log1p(-share)).exp()).sum().item()
    assert w.num_ids == 1_048_570
    assert distinct == pytest.approx(350_280, rel=1e-3)


def test_ids_follow_the_power_law() -> None:
    """The five hottest rows have the frequencies of the power law."""
    w = cases.GpuWorkload("hot", 1, 100_000, 1000, 4, 1, power=1.05)
    counts = torch.bincount(cases.batches_of_ids(w, CPU, 1)[0], minlength=1000).sort(descending=True).values
    assert torch.allclose(
        counts[:5].double() / 100_000, torch.diff(cases.shares(w)[:6], prepend=torch.zeros(1))[:5], rtol=0.05
    )


def test_bytes_by_hand() -> None:
    """160 ids of 8 bytes with a factor, 81 offsets, 80 pooled rows of 32 bytes; Adam reads and writes three rows."""
    around = 160 * 12 + 81 * 8 + 80 * 32
    assert cases.bytes_moved(SMALL, "forward", cases.SGD, 50)["unique"] == 50 * 32 + around
    assert cases.bytes_moved(SMALL, "backward", cases.ADAM, 50)["unique"] == 50 * 2 * 3 * 32 + around
    assert cases.bytes_moved(SMALL, "forward", cases.SGD, 50, "int8")["all"] == 160 * 16 + around


class Planted(imp.Ops):
    """Ours with a planted error."""

    wrong = ""

    def backward(self, status: torch.Tensor | None = None) -> None:
        super().backward(status)
        row = self.data.ids_of_tables[1][0]
        if self.wrong == "moment":
            self.state[1][1][row] *= 1 + 1e-3
        if self.wrong == "row":
            self.tables[1][row] += 1e-4


@pytest.mark.parametrize("wrong", ["moment", "row"])
def test_a_wrong_adam_is_found(wrong: str) -> None:
    """The check compares a first step, even after earlier updates."""
    data = imp.Tables(SMALL, CPU)
    planted = Planted(data, cases.ADAM)
    for turn in range(3):
        data.use(turn)
        checks.check_update(data, planted, planted.backward)
    planted.wrong = wrong
    with pytest.raises(AssertionError, match="second moment differ" if wrong == "moment" else "rows differ"):
        checks.check_update(data, planted, planted.backward)


@pytest.mark.parametrize("make", [imp.Ours, imp.Ops, imp.Torch])
def test_factors_are_checked(make: imp.Make) -> None:
    """Correct factors pass; an output or an update without factors does not."""
    data = imp.Tables(SMALL, CPU)
    implementation = make(data, cases.SGD)
    checks.check_forward(data, implementation)
    checks.check_update(data, implementation, implementation.step)
    right, data.factors = data.factors, torch.ones_like(data.factors)
    implementation = make(data, cases.SGD)
    data.factors = right
    if make is imp.Ops:
        with pytest.raises(AssertionError, match="rows differ"):
            checks.check_update(data, implementation, implementation.backward)
