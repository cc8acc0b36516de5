"""rk.distributed: backwards of several lookups, of scaled losses and of per-sample weights, on two gloo processes."""

from __future__ import annotations

import pytest
import torch
from distributed_backward_cases import ranks_of, scaled_alone, train_together
from distributed_cases import Case, Model, collection, differences, same_bits
from distributed_pool import pool
from tiers import full

pytest.importorskip("torchrec.distributed")
HERE = "distributed_backward_cases"


@pytest.mark.parametrize("plan", ["mixed", "table_wise", *full("row_wise", "one_rank", "data_parallel")])
@pytest.mark.parametrize("format", ["bf16", *full("int8")])
def test_lookups_of_one_backward(plan: str, format: str) -> None:
    """One update for all of them, with one process's bits: Adam's would differ after three."""
    if format == "int8" and plan == "mixed":
        plan = "row_wise"
    case = Case(plan, format, "adam", sizes=(8, 5), one_id=True)
    found = pool(2).run(HERE, "together", case)
    model = Model(collection(case))
    outputs = train_together(case, model, ranks_of(case))
    assert all(same_bits(torch.cat(got), want) for *got, want in zip(*(o for o, _ in found), outputs, strict=True))
    assert differences(dict(model.ebc.state_dict()), [blocks for _, blocks in found]) == []
    assert model.ebc.step == case.steps


@pytest.mark.parametrize("plan", ["mixed", *full("one_rank", "row_wise")])
def test_scaled_losses(plan: str) -> None:
    """An overflow on one rank skips the update on all, and every rank's scaler hears of it; bits of one process."""
    case = Case(plan, "bf16", "adam", sizes=(8, 5), one_id=True, steps=5)
    found = pool(2).run(HERE, "scaled", case)
    scales, state = scaled_alone(case)
    assert scales == [1024.0, 512.0, 512.0, 1024.0, 1024.0]
    assert [own for own, _ in found] == [scales] * 2
    assert differences(state, [blocks for _, blocks in found]) == []
    assert state["step"] == 4


def test_unlike_backwards() -> None:
    """Ranks that run other backwards, or scale losses otherwise, are told so, all of them; nothing has changed."""
    (errors, same), (others, same_there) = pool(2).run(HERE, "unlike", Case("mixed", optimizer="sgd"))
    assert errors == others
    assert same
    assert same_there
    texts = [
        "rank 0 updates with lookup 1 together with others of the same backward, scale 0, and rank 1 with lookup 1 at",
        "rank 0 updates with lookup 3 at once, scale 0, and rank 1 with lookup 2 at once, scale 0",
        "rank 0 updates with lookup 4 at once, scale 0, and rank 1 with lookup 4 at once, scale 2 (0: no GradScaler)",
    ]
    assert all(text in error for text, error in zip(texts, errors, strict=True))
