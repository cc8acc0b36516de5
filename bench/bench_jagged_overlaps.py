"""jagged_overlaps on histories of users, compared with reading the ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

import rec_kernels  # noqa: F401 -- registers the ops
from bench.cases import INPUTS, Case, Way, op_case

SAMPLES, LENGTH = 6, 50  # of a user: windows of so many ids


def histories(users: int, step: int, seed: int) -> torch.Tensor:
    """[users * SAMPLES * LENGTH] int64: windows of users in turns, each ``step`` ids further than the one before it."""
    generator = torch.Generator().manual_seed(seed)
    all_ids = torch.randint(100_000, (users, LENGTH + step * (SAMPLES - 1)), generator=generator)
    return all_ids.unfold(1, LENGTH, step).transpose(0, 1).flatten()


def cases() -> Iterator[Case]:
    """Yields the cases. The op always runs on the calling thread; bytes are those of the ids."""
    for users, step in itertools.product((40, 1200), (1, 10, LENGTH)):
        values = [histories(users, step, seed) for seed in range(INPUTS)]
        offsets = torch.arange(0, len(values[0]) + 1, LENGTH)
        given = [(ids, offsets) for ids in values]
        ways = {"ours": Way(torch.ops.rec_kernels.jagged_overlaps, given), "read": Way(lambda ids, _: ids.sum(), given)}
        yield op_case(f"jagged_overlaps {users * SAMPLES} x {LENGTH}, {step} new", ways, values[0].nbytes)
