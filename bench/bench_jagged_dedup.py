"""jagged_dedup compared with torch.unique over rows, and with reading the ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import rec_kernels  # noqa: F401 -- registers the ops
from bench.cases import INPUTS, Case, Way, op_case

LENGTH, SESSION = 50, 9.4  # ids of a bag; samples per distinct bag, as for histories of Complete Journey's baskets


def bags(batch: int, order: str, seed: int) -> Tensor:
    """Returns ids [B, L] int64; ``order``: a session's samples are neighbours, anywhere in the batch, or all differ."""
    generator = torch.Generator().manual_seed(seed)
    distinct = batch if order == "distinct" else 1 + int((batch - 1) / SESSION)
    ids = torch.randint(100_000, (distinct, LENGTH), generator=generator)
    session = torch.arange(batch) * distinct // batch
    if order == "shuffled":
        session = session[torch.randperm(batch, generator=generator)]
    return ids[session]


def cases() -> Iterator[Case]:
    """Yields the cases: one group of one feature. Bytes are those of the ids; torch.unique needs bags of one length."""
    for batch, order in itertools.product((2043, 65536), ("clustered", "shuffled", "distinct")):
        dense = [(bags(batch, order, seed),) for seed in range(INPUTS)]
        offsets = torch.arange(batch + 1) * LENGTH
        jagged = [(ids.view(-1), offsets, [0]) for (ids,) in dense]
        ways = {
            "ours": Way(torch.ops.rec_kernels.jagged_dedup, jagged),
            "torch": Way(lambda ids: torch.unique(ids, dim=0, return_inverse=True), dense),
            "read": Way(Tensor.sum, dense),
        }
        yield op_case(f"jagged_dedup {batch} x {LENGTH}, {order}", ways, 8 * batch * LENGTH)
