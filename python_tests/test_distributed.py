"""rk.distributed on two gloo processes has the bits of one process with all samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from distributed_cases import DIM, ROWS, Case, check_found, differences, one_process, same_bits
from distributed_pool import WorkerError, pool
from tiers import full

import rec_kernels as rk

pytest.importorskip("torchrec.distributed")


def check(case: Case, *, same_outputs: bool = True) -> None:
    """Asserts one process's state to the bit; outputs too, or within the rounding of sums."""
    found = pool(len(case.sizes)).run("distributed_cases", "run", case)
    check_found(found, *one_process(case), same_outputs=same_outputs)


@pytest.mark.parametrize("plan", ["table_wise", *full("one_rank", "data_parallel")])
@pytest.mark.parametrize("format", ["fp32", "int8", *full("mx9", "bf16")])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad", *full("sgd", "adam_bf16", "lamb")])
def test_whole_tables(plan: str, format: str, optimizer: str) -> None:
    """Table-wise and data-parallel tables have one process's bits."""
    check(Case(plan, format, optimizer, sizes=(8, 5)))


@pytest.mark.parametrize("format", ["fp32", "int8", *full("mx9", "bf16")])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", *full("sgd", "adam_bf16", "lamb", "clipped")])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_rows(format: str, optimizer: str, pooling: str) -> None:
    """Row-wise tables have one process's updates for equal output gradients, with either rounding."""
    check(Case("row_wise", format, optimizer, pooling=pooling, sizes=(8, 5)), same_outputs=False)


@pytest.mark.parametrize("format", ["fp32", "int8", *full("mx9")])
@pytest.mark.parametrize("pooling", ["sum", *full("mean")])
def test_rows_of_one_id(format: str, pooling: str) -> None:
    """Row-wise tables have one process's bits for bags of one id, which have no partial sums."""
    check(Case("row_wise", format, pooling=pooling, one_id=True, sizes=(8, 5)))


@pytest.mark.parametrize("format", ["fp32", *full("fp16", "bf16")])
@pytest.mark.parametrize("optimizer", ["adam", *full("adagrad", "adam_bf16", "sgd")])
def test_columns(format: str, optimizer: str) -> None:
    """Column-wise tables have one process's bits."""
    check(Case("column_wise", format, optimizer, pooling="mean", sizes=(8, 5)))


