"""bench/format_quality.py: the published table is its file's, and the kernels reproduce the file's figures."""

from __future__ import annotations

import json

import pytest
import torch
from tiers import full

import rec_kernels as rk
from bench import format_quality as quality

RECORDED = json.loads(quality.RESULT.read_text())["formats"]


def test_page_has_the_recorded_table() -> None:
    """Every format has a row between the markers."""
    assert [*RECORDED] == [*rk.ROW_FORMATS]
    part = quality.PART.search(quality.PAGE.read_text())
    assert part[0] == part[1] + quality.table(RECORDED) + part[2]


#: One of each family's formats.
FAMILIES = ("fp16", "int8", "mx6", "mxfp6_e3m2")


@pytest.mark.parametrize("format", [*FAMILIES, *full(*(format for format in rk.ROW_FORMATS if format not in FAMILIES))])
def test_recorded_figures(format: str) -> None:
    """A tenth of the rows gives the recorded figures within 0.4 dB."""
    found, recorded = quality.measure(format, quality.ROWS // 10), RECORDED[format]
    assert found["bits_per_column"] == recorded["bits_per_column"]
    assert found.get("worst_block_db") == pytest.approx(recorded.get("worst_block_db"), abs=1e-6)
    for now, before in zip(
        (*found["nearest_db"].values(), found["stochastic_db"]),
        (*recorded["nearest_db"].values(), recorded["stochastic_db"]),
        strict=True,
    ):
        assert now == before is None or now == pytest.approx(before, abs=0.4)
    assert abs(found["bias"]["rceil"]) < 4


@pytest.mark.parametrize("format", quality.BOUNDS)
def test_bounds_hold(format: str) -> None:
    """No block is worse than the bound, which is at most 2 dB too pessimistic."""
    for bound, rule in zip(quality.BOUNDS[format], quality.RULES, strict=True):
        assert bound <= RECORDED[format]["worst_block_db"][rule] <= bound + 2.0


def test_by_hand() -> None:
    """Two values in int2: 0 and 3 are on the grid, 1.25 moves by 0.25; energies are 10.5625 and 0.0625."""
    x = torch.tensor([[0.0, 3.0, 1.25]])
    assert quality.error(x, "int2").tolist() == [[0.0, 0.0, -0.25]]
    assert quality.decibels(x, quality.error(x, "int2")) == pytest.approx(22.2788, abs=1e-3)
    assert quality.decibels(x, quality.error(x, "fp32")) is None
