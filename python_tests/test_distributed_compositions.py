"""rk.distributed with compositions of pooled parts, or with narrow rows, against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed_cases import Case, collection, differences, same_bits
from distributed_composition_cases import COMPRESSIONS, Model, batch, check_trained, coefficients, one_process
from distributed_distinct_cases import Distinct
from distributed_distinct_cases import one_process as one_distinct_process
from distributed_pool import pool
from tiers import full

HERE = "distributed_composition_cases"
pytest.importorskip("torchrec.distributed")


@pytest.mark.parametrize(("plan", "other"), [("table_wise", "data_parallel"), *full(("data_parallel", "one_rank"))])
@pytest.mark.parametrize("kind", ["narrow", "mult", *full("add", "concat")])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", *full("adam", "torch")])
def test_training(kind: str, plan: str, other: str, optimizer: str, tmp_path: Path) -> None:
    """Outputs, tables, projections and gradients have one process's bits; states load into any plan."""
    case = Case(plan, optimizer=optimizer, compression=COMPRESSIONS[kind], sizes=(8, 5))
    found = pool(2).run(HERE, "run", case, other, str(tmp_path / "checkpoint"))
    outputs, grads, state = one_process(case)
    check_trained(found, case, outputs, state)
    narrow = [f"embedding_bags.t{i}.projection" for i in range(3)] if kind == "narrow" else []
    assert [name for name in grads if name.endswith("projection")] == narrow
    for name, expected in grads.items():
        own = [rank["grads"][name] for rank in found if name in rank["grads"]]
        assert len(own) == (2 if plan == "data_parallel" else 1)
        for each in own:
            assert all(same_bits(a, b) for a, b in zip(each, expected, strict=True))
    if optimizer != "torch" and plan == "table_wise":  # t0 and t2 are on rank 1
        assert [own["names"] for own in found] == ([narrow[1:2], [narrow[0], narrow[2]]] if narrow else [[], []])


@pytest.mark.parametrize("kind", ["narrow", *full("mult", "add")])
@pytest.mark.parametrize("kinds", [("inverse", "groups"), *full((("inverse", "plain"),), (("groups", "torchrec"),))])
@pytest.mark.parametrize("plan", ["table_wise", *full("data_parallel")])
def test_shared_bags(kind: str, kinds: tuple[str, str], plan: str) -> None:
    """Distinct bags are composed and projected on their tables' rank, before they are expanded to samples."""
    given = Distinct(Case(plan, compression=COMPRESSIONS[kind], sizes=(8, 5), weighted=True), kinds)
    found = pool(2).run("distributed_distinct_cases", "run", given)
    outputs, state = one_distinct_process(given)
    assert differences(state, [blocks for _, blocks in found]) == []
    for step, whole in enumerate(outputs):
        assert same_bits(torch.cat([out[step] for out, _ in found]), whole)


@pytest.mark.parametrize("plan", ["table_wise", "data_parallel"])
def test_global_mean(plan: str) -> None:
    """Projections train with the mean over all ranks' samples, as tables do, and DDP ignores them."""
    case = Case(plan, optimizer="sgd", gradient="global_mean", sizes=(8, 3), compression=COMPRESSIONS["narrow"])
    found = pool(2).run(HERE, "averaged", case)
    model = Model(collection(case))
    out = model(batch(case, 0, [0, 1]))
    ((out * coefficients(case, 0, [0, 1])).sum() / len(out)).backward()
    expected = [model.ebc.embedding_bags[f"t{i}"].projection.grad for i in range(3)]
    if plan == "table_wise":
        found = [[found[1][0], found[0][0], found[1][1]]]
    for own in found:
        for got, want in zip(own, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_first_numbers() -> None:
    """Projections of a collection on the meta device have the same initial values on every rank and in every plan."""
    case = Case("data_parallel", compression=COMPRESSIONS["narrow"])
    both = pool(2).run("distributed_torchrec_cases", "from_meta", case)
    ((_, whole),) = both[0]["embedding_bags.t2.projection"]
    assert float(whole.std()) > 0.1
    others = pool(2).run("distributed_torchrec_cases", "from_meta", replace(case, plan="table_wise"))
    for blocks in (both[1], others[1]):
        ((_, own),) = blocks["embedding_bags.t2.projection"]
        assert same_bits(own, whole)
