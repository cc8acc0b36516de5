"""Invalid arguments of the ops on jagged rows: the message names the argument and what is allowed."""

from __future__ import annotations

import re

import pytest
import torch
from test_jagged_permute import torch_backend
from torch import Tensor

ops = torch.ops.rec_kernels
IDS, OFFSETS = torch.arange(7), torch.tensor([0, 2, 3, 3, 4, 6, 7])
WEIGHTS, STRIDES = torch.linspace(1, 2, 7), [3, 3]
#: A valid call of each op: six bags, of two features with three samples if the op has features.
GOOD = {
    "jagged_bucketize": {"block_sizes": torch.tensor([5, 4]), "num_buckets": 2, "strides": STRIDES, "weights": WEIGHTS},
    "jagged_dedup": {"groups": [0, 1], "weights": WEIGHTS},
    "jagged_index_select": {"index": torch.tensor([2, 0])},
    "jagged_overlaps": {},
    "jagged_permute": {"permute": [1, 0], "strides": STRIDES, "weights": WEIGHTS},
    "jagged_windows": {"starts": torch.tensor([2, 0]), "lengths": torch.tensor([5, 2])},
}
GOOD = {op: {"values": IDS} | ({"offsets": OFFSETS} if op != "jagged_windows" else {}) | g for op, g in GOOD.items()}


def ops_with(*names: str) -> list[str]:
    """The ops with these arguments."""
    return [op for op, given in GOOD.items() if given.keys() >= set(names)]


