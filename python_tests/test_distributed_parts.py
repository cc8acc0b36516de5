"""rk.distributed with row-wise tables of several parts, on gloo processes against one process."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed_backward_cases import of_rank, scaled_alone
from distributed_cases import DIM, KEYS, ROWS, Case, check_found, collection, differences, one_process, same_bits
from distributed_composition_cases import check_trained
from distributed_composition_cases import one_process as trained_alone
from distributed_distinct_cases import Distinct, own_batch
from distributed_distinct_cases import one_process as distinct_alone
from distributed_pool import pool
from distributed_sequence_cases import Sequences
from test_distributed import check
from test_distributed_sequences import check as check_sequences
from tiers import full

import rec_kernels as rk

pytest.importorskip("torchrec.distributed")
#: Compressions by name; of "tiny", one of two ranks has no row of some part.
KINDS = {
    "hash": rk.Hash(10),
    "mult": rk.QuotientRemainder(10),
    "digits": rk.Partitions.mixed_radix([11, 11, 11]),
    "add": rk.QuotientRemainder(10, "add"),
    "concat": rk.QuotientRemainder(10, "concat"),
    "pooled": rk.QuotientRemainder(10, compose="pooled"),
    "pooled_digits": rk.Partitions.mixed_radix([11, 11, 11], compose="pooled"),
    "tiny": rk.Partitions([(1, 1), (1, 1030)]),
    "pooled_tiny": rk.Partitions([(1, 1), (1, 1030)], combine="add", compose="pooled"),
}
LAST = (3, None, ROWS[2] - 1)


def case_of(kind: str, **options: object) -> Case:
    """A case whose outputs have one process's bits."""
    given = {"plan": "row_wise", "row_wise": "exact", "sizes": (8, 5), "compression": KINDS[kind]}
    return Case(**{**given, **options})


