"""States of sharded collections that one rank cannot load: all ranks raise, and nothing is loaded."""

from __future__ import annotations

import pytest
import torch
from distributed_cases import Case, collection, differences, one_process
from distributed_pool import pool
from tiers import full

HERE = "distributed_state_cases"
pytest.importorskip("torchrec.distributed")
#: Defects of rank 1's state, and a part of each error.
WRONG = {
    "missing": "Missing key(s) in state_dict: embedding_bags.t0.weight; none of the collection's tables was changed",
    "unexpected": "Unexpected key(s) in state_dict: embedding_bags.t9.weight",
    "rows": "size mismatch for embedding_bags.t0.weight: the state has [99, ",
    "columns": "size mismatch for ",
    "format": "the collection's are ",
    "dtype": "exp_avg: the state has torch.int64 of layout torch.strided, this collection has torch.float32",
    "complex": "step: the state has torch.complex64",
    "meta": ".weight: the state has torch.",
    "none": "size mismatch for embedding_bags.t0.weight: the state has NoneType",
}


@pytest.mark.parametrize("plan", ["mixed", *full("table_wise", "row_wise")])
@pytest.mark.parametrize("format", ["fp32", *full("int8")])
def test_one_rank(plan: str, format: str) -> None:
    """Every defect raises on its rank, and on the other one with that rank and message."""
    plan = plan if format == "fp32" or plan != "mixed" else "data_parallel"
    case = Case(plan, format, "adam", sizes=(8, 5), steps=2)
    state = one_process(case)[1]
    given = {f"ebc.{name}": t for name, t in state.items()} | {"dense.weight": torch.ones(1, 2)}
    (other, kept, read), (own, kept_too, too) = pool(2).run(HERE, "load_forged", case, list(WRONG), given)
    assert len(own) == len(other) == len(WRONG)
    for text, error, other_error in zip(WRONG.values(), own, other, strict=True):
        assert text in error
        before = "another rank cannot load its state, and no rank has loaded any of its tables: rank 1: RuntimeError: "
        assert other_error == before + error
    assert [kept, kept_too] == [True, True]
    assert differences(state, [read, too]) == []


def test_one_process() -> None:
    """A forged dtype is rejected before any table is written."""
    ebc = collection(Case(optimizer="adam"))
    before = {name: t.clone() for name, t in ebc.state_dict().items()}
    given = {name: torch.zeros_like(t) for name, t in before.items()}
    for wrong in (torch.int64, torch.complex64, torch.bool):
        given["embedding_bags.t2.exp_avg"] = torch.zeros_like(before["embedding_bags.t2.exp_avg"], dtype=wrong)
        with pytest.raises(RuntimeError, match=rf"exp_avg: the state has {wrong} of layout torch.strided"):
            ebc.load_state_dict(given)
    given["embedding_bags.t2.exp_avg"] = before["embedding_bags.t2.exp_avg"].to("meta")
    with pytest.raises(RuntimeError, match=r"torch.float32 on the meta device, this collection has torch.float32"):
        ebc.load_state_dict(given)
    assert all(torch.equal(t, before[name]) for name, t in ebc.state_dict().items())
