"""Forged layouts do no harm: no write outside of tensors, an error or a status, and a correct next call."""

from __future__ import annotations

import collections

import pytest
import torch
from backends import Backend, emulated
from layout_fuzz import BAD_LAYOUT, Forgery, check, check_forgery, forge

import rec_kernels as rk
from rec_kernels.ops.table_layout import Column, Flag, Size

CALLS = 3_000


@pytest.mark.parametrize("kind", ["cpu", "cuda_emulated"])
def test_forgeries(kind: str) -> None:
    """Random forgeries of every op with a layout include errors and harmless calls."""
    backend = Backend(kind, torch.ops.rec_kernels if kind == "cpu" else emulated())
    outcomes = collections.Counter(check(number, backend) for number in range(CALLS))
    assert outcomes["raised"] > CALLS // 10
    assert outcomes["done"] > CALLS // 10
    if kind != "cpu":
        assert outcomes["noted"] > CALLS // 10


def test_calls_are_those_of_their_number() -> None:
    """A call is determined by its number."""
    assert forge(7).changes == forge(7).changes
    assert torch.equal(forge(7).arguments["layout"], forge(7).arguments["layout"])


def _of_one_table_twice(how: str) -> Forgery:
    """A dense gradient of 40 equal ids; the feature's two parts have one table's records."""
    parts = rk.IdPartitions([0, 2], [1, 1], [8, 8], [8], [how])
    made = rk.table_layout([8, 8], [4, 4], partitions=parts)
    for column in (Column.row_offset, Column.weight_offset, Column.state_offset):
        made.layout[1, column] = made.layout[0, column]
    return _gradient(made, torch.zeros(64))


def _gradient(made: rk.TableLayout, weights: torch.Tensor) -> Forgery:
    grad = torch.ones(1, made.layout_sizes[Size.output_dim])
    bag = {"values": torch.zeros(40, dtype=torch.int64), "offsets": torch.tensor([0, 40])}
    given = {"grad": grad, "weights": weights, **bag, **made._asdict()}
    return Forgery("embedding_bag_backward_dense.layout", given, ["by hand"])


def _without_parts_to_multiply() -> Forgery:
    """A gradient of one table whose flags and record declare it multiplied."""
    made = rk.table_layout([8], [4])
    made.layout_sizes[Size.flags] = Flag.multiplies
    made.layout[0, Column.multiplied] = 1
    return _gradient(made, torch.zeros(32))


@pytest.mark.parametrize("kind", ["cpu", "cuda_emulated"])
@pytest.mark.parametrize(
    "forgery",
    [*map(_of_one_table_twice, ["concat", "add", "mult"]), _without_parts_to_multiply()],
    ids=["concat", "add", "mult", "flag"],
)
def test_known_forgeries(kind: str, forgery: Forgery) -> None:
    """Records that make a run of ids longer than the ids, or multiply rows by those of no part, are detected."""
    backend = Backend(kind, torch.ops.rec_kernels if kind == "cpu" else emulated())
    by_sizes = forgery.arguments["layout_sizes"][Size.num_features] == len(forgery.arguments["layout"])
    outcome = check_forgery(forgery, backend)
    assert outcome == ("raised" if by_sizes or kind == "cpu" else "noted")


@pytest.mark.parametrize("op", ["embedding_bag.layout", "embedding_bag_fused.layout", "embedding_bag.table"])
def test_floats_between_multiples_of_four_bytes(op: str) -> None:
    """Float rows at unaligned addresses, which a GPU cannot read, are rejected."""
    made = rk.table_layout([8], [4], formats=["fp32"])
    rows = torch.zeros(8 * 16 + 1, dtype=torch.uint8)[1:]
    bag = torch.tensor([1]), torch.tensor([0, 1])
    calls = {
        "embedding_bag.layout": lambda ops: ops.embedding_bag.layout(rows, *bag, *made),
        "embedding_bag_fused.layout": lambda ops: ops.embedding_bag_fused.layout(
            rows, None, torch.tensor(0), torch.tensor(1.0), torch.empty(0), *bag, *made, optimizer="sgd"
        ),
        "embedding_bag.table": lambda ops: ops.embedding_bag.table(
            rows.view(8, 16), *bag, format="fp32", embedding_dim=4
        ),
    }
    for ops in (torch.ops.rec_kernels, emulated().ops):
        with pytest.raises(ValueError, match="weights must start at a multiple of 4 bytes, as its rows are float32"):
            calls[op](ops)


def test_no_features_in_groups() -> None:
    """With samples but no features, the output has a row of no columns per sample."""
    made = rk.table_layout([], [])
    nothing, start = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    shared = {"bag_starts": start, "inverse": torch.empty(0, 3, dtype=torch.int64), "groups": []}
    for ops in (torch.ops.rec_kernels, emulated().ops):
        assert ops.embedding_bag.layout(torch.empty(0), nothing, start, *made, **shared)[0].shape == (3, 0)
        sizes = [4 if size == Size.output_dim else n for size, n in zip(Size, made.layout_sizes, strict=True)]
        with pytest.raises(ValueError, match=r"layout_sizes\[1\] = 4 must be the columns of all features"):
            ops.embedding_bag.layout(torch.empty(0), nothing, start, made.layout, sizes, **shared)


@pytest.mark.parametrize("flag", Flag)
def test_what_is_known_of_all_records(flag: Flag) -> None:
    """Sizes that contradict a record raise on the CPU; CUDA kernels set status and look up nothing."""
    made = rk.table_layout(
        [7, 7],
        [4, 4],
        mean=[True],
        padding_idx=[33],
        partitions=rk.IdPartitions([0, 2], [10, 1], [7, 7], [70], ["mult"]),
        formats=["int8", "int8"],
    )
    if flag == Flag.maps_ids:  # of one part: several parts always map ids
        one = rk.IdPartitions([0, 1], [10], [7], [70], ["concat"])
        made = rk.table_layout([7], [4], partitions=one, formats=["int8"])
    if flag == Flag.hashes:
        every = rk.IdPartitions([0, 1], [1], [7], [None], ["concat"])
        made = rk.table_layout([7], [4], partitions=every, formats=["int8"])
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
