"""jagged_bucketize beside FBGEMM's block_bucketize_sparse_features."""

from __future__ import annotations

import pytest
import torch

from bench.peers import fbgemm_ops
from bench.timing import time_calls
from rec_kernels.testing import jagged_batch

#: Inputs that the calls take in turn.
INPUTS = 6
FEATURES, BATCH, ROWS = 26, 2048, 100_000
CASES = [(buckets, length) for buckets in (2, 8, 64) for length in (1.0, 4.0, 20.0)]
IMPLEMENTATIONS = ["ours", *["fbgemm"] * (fbgemm_ops() is not None), "copy"]

ops = torch.ops.rec_kernels


class Subject:
    """Ids of 26 features, for so many shards: functions of the number of an input."""

    def __init__(self, buckets: int, mean_length: float) -> None:
        made = [jagged_batch([ROWS] * FEATURES, BATCH, mean_length=mean_length, seed=i) for i in range(INPUTS)]
        self.values, self.offsets = zip(*made, strict=True)
        self.lengths = [offsets.diff() for offsets in self.offsets]
        self.block_sizes = torch.full((FEATURES,), -(-ROWS // buckets))
        self.buckets, self.mean_length = buckets, mean_length

    def ours(self, i: int) -> object:
        """Our op; it also returns each id's position."""
        strides = [BATCH] * FEATURES
        return ops.jagged_bucketize(self.values[i], self.offsets[i], self.block_sizes, self.buckets, strides)

    def fbgemm(self, i: int) -> object:
        """FBGEMM's op; it also returns each id's position, and takes and returns lengths."""
        return torch.ops.fbgemm.block_bucketize_sparse_features(
            self.lengths[i], self.values[i], False, True, self.block_sizes, self.buckets
        )

    def copy(self, i: int) -> object:
        """A limit: two numbers written for each id, and an offset for each bag of each bucket."""
        return self.values[i].clone(), self.values[i].clone(), self.offsets[i].repeat(self.buckets)


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]} buckets, L={c[1]:g}")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The ids under test."""
    return Subject(*request.param)


def test_bucketize(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Bytes: ids read, ids and places written, offsets of all buckets."""
    benchmark.group = f"jagged_bucketize {subject.buckets} buckets, {subject.mean_length:g} ids a bag"
    size = 3 * subject.values[0].numel() + (1 + subject.buckets) * subject.offsets[0].numel()
    time_calls(benchmark, getattr(subject, name), INPUTS, rounds, 8 * size)
