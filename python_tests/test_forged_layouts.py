"""Forged layouts do no harm: no write outside of the tensors, an error or a status, and the next call is right."""

from __future__ import annotations

import collections

import pytest
import torch
from backends import Backend, emulated
from layout_fuzz import check, forge

import rec_kernels as rk
from rec_kernels.ops.table_layout import Column

CALLS = 3_000


@pytest.mark.parametrize("kind", ["cpu", "cuda_emulated"])
def test_forgeries(kind: str) -> None:
    """Calls of every op with a layout: some are refused, some come out harmless."""
    backend = Backend(kind, torch.ops.rec_kernels if kind == "cpu" else emulated())
    outcomes = collections.Counter(check(number, backend) for number in range(CALLS))
    assert outcomes["raised"] > CALLS // 10
    assert outcomes["done"] > CALLS // 10
    if kind != "cpu":
        assert outcomes["noted"] > CALLS // 10


def test_calls_are_those_of_their_number() -> None:
    """A finding can be looked at again."""
    assert forge(7).changes == forge(7).changes
    assert torch.equal(forge(7).arguments["layout"], forge(7).arguments["layout"])
