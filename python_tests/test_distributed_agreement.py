"""rk.distributed checks settings that ranks must share, computes global norms, and saves one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed_agreement_cases import train_clipped
from distributed_cases import Case, batch, collection, differences
from distributed_pool import pool
from distributed_torchrec_cases import Loss, WithLayers
from tiers import full
from torch import nn

import rec_kernels as rk

pytest.importorskip("torchrec.distributed")
HERE = "distributed_agreement_cases"


@pytest.mark.parametrize(
    "case",
    [
        Case("mixed", optimizer="torch", gradient="global_mean"),
        Case("table_wise", optimizer="sgd", gradient="global_mean", compression=rk.MixedDimension(8)),
        *full(Case("row_wise", optimizer="torch", gradient="global_mean")),
    ],
    ids=["shards and replicas", "projections", "rows"],
)
def test_norms_of_all_ranks(case: Case) -> None:
    """clip_grad_norm_ has one process's norms and keeps replicas equal, unlike torch's."""
    norms, dense = train_clipped(case, Loss(collection(case)), [0, 1])
    assert min(norms) > 0.5
    (first, own), (second, others) = pool(2).run(HERE, "clipped", case)
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(own, others, strict=True))
    if case.compression is not None:
        return  # each rank draws its own matrices
    assert first == pytest.approx(norms, rel=1e-5)
    for got, want in zip(own, dense, strict=True):
        torch.testing.assert_close(got, want)


def test_arguments_of_norms() -> None:
    """clip_grad_norm_ rejects a list of parameters, which does not tell how tables are sharded."""
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        rk.distributed.clip_grad_norm_([torch.zeros(2)], 1.0)
    layer = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"norm_type = 0 must be above 0"):
        rk.distributed.clip_grad_norm_(layer, 1.0, 0)
    for wrong in (-1.0, "1", float("nan")):
        with pytest.raises(ValueError, match=rf"max_norm = {wrong!r} must be at least 0"):
            rk.distributed.clip_grad_norm_(layer, wrong)
    layer.weight.grad = torch.full((1, 2), float("inf"))
    with pytest.raises(RuntimeError, match="the norm of all gradients is inf; nothing was scaled"):
        rk.distributed.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    assert rk.distributed.clip_grad_norm_(layer, 1.0) == 5.0
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.6, 0.8]]))


def test_what_ranks_do_apart() -> None:
    """Different steps in a state, and a feature frozen on one rank, raise on all ranks; nothing changes."""
    first, second = pool(2).run(HERE, "different_states_and_freezing", Case("mixed"))
    assert first == second
    loaded, frozen = first
    assert loaded.startswith("step in the state of rank 1 differs from that of rank 0")
    assert "; learning rates, frozen features or requires_grad of replicas differ" in frozen


@pytest.mark.parametrize("optimizer", ["sgd", *full("adam")])
def test_replicas_that_ranks_treat_apart(optimizer: str) -> None:
    """Freezing a replica, or leaving a block by an exception, on one rank raises on all: replicas would differ."""
    (first, kept), (second, others) = pool(2).run(
        HERE, "different_replicas", Case("data_parallel", optimizer=optimizer)
    )
    assert kept
    assert others
    assert (first[1], second[1]) == ("none", "KeyError: 'mine'")
    assert (first[-2], second[-2]) == ("none", "MemoryError: mine")
    for flags, _, after, loaded, beside, in_block, alone, _, after_failing in (first, second):
        used = "the weight of a table of which every rank has a replica is used beside lookups"
        assert beside.startswith(f"RuntimeError: on rank 1, {used}")
        assert in_block == beside
        assert alone.startswith(f"RuntimeError: {used}")
        assert flags.startswith("RuntimeError: ranks must run the backwards")
        assert "requires_grad of replicas differ" in flags
        for error in (after, after_failing):
            assert "have made different numbers of updates, as an exception has ended a backward, or an accu" in error
        assert loaded == "none"


@pytest.mark.parametrize(
    "case",
    [
        Case("data_parallel", optimizer="torch"),
        *full(
            Case("mixed", optimizer="torch"),
            Case("data_parallel", optimizer="sgd", compression=rk.MixedDimension(8)),
        ),
    ],
    ids=["replicas", "replicas and shards", "matrices"],
)
def test_replicas_that_a_loss_uses(case: Case) -> None:
    """Replicas trained by torch's optimizers raise on all ranks if one rank's loss makes them differ."""
    first, second = pool(2).run(HERE, "replicas_of_torch", case)
    assert first == second
    *first_steps, error = first
    assert first_steps == ["none", "none"]
    assert "; replicas of data_parallel tables differ, as a loss of one rank has used" in error


def test_data_that_one_rank_cannot_begin_to_read() -> None:
    """No rank waits for another one whose batches have no iterator."""
    assert pool(2).run(HERE, "unreadable_data", Case()) == [
        "OSError: no such file",
        "OtherRankError: another rank could not read its batches: rank 0: OSError: no such file",
    ]


def test_settings_of_sharded_collections() -> None:
    """Unknown bounds_check, unsupported options, copies and resets are rejected; valid settings reach the shards."""
    begins = [
        *["RuntimeError: embedding_bags of ShardedEmbeddingBagCollection cannot be replaced"] * 2,
        *["TypeError: a ShardedEmbeddingBagCollection cannot be copied or pickled, because it belongs"] * 3,
        "RuntimeError: reset_parameters() of ShardedEmbeddingBagCollection: the rows of its tables",
    ]
    for (bounds, decay, frozen, *others, different), rate, rule, total in pool(2).run(
        HERE, "settings", Case(optimizer="sgd")
    ):
        assert bounds == "ValueError: bounds_check must be 'error', 'ignore' or 'none', got 'warn'"
        assert decay.startswith("ValueError: weight_decay = 0.5 must remain 0.0")
        assert frozen.startswith("RuntimeError: on rank 0, requires_grad of tables was changed inside accumulate()")
        assert all(error.startswith(begin) for error, begin in zip(others, begins, strict=True)), others
        assert different.startswith(
            "ValueError: bounds_check must be the same on all ranks: rank 0 has 'error', but rank 1 h"
        )
        assert (rate, rule, total) == (0.75, "ignore", 0.0)


@pytest.mark.parametrize("optimizer", ["torch", *full("sgd")])
def test_weights_that_other_layers_share(optimizer: str) -> None:
    """An output layer that shares the weight of a sharded table raises on all ranks."""
    for *errors, alone in pool(2).run(HERE, "shared_weight", Case(optimizer=optimizer)):
        assert alone.startswith("RuntimeError: the weight of a whole table, which was sharded, is used beside lookups")
        for error in errors:
            assert error.startswith("RuntimeError: on rank 1, the weight of a whole table, which was sharded, is used")


@pytest.mark.parametrize("plan", ["row_wise", *full("data_parallel")])
def test_states_of_some_tables(plan: str) -> None:
    """With strict=False, a state may have only some of the tables."""
    for (strict, *others), good in pool(2).run(HERE, "partial_state", Case(plan)):
        assert strict.startswith("RuntimeError: Missing key(s) in state_dict: embedding_bags.t1.weight")
        assert others == ["none", "none"]
        assert good


def test_whole_models_of_fsdp() -> None:
    """FSDP2 of a whole model is rejected unless it ignores ``all_tables``, by which requires_grad_() finds tables."""
    for error, same in pool(2).run(HERE, "whole_fsdp", Case("row_wise", optimizer="sgd")):
        assert error.startswith("RuntimeError: all_tables cannot be replaced, as fully_shard() does")
        assert same


def test_norms_beside_fsdp() -> None:
    """clip_grad_norm_ includes and scales gradients sharded by FSDP2."""
    case = Case("row_wise", optimizer="torch", gradient="global_mean")
    model = WithLayers(collection(case))
    model(batch(case, 0, [0, 1])).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    left = nn.utils.get_total_norm([p.grad for p in model.dense.parameters()]).item()
    for found, layers in pool(2).run(HERE, "clipped_with_fsdp", case):
        assert found == pytest.approx(norm, rel=1e-5)
        assert layers == pytest.approx(left, rel=1e-4)


@pytest.mark.parametrize("format", ["bf16", *full("int8")])
def test_evaluations_of_one_rank_leave_replicas_alike(format: str) -> None:
    """Replicas stay equal if only one rank evaluates: a lookup inserts rows on all ranks if any rank trains."""
    case = Case("data_parallel", format, "rowwise_adagrad", cache=rk.RowCache(0.1), steps=4)
    first, second = pool(2).run(HERE, "evaluating_rank", case)
    assert differences({n: t for n, ((_, t),) in first.items()}, [second]) == []


def test_messages_of_other_collectives() -> None:
    """A lookup's header in a backward's collective raises."""
    from rec_kernels.distributed.backward_sync import HEADER_SIZE, BackwardSync

    with pytest.raises(RuntimeError, match="rank 0 is in another collective, such as a lookup, while this rank runs"):
        BackwardSync.check(torch.zeros(2, HEADER_SIZE))


def test_refusals_of_all_ranks() -> None:
    """A rank without a plan stops all ranks; a wrong row format is reported for the whole table."""
    (no_plan, loaded), (other_error, others) = pool(2).run(
        HERE, "planner_and_format_errors", Case("row_wise", "int8", "sgd")
    )
    assert no_plan.startswith("PlannerError")
    assert other_error.startswith(f"OtherRankError: another rank has found no plan: rank 0: {no_plan[:40]}")
    for error in (loaded, others):
        assert (
            "embedding_bags.t0.weight has rows of format fp32, the collection's are int8, and ranks do not conv"
            in error
        )


def test_one_checkpoint_of_model_and_optimizers(tmp_path: Path) -> None:
    """Model and optimizers load from one checkpoint in two calls, also on ranks without blocks of a table."""
    for same, others in pool(2).run(HERE, "one_checkpoint", Case("table_wise", optimizer="adam"), str(tmp_path)):
        assert same
        assert all(others)