@pytest.mark.parametrize("plan", ["mixed", *full("grid_shard")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_blocks(plan: str, pooling: str) -> None:
    """Tables split by rows and columns, and different sharding types in one plan, work."""
    check(
        Case(plan, "bf16", "adam_bf16", pooling=pooling, sizes=(8, 5), output_dtype=torch.float16), same_outputs=False
    )


@pytest.mark.parametrize("plan", ["table_wise", "row_wise", *full("data_parallel", "column_wise")])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_weights_of_one_rank(plan: str, pooling: str) -> None:
    """Per-sample weights on one rank alone are allowed."""
    check(Case(plan, pooling=pooling, weighted=True, sizes=(4, 7)), same_outputs=plan != "row_wise")


@pytest.mark.parametrize("sizes", [(0, 6), *full(((0, 0),), ((1, 0),))])
@pytest.mark.parametrize("plan", ["mixed", *full("table_wise", "row_wise", "one_rank")])
def test_ranks_without_samples(plan: str, sizes: tuple[int, int]) -> None:
    """A rank without more data feeds empty batches."""
    check(Case(plan, optimizer="adam", sizes=sizes), same_outputs=False)


@pytest.mark.parametrize("plan", ["row_wise", "table_wise", *full("mixed", "data_parallel")])
def test_padding(plan: str) -> None:
    """Padding ids are neither pooled nor counted in means, on any shard."""
    case = Case(plan, optimizer="adam", pooling="mean", sizes=(8, 5), padding=(3, None, ROWS[2] - 1))
    check(case, same_outputs=plan in ("table_wise", "data_parallel"))


@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
@pytest.mark.parametrize("plan", ["row_wise", *full("table_wise", "mixed", "grid_shard")])
def test_ignored_ids(plan: str, pooling: str) -> None:
    """Ids out of range are left out of sums, updates and means, on any shard."""
    check(Case(plan, optimizer="adam", pooling=pooling, bad_ids=True), same_outputs=False)


@pytest.mark.parametrize("bad_ids", [False, *full(True)])
@pytest.mark.parametrize("plan", ["hashed_apart", "hashed_replica", "hashed_rows"])
def test_every_id(plan: str, bad_ids: bool) -> None:
    """A hashed table takes negative ids beside row-wise means of other tables, which count only their own ids."""
    padding = (3, None, -7)
    case = Case(plan, pooling="mean", sizes=(8, 5), padding=padding, every_id=True, bad_ids=bad_ids)
    check(case, same_outputs=False)


@pytest.mark.parametrize("plan", ["mixed", "row_wise", *full("grid_shard")])
@pytest.mark.parametrize("sizes", [(8, 5), (0, 6), *full(((5, 0, 4, 8),))])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_reduced_parts(plan: str, sizes: tuple[int, ...], pooling: str) -> None:
    """A collective adds partial bags, also of uneven batches; with two ranks, outputs have the bits of "ordered"."""
    case = Case(plan, "bf16", "adam_bf16", pooling=pooling, sizes=sizes, weighted=True, row_wise="reduce_scatter")
    ordered = pool(len(sizes)).run("distributed_cases", "run", replace(case, row_wise="ordered"))
    *found, shapes = zip(*pool(len(sizes)).run("distributed_cases", "run_reduced", case), strict=True)
    check_found(list(zip(*found, strict=True)), *one_process(case), same_outputs=False)
    columns = DIM * {"mixed": 2, "row_wise": 4, "grid_shard": 4}[plan]
    assert shapes == tuple([[size, columns]] * case.steps for size in sizes)
    if len(sizes) == 2:
        pairs = zip([out for own in found[0] for out in own], [out for own, _ in ordered for out in own], strict=True)
        assert all(same_bits(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("case", "device"),
    [
        (Case("mixed", weighted=True), "meta"),
        (Case("one_rank", optimizer="torch", weighted=True), "meta"),
        (Case("table_wise", optimizer="sgd", compression=rk.MixedDimension(8)), "meta"),
        (Case("row_wise", row_wise="exact"), "cpu"),  # TorchRec needs the device for the batch sizes of row-wise tables
        (Case("row_wise", compression=rk.QuotientRemainder(10)), "cpu"),
    ],
    ids=["blocks", "torch's gradients", "matrices", "rows", "parts"],
)
def test_elsewhere(case: Case, device: str) -> None:
    """Bits, dtypes and devices do not depend on torch's default dtype and device."""
    expected = pool(2).run("distributed_cases", "run_elsewhere", case, None)
    found = pool(2).run("distributed_cases", "run_elsewhere", case, device)
    for (outputs, state), (others, whole) in zip(found, expected, strict=True):
        assert all(same_bits(a, b) for a, b in zip(outputs, others, strict=True))
        for name in whole:
            assert all(same_bits(a, b) for (_, a), (_, b) in zip(state[name], whole[name], strict=True)), name


def test_compiled() -> None:
    """torch.compile excludes sharded lookups from its graphs, also with capture_scalar_outputs."""
    case = Case("table_wise")
    check_found(pool(2).run("distributed_cases", "run_compiled", case), *one_process(case))


@pytest.mark.parametrize("plan", ["mixed", "one_rank", *full("table_wise", "row_wise", "data_parallel")])
def test_optimizers_of_tables(plan: str) -> None:
    """Each table has its own optimizer; all ranks count updates, also those without tables of some optimizer."""
    own = (None, "rowwise_adagrad", "lamb")
    case = Case(plan, "bf16", "adam_bf16", sizes=(8, 5), optimizers=own, rates=(None, 0.3, None))
    check(case, same_outputs=plan not in ("mixed", "row_wise"))


@pytest.mark.parametrize("plan", ["mixed", "row_wise", *full("grid_shard")])
@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, *full(True)])
@pytest.mark.parametrize("sizes", [(8, 5), *full(((0, 6),), ((5, 0, 4, 8),))])
def test_exact(plan: str, pooling: str, weighted: bool, sizes: tuple[int, ...]) -> None:
    """With row_wise="exact", rows are pooled on the samples' ranks: one process's outputs and state to the bit."""
    check(Case(plan, "bf16", "adam_bf16", pooling=pooling, sizes=sizes, weighted=weighted, row_wise="exact"))


@pytest.mark.parametrize("case", [Case(format="int8", optimizer="rowwise_adagrad"), *full(Case(format="mx9"))])
@pytest.mark.parametrize("pooling", ["mean", *full("sum")])
def test_exact_of_ids_that_do_not_count(case: Case, pooling: str) -> None:
    """Padding ids and ids out of range are not pooled."""
    own = {"plan": "row_wise", "row_wise": "exact", "pooling": pooling, "padding": (3, None, ROWS[2] - 1)}
    check(replace(case, **own, bad_ids=True, sizes=(8, 5)))


@pytest.mark.parametrize("sizes", [*full(((8,),), ((5, 0, 4, 8),))])
@pytest.mark.parametrize("plan", ["mixed", "table_wise", "row_wise", "grid_shard"])
def test_other_numbers_of_ranks(plan: str, sizes: tuple[int, ...]) -> None:
    """One and four ranks have one process's results."""
    check(Case(plan, "bf16", "adam_bf16", pooling="mean", sizes=sizes), same_outputs=False)


@pytest.mark.parametrize("plan", ["table_wise", "row_wise"])
def test_global_mean_of_uneven_batches(plan: str) -> None:
    """global_mean" weights every sample equally for uneven batches."""
    case = Case(plan, optimizer="sgd", gradient="global_mean", sizes=(8, 3))
    found = pool(2).run("distributed_cases", "run", case)
    state, begun = one_process(case)[1], one_process(replace(case, steps=0))[1]
    for name, whole in state.items():
        for offsets, block in (pair for _, blocks in found for pair in blocks[name]):
            place = tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
            torch.testing.assert_close(block, whole[place], rtol=1e-5, atol=1e-7)
            assert not torch.equal(block, begun[name][place])


@pytest.mark.parametrize("gradient", ["global_mean", "torchrec"])
@pytest.mark.parametrize("plan", ["table_wise", "row_wise"])
def test_even_means(plan: str, gradient: str) -> None:
    """Means over each rank's samples have one process's bits for even batches on two ranks."""
    check(Case(plan, gradient=gradient, one_id=True))


def test_is_weighted() -> None:
    """Unused weights change nothing; a missing required weight is reported with the rank."""
    case = Case("mixed", optimizer="sgd", weighted=True, is_weighted=False)
    plain = one_process(replace(case, weighted=False))[1]
    assert differences(plain, [blocks for _, blocks in pool(2).run("distributed_cases", "run", case)]) == []
    must = replace(case, is_weighted=True)
    with pytest.raises(WorkerError, match=r"(?s)rank 0: .*the batch must have weights.*rank 1: .*another rank refused"):
        pool(2).run("distributed_cases", "run", must)
