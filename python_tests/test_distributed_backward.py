"""rk.distributed: backward passes of several lookups, scaled losses and per-sample weights, on two gloo processes."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from distributed_backward_cases import (
    of_rank,
    ranks_of,
    scaled_alone,
    step_by_torch,
    train_by_torch,
    train_together,
    train_weighted,
)
from distributed_cases import Case, Model, batch, collection, differences, same_bits
from distributed_pool import pool
from distributed_sequence_cases import Model as SequenceModel
from distributed_sequence_cases import Sequences
from distributed_sequence_cases import collection as sequence_collection
from tiers import full

pytest.importorskip("torchrec.distributed")
HERE = "distributed_backward_cases"


@pytest.mark.parametrize(
    ("plan", "format"),
    [
        ("mixed", "bf16"),
        ("table_wise", "bf16"),
        *full(("table_wise", "int8"), *itertools.product(("row_wise", "one_rank", "data_parallel"), ("bf16", "int8"))),
    ],
)
def test_lookups_of_one_backward(plan: str, format: str) -> None:
    """Three lookups in one backward make one update with one process's bits."""
    case = Case(plan, format, "adam", sizes=(8, 5), one_id=True)
    found = pool(2).run(HERE, "together", case)
    model = Model(collection(case))
    outputs = train_together(case, model, ranks_of(case))
    assert all(same_bits(torch.cat(got), want) for *got, want in zip(*(o for o, _ in found), outputs, strict=True))
    assert differences(dict(model.ebc.state_dict()), [blocks for _, blocks in found]) == []
    assert model.ebc.step == case.steps


@pytest.mark.parametrize("case", [Case(optimizer="sgd"), Sequences(optimizer="sgd", sizes=(8, 8))])
def test_outputs_that_one_rank_reads_first(case: Case | Sequences) -> None:
    """Reading an output early on one rank, as for a log, changes no gradient: all ranks send them in one order."""
    expected = pool(2).run(HERE, "read_first", case, None)
    for mode in ("enable_grad", "no_grad", "inference_mode"):
        for got, want in zip(pool(2).run(HERE, "read_first", case, 0, mode), expected, strict=True):
            assert all(map(_same_blocks, got, want)), mode


@pytest.mark.parametrize("way", ["log", "by_feature"])
def test_layers_beside_outputs_that_one_rank_reads_first(way: str) -> None:
    """Collectives of DDP stay in order if one rank reads the output before it calls the layers."""
    case = Case(optimizer="sgd")
    found = pool(2).run(HERE, "with_dense_layers", case, (way, ""))
    for got, expected in zip(found, pool(2).run(HERE, "with_dense_layers", case, ("", "")), strict=True):
        assert _same_blocks(got, expected)


def _same_blocks(found: dict[str, list], expected: dict[str, list]) -> bool:
    return all(same_bits(a, b) for n in expected for (_, a), (_, b) in zip(found[n], expected[n], strict=True))


def test_numbers_of_nodes() -> None:
    """torch keeps sequence numbers that are set on autograd nodes; this is undocumented."""
    node: Any = torch.ones(1, requires_grad=True).sum().grad_fn
    node._set_sequence_nr(1 << 62)
    assert node._sequence_nr() == 1 << 62


@pytest.mark.parametrize("plan", ["mixed", *full("one_rank", "row_wise")])
def test_scaled_losses(plan: str) -> None:
    """An overflow on one rank skips the update and lowers the scale on all ranks: one process's bits."""
    case = Case(plan, "bf16", "adam", sizes=(8, 5), one_id=True, steps=5)
    assert check_scaled(case)["step"] == 3


@pytest.mark.parametrize("plan", ["table_wise", *full("one_rank", "row_wise", "mixed")])
@pytest.mark.parametrize("optimizer", ["torch", "adam"])
def test_scaler_of_all_ranks(plan: str, optimizer: str) -> None:
    """FSDP's scaler skips a step on all ranks if gradients overflow in one rank's shards: one process's bits."""
    case = Case(plan, optimizer=optimizer, sizes=(8, 5), one_id=True, steps=5)
    check_scaled(case, by_all=True)


def check_scaled(case: Case, *, by_all: bool = False) -> dict[str, torch.Tensor]:
    """Asserts one process's scales and state, and returns the state; ``by_all``: with FSDP's scaler."""
    found = pool(2).run(HERE, "scaled", case, by_all)
    scales, state = scaled_alone(case)
    assert scales == [1024.0, 512.0, 512.0, 1024.0, 512.0]
    assert [own for own, _ in found] == [scales] * 2
    assert differences(state, [blocks for _, blocks in found]) == []
    return state


def test_unlike_backwards() -> None:
    """Different backward passes or scalers on ranks raise on all ranks; nothing changes."""
    (errors, same), (others, same_there) = pool(2).run(HERE, "different_backwards", Case("mixed", optimizer="sgd"))
    assert errors == others
    assert same
    assert same_there
    updates = [re.findall(r"(rank \d updates with .*?, scale \d)", error) for error in errors]
    together = "lookup 1 together with others of the same backward, scale 0"
    assert updates == [
        [f"rank 0 updates with {together}", "rank 1 updates with lookup 1 at once, scale 0"],
        ["rank 0 updates with lookup 3 at once, scale 0", "rank 1 updates with lookup 2 at once, scale 0"],
        ["rank 0 updates with lookup 4 at once, scale 0", "rank 1 updates with lookup 4 at once, scale 2"],
        [f"rank {rank} updates with lookup 6 at once, scale 0" for rank in (0, 1)],
    ]
    assert ["requires_grad of replicas differ" in error for error in errors] == [False, False, False, True]


