"""Checkpoints of TorchRec's fused kernels: read and written with its names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_import_cases import Import, alone, torchrec_named_state, train
from distributed_pool import pool
from tiers import full

import rec_kernels as rk

HERE = "distributed_import_cases"
pytest.importorskip("torchrec.distributed")

CASES = [
    Import(),
    *full(
        Import("exact_adagrad", kinds=("column_wise", "table_wise", "row_wise")),
        Import("exact_sgd"),
        Import("exact_row_wise_adagrad"),
        Import("exact_adagrad", pooled=False),
    ),
    Import("exact_row_wise_adagrad", pooled=False),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", CASES)
def test_import(tmp_path: Path, case: Import) -> None:
    """A checkpoint of TorchRec loads with the optimizer's state, on ranks and in one process, and trains on."""
    found = pool(2).run(HERE, "imported", case, str(tmp_path))
    for theirs, ours in found:
        for got, want in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    model = alone(case)
    dcp.load(torchrec_named_state(model), checkpoint_id=str(tmp_path), no_dist=True)
    for step, got in enumerate(train(model, range(2, 5), [0, 1])):
        want = torch.cat([theirs[step] for theirs, _ in found])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", [Import("exact_row_wise_adagrad"), *full(Import("exact_adagrad", pooled=False))])
def test_export(tmp_path: Path, case: Import) -> None:
    """TorchRec loads a checkpoint of this package with its names."""
    for ours, theirs in pool(2).run(HERE, "exported", case, str(tmp_path)):
        for got, want in zip(theirs, ours, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_names() -> None:
    """Names are TorchRec's, tensors alias the collection's memory, and other modules keep their names."""
    model = alone(Import())
    state = rk.distributed.torchrec_state(model)
    weights = [f"tables.embedding_bags.t{i}.weight" for i in range(3)]
    assert sorted(state.model) == ["dense.bias", "dense.weight", *weights]
    assert list(state.optimizer["state"]) == weights
    sums = state.optimizer["state"][weights[1]]
    assert list(sums) == ["t1.momentum1"]
    sums["t1.momentum1"].fill_(3)
    assert torch.equal(model.tables.state_dict()["embedding_bags.t1.sum"], torch.full((33, 16), 3.0))


def test_optimizers_of_tables() -> None:
    """Each table has its optimizer's state; an optimizer that TorchRec's checkpoints lack is named."""
    own = {"a": rk.SGD(), "b": None, "c": rk.Adagrad()}
    tables = [rk.EmbeddingBagConfig(9, 4, name=n, feature_names=[n], optimizer=o) for n, o in own.items()]
    model = rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad())
    state = rk.distributed.torchrec_state(model).optimizer["state"]
    assert {name: list(of) for name, of in state.items()} == {
        "embedding_bags.b.weight": ["b.momentum1"],
        "embedding_bags.c.weight": ["c.momentum1"],
    }
    assert state["embedding_bags.c.weight"]["c.momentum1"].shape == (9, 4)
    tables[1] = dataclasses.replace(tables[1], optimizer=rk.Adam())
    with pytest.raises(
        ValueError, match=r"table 'b' of collection '': TorchRec's checkpoints cannot hold the whole state of Adam\("
    ):
        rk.distributed.torchrec_state(rk.EmbeddingBagCollection(tables))


def test_refused() -> None:
    """State that TorchRec's checkpoints lack and quantized rows are rejected."""
    config = {"name": "t", "feature_names": ["f"]}
    table = rk.EmbeddingBagConfig(100, 16, **config)

    def error_of(table: rk.EmbeddingBagConfig, **options: object) -> None:
        rk.distributed.torchrec_state(rk.EmbeddingBagCollection([table], **options))

    with pytest.raises(ValueError, match="checkpoints cannot hold the whole state of Adam"):
        error_of(table, optimizer=rk.Adam())
    with pytest.raises(ValueError, match=r"state_dtype=torch\.bfloat16"):
        error_of(table, optimizer=rk.Adagrad(state_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="has a row cache"):
        error_of(table, optimizer=rk.SGD(), cache=rk.RowCache(0.5))
    with pytest.raises(ValueError, match=r"table 't' .* got format 'int8'"):
        error_of(rk.EmbeddingBagConfig(100, 16, format="int8", **config), optimizer=rk.SGD())
