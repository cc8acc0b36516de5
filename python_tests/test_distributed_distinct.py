"""rk.distributed for batches with bags shared by samples, on gloo processes against one process."""

from __future__ import annotations

import pytest
import torch
from distributed_cases import DIM, ROWS, Case, check_found, collection, differences, same_bits
from distributed_distinct_cases import Distinct, one_process, train_by_feature, weighted_alone
from distributed_pool import pool
from tiers import full

HERE = "distributed_distinct_cases"
pytest.importorskip("torchrec.distributed")


def check(given: Distinct, *, same_outputs: bool = True) -> None:
    """Asserts one process's state to the bit; outputs too, or within the rounding of sums."""
    found = pool(len(given.case.sizes)).run(HERE, "run", given)
    check_found(found, *one_process(given), same_outputs=same_outputs)


@pytest.mark.parametrize("kinds", [("inverse", "plain"), ("groups", "torchrec"), *full((("plain", "inverse"),))])
@pytest.mark.parametrize("plan", ["table_wise", *full("one_rank", "data_parallel", "column_wise")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_whole_rows(kinds: tuple[str, ...], plan: str, pooling: str) -> None:
    """Every kind of batch, also different kinds per rank, has one process's bits."""
    check(Distinct(Case(plan, pooling=pooling, sizes=(8, 5)), kinds))


@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
@pytest.mark.parametrize("plan", ["rows_back", "mixed", *full("row_wise", "grid_shard")])
@pytest.mark.parametrize("kinds", [("inverse", "groups"), *full((("plain", "torchrec"),))])
@pytest.mark.parametrize("row_wise", ["ordered", "exact"])
def test_rows(kinds: tuple[str, ...], plan: str, pooling: str, row_wise: str) -> None:
    """Row-wise tables add parts of bags in row order; updates are one process's."""
    case = Case(plan, "bf16", "adam_bf16", pooling=pooling, sizes=(8, 5), row_wise=row_wise)
    check(Distinct(case, kinds), same_outputs=row_wise == "exact")


@pytest.mark.parametrize("plan", ["mixed", *full("row_wise", "table_wise")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_weights_padding_and_ignored_ids(plan: str, pooling: str) -> None:
    """Weights on one rank, ignored ids and float16 outputs, with gradients summed in float32."""
    case = Case(
        plan,
        pooling=pooling,
        weighted=True,
        bad_ids=True,
        padding=(3, None, ROWS[2] - 1),
        output_dtype=torch.float16,
        sizes=(9, 6),
    )
    check(Distinct(case, ("inverse", "groups")), same_outputs=False)


@pytest.mark.parametrize("plan", ["mixed", "row_wise", *full("table_wise", "one_rank", "grid_shard", "data_parallel")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_by_feature(plan: str, pooling: str) -> None:
    """by_feature() on bags with different counts per rank has one process's outputs and weight gradients."""
    given = Distinct(Case(plan, "bf16", pooling=pooling, sizes=(8, 5)))
    found = pool(2).run(HERE, "by_feature", given)
    ebc = collection(given.case)
    whole_rows = plan in ("table_wise", "one_rank", "data_parallel")
    for step, (outputs, grads) in enumerate(train_by_feature(given, ebc, [0, 1])):
        for f, (key, want) in enumerate(outputs.items()):
            got = torch.cat([own[step][0][key] for own, *_ in found])
            assert same_bits(got, want) if whole_rows else torch.allclose(got, want, rtol=1e-6, atol=2e-6)
            factors = torch.cat([own[step][1][f] for own, *_ in found])
            columns = plan == "grid_shard" or (plan == "mixed" and f == 0)
            assert torch.allclose(factors, grads[f], 1e-5, 1e-6) if columns else same_bits(factors, grads[f])
    assert differences(dict(ebc.state_dict()), [blocks for _, blocks, _ in found]) == []
    assert [same for *_, same in found] == [[True, True]] * 2


@pytest.mark.parametrize("plan", ["mixed", *full("row_wise", "table_wise", "data_parallel")])
@pytest.mark.parametrize("kinds", [("inverse", "plain"), *full((("plain", "torchrec"),))])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_gradients_of_weights(plan: str, kinds: tuple[str, ...], pooling: str) -> None:
    """Weight gradients return to the bags' rank, summed over the samples that share a bag."""
    given = Distinct(Case(plan, "bf16", pooling=pooling, sizes=(8, 5)), kinds)
    found = pool(2).run(HERE, "weighted", given)
    grads, state = weighted_alone(given)
    for step, ranks in enumerate(grads):
        for rank, want in enumerate(ranks):
            got = found[rank][0][step]
            if (step, rank) == (1, 0):
                assert len(got) == 0
            elif plan == "mixed":
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            else:
                assert same_bits(got, want)
    assert differences(state, [blocks for _, blocks in found]) == []


@pytest.mark.parametrize("gradient", ["global_mean", *full("torchrec")])
def test_even_means(gradient: str) -> None:
    """Means over each rank's samples have one process's bits for even batches on two ranks."""
    check(Distinct(Case("table_wise", gradient=gradient)))


def test_four_ranks() -> None:
    """Four ranks, more than tables, one of them without samples."""
    case = Case("mixed", pooling="mean", sizes=(5, 0, 4, 8))
    check(Distinct(case, ("inverse", "inverse", "plain", "groups")), same_outputs=False)


@pytest.mark.full
def test_one_rank() -> None:
    check(Distinct(Case("table_wise", sizes=(8,)), ("inverse",)))


def test_what_travels() -> None:
    """Pooled rows of distinct bags are sent, independent of the number of samples."""
    given = Distinct(Case("table_wise", sizes=(40, 40)))  # rank 0 has t1, rank 1 t0 and t2; two features use t2
    bags = [20, 21, 22, 23]
    requested = [bags[0] + bags[2] + bags[3], bags[1]]  # by rank 0 from rank 1, and by rank 1 from rank 0
    assert pool(2).run(HERE, "values_sent", given) == [
        [requested[1] * DIM, requested[0] * DIM + 7],
        [requested[0] * DIM, requested[1] * DIM + 7],
    ]


def test_without_inverse_indices() -> None:
    """Features with different batch sizes and no inverse indices raise on all ranks."""
    others, own = pool(2).run(HERE, "without_inverse", Distinct())
    assert own.startswith("ValueError: the features have batch sizes of their own and no inverse indices")
    assert others.startswith("OtherRankError: another rank refused its batch")
    assert own in others
