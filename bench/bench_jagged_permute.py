"""jagged_permute beside FBGEMM's permute_2D_sparse_data, and a copy of as many bytes."""

from __future__ import annotations

import pytest
import torch

from bench.peers import fbgemm_ops
from bench.timing import time_calls
from rec_kernels.testing import jagged_batch

#: Inputs that the calls take in turn.
INPUTS = 6
FEATURES, BATCH = 26, 2048
LENGTHS = (1.0, 4.0, 20.0)
IMPLEMENTATIONS = ["ours", *["fbgemm"] * (fbgemm_ops() is not None), "copy"]

ops = torch.ops.rec_kernels


class Subject:
    """Ids of 26 features, which are reversed: functions of the number of an input."""

    def __init__(self, mean_length: float) -> None:
        made = [jagged_batch([100_000] * FEATURES, BATCH, mean_length=mean_length, seed=i) for i in range(INPUTS)]
        self.values, self.offsets = zip(*made, strict=True)
        self.lengths = [offsets.diff().view(FEATURES, BATCH) for offsets in self.offsets]
        self.permute = list(range(FEATURES))[::-1]
        self.as_tensor = torch.tensor(self.permute, dtype=torch.int32)
        self.mean_length = mean_length

    def ours(self, i: int) -> object:
        """One call."""
        return ops.jagged_permute(self.values[i], self.offsets[i], self.permute, [BATCH] * FEATURES)

    def fbgemm(self, i: int) -> object:
        """One call; it takes and returns lengths."""
        values = self.values[i]
        return torch.ops.fbgemm.permute_2D_sparse_data(self.as_tensor, self.lengths[i], values, None, values.numel())

    def copy(self, i: int) -> object:
        """A limit: ids and offsets copied as they are."""
        return self.values[i].clone(), self.offsets[i].clone()


@pytest.fixture(scope="module", params=LENGTHS, ids=lambda length: f"L={length:g}")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The ids under test."""
    return Subject(request.param)


def test_permute(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Bytes: ids and offsets, read and written."""
    benchmark.group = f"jagged_permute {FEATURES} x {BATCH}, {subject.mean_length:g} ids a bag"
    size = subject.values[0].numel() + subject.offsets[0].numel()
    time_calls(benchmark, getattr(subject, name), INPUTS, rounds, 16 * size)
