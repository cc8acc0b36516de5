"""rk.distributed with a row cache on each rank, on two gloo processes against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed_cache_cases import train_cached
from distributed_cases import Case, Model, collection, differences, one_process, same_bits
from distributed_pool import pool
from distributed_sequence_cases import Sequences
from distributed_sequence_cases import one_process as one_sequence_process
from tiers import full

import rec_kernels as rk

HERE = "distributed_cache_cases"
pytest.importorskip("torchrec.distributed")
#: A cache of some rows of all tables, with evictions, and one of all rows.
SOME = rk.RowCache(0.1, ways=4)
ALL = rk.RowCache(1.0)


def state_of(model: Model) -> dict[str, torch.Tensor]:
    """The state of one process without the slots of its cache."""
    return {name: t for name, t in model.ebc.state_dict().items() if not name.startswith("row_cache.")}


@pytest.mark.parametrize("plan", ["mixed", *full("table_wise", "row_wise", "grid_shard", "one_rank", "data_parallel")])
@pytest.mark.parametrize("backing", ["device", *full("host")])
def test_rows_of_floats(plan: str, backing: str) -> None:
    """Cached fp32 rows are not rounded: one process's bits without a cache."""
    cache = replace(SOME, backing=backing, policy="lfu" if backing == "host" else "lru")
    case = Case(plan, optimizer="adam", sizes=(8, 5), cache=cache, one_id=True)
    found = pool(2).run(HERE, "run", case)
    model = Model(collection(replace(case, cache=None)))
    outputs = train_cached(case, model, model.ebc, [0, 1])
    for i, want in enumerate(outputs[:7]):
        assert same_bits(torch.cat([own[0][i] for own in found]), want)
    assert differences(state_of(model), [blocks for _, blocks, _ in found]) == []
    tables = [table for *_, report in found for table in report]
    assert sum(table["inserted"] for table in tables) > 0
    assert sum(table["left_out"] + table["evicted"] for table in tables) > 0


@pytest.mark.parametrize("plan", ["row_wise", *full("table_wise", "one_rank", "data_parallel")])
@pytest.mark.parametrize("format", ["int8", *full("mx6", "bf16")])
@pytest.mark.parametrize("own", [(None, None, None), (None, "adam", "lamb")])
def test_all_rows(plan: str, format: str, own: tuple[str | None, ...]) -> None:
    """With a slot for every row, trained rows are rounded only when encoded: one process's bits with a cache."""
    case = Case(plan, format, "rowwise_adagrad", sizes=(8, 5), cache=ALL, one_id=True, optimizers=own)
    found = pool(2).run(HERE, "run", case)
    model = Model(collection(case))
    outputs = train_cached(case, model, model.ebc, [0, 1])
    for i, want in enumerate(outputs[:7]):
        assert same_bits(torch.cat([own[0][i] for own in found]), want)
    assert differences(state_of(model), [blocks for _, blocks, _ in found]) == []
    without = one_process(replace(case, cache=None))[0]
    assert not torch.equal(outputs[case.steps - 1], without[-1])


@pytest.mark.parametrize(("plan", "other"), [("mixed", "row_wise"), *full(("table_wise", "data_parallel"))])
def test_checkpoints(plan: str, other: str, tmp_path: Path) -> None:
    """A state is flushed and has no slots; it loads into another plan with another cache."""
    case = Case(plan, "bf16", "adam", sizes=(8, 5), cache=ALL, one_id=True)
    changed = replace(case, plan=other, cache=SOME)
    found = pool(2).run(HERE, "reshard", case, changed, str(tmp_path / "checkpoint"))
    state = one_process(case)[1]
    assert any(name.startswith("row_cache.") for name in state)
    tables = {name: tensor for name, tensor in state.items() if not name.startswith("row_cache.")}
    assert differences(tables, [saved for saved, *_ in found]) == []
    assert differences(tables, [read for _, read, _ in found]) == []
    assert int(found[0][2]["step"][0][1]) == case.steps + 1
    assert differences(tables, [later for *_, later in found]) != []


def test_when_rows_come_in() -> None:
    """Rows are inserted only in training with gradients, and only of tables in the cache."""
    cache = rk.RowCache({"t2": 0.5, "t0": 0.0}, ways=4)
    case = Case("row_wise", "int8", "rowwise_adagrad", sizes=(8, 5), cache=cache)
    for trained, later in pool(2).run(HERE, "counters", case):
        assert trained == later
        assert [inserted > 0 for _, inserted in trained] == [False, False, True]


@pytest.mark.parametrize("plan", ["mixed", *full("row_wise", "table_wise", "one_rank")])
def test_sequences(plan: str) -> None:
    case = Sequences(plan, "fp32", "adam", cache=SOME)
    found = pool(2).run(HERE, "sequence", case)
    outputs, state = one_sequence_process(replace(case, cache=None))
    for step, features in enumerate(outputs):
        for f, (_, want) in enumerate(features):
            assert same_bits(torch.cat([own[0][step][f][1] for own in found]), want)
    assert differences(state, [blocks for _, blocks, _ in found]) == []
    assert sum(cached for *_, cached in found) > 0
