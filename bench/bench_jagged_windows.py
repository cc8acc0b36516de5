"""jagged_windows compared with torch's indexing, FBGEMM's copies of whole rows, and copying as many bytes.

FBGEMM has no windows: its jagged_index_select copies the same rows from a tensor that has each of them whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.cases import INPUTS, Case, Way, op_case, trained_case
from bench.peers import fbgemm_ops

USERS, SAMPLES, STEP, LONGEST = 100, 20, 3, 50  # windows of LONGEST values, each shifted by STEP from the previous one
EACH = LONGEST + STEP * (SAMPLES - 1)  # values of a user

ops = torch.ops.rec_kernels


def indexed(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Computes the position of every value, then indexes the values."""
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return values.index_select(0, starts.repeat_interleave(lengths) + within)


def cases() -> Iterator[Case]:
    """Yields the cases: windows of D columns, consecutive for each user. Bytes: each value written and read once."""
    starts = (EACH * torch.arange(USERS)[:, None] + STEP * torch.arange(SAMPLES)).flatten()
    lengths, every = torch.full_like(starts, LONGEST), torch.arange(len(starts))
    for columns in (1, 16, 64):
        values = [torch.randn(EACH * USERS, columns, requires_grad=True) for _ in range(INPUTS)]
        given = [(x, starts, lengths) for x in values]
        rows = [(ops.jagged_windows(x.detach(), starts, lengths)[0].requires_grad_(),) for x in values]
        ways = {"ours": Way(lambda *given: ops.jagged_windows(*given)[0], given), "torch": Way(indexed, given)}
        if fbgemm := fbgemm_ops():
            select = fbgemm.jagged_index_select
            ways["fbgemm"] = Way(lambda x, select=select: select(x, lengths, every)[0], rows)
        size = f"{len(starts)} of {LONGEST}, D={columns}"
        moved = 8 * rows[0][0].numel()
        yield op_case(f"jagged_windows {size}", ways | {"copy": Way(Tensor.clone, rows)}, moved)
        yield trained_case(f"jagged_windows, trained, {size}", ways, 2 * moved)
