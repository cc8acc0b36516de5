"""rk.distributed with TorchRec and torch: plans, checkpoints, errors, pipelines, and assumptions about their APIs."""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_cases import PLANS, Case, Model, batch, collection, differences, one_process, plan_of, train
from distributed_pool import WorkerError, pool
from distributed_torchrec_cases import WithLayers, prepared, train_layers, train_rates, use_options
from process_cases import run_script
from test_documented import own_docstring
from test_examples import EXAMPLES, groceries
from tiers import full

import rec_kernels as rk

HERE = "distributed_torchrec_cases"
torchrec = pytest.importorskip("torchrec.distributed")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("plan", "other"), [("mixed", "table_wise"), *full(("table_wise", "row_wise"))])
@pytest.mark.parametrize("format", ["bf16", *full("fp32")])
def test_checkpoints(tmp_path: Path, plan: str, other: str, format: str) -> None:
    """Checkpoints of torch.distributed.checkpoint load into another plan, and into one process with its names."""
    case = Case(plan, format, "adam")
    found = pool(2).run(HERE, "save_and_load", case, other, str(tmp_path))
    whole = one_process(case)[1]
    assert differences(whole, [saved for saved, _ in found]) == []
    assert differences(whole, [loaded for _, loaded in found]) == []
    alone = collection(case)
    state = alone.state_dict()
    dcp.load({"model": {f"ebc.{name}": t for name, t in state.items()}}, checkpoint_id=str(tmp_path), no_dist=True)
    alone.load_state_dict(state)
    assert all(torch.equal(t, whole[name]) for name, t in alone.state_dict().items())


def test_groups_that_lack_the_first_rank() -> None:
    """Plans count a group's ranks, and states all ranks: a process in its own group behaves as one process."""
    case = Case(sizes=(8,))
    for found in pool(2).run(HERE, "own_group", case):
        assert differences(one_process(case)[1], [found]) == []


