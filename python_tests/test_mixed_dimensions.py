"""rk.mixed_dimensions: the figures of a known data set, options and errors."""

from __future__ import annotations

import pytest
import torch

import rec_kernels as rk

# Rows of the categorical features of Criteo's Kaggle data set.
CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
CRITEO += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
# Widths by the power law alone (threshold=0).
WIDTHS = [3, 3, 1, 1, 4, 9, 1, 3, 16, 1, 2, 1, 2, 8, 1, 1, 11, 2, 2, 15, 1, 9, 10, 1, 6, 1]


def parameters(dims: list[int], rows: list[int] = CRITEO) -> int:
    """Parameters of all tables together."""
    return sum(n * d for n, d in zip(rows, dims, strict=True))


def test_criteo() -> None:
    """Criteo has 33.8 million parameters instead of 540.2: 16.0 times fewer."""
    dims = rk.mixed_dimensions(CRITEO, 16, 0.3, threshold=0)
    assert dims == WIDTHS
    assert all(type(d) is int for d in dims)
    assert (parameters(dims), parameters([16] * 26)) == (33_786_932, 540_201_232)
    assert round(parameters([16] * 26) / parameters(dims), 1) == 16.0


def test_threshold() -> None:
    """Tables with at most ``threshold`` rows keep the base; the default, 200, costs little."""
    kept = [16 if n <= 200 else d for n, d in zip(CRITEO, WIDTHS, strict=True)]
    assert rk.mixed_dimensions(CRITEO, 16, 0.3) == kept
    assert kept.count(16) == sum(n <= 200 for n in CRITEO) == 8
    assert parameters(kept) < 1.001 * parameters(WIDTHS)
    assert rk.mixed_dimensions([200, 201], 8, 1.0) == [8, 8]
    assert rk.mixed_dimensions([100, 200, 201], 8, 1.0) == [8, 8, 4]
    assert rk.mixed_dimensions([100, 200, 201], 8, 1.0, threshold=199) == [8, 4, 4]


def test_power_of_two() -> None:
    """The nearest power of two on a logarithmic scale; a base that is none is kept."""
    dims = rk.mixed_dimensions([1, 2, 3, 5, 6, 100], 16, 1.0, threshold=0, power_of_two=True)
    assert dims == [16, 8, 4, 4, 2, 1]
    assert rk.mixed_dimensions([1, 2, 3], 12, 1.0, threshold=1, power_of_two=True) == [12, 8, 4]
    assert set(rk.mixed_dimensions(CRITEO, 64, 0.2, threshold=0, power_of_two=True)) <= {1, 2, 4, 8, 16, 32, 64}


def test_budget() -> None:
    """The budget is used up to rounding, unless all tables have the base or one column."""
    rows = [1000, 5000, 20_000, 100_000]
    dims = rk.mixed_dimensions(rows, 512, 0.3, budget=16_000_000)
    assert parameters(dims, rows) == pytest.approx(16_000_000, rel=0.01)
    assert dims == sorted(dims, reverse=True)
    assert rk.mixed_dimensions(rows, 64, 0.3, budget=16_000_000)[0] == 64
    assert rk.mixed_dimensions(rows, 64, 0.3, budget=1) == [1, 1, 1, 1]


def test_temperature() -> None:
    """Temperature 0 gives every table the base; results are in the tables' order."""
    assert rk.mixed_dimensions(CRITEO, 16, 0) == [16] * 26
    assert rk.mixed_dimensions(CRITEO[::-1], 16, 0.3, threshold=0) == WIDTHS[::-1]
    assert rk.mixed_dimensions([7], 5, 3.0, threshold=0) == [5]
    assert rk.mixed_dimensions((10, 10**9), 128, 40.0, threshold=0) == [128, 1]
    assert rk.mixed_dimensions(CRITEO, 16, torch.tensor(0.5)) == rk.mixed_dimensions(CRITEO, 16, 0.5)
