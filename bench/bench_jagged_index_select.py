"""jagged_index_select compared with FBGEMM's, and with reading and writing as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.cases import INPUTS, Case, Way, op_case, trained_case
from bench.peers import fbgemm_ops

ROWS, CHOSEN, MOST = 2048, 4096, 10

ops = torch.ops.rec_kernels


def cases() -> Iterator[Case]:
    """Yields the cases: selects rows of 0 to 9 values of D columns. Bytes: each value written and read once."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(MOST, (ROWS,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    index = [torch.randint(ROWS, (CHOSEN,), generator=generator) for _ in range(INPUTS)]
    for columns in (1, 16, 64, 128):
        values = [torch.randn(int(offsets[-1]), columns, requires_grad=True) for _ in range(INPUTS)]
        given = list(zip(values, index, strict=True))
        ways = {"ours": Way(lambda x, i: ops.jagged_index_select(x, offsets, i)[0], given)}
        if fbgemm := fbgemm_ops():
            select = fbgemm.jagged_index_select
            ways["fbgemm"] = Way(lambda x, i, select=select: select(x, lengths, i)[0], given)
        copied = [(torch.randn(int(lengths[i].sum()), columns),) for i in index]
        size = f"{CHOSEN} of {ROWS}, D={columns}"
        moved = 8 * copied[0][0].numel()
        yield op_case(f"jagged_index_select {size}", ways | {"copy": Way(Tensor.clone, copied)}, moved)
        yield trained_case(f"jagged_index_select, trained, {size}", ways, 2 * moved)
