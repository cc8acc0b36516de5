"""rk.distributed for lookups that are not pooled, on gloo processes against one process, bit by bit."""

from __future__ import annotations

import pytest
import torch
from distributed_cases import differences, same_bits
from distributed_pool import pool
from distributed_sequence_cases import Sequences, one_process
from tiers import full

HERE = "distributed_sequence_cases"
pytest.importorskip("torchrec.distributed")


def check(case: Sequences) -> None:
    """Rows, lengths and state have the bits of one process."""
    found = pool(len(case.sizes)).run(HERE, "run", case)
    outputs, state = one_process(case)
    assert differences(state, [blocks for _, blocks in found]) == []
    for step, whole in enumerate(outputs):
        for f, (lengths, rows) in enumerate(whole):
            got = [out[step][f] for out, _ in found]
            assert torch.equal(torch.cat([own for own, _ in got]), lengths)
            assert same_bits(torch.cat([own for _, own in got]), rows)


@pytest.mark.parametrize("plan", ["table_wise", "row_wise", *full("one_rank", "data_parallel")])
@pytest.mark.parametrize("format", ["fp32", "int8", *full("mx9", "bf16")])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", *full("adam", "sgd", "adam_bf16", "lamb", "clipped")])
def test_whole_rows(plan: str, format: str, optimizer: str) -> None:
    """Shards of whole rows, for every format and optimizer."""
    check(Sequences(plan, format, optimizer))


@pytest.mark.parametrize("format", ["bf16", *full("fp32", "fp16")])
@pytest.mark.parametrize("plan", ["mixed", "grid_shard", *full("column_wise")])
@pytest.mark.parametrize("optimizer", ["adam_bf16", *full("adagrad", "sgd")])
def test_blocks(plan: str, format: str, optimizer: str) -> None:
    """Tables that are split by columns, and several ways in one plan."""
    check(Sequences(plan, format, optimizer, output_dtype=torch.float16))
