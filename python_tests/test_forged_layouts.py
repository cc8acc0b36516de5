"""Forged layouts do no harm: no write outside of the tensors, an error or a status, and the next call is right."""

from __future__ import annotations

import collections

import pytest
import torch
from backends import Backend, emulated
from layout_fuzz import BAD_LAYOUT, check, forge

import rec_kernels as rk
from rec_kernels.ops.table_layout import Flag, Size

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


@pytest.mark.parametrize("flag", Flag)
def test_what_is_known_of_all_records(flag: Flag) -> None:
    """A layout whose sizes deny what a record does: CPU kernels raise, CUDA kernels note it and look up nothing."""
    made = rk.table_layout(
        [7, 7],
        [4, 4],
        mean=[True],
        partitions=rk.IdPartitions([0, 2], [10, 1], [7, 7], [70], ["mult"]),
        formats=["int8", "int8"],
    )
    if flag == Flag.maps_ids:  # of one part: of several, every id is mapped
        one = rk.IdPartitions([0, 1], [10], [7], [70], ["concat"])
        made = rk.table_layout([7], [4], partitions=one, formats=["int8"])
    sizes = list(made.layout_sizes)
    assert sizes[Size.flags] & flag
    sizes[Size.flags] -= flag
    weights = torch.zeros(2 * 7 * rk.row_bytes("int8", 4), dtype=torch.uint8)
    bags = torch.tensor([5, 69, 33]), torch.tensor([0, 1, 3])
    for ops in (torch.ops.rec_kernels, emulated().ops):
        assert ops.embedding_bag(weights, *bags, *made)[1][0].item() > 0
        if flag == Flag.bytes or ops is torch.ops.rec_kernels:
            with pytest.raises(ValueError, match="weights must be float32" if flag == Flag.bytes else r"layout\[0\]: "):
                ops.embedding_bag(weights, *bags, made.layout, sizes)
        else:
            assert ops.embedding_bag(weights, *bags, made.layout, sizes)[1][0].item() == BAD_LAYOUT
