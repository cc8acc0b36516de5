"""rk.distributed for sequence embeddings, on gloo processes against one process, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_cases import KEYS, ROWS, differences, same_bits
from distributed_pool import pool
from distributed_sequence_cases import (
    FEATURE_DIMS,
    Model,
    Sequences,
    batch,
    coefficients,
    collection,
    one_process,
    train_scaled,
    train_weighted,
    use_options,
)
from tiers import full

import rec_kernels as rk

HERE = "distributed_sequence_cases"
pytest.importorskip("torchrec.distributed")


def check(case: Sequences) -> None:
    """Asserts one process's rows, lengths and state to the bit."""
    found = pool(len(case.sizes)).run(HERE, "run", case)
    outputs, state = one_process(case)
    assert differences(state, [blocks for _, blocks in found]) == []
    for step, whole in enumerate(outputs):
        for f, (lengths, rows) in enumerate(whole):
            got = [out[step][f] for out, _ in found]
            assert torch.equal(torch.cat([own for own, _ in got]), lengths)
            assert same_bits(torch.cat([own for _, own in got]), rows)


@pytest.mark.parametrize("format", ["fp32", "int8", *full("mx9", "bf16")])
@pytest.mark.parametrize("plan", ["table_wise", "row_wise", *full("one_rank", "data_parallel")])
def test_whole_rows(plan: str, format: str) -> None:
    """Shards of whole rows work in every format."""
    check(Sequences(plan, format, "rowwise_adagrad"))


@pytest.mark.parametrize("plan", ["row_wise", *full("table_wise")])
@pytest.mark.parametrize("optimizer", ["adam", *full("sgd", "adam_bf16", "lamb", "clipped")])
def test_optimizers(plan: str, optimizer: str) -> None:
    """Every optimizer works, also those that need a whole row's gradient."""
    check(Sequences(plan, "bf16", optimizer))


@pytest.mark.parametrize("format", ["bf16", *full("fp32", "fp16")])
@pytest.mark.parametrize("plan", ["mixed", "grid_shard", *full("column_wise")])
def test_blocks(plan: str, format: str) -> None:
    """Tables split by columns, and different sharding types in one plan, work."""
    check(Sequences(plan, format, "adam_bf16", output_dtype=torch.float16))


@pytest.mark.parametrize("plan", ["row_wise", "mixed", *full("table_wise", "data_parallel", "grid_shard")])
@pytest.mark.parametrize(
    "given",
    [
        {"padding": (3, None, ROWS[2] - 1), "weighted": True},
        {"bad_ids": True, "own_sizes": True},
        *full(({"padding": (3, 5, ROWS[2] - 1), "bad_ids": True, "sizes": (0, 6)},), ({"sizes": (0, 0)},)),
    ],
)
def test_what_batches_have(plan: str, given: dict) -> None:
    """Padding, weights on one rank, ids out of range, batch sizes per feature, and ranks without samples."""
    check(Sequences(plan, **given))


@pytest.mark.parametrize("sizes", [(3, 0, 4, 2), *full(((8,),))])
@pytest.mark.parametrize("plan", ["mixed", "row_wise", *full("table_wise", "grid_shard", "one_rank")])
def test_other_numbers_of_ranks(plan: str, sizes: tuple[int, ...]) -> None:
    """Four ranks, more than tables, and one."""
    check(Sequences(plan, "bf16", sizes=sizes, own_sizes=True))


@pytest.mark.parametrize("compression", [rk.Hash(20), *full(rk.QuotientRemainder(8))])
def test_compressed_tables(compression: object) -> None:
    """Hashed tables and tables of several parts work."""
    check(Sequences("table_wise", compression=compression))


@pytest.mark.parametrize("gradient", ["global_mean", "torchrec"])
def test_even_means(gradient: str) -> None:
    """Means over each rank's samples have one process's bits, whatever the numbers of ids."""
    check(Sequences("row_wise", gradient=gradient, sizes=(8, 8)))


def test_global_mean_of_uneven_batches() -> None:
    """Samples have equal weight whatever their numbers of ids and the ranks' batch sizes."""
    case = Sequences("row_wise", "fp32", "sgd", gradient="global_mean", sizes=(8, 3), own_sizes=True)
    found = pool(2).run(HERE, "run", case)
    state, begun = train_by_hand(case, (11 / 17, 6 / 17))
    for name, whole in state.items():
        for offsets, block in (pair for _, blocks in found for pair in blocks[name]):
            place = tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
            torch.testing.assert_close(block, whole[place], rtol=1e-5, atol=1e-7)
            assert not torch.equal(block, begun[name][place])


def train_by_hand(case: Sequences, shares: tuple[float, ...]) -> tuple[dict, dict]:
    """States of one process before and after training with each rank's mean times its share."""
    model = Model(collection(case))
    begun = {name: t.clone() for name, t in model.sequences.state_dict().items()}
    for step in range(case.steps):
        with model.sequences.accumulate():
            for rank, share in enumerate(shares):
                features = batch(case, step, [rank])
                out, factors = model(features), coefficients(case, step, [rank])
                loss = sum((out[key].values() * c).sum() for key, c in zip(KEYS, factors, strict=True))
                (loss * share / features.stride()).backward()
    return dict(model.sequences.state_dict()), begun


@pytest.mark.parametrize("plan", ["mixed", *full("row_wise", "one_rank")])
def test_options(plan: str) -> None:
    """accumulate(), several lookups per backward, freeze() and the learning rate work as in one process."""
    case = Sequences(plan)
    found = pool(2).run(HERE, "options", case)
    model = Model(collection(case))
    whole = use_options(case, model, model.sequences, model.sequences.fused_optimizer, [0, 1])
    assert differences(dict(whole), found) == []