OF_IDS, OF_ROWS = ["jagged_bucketize", "jagged_dedup", "jagged_overlaps"], ["jagged_index_select", "jagged_windows"]
WITH_TOTAL = [*OF_ROWS, "jagged_permute"]
TOO_MANY = "the result has 2147483648 values, more than int32 offsets can name"
BIG = torch.empty(2**62, 0)
#: Ops, changes of the valid call, and the message.
WRONG = [
    (OF_IDS, {"values": IDS.float()}, "values must be int32 or int64, got float32"),
    ([*OF_IDS, "jagged_permute"], {"values": IDS[None]}, "values must have 1 dimension(s), got shape [1, 7]"),
    (OF_ROWS, {"values": IDS[None, None]}, "values must be [N] or [N, D], got shape [1, 1, 7]"),
    (ops_with("offsets"), {"offsets": OFFSETS[None]}, "offsets must have 1 dimension(s), got shape [1, 7]"),
    (ops_with("offsets"), {"offsets": OFFSETS.short()}, "offsets must be int32 or int64, got int16"),
    (ops_with("offsets"), {"offsets": OFFSETS[:0]}, "offsets must have one element more than there are rows, got none"),
    (ops_with("weights"), {"weights": WEIGHTS.double()}, "weights must be float32, got float64"),
    (ops_with("weights"), {"weights": WEIGHTS[:3]}, "weights must have shape [7], got [3]"),
    (ops_with("strides"), {"strides": [3, 4]}, "strides[1] = 4 must be in [0, 3]: offsets describe 6 bags"),
    (ops_with("strides"), {"strides": [3, 2]}, "strides are of 5 bags, and offsets of 6"),
    (ops_with("strides"), {"strides": [-1, 7]}, "strides[0] = -1 must be in"),
    (ops_with("block_sizes"), {"block_sizes": torch.tensor([5, 4]).int()}, "block_sizes must be int64, got int32"),
    (ops_with("block_sizes"), {"block_sizes": torch.tensor([5])}, "block_sizes must have shape [2], got [1]"),
    (ops_with("num_buckets"), {"num_buckets": 0}, "num_buckets = 0 must be in [1, 1048576]"),
    (ops_with("num_buckets"), {"num_buckets": 2**20 + 1}, "num_buckets = 1048577 must be in [1, 1048576]"),
    (["jagged_bucketize"], {"strides": [2**62] * 4 + [6]}, "strides[0] = 4611686018427387904 must be in [0, 6]"),
    (
        ["jagged_permute"],
        {"strides": [2**62 + 9, 2**62, 2**62 - 9, 2**62 + 6]},
        "strides[0] = 4611686018427387913",
    ),
    (ops_with("permute"), {"permute": [0, 2]}, "permute[1] = 2 must be in [0, 2), the features"),
    (ops_with("permute"), {"permute": [-1]}, "permute[0] = -1 must be in [0, 2), the features"),
    (["jagged_dedup"], {"hash_bits": 65}, "hash_bits = 65 must be in [0, 64]"),
    (["jagged_dedup"], {"hash_bits": -1}, "hash_bits = -1 must be in [0, 64]"),
    (
        ops_with("groups"),
        {"groups": [0] * 4},
        "offsets describe 6 bags, which is not a multiple of the 4 features",
    ),
    (ops_with("groups"), {"groups": []}, "offsets describe 6 bags, which is not a multiple of the 0 features"),
    (ops_with("groups"), {"groups": [0, 2]}, "groups[1] = 2 must be in [-1, 2): a group's number, or -1"),
    (ops_with("groups"), {"groups": [-2, 0]}, "groups[0] = -2 must be in [-1, 2)"),
    (
        ops_with("groups"),
        {"groups": [1, -1]},
        "groups has no feature of group 0, and some of group 1: groups are",
    ),
    (ops_with("index"), {"index": torch.tensor([[2, 0]])}, "index must have 1 dimension(s), got shape [1, 2]"),
    (ops_with("index"), {"index": torch.tensor([2.0])}, "index must be int32 or int64, got float32"),
    (ops_with("starts"), {"starts": torch.tensor([[2, 0]])}, "starts must have 1 dimension(s), got shape [1, 2]"),
    (ops_with("starts"), {"starts": torch.tensor([2, 0]).short()}, "starts must be int32 or int64, got int16"),
    (ops_with("lengths"), {"lengths": torch.tensor([5])}, "lengths must have shape [2], got [1]"),
    (ops_with("lengths"), {"lengths": torch.tensor([5.0, 2.0])}, "lengths must be int32 or int64, got float32"),
    (WITH_TOTAL, {"total": -1}, "total = -1 must be 0 or more"),
    (ops_with("index"), {"offsets": OFFSETS.int(), "total": 2**31}, TOO_MANY),
    (ops_with("lengths"), {"lengths": torch.tensor([5, 2]).int(), "total": 2**31}, TOO_MANY),
    (ops_with("permute"), {"offsets": OFFSETS.int(), "total": 2**31}, TOO_MANY),
    (
        ops_with("index"),
        {"values": BIG, "offsets": torch.tensor([0, 2**62]), "index": torch.tensor([0, 0])},
        "could have more than 2^63",
    ),
    (
        ops_with("starts"),
        {"values": BIG, "starts": torch.tensor([0, 0]), "lengths": torch.tensor([2**62] * 2)},
        "could have more than 2^63",
    ),
]
#: Every tensor after the first may be on another device.
WRONG += [
    ([op], {name: given[name].to("meta")}, "must be on the same device")
    for op, given in GOOD.items()
    for name in list(given)[1:]
    if isinstance(given[name], Tensor)
]


@pytest.mark.parametrize(("op", "changes", "message"), [(op, *row) for taken_by, *row in WRONG for op in taken_by])
def test_bad_input(op: str, changes: dict[str, object], message: str) -> None:
    """The op, and its replacement on GPUs without the compiled library, raise ValueError."""
    for namespace in (ops, *(backend.ops for backend in torch_backend() if op == "jagged_permute")):
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(namespace, op)(**GOOD[op] | changes)


@pytest.mark.parametrize("op", GOOD)
def test_the_calls_to_be_spoilt_are_good(op: str) -> None:
    """Every op accepts the arguments that are changed above."""
    getattr(ops, op)(**GOOD[op])
