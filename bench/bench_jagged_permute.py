"""jagged_permute compared with FBGEMM's permute_2D_sparse_data, and with copying as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.cases import INPUTS, Case, Way, op_case
from bench.peers import fbgemm_ops
from rec_kernels.testing import jagged_batch

FEATURES, BATCH = 26, 2048

ops = torch.ops.rec_kernels


def cases() -> Iterator[Case]:
    """Yields the cases: reverses 26 features. Bytes: ids and offsets, read and written."""
    order = list(range(FEATURES))[::-1]
    as_tensor = torch.tensor(order, dtype=torch.int32)
    for length in (1.0, 4.0, 20.0):
        given = [jagged_batch([100_000] * FEATURES, BATCH, mean_length=length, seed=i) for i in range(INPUTS)]
        ways = {"ours": Way(lambda ids, offsets: ops.jagged_permute(ids, offsets, order, [BATCH] * FEATURES), given)}
        if fbgemm := fbgemm_ops():  # which takes and returns lengths
            of_lengths = [(offsets.diff().view(FEATURES, BATCH), ids) for ids, offsets in given]
            permute = fbgemm.permute_2D_sparse_data
            ways["fbgemm"] = Way(
                lambda lengths, ids, permute=permute: permute(as_tensor, lengths, ids, None, ids.numel()), of_lengths
            )
        ways["copy"] = Way(lambda ids, offsets: (ids.clone(), offsets.clone()), given)
        size = 16 * sum(tensor.numel() for tensor in given[0])
        yield op_case(f"jagged_permute {FEATURES} x {BATCH}, {length:g} ids a bag", ways, size)