@pytest.mark.parametrize("kind", ["hash", "digits", "add", "concat", "pooled_digits", *full("mult", "pooled", "tiny")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
@pytest.mark.parametrize("format", ["fp32", *full("int8", "mx9", "bf16")])
def test_exact(kind: str, pooling: str, format: str) -> None:
    """Outputs, rows and state have one process's bits for every composition."""
    check(case_of(kind, pooling=pooling, format=format, optimizer="rowwise_adagrad", weighted=True))


@pytest.mark.parametrize("kind", ["hash", "add", *full("concat")])
@pytest.mark.parametrize("row_wise", ["ordered", *full("reduce_scatter")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_parts_of_bags(kind: str, row_wise: str, pooling: str) -> None:
    """Parts that are not multiplied may be pooled per shard."""
    check(case_of(kind, row_wise=row_wise, pooling=pooling, weighted=True), same_outputs=False)


@pytest.mark.parametrize("kind", ["digits", *full("tiny")])
@pytest.mark.parametrize(
    "given",
    [
        {"weighted": True, "pooling": "mean", "bad_ids": True, "padding": LAST},
        *full(({"sizes": (5, 0, 4, 8)},), ({"row_wise": "reduce_scatter"},)),
    ],
)
def test_products(kind: str, given: dict) -> None:
    """Each rank sums its gradients of a row, and sums are added in rank order: one process's within rounding."""
    case = case_of(kind, **{"row_wise": "ordered", "optimizer": "sgd", **given})
    found, again = (pool(len(case.sizes)).run("distributed_cases", "run", case) for _ in range(2))
    outputs, state = one_process(case)
    for (own, blocks), (same, same_blocks) in zip(found, again, strict=True):
        assert all(same_bits(*pair) for pair in zip(own, same, strict=True))
        for name, whole in state.items():
            for (offsets, block), (_, other) in zip(blocks[name], same_blocks[name], strict=True):
                assert same_bits(block, other)
                place = tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
                torch.testing.assert_close(block, whole[place], rtol=1e-5, atol=1e-6)
    assert same_bits(torch.cat([own[0] for own, _ in found]), outputs[0])
    for step, whole in enumerate(outputs[1:], 1):
        torch.testing.assert_close(torch.cat([own[step] for own, _ in found]), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", *full("torch")])
def test_training_of_products(optimizer: str, tmp_path: Path) -> None:
    """With several lookups, gradients of weights have one process's bits before the first update."""
    case = case_of("mult", row_wise="ordered", optimizer=optimizer, steps=0)
    found = pool(2).run("distributed_composition_cases", "run", case, "table_wise", str(tmp_path / "checkpoint"))
    outputs, _, state = trained_alone(case)
    for i, want in enumerate(outputs[:3]):
        assert same_bits(torch.cat([own["outputs"][i] for own in found]), want)
    for step, want in enumerate(outputs[4:]):
        for rank in [1] if step == 1 else [0, 1]:
            got = found[rank]["outputs"][4 + step]
            torch.testing.assert_close(got, want[of_rank(case, step, rank)], rtol=1e-5, atol=1e-5)
    read = [own["loaded"] for own in found]
    for offsets, block in (pair for own in read for pair in own["embedding_bags.t2_0.weight"]):
        place = tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
        torch.testing.assert_close(block, state["embedding_bags.t2_0.weight"][place], rtol=1e-5, atol=1e-6)


def rows_requested(given: Distinct, rank: int, *, distinct: bool) -> int:
    """Rows of parts that a rank requests from the other."""
    from rec_kernels.distributed.table_parts import part_block

    batch, found = own_batch(given, 0, rank), 0
    for num_ids, key in zip((*ROWS, ROWS[-1]), KEYS, strict=True):
        for part in given.case.compression.parts(num_ids, DIM):
            half = -(-num_ids // 2)
            block = (half, num_ids - half) if rank == 0 else (0, half)
            first, count = part_block(*block, num_ids, part.num_embeddings)
            rows = batch[key].values() // part.divisor % part.modulus
            rows = rows[(rows >= first) & (rows < first + count)]
            found += len(rows.unique() if distinct else rows)
    return found


@pytest.mark.parametrize("row_wise", ["ordered", "exact"])
def test_what_travels(row_wise: str) -> None:
    """Rows of multiplied parts and their gradients are sent once per rank, or per id with row_wise="exact"."""
    given = Distinct(case_of("mult", row_wise=row_wise, sizes=(40, 40)), ("plain", "plain"))
    requested = [rows_requested(given, rank, distinct=row_wise == "ordered") for rank in range(2)]
    assert pool(2).run("distributed_distinct_cases", "values_sent", given) == [
        [requested[1] * DIM, requested[0] * DIM + 7],
        [requested[0] * DIM, requested[1] * DIM + 7],
    ]


@pytest.mark.parametrize("kind", ["digits", *full("hash", "add", "concat", "pooled")])
@pytest.mark.parametrize(
    "given",
    [
        {"bad_ids": True, "padding": LAST},
        *full(({"sizes": (0, 6)},), ({"sizes": (0, 0)},)),
        *full(({"optimizers": (None, "rowwise_adagrad", "lamb"), "rates": (None, 0.3, None)},)),
    ],
)
def test_what_batches_have(kind: str, given: dict) -> None:
    """Ignored ids, ranks without samples, and optimizers and rates per table."""
    check(case_of(kind, pooling="mean", **given))


@pytest.mark.parametrize("kind", ["tiny", *full("hash", "mult", "concat", "pooled")])
def test_four_ranks(kind: str) -> None:
    """Four ranks; some have no row of a part, and one has no samples."""
    check(case_of(kind, sizes=(5, 0, 4, 8)))


@pytest.mark.parametrize(("plan", "row_wise"), [("grid_shard", "exact"), *full(("mixed", "exact"))])
def test_columns_of_hashed_tables(plan: str, row_wise: str) -> None:
    """A hashed table may be split by columns."""
    check(case_of("hash", plan=plan, row_wise=row_wise, format="bf16", optimizer="adam_bf16"))


@pytest.mark.parametrize("kind", ["hash", "mult", *full("add", "concat", "pooled", "digits")])
@pytest.mark.parametrize("other", ["table_wise", *full("data_parallel", "row_wise")])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", *full("torch")])
def test_training(kind: str, other: str, optimizer: str, tmp_path: Path) -> None:
    """Several lookups per backward, blocks, weight gradients, torch's optimizers; checkpoints load in other plans."""
    case = case_of(kind, optimizer=optimizer)
    found = pool(2).run("distributed_composition_cases", "run", case, other, str(tmp_path / "checkpoint"))
    outputs, grads, state = trained_alone(case)
    check_trained(found, case, outputs, state)
    if optimizer == "torch":
        assert {name for own in found for name in own["names"]} == set(grads)


@pytest.mark.parametrize("kind", ["concat", "pooled_tiny", *full("hash", "mult", "add", "pooled")])
def test_training_of_means(kind: str, tmp_path: Path) -> None:
    """A weight's gradient is divided after the sum over parts, also if one rank has all of a part."""
    case = case_of(kind, pooling="mean", optimizer="sgd")
    found = pool(2).run("distributed_composition_cases", "run", case, "table_wise", str(tmp_path / "checkpoint"))
    outputs, _, state = trained_alone(case)
    check_trained(found, case, outputs, state)


@pytest.mark.parametrize("kind", ["mult", *full("hash", "add")])
def test_rank_without_tables(kind: str) -> None:
    """One rank has all rows, and both have samples with weights, pooled and not."""
    check(case_of(kind, plan="rows_of_one_rank", weighted=True))
    check_sequences(Sequences("rows_of_one_rank", compression=KINDS[kind], weighted=True))


@pytest.mark.parametrize("kind", ["mult", *full("hash", "pooled")])
def test_scaled_losses(kind: str) -> None:
    """An overflow on one rank skips the update of all parts on all ranks."""
    case = case_of(kind, optimizer="adam", steps=5)
    found = pool(2).run("distributed_backward_cases", "scaled", case)
    scales, state = scaled_alone(case)
    assert [own for own, _ in found] == [scales] * 2
    assert differences(state, [blocks for _, blocks in found]) == []


@pytest.mark.parametrize("kind", ["hash", "mult", "add", *full("concat", "digits", "tiny")])
@pytest.mark.parametrize(
    "given",
    [
        {"weighted": True, "bad_ids": True, "own_sizes": True},
        *full(({"weighted": True, "padding": LAST},), ({"sizes": (0, 6)},), ({"sizes": (3, 0, 4, 2)},)),
    ],
)
def test_sequences(kind: str, given: dict) -> None:
    """Sequence rows are composed on the samples' rank: one process's bits."""
    check_sequences(Sequences("row_wise", compression=KINDS[kind], **given))


@pytest.mark.parametrize("kind", ["mult", *full("hash", "add", "concat", "pooled_digits")])
@pytest.mark.parametrize("kinds", [("inverse", "groups"), *full((("plain", "torchrec"),))])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_shared_bags(kind: str, kinds: tuple[str, str], pooling: str) -> None:
    """Distinct bags are expanded to samples after composition."""
    given = Distinct(case_of(kind, pooling=pooling, weighted=True, bad_ids=True, padding=LAST), kinds)
    found = pool(2).run("distributed_distinct_cases", "run", given)
    check_found(found, *distinct_alone(given))


@pytest.mark.parametrize("kind", ["hash", "mult"])
def test_caches(kind: str) -> None:
    """Hashed tables have slots; tables of several parts have none, as in one process."""
    case = case_of(kind, optimizer="adam", cache=rk.RowCache(0.2, ways=4))
    found = pool(2).run("distributed_cache_cases", "run", case)
    inserted = sum(table["inserted"] for *_, report in found for table in report)
    assert (inserted > 0) == (kind == "hash")
    for i, want in enumerate(one_process(replace(case, cache=None))[0]):
        assert same_bits(torch.cat([own[0][i] for own in found]), want)


@pytest.mark.parametrize("kind", ["hash", *full("mult")])
def test_first_numbers(kind: str) -> None:
    """Rows of a collection on the meta device have the same initial values in every plan."""
    case = case_of(kind)
    found = pool(2).run("distributed_torchrec_cases", "from_meta", replace(case, plan="table_wise"))
    whole = {name: numbers for own in found for name, pairs in own.items() for _, numbers in pairs}
    assert len({numbers.shape for numbers in whole.values()}) > 2
    assert differences(whole, pool(2).run("distributed_torchrec_cases", "from_meta", case)) == []


def test_blocks_of_parts() -> None:
    """Parts are split in proportion to the table; shards cover every row once."""
    from rec_kernels.distributed.table_parts import part_block

    for ids, part in ((10**9, 1000), (100, 3), (7, 7), (1030, 1)):
        for world in (1, 2, 3, 8):
            size = -(-ids // world)
            bounds = [min(rank * size, ids) for rank in range(world + 1)]
            blocks = [part_block(a, b - a, ids, part) for a, b in itertools.pairwise(bounds)]
            firsts, rows = zip(*blocks, strict=True)
            assert firsts[0] == 0
            assert [first + n for first, n in blocks] == [*firsts[1:], part]
            assert max(rows) <= -(-part // world) + 1


def test_other_groups() -> None:
    """A state of other tables is rejected, and TorchRec's optimizer saves no rates."""
    from rec_kernels.distributed.sharded_optimizer import ShardedFusedOptimizer, TorchRecFusedOptimizer
    from rec_kernels.nn.training.fused_update import rate_groups

    ebc = collection(Case(rates=(None, 0.3, None)))
    groups = rate_groups(ebc._features)
    face = ShardedFusedOptimizer([], groups, [], ebc.lr, ebc.step)
    assert [group["lr"] for group in face.param_groups] == pytest.approx([0.01, 0.3])
    face.load_state_dict(ebc.fused_optimizer.state_dict())
    with pytest.raises(ValueError, match=r"the state has parameter groups of \[3\] tables, but .* of \[2, 1\]"):
        face.load_state_dict(collection(Case()).fused_optimizer.state_dict())
    one = collection(Case(rates=(0.1, 0.2, 0.3)))
    face = ShardedFusedOptimizer([], rate_groups(one._features), [], one.lr, one.step)
    state = one.fused_optimizer.state_dict()
    face.load_state_dict({**state, "param_groups": state["param_groups"][::-1], "tables": state["tables"][::-1]})
    assert [group["lr"] for group in face.param_groups] == pytest.approx([0.1, 0.2, 0.3])
    TorchRecFusedOptimizer(face).save_param_groups(False)
    with pytest.raises(NotImplementedError, match="does not have the learning rates of sharded tables"):
        TorchRecFusedOptimizer(face).save_param_groups(True)


def test_what_it_says_of_itself() -> None:
    """A sharded collection reports its names, sizes and values, and this rank's share."""
    found = pool(2).run("distributed_torchrec_cases", "properties", Case())
    for rank, (text, step, device, is_weighted, tables) in enumerate(found):
        assert text.startswith("ShardedEmbeddingBagCollection(\n  t0: ")
        assert text.endswith(f"shards on rank {rank} of 2\n)")
        assert (step, device, is_weighted) == (3, "cpu", None)
        assert tables == [["t1"], ["t0", "t2"]][rank]


def test_errors_of_others_are_pickled() -> None:
    """OtherRankError can be pickled, as process pools require."""
    from rec_kernels.distributed.agreement import OtherRankError

    error = pickle.loads(pickle.dumps(OtherRankError("rank 1: no rows", "IndexError")))
    assert (str(error), error.cause) == ("rank 1: no rows", "IndexError")