def test_overflow_on_one_rank() -> None:
    """An overflow skips the update on all ranks, as in one process."""
    case = Sequences("mixed", "bf16", "adam_bf16", steps=4)
    (scales, first), (others, second) = pool(2).run(HERE, "scaled", case)
    model = Model(collection(case))
    expected = train_scaled(case, model, model.sequences, model.sequences.fused_optimizer, [0, 1])
    assert scales == others == expected
    assert expected[1] == expected[0] / 2
    assert differences(dict(model.sequences.state_dict()), [first, second]) == []


def test_unlike_backwards() -> None:
    """Backward passes of different lookups on ranks raise on all ranks, and nothing changes."""
    (first, same0), (second, same1) = pool(2).run(HERE, "different_backwards", Sequences("row_wise"))
    assert first == second
    assert "rank 0 updates with lookup 0 at once, scale 0, and rank 1 updates with lookup 1" in first
    assert same0
    assert same1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("plan", "other"), [("mixed", "row_wise"), *full(("row_wise", "grid_shard"))])
def test_checkpoints(tmp_path: Path, plan: str, other: str) -> None:
    """Checkpoints of torch.distributed.checkpoint load into another plan, and into one process with its names."""
    case = Sequences(plan, "bf16")
    found = pool(2).run(HERE, "save_and_load", case, other, str(tmp_path))
    whole = one_process(case)[1]
    assert "embeddings.t0.weight" in whole
    assert differences(whole, [saved for saved, _ in found]) == []
    assert differences(whole, [loaded for _, loaded in found]) == []
    alone = collection(case)
    state = alone.state_dict()
    dcp.load({"model": {f"sequences.{n}": t for n, t in state.items()}}, checkpoint_id=str(tmp_path), no_dist=True)
    alone.load_state_dict(state)
    assert all(torch.equal(t, whole[name]) for name, t in alone.state_dict().items())


def test_states_of_bags() -> None:
    """A state with the names of rk.EmbeddingBagCollection loads, as in one process."""
    case = Sequences("row_wise", "int8", "rowwise_adagrad")
    whole = one_process(case)[1]
    renamed = {name.replace("embeddings.", "embedding_bags."): t for name, t in whole.items()}
    assert differences(whole, pool(2).run(HERE, "load_whole", case, renamed)) == []


def test_bad_batches() -> None:
    """The rank of a bad batch names feature and bag; the others raise its message; nothing changes, and all go on."""
    case = Sequences("mixed", optimizer="sgd", own_sizes=True)
    (others, same0, after0), (own, same1, after1) = pool(2).run(HERE, "bad_batches", case)
    assert same0
    assert same1
    assert [text.partition(":")[0] for text in own] == ["IndexError", "KeyError"]
    assert "feature 'f2', bag 3: id 1030 must be in [0, 1030)" in own[0]
    assert all(text.startswith("OtherRankError: another rank refused its batch") for text in others)
    assert all(f"rank 1: {text}" in other for text, other in zip(own, others, strict=True))
    for step, whole in enumerate(one_process(case)[0]):
        for f, (_, rows) in enumerate(whole):
            assert same_bits(torch.cat([after0[step][f][1], after1[step][f][1]]), rows)


@pytest.mark.parametrize("plan", ["mixed", "row_wise", *full("table_wise", "one_rank", "data_parallel", "grid_shard")])
@pytest.mark.parametrize("own_sizes", [True, *full(False)])
def test_gradients_of_weights(plan: str, own_sizes: bool) -> None:
    """Weight gradients return to the ids' rank with one process's bits, up to rounding if column-wise."""
    case = Sequences(plan, "bf16", own_sizes=own_sizes, steps=4, padding=(3, None, None))
    found = pool(2).run(HERE, "weighted", case)
    model = Model(collection(case))
    for step, features in enumerate(train_weighted(case, model, model.sequences, [0, 1])):
        for f, want in enumerate(features):
            got = torch.cat([own[step][f] for own, _ in found])
            want = want[len(want) - len(got) :]  # the last rank's part in the second step
            assert len(got) > 0
            if plan == "grid_shard" or (plan == "mixed" and f == 0):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            else:
                assert same_bits(got, want)
    assert differences(dict(model.sequences.state_dict()), [blocks for _, blocks in found]) == []


def test_planner_and_pipeline() -> None:
    """TorchRec's planner and pipelined step have the bits of a loop, for a model with both kinds of collections."""
    assert pool(2).run(HERE, "pipelined", Sequences()) == [[True] * 4] * 2


@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_what_travels(plan: str) -> None:
    """Each row is sent once to the requesting rank, and its gradient once back after the control values."""
    case = Sequences(plan)
    rows = [[(f, ids) for f, ids in enumerate(_features(case, rank))] for rank in range(2)]

    def away(rank: int, f: int, ids: torch.Tensor) -> int:
        table = min(f, 2)
        owner = ids // -(-ROWS[table] // 2) if plan == "row_wise" else torch.full_like(ids, (table + 1) % 2)
        return int((owner != rank).sum()) * FEATURE_DIMS[f]

    expected = [sum(away(rank, f, ids) for f, ids in rows[rank]) for rank in range(2)]
    assert pool(2).run(HERE, "values_sent", case) == [[expected[1], expected[0] + 7], [expected[0], expected[1] + 7]]


def _features(case: Sequences, rank: int) -> list[torch.Tensor]:
    given = batch(case, 0, [rank])
    return [given[key].values() for key in KEYS]