@pytest.mark.parametrize("plan", ["mixed", "row_wise", *full("table_wise", "one_rank", "grid_shard", "data_parallel")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
@pytest.mark.parametrize("row_wise", ["ordered", "exact", *full("reduce_scatter")])
def test_gradients_of_weights(plan: str, pooling: str, row_wise: str) -> None:
    """Gradients of weights return to the sample's rank with one process's bits, up to rounding if column-wise."""
    padding = (3, None, None)
    case = Case(plan, "bf16", "adam", pooling=pooling, sizes=(8, 5), steps=4, padding=padding, row_wise=row_wise)
    found = pool(2).run(HERE, "weighted", case)
    model = Model(collection(case))
    grads = train_weighted(case, model, model.ebc, ranks_of(case))
    for step, whole in enumerate(grads):
        for rank in ranks_of(case):
            got, want = found[rank][0][step], whole[of_rank(case, step, rank)]
            if (step, rank) == (1, 0):
                assert len(got) == 0
            elif plan in ("mixed", "grid_shard"):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            else:
                assert same_bits(got, want)
    assert differences(dict(model.ebc.state_dict()), [blocks for _, blocks in found]) == []


def test_weights_whose_rows_have_changed() -> None:
    """The second of two backward passes, after an update of the rows, raises on all ranks."""
    errors = pool(2).run(HERE, "late_backward", Case("mixed", optimizer="sgd"))
    assert errors[0] == errors[1]
    assert errors[0][0].startswith("the tables of rank 0 have changed since this lookup, and gradients of per_sample")


def test_blocks_of_one_rank() -> None:
    """A backward outside of its lookup's accumulate() block on one rank raises on all ranks; nothing changes."""
    (others, same), (own, same_there) = pool(2).run(HERE, "blocks_of_one_rank", Case("mixed", optimizer="sgd"))
    assert others == own
    assert same
    assert same_there
    assert own[0].startswith("on rank 1, a lookup made before this accumulate() block ran its backward inside it")
    assert own[1].startswith("on rank 1, a lookup made in an accumulate() block ran its backward after the block")


NAMES = {
    "mixed": [["t0", "t1", "t2"], ["t0", "t1", "t2"]],
    "one_rank": [["t0", "t1", "t2"], []],
    "grid_shard": [["t0", "t0#2", "t1", "t1#6", "t2", "t2#10"], ["t0", "t0#3", "t1", "t1#7", "t2", "t2#11"]],
}


@pytest.mark.parametrize("plan", ["mixed", "one_rank", *full("grid_shard", "table_wise", "data_parallel", "row_wise")])
@pytest.mark.parametrize(
    ("pooling", "format"), [("mean", "fp32"), ("sum", "fp16 bf16 fp32"), *full(("sum", "fp32"), ("mean", "fp16"))]
)
def test_optimizers_of_torch(plan: str, pooling: str, format: str) -> None:
    """A rank's shards are parameters with the gradients of all ranks, also replicas: one process's bits."""
    case = Case(plan, format, "torch", pooling=pooling, sizes=(8, 5), one_id=True)
    found = pool(2).run(HERE, "by_torch", case)
    model = Model(collection(case))
    outputs = train_by_torch(case, model, ranks_of(case))
    assert all(same_bits(torch.cat(got), want) for *got, want in zip(*(o for o, _, _ in found), outputs, strict=True))
    assert differences(dict(model.ebc.state_dict()), [blocks for _, blocks, _ in found]) == []
    if plan in NAMES:
        want = [[f"ebc.embedding_bags.{name}.weight" for name in own] for own in NAMES[plan]]
        assert [names for *_, names in found] == want


def test_tables_that_nothing_trains() -> None:
    """Without an optimizer, outputs of uint8 tables require gradients only with per-sample weights."""
    case = Case("row_wise", "int8", "torch")
    for rank, (grad, requires, warned) in enumerate(pool(2).run(HERE, "only_weights", case)):
        given = batch(case, 0, [rank])
        weights = torch.ones(len(given.values()), requires_grad=True)
        Model(collection(case))(
            type(given)(given.keys(), given.values(), lengths=given.lengths(), weights=weights)
        ).sum().backward()
        assert same_bits(grad, weights.grad)
        assert not requires
        assert sum("a collection whose tables nothing trains" in text for text in warned) == 1


@pytest.mark.parametrize("plan", ["mixed", *full("row_wise", "one_rank")])
def test_sequences_and_optimizers_of_torch(plan: str) -> None:
    """Shards of an EmbeddingCollection are parameters, too."""
    case = Sequences(plan, optimizer="torch")
    found = pool(2).run(HERE, "sequences_by_torch", case)
    model = SequenceModel(sequence_collection(case))
    step_by_torch(case, model, list(range(len(case.sizes))))
    assert differences(dict(model.sequences.state_dict()), found) == []