@pytest.mark.full
@pytest.mark.parametrize("plan", ["mixed", "grid_shard"])
def test_checkpoints_of_other_numbers_of_ranks(tmp_path: Path, plan: str) -> None:
    """Four ranks save, and two load with another plan."""
    case = Case(plan, "bf16", "adam", sizes=(4, 1, 0, 5))
    pool(4).run(HERE, "save_and_load", case, "table_wise", str(tmp_path))
    found = pool(2).run(HERE, "load", dataclasses.replace(case, plan="row_wise", steps=0), str(tmp_path))
    assert differences(one_process(case)[1], [blocks for _, blocks in found]) == []


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_reshardings(tmp_path: Path) -> None:
    """Twenty random reshardings on 1, 2 or 4 processes, with a step after each, have the bits of one process."""
    drawn = random.Random(5)
    case = Case(format="bf16", optimizer="adam", sizes=(4, 1, 0, 5), steps=20)
    for step in range(20):
        world, plan = drawn.choice([1, 2, 4]), drawn.choice([name for name in PLANS if name != "first_rank"])
        ranks = [list(range(4))[4 * r // world : 4 * (r + 1) // world] for r in range(world)]
        own = dataclasses.replace(case, plan=plan)
        found = pool(world).run(HERE, "reshard", own, ranks, step, str(tmp_path))
    assert differences(one_process(case)[1], found) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_one_process(tmp_path: Path) -> None:
    """A checkpoint of one process loads into shards."""
    case = Case("row_wise", "int8", "rowwise_adagrad", one_id=True)
    model = Model(collection(case))
    train(case, model, [0, 1])
    state = {f"ebc.{name}": t for name, t in model.ebc.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=str(tmp_path), no_dist=True)
    outputs = train(case, model, [0, 1])
    found = pool(2).run(HERE, "load", case, str(tmp_path))
    assert all(torch.equal(torch.cat(got), want) for *got, want in zip(*(o for o, _ in found), outputs, strict=True))
    assert differences(dict(model.ebc.state_dict()), [blocks for _, blocks in found]) == []


@pytest.mark.parametrize("format", ["int8", *full("fp32")])
def test_first_rows(format: str) -> None:
    """Initial rows of a collection on the meta device are equal in every plan, with the whole table's spread."""
    case = Case(format=format, optimizer="sgd")
    plans = ["table_wise", "row_wise"]
    found = [pool(2).run(HERE, "from_meta", dataclasses.replace(case, plan=plan)) for plan in plans]
    name = "embedding_bags.t2.weight"
    whole = next(rank[name][0][1] for rank in found[0] if rank[name])
    halves = torch.cat([rank[name][0][1] for rank in found[1]])
    assert torch.equal(whole, halves)
    floats = whole if format == "fp32" else rk.dequantize_rows(whole, format, 16)
    assert floats.abs().max() < 1.1 * 1030**-0.5
    assert 0.9 < floats.std() / (1030**-0.5 / 3**0.5) < 1.1


def test_bad_batches() -> None:
    """The rank of a bad batch names feature and bag; the others raise its message; nothing changes, and all go on."""
    case = Case("mixed", optimizer="sgd")
    (others, same0, after0), (own, same1, after1) = pool(2).run(HERE, "bad_batches", case)
    assert same0
    assert same1
    assert " ".join(t.partition(":")[0] for t in own) == "IndexError KeyError TypeError ValueError ValueError TypeError"
    assert "feature 'f2', bag 3: id 1030 must be in [0, 1030)" in own[0]
    assert all(text.startswith("OtherRankError: another rank refused its batch") for text in others)
    assert all(f"rank 1: {text}" in other for text, other in zip(own, others, strict=True))
    outputs = one_process(case)[0]
    for got, want in zip(zip(after0, after1, strict=True), outputs, strict=True):
        torch.testing.assert_close(torch.cat(got), want)


@pytest.mark.parametrize(
    ("plan", "format"), [("row_wise", "int8"), ("table_wise", "fp32"), *full(("row_wise", "fp32"))]
)
def test_carried_over(plan: str, format: str) -> None:
    """A changed learning rate, and frozen features and tables, are kept by sharding."""
    case = Case(plan, format, "rowwise_adagrad")
    model = Model(prepared(case))
    train(case, model, [0, 1])
    assert differences(dict(model.ebc.state_dict()), pool(2).run(HERE, "run_prepared", case)) == []


@pytest.mark.parametrize("plan", ["mixed", *full("table_wise")])
def test_uneven_data(plan: str) -> None:
    """until_all_end() feeds a rank whose data ended, with one process's updates; failing data stop all ranks."""
    case = Case(plan, optimizer="adam")
    (steps, first, errors), (others, second, failed) = pool(2).run(HERE, "uneven", case)
    assert steps == others == 3
    model = collection(case)
    for step in range(3):
        model(batch(case, step, [0, 1] if step == 0 else [0])).values().sum().backward()
    assert differences(dict(model.state_dict()), [first, second]) == []
    assert failed == ["OSError: no more data"]
    assert errors == ["OtherRankError: another rank could not read its batches: rank 1: OSError: no more data"]


@pytest.mark.parametrize(("what", "text"), [("plan", "the plan"), ("optimizer", "the optimizer")])
def test_unlike_ranks(what: str, text: str) -> None:
    """Different settings of ranks raise on all ranks."""
    errors = pool(2).run(HERE, "different_ranks", Case(optimizer="sgd"), what)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"{text} must be the same on all ranks: rank 0 has")
    assert errors[0].endswith("a planner's collective_plan() gives all ranks the same plan") == (what == "plan")


def test_shards_of_one_rank_fail() -> None:
    """A failing shard on one rank raises on all ranks, which can go on."""
    (other, first), (own, second) = pool(2).run(HERE, "failing_init", Case("row_wise", steps=1))
    assert own == "OSError: no rows here"
    assert other == "OtherRankError: another rank could not make its shards: rank 1: OSError: no rows here"
    assert first
    assert second


def test_plan_of_one_rank_is_refused() -> None:
    """An invalid plan on one rank raises on all ranks before they wait for each other."""
    other, own = pool(2).run(HERE, "bad_plan", Case())
    assert own.startswith("ValueError: the plan must have each of the tables")
    assert other == f"OtherRankError: another rank cannot shard by its plan, and no rank has: rank 1: {own}"


def test_replicas_begin_alike() -> None:
    """Replicas start with the first rank's rows and step."""
    first, second = pool(2).run(HERE, "replicas", Case("data_parallel", optimizer="sgd", format="bf16"))
    assert torch.equal(first[0], second[0])
    assert first[0].abs().max() < 1.5
    assert first[1] == second[1] == 7


@pytest.mark.full
def test_killed_rank() -> None:
    """If a rank is killed, the others raise an error of the process group at once."""
    with pytest.raises(WorkerError, match=r"(?s)rank 0: .*RuntimeError.*without an answer: \[1\]"):
        pool(2).run(HERE, "killed", Case())


@pytest.mark.parametrize("plan", ["mixed", *full("one_rank")])
def test_options(plan: str) -> None:
    """accumulate(), freeze(), requires_grad and rates of TorchRec's optimizer work as in one process."""
    case = Case(plan, optimizer="adam")
    found = pool(2).run(HERE, "options", case)
    model = Model(collection(case))
    whole = use_options(case, model, model.ebc, model.ebc.fused_optimizer, [0, 1])
    assert differences(dict(whole), found) == []


PAIRS = [("table_wise", "column_wise"), ("mixed", "row_wise")]
PAIRS += full(("one_rank", "data_parallel"), ("grid_shard", "mixed"))


@pytest.mark.parametrize(("plan", "other"), PAIRS)
@pytest.mark.parametrize("rates", [(None, 0.3, 0.02), *full(((0.3, None, None),), ((0.1, 0.2, 0.3),))])
def test_rates_of_tables(plan: str, other: str, rates: tuple, tmp_path: Path) -> None:
    """Learning rates per table: groups, schedulers and states equal one process's in every plan."""
    check_rates(Case(plan, "bf16", "adam", sizes=(8, 5), one_id=True, rates=rates), other, tmp_path)


@pytest.mark.parametrize(("plan", "other"), [("table_wise", "mixed"), *full(("mixed", "one_rank"))])
def test_optimizers_of_tables(plan: str, other: str, tmp_path: Path) -> None:
    """Optimizers per table: groups, rates and states equal one process's in every plan; groups name their optimizer."""
    own = (None, "lamb", "sgd")
    case = Case(plan, "bf16", "adam", sizes=(8, 5), one_id=True, rates=(None, 0.3, 0.1), optimizers=own)
    groups = check_rates(case, other, tmp_path)["param_groups"]
    assert [group["optimizer"] for group in groups] == ["Adam", "LAMB", "SGD"]


def check_rates(case: Case, other: str, tmp_path: Path) -> dict:
    """Compares ranks that train and go on in another plan with one process; returns its optimizer's state."""
    rates = case.rates
    model = Model(collection(case))
    face = model.ebc.fused_optimizer
    state = train_rates(case, model, model.ebc, face, [0, 1])
    found = pool(2).run(HERE, "rates", case, dataclasses.replace(case, plan=other), state, str(tmp_path / "checkpoint"))
    assert len(face.param_groups) == len(set(rates))
    assert [own[0] for own in found] == [[group["lr"] for group in face.param_groups]] * 2
    first = [f"t{i}" for i in range(3) if rates[i] is None]
    groups = [first] * bool(first) + [[f"t{i}"] for i in range(3) if rates[i] is not None]
    assert [sorted({*a, *b}) for a, b in zip(found[0][1], found[1][1], strict=True)] == groups
    assert [own[2] for own in found] == [state] * 2
    assert all(torch.equal(own[5], model.ebc.lr) for own in found)
    assert differences(dict(model.ebc.state_dict()), [own[3] for own in found]) == []
    train(case, model, [0, 1])
    assert differences(dict(model.ebc.state_dict()), [own[4] for own in found]) == []
    return state


@pytest.mark.parametrize("plan", ["mixed", *full("table_wise", "row_wise", "data_parallel")])
def test_beside_fsdp(plan: str) -> None:
    """With layers under FSDP2, losses, layers and tables equal one process's."""
    case = Case(plan, optimizer="adagrad", gradient="global_mean", sizes=(8, 8))
    found = pool(2).run(HERE, "with_fsdp", case)
    model = WithLayers(collection(case))
    losses = train_layers(case, model, [0, 1])
    of_ranks = [sum(pair) / 2 for pair in zip(*(own for own, _, _, _ in found), strict=True)]
    torch.testing.assert_close(of_ranks, losses, rtol=1e-5, atol=1e-6)
    for _, tables, layers, held in found:
        assert sum(held) < sum(weight.numel() for weight in layers.values())
        for name, weight in model.dense.named_parameters():
            torch.testing.assert_close(layers[name], weight.detach(), rtol=1e-4, atol=1e-5)
        for name, whole in model.ebc.state_dict().items():
            for offsets, block in tables[name]:
                place = tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
                torch.testing.assert_close(block, whole[place], rtol=1e-4, atol=1e-5)


def test_planner_and_pipeline() -> None:
    """planner() makes all ranks' plan; TorchRec's pipelined step has the bits of a loop with dense parts under DDP."""
    assert pool(2).run(HERE, "pipelined", Case(optimizer="rowwise_adagrad")) == [[True] * 4] * 2


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_example(tmp_path: Path) -> None:
    """The example learns which products are discounted, fits on a page, and one process loads its checkpoint."""
    pytest.importorskip("sklearn")
    arguments = ["--format", "int8", "--checkpoint", str(tmp_path)]
    aucs = pool(2).run(HERE, "example", groceries(), arguments)
    assert aucs[0] == aucs[1] > 0.95
    table = rk.EmbeddingBagConfig(41, 16, name="household_id", feature_names=["f"], format="int8")
    state = rk.EmbeddingBagCollection([table], optimizer=rk.RowwiseAdagrad()).state_dict()
    dcp.load({"model": {f"tables.{name}": t for name, t in state.items()}}, checkpoint_id=str(tmp_path), no_dist=True)
    assert state["step"] == 75
    assert (state["embedding_bags.household_id.sum"] > 0).sum() == 40
    assert len((EXAMPLES / "train_torchrec.py").read_text().splitlines()) <= 120


def test_page() -> None:
    """The example of docs/distributed.md runs, and the page quotes an error exactly."""
    text = (EXAMPLES.parent / "docs" / "distributed.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    pool(2).run(HERE, "page", block)
    from rec_kernels.distributed.parameter_sharding import shards_from_plan

    case = REFUSED[0][0]
    ebc = collection(case, device="meta")
    with pytest.raises(ValueError, match="column_wise") as raised:
        shards_from_plan(ebc.tables, ebc.optimizer, plan_of(case, 2), 2)
    assert str(raised.value) in " ".join(text.split())


BY_ROWS = "in parts, which can be split by rows only; it can be sharded table_wise, row_wise, table_row"
REFUSED = [
    (Case("column_wise", optimizer="rowwise_adagrad"), "t0.* column_wise: RowwiseAdagrad has one state .* row_wise"),
    (Case("column_wise", optimizers=(None, "rowwise_adagrad", None)), "t1.* column_wise: RowwiseAdagrad has one"),
    (Case("column_wise", optimizer="lamb"), "LAMB scales an update by the norm of the whole row"),
    (Case("column_wise", optimizer="clipped"), "clip_grad_norm=0.5 clips by the norm"),
    (Case("grid_shard", "int8"), "rows of format int8 have scales that span all columns; it can be sharded table_wise"),
    (
        Case("row_wise", compression=rk.MixedDimension(6)),
        "a projection, .*; it can be sharded table_wise, data_parallel",
    ),
    (Case("grid_shard", optimizer="sgd", compression=rk.QuotientRemainder(10)), BY_ROWS),
    (Case("column_wise", optimizer="sgd", compression=rk.QuotientRemainder(10, "concat")), BY_ROWS),
]


@pytest.mark.parametrize(("case", "text"), REFUSED)
def test_refused_plans(case: Case, text: str) -> None:
    """The error has the table, the reason, and the possible sharding types."""
    from rec_kernels.distributed.parameter_sharding import shards_from_plan

    ebc = collection(case, device="meta")
    with pytest.raises(ValueError, match=text):
        shards_from_plan(ebc.tables, ebc.optimizer, plan_of(case, 2), 2)


def test_wrong_plans() -> None:
    """Missing tables, unknown ranks and incomplete blocks are rejected."""
    from rec_kernels.distributed.parameter_sharding import shards_from_plan

    ebc, plan = collection(Case(), device="meta"), plan_of(Case(), 3)
    with pytest.raises(ValueError, match=r"the plan must have each of the tables .* got \['t0'\]"):
        shards_from_plan(ebc.tables, ebc.optimizer, {"t0": plan["t0"]}, 3)
    with pytest.raises(ValueError, match="table 't1': the plan has rank 2, but there are only 2 ranks"):
        shards_from_plan(ebc.tables, ebc.optimizer, plan, 2)
    plan["t0"].sharding_spec.shards[0].shard_sizes[0] -= 1
    with pytest.raises(ValueError, match="table 't0': the plan's shards must cover its 100 rows"):
        shards_from_plan(ebc.tables, ebc.optimizer, plan, 3)
    twice = plan_of(Case("grid_shard"), 2)
    blocks = twice["t1"].sharding_spec.shards  # by rows, then columns; 57 rows are 29 and 28
    blocks[2].shard_offsets[0], blocks[2].shard_sizes[0] = 28, 28
    with pytest.raises(ValueError, match="table 't1': the plan's shards must cover its 57 rows"):
        shards_from_plan(ebc.tables, ebc.optimizer, twice, 2)


IDS = torch.tensor([1, 2, 3])
WRONG_BATCHES = [
    (
        (IDS.float(), torch.tensor([0, 1, 3]), None),
        "values must be int32 or int64 with one dimension, got torch.float32",
    ),
    ((IDS, torch.tensor([0, 2, 1]), None), r"offsets\[2\] = 1 \(feature 'b', bag 0\) is below"),
    ((IDS, torch.tensor([0, 1, 4]), None), "offsets"),
    ((IDS, torch.tensor([0, 1]), None), "offsets must have one element more than .* of 2 features, got 2 elements"),
    ((IDS, torch.tensor([0, 1, 3]), torch.ones(2)), "weights must have values' shape"),
    ((IDS, torch.tensor([0, 1, 3]), torch.ones(3, dtype=torch.int64)), "weights must be floating-point"),
]


@pytest.mark.parametrize(("tensors", "text"), WRONG_BATCHES)
def test_wrong_tensors(tensors: tuple, text: str) -> None:
    """Invalid tensors in unchecked containers are rejected on the rank that feeds them, before they reach others."""
    from rec_kernels.distributed.batch_checks import checked_batch

    values, offsets, weights = tensors
    parts = {"keys": lambda: ["a", "b"], "values": lambda: values, "offsets": lambda: offsets}
    with pytest.raises(ValueError, match=text):
        checked_batch(SimpleNamespace(**parts, weights_or_none=lambda: weights), ["a", "b"], [9, 9], "error")


def test_plans_of_torchrec() -> None:
    """TorchRec's manual plans for two ranks of one host have the expected blocks and replicas."""
    from torchrec.distributed import sharding_plan as by_hand

    from rec_kernels.distributed.parameter_sharding import shards_from_plan

    ebc, sharder = collection(Case(), device="meta"), rk.distributed.EmbeddingBagCollectionSharder()

    def shards(*kinds: object) -> list[tuple]:
        ways = {f"t{i}": kind for i, kind in enumerate(kinds)}
        sizes = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
        plan = by_hand.construct_module_sharding_plan(ebc, ways, sharder=sharder, **sizes)
        return [dataclasses.astuple(s) for s in shards_from_plan(ebc.tables, ebc.optimizer, plan, 2)]

    table, rows = by_hand.table_wise(rank=1), by_hand.row_wise()
    assert shards(table, rows, by_hand.data_parallel()) == [
        (0, 1, 0, 100, 0, 16, False),
        (1, 0, 0, 29, 0, 16, False),
        (1, 1, 29, 28, 0, 16, False),
        (2, 0, 0, 1030, 0, 16, True),
        (2, 1, 0, 1030, 0, 16, True),
    ]
    assert shards(by_hand.column_wise(ranks=[1, 0]), by_hand.table_row_wise(host_index=0), table) == [
        (0, 1, 0, 100, 0, 8, False),
        (0, 0, 0, 100, 8, 8, False),
        (1, 0, 0, 29, 0, 16, False),
        (1, 1, 29, 28, 0, 16, False),
        (2, 1, 0, 1030, 0, 16, False),
    ]


def test_sharder() -> None:
    """The sharder has TorchRec's arguments, and the sharding types for a planner."""
    sharder = rk.distributed.EmbeddingBagCollectionSharder
    with pytest.raises(ValueError, match="gradient must be"):
        sharder(gradient="mean")
    with pytest.raises(ValueError, match="row_wise must be"):
        sharder(row_wise="any")
    with pytest.raises(ValueError, match=r"sharding_types\[0\] must be"):
        sharder(sharding_types=["rows"])
    ebc = collection(Case(optimizer="rowwise_adagrad"), device="meta")
    offered = sharder(sharding_types=("column_wise", "table_wise")).constraints(ebc)
    assert {name: c.sharding_types for name, c in offered.items()} == {f"t{i}": ["table_wise"] for i in range(3)}
    with pytest.raises(ValueError, match=r"table 't0' can be sharded table_wise, .* \['column_wise'\] has none"):
        sharder(sharding_types=("column_wise",)).constraints(ebc)
    assert set(PLANS["mixed"]) < {"table_wise", "row_wise", "column_wise", "data_parallel"}


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_what_is_relied_on() -> None:
    """Signatures of TorchRec 1.8 and torch that are overridden or called, partly undocumented, are as expected."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
    from torchrec.distributed.embedding_sharding import KJTListAwaitable, KJTListSplitsAwaitable
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import ParameterConstraints, Perf, ShardEstimator, Storage
    from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardedModule
    from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    from torchrec.streamable import Multistreamable

    assert parameters(ModuleSharder.__init__) == ["qcomm_codecs_registry"]
    assert parameters(ModuleSharder.shard) == ["module", "params", "env", "device", "module_fqn"]
    assert parameters(ModuleSharder.shardable_parameters) == ["module"]
    assert parameters(ModuleSharder.sharding_types) == ["compute_device_type"]
    assert parameters(ModuleSharder.compute_kernels) == ["sharding_type", "compute_device_type"]
    assert ShardedModule.__abstractmethods__ == {
        *("__init__", "create_context", "input_dist", "compute", "output_dist", "unsharded_module_type")
    }
    assert parameters(ShardedModule.input_dist) == ["ctx", "input", "kwargs"]
    assert parameters(ShardedModule.compute) == ["ctx", "dist_input"]
    assert parameters(ShardedModule.output_dist) == ["ctx", "output"]
    assert FusedOptimizerModule.__abstractmethods__ == {"fused_optimizer"}
    assert FusedOptimizer.__abstractmethods__ == {"step", "zero_grad"}
    assert Multistreamable.__abstractmethods__ == {"record_stream"}
    assert parameters(KJTAllToAllTensorsAwaitable.__init__) == [
        *("pg", "input", "splits", "input_splits", "output_splits", "input_tensors", "labels", "keys", "device"),
        *("stagger", "stride_per_rank"),
    ]
    assert {"stride", "stride_per_key_per_rank"} <= set(parameters(KeyedJaggedTensor.__init__))
    assert parameters(KeyedJaggedTensor.stride_per_key_per_rank) == []
    ids = KeyedJaggedTensor(["f"], torch.ones(3), torch.ones(3), torch.tensor([3]), stride_per_key_per_rank=[[1]])
    assert ids.dist_labels() == ["lengths", "values", "strides", "weights"]
    assert [len(part) for part in ids.dist_tensors()] == [1, 3, 1, 3]
    assert parameters(KJTListSplitsAwaitable.__init__)[:2] == ["awaitables", "ctx"]
    assert parameters(KJTListAwaitable.__init__) == ["awaitables", "ctx"]
    assert {"sharding_type", "compute_kernel", "ranks", "sharding_spec"} <= set(parameters(ParameterSharding))
    assert {"sharding_types", "pooling_factors"} <= set(parameters(ParameterConstraints))
    assert {"topology", "batch_size", "enumerator", "constraints"} <= set(parameters(EmbeddingShardingPlanner))
    assert parameters(EmbeddingEnumerator.__init__)[:4] == ["topology", "batch_size", "constraints", "estimator"]
    assert ShardEstimator.__abstractmethods__ == {"__init__", "estimate"}
    assert parameters(Perf)[:5] == ["fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "input_dist_comms"]
    assert parameters(Storage)[:2] == ["hbm", "ddr"]
    assert parameters(Topology(2, "cpu").comms_bandwidths.get_bw)[0] == "local_world_size"
    make = parameters(ShardedTensor._init_from_local_shards_and_global_metadata)
    assert make[:3] == ["local_shards", "sharded_tensor_metadata", "process_group"]


@pytest.mark.parametrize("name", rk.distributed.__all__)
def test_documented(name: str) -> None:
    """Public names are on the page, and their arguments in docstrings."""
    thing, page = getattr(rk.distributed, name), (EXAMPLES.parent / "docs" / "distributed.md").read_text()
    assert f"rk.distributed.{name}" in page
    assert [a for a in inspect.signature(thing).parameters if not re.search(rf"\b{a}\b", own_docstring(thing))] == []


def test_torchrec_is_imported_late() -> None:
    """Only rk.distributed imports TorchRec; without it, the error names the requirement."""
    script = "import sys, rec_kernels as rk; print('torchrec' in sys.modules); sys.modules['torchrec'] = None"
    done = run_script(f"{script}; rk.distributed")
    assert done.stdout.strip() == "False"
    assert re.search(r"ImportError: rk.distributed needs torchrec 1.8.0, .* mypy_extensions", done.stderr)
