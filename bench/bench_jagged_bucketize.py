"""jagged_bucketize compared with FBGEMM's block_bucketize_sparse_features, and with writing as many bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from bench.cases import INPUTS, Case, Way, op_case
from bench.peers import fbgemm_ops
from rec_kernels.testing import jagged_batch

FEATURES, BATCH, ROWS = 26, 2048, 100_000

ops = torch.ops.rec_kernels


def cases() -> Iterator[Case]:
    """Yields the cases: ids of 26 features. Bytes: ids read, ids and positions written, all offsets."""
    for buckets, length in itertools.product((2, 8, 64), (1.0, 4.0, 20.0)):
        made = [jagged_batch([ROWS] * FEATURES, BATCH, mean_length=length, seed=i) for i in range(INPUTS)]
        sizes = torch.full((FEATURES,), -(-ROWS // buckets))
        given = [(*batch, sizes, buckets) for batch in made]
        # Both also return each id's position.
        ways = {"ours": Way(lambda *batch: ops.jagged_bucketize(*batch, [BATCH] * FEATURES), given)}
        if fbgemm := fbgemm_ops():  # which takes and returns lengths
            of_lengths = [(offsets.diff(), ids, False, True, sizes, buckets) for ids, offsets in made]
            ways["fbgemm"] = Way(fbgemm.block_bucketize_sparse_features, of_lengths)
        # Writes two integers per id, and an offset per bag and bucket.
        ways["copy"] = Way(lambda ids, offsets, _, n: (ids.clone(), ids.clone(), offsets.repeat(n)), given)
        size = 8 * (3 * made[0][0].numel() + (1 + buckets) * made[0][1].numel())
        yield op_case(f"jagged_bucketize {buckets} buckets, {length:g} ids a bag", ways, size)
