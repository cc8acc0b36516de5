"""rk.distributed.planner: its estimates of bytes, and its plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from distributed_cases import OPTIMIZERS, Case, collection, plan_of
from tiers import full
from torch import nn

import rec_kernels as rk

torchrec = pytest.importorskip("torchrec.distributed")
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """Tables, and a layer that is not sharded."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.top = nn.Linear(8, 1)


def tables_of(rows: list[int], dim: int = 16, **options: object) -> rk.EmbeddingBagCollection:
    """Tables of one feature each, on the meta device."""
    configs = [rk.EmbeddingBagConfig(n, dim, name=f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate(rows)]
    return rk.EmbeddingBagCollection(configs, device="meta", **{"optimizer": rk.SGD(), **options})


def planned(
    tables: nn.Module, world: int = 2, types: tuple[str, ...] = ("table_wise", "row_wise"), **given: object
) -> tuple[dict[str, str], list]:
    """Returns the sharding type of each table, and the options of the plan."""
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    memory = {name: given.pop(name) for name in ("ddr_cap", "hbm_cap", "compute_device") if name in given}
    topology = Topology(world, **{"compute_device": "cpu", "local_world_size": world, **memory})
    model, pools = Model(tables), not isinstance(tables, rk.EmbeddingCollection)
    kind = rk.distributed.EmbeddingBagCollectionSharder if pools else rk.distributed.EmbeddingCollectionSharder
    sharder = kind(sharding_types=types, **{key: given.pop(key) for key in ("wire", "row_wise") if key in given})
    reservation = FixedPercentageStorageReservation(0)
    planner = rk.distributed.planner(
        model, [sharder], topology, storage_reservation=reservation, debug=False, **{"batch_size": 64, **given}
    )
    plan = planner.plan(model, [sharder]).plan["tables"]
    return {name: sharding.sharding_type for name, sharding in plan.items()}, planner._best_plan


every_plan = pytest.mark.parametrize("plan", ["row_wise", "mixed", *full("table_wise", "data_parallel", "grid_shard")])
SLOTS = rk.RowCache({"t0": 1.0, "t2": 0.0}, ways=8, policy="lfu")  # fraction 1: each table has its own slots


@every_plan
@pytest.mark.parametrize("format", ["bf16", *full("int8", "fp32", "mx6")])
@pytest.mark.parametrize("optimizer", ["adam", "own", *full("rowwise_adagrad", "sgd", "adam_bf16", "torch")])
def test_bytes(plan: str, format: str, optimizer: str) -> None:
    """Estimated bytes of rows, state and slots are those of each rank's collection."""
    own = ("sgd", None, "rowwise_adagrad") if optimizer == "own" else (None,) * 3
    optimizer = "adam" if optimizer == "own" else optimizer
    cache = SLOTS if OPTIMIZERS[optimizer] else None
    check_bytes(Case(plan, format, optimizer, optimizers=own, cache=cache))


@pytest.mark.full
@every_plan
def test_bytes_of_slots_without_counts(plan: str) -> None:
    """Without policy counts, rows and state have equal bytes; one format and optimizer are enough."""
    check_bytes(Case(plan, "bf16", "adam", cache=replace(SLOTS, policy="lru")))


@pytest.mark.parametrize("compression", [rk.QuotientRemainder(7), *full(rk.Hash(30))])
@pytest.mark.parametrize("policy", ["lfu", *full("lru")])
def test_bytes_of_split_parts(compression: object, policy: str) -> None:
    """Each rank has a block of every part."""
    fraction = {"t0": 1.0} if isinstance(compression, rk.Hash) else 0.0
    check_bytes(Case("row_wise", compression=compression, cache=rk.RowCache(fraction, ways=8, policy=policy)))


def check_bytes(case: Case) -> None:
    """Compares the bytes of shards with the reports of ranks' collections."""
    from rec_kernels.distributed.local_shards import make_local_collection, stored_blocks
    from rec_kernels.distributed.parameter_sharding import sharding_refusal, shards_from_plan
    from rec_kernels.distributed.planning import shard_bytes
    from rec_kernels.distributed.routes import Routes
    from rec_kernels.distributed.table_parts import LookupMap

    whole, kinds = collection(case, device="meta"), plan_of(case, 2)
    if any(sharding_refusal(t, whole.optimizer, kinds[t.name].sharding_type) for t in whole.tables):
        pytest.skip("no such plan")
    shards = shards_from_plan(whole.tables, whole.optimizer, kinds, 2)
    parts = LookupMap(whole.tables, shards, pooled=True, row_wise="ordered")
    for rank in range(2):
        routes = Routes(parts, rank, 2)
        own = [piece for piece in stored_blocks(parts) if piece.shard.rank == rank]
        made = make_local_collection(whole, parts, routes.own, own, torch.device("cpu"), "")
        report = [(int(t["name"][1]), t) for t in made.memory_report()]
        for table in {parts.owners[piece.shard.table] for piece in own}:
            blocks = [s for s in shards if s.table == table and s.rank == rank]
            found = [shard_bytes(whole, whole.tables[table], s.rows, s.columns, s.first_row) for s in blocks]
            reported = [t for owner, t in report if owner == table]
            for i, key in enumerate(("weight_bytes", "state_bytes", "cache_bytes")):
                assert sum(each[i] for each in found) == sum(t.get(key, 0) for t in reported)


def test_bytes_of_parts() -> None:
    """A compressed table has the bytes of its parts; slots for a fraction of the rows are that share of the bytes."""
    from rec_kernels.distributed.planning import shard_bytes

    table = rk.EmbeddingBagConfig(
        1000, 8, name="t", feature_names=["f"], format="int8", compression=rk.QuotientRemainder(10)
    )
    ebc = rk.EmbeddingBagCollection([table], optimizer=rk.RowwiseAdagrad(), cache=rk.RowCache(0.0))
    report = ebc.memory_report()
    weights, state = (sum(t[f"{name}_bytes"] for t in report) for name in ("weight", "state"))
    assert tuple(shard_bytes(ebc, table, 1000, 8)) == (weights, state, 0)
    cached = tables_of([1000], cache=rk.RowCache(0.1, ways=32))
    assert shard_bytes(cached, cached.tables[0], 1000, 16).slots == 4 * 32 * (4 * 16 + 18)
    assert shard_bytes(cached, cached.tables[0], 500, 16).slots == 2 * 32 * (4 * 16 + 18)
    assert shard_bytes(cached, cached.tables[0], 20, 16).slots == 32 * (4 * 16 + 18)


def test_bytes_sent() -> None:
    """Row shards send a row per bag or per id, other shards once per bag; sequences send a row per id."""
    sent = {}
    for kind in ("table_wise", "row_wise", "data_parallel"):
        _, options = planned(tables_of([1000]), types=(kind,), lengths={"f0": 3})
        sent[kind] = sum(shard.perf.bwd_comms for option in options for shard in option.shards)
        forward = sum(shard.perf.fwd_comms for option in options for shard in option.shards)
        assert forward == (0 if kind == "data_parallel" else sent[kind])
    assert sent["row_wise"] == sent["data_parallel"] == 2 * sent["table_wise"] > 0
    _, ((option,)) = planned(tables_of([2]), world=4, types=("row_wise",))
    assert [shard.perf.total > 0 for shard in option.shards] == [True, True, False, False]
    _, ((option,)) = planned(tables_of([1000]), types=("row_wise",), lengths={"f0": 3}, row_wise="exact")
    assert sum(shard.perf.bwd_comms for shard in option.shards) == pytest.approx(3 * sent["table_wise"])
    for compression, row_wise, rows in (
        (rk.Hash(100), "ordered", 2 * 128),  # bags of each shard
        (rk.QuotientRemainder(10), "ordered", 2 * 2 * (50 + 5)),  # each row once for each rank
        (rk.QuotientRemainder(10), "exact", 2 * 3 * 128),
        (rk.QuotientRemainder(10, "add"), "ordered", 2 * 2 * 128),
    ):
        config = rk.EmbeddingBagConfig(1000, 16, name="t0", feature_names=["f0"], compression=compression)
        whole = rk.EmbeddingBagCollection([config], device="meta", optimizer=rk.SGD())
        _, ((option,)) = planned(whole, types=("row_wise",), lengths={"f0": 3}, row_wise=row_wise)
        found = sum(shard.perf.bwd_comms for shard in option.shards)
        assert found == pytest.approx(sent["table_wise"] * rows / 128)
    table = rk.EmbeddingConfig(1000, 16, name="t0", feature_names=["f0"])
    for kind in ("table_wise", "row_wise"):
        sequences = rk.EmbeddingCollection([table], device="meta", optimizer=rk.SGD())
        _, ((option,)) = planned(sequences, types=(kind,), lengths={"f0": 3})
        assert sum(shard.perf.bwd_comms for shard in option.shards) == pytest.approx(3 * sent["table_wise"])


def test_plans() -> None:
    """Equal tables are placed whole on two ranks, which halves the bytes sent, or row-wise if a rank lacks memory."""
    equal = tables_of([1000] * 4)
    kinds, options = planned(equal)
    assert set(kinds.values()) == {"table_wise"}
    assert sorted(shard.rank for option in options for shard in option.shards) == [0, 0, 1, 1]
    uneven = planned(tables_of([1000] * 7))[0]
    assert sorted(uneven.values()) == ["row_wise"] + ["table_wise"] * 6
    held = 100_000 * 16 * 4 * 3  # with Adam's state
    limits = {"ddr_cap": held * 3 // 4, "lengths": {f"f{i}": 4 for i in range(4)}}
    large = [100_000, 1000, 1000, 1000]
    assert set(planned(tables_of(large, optimizer=rk.SGD()), **limits)[0].values()) == {"table_wise"}
    assert planned(tables_of(large, optimizer=rk.Adam()), **limits)[0]["t0"] == "row_wise"


def test_tables_in_host_memory() -> None:
    """A cache with backing "host" keeps state, slots and a step's rows on the GPU."""
    options = {"optimizer": rk.RowwiseAdagrad(), "cache": rk.RowCache(0.1, backing="host")}
    given = {"compute_device": "cuda", "ddr_cap": 1 << 30, "hbm_cap": 1 << 30, "types": ("table_wise",)}
    ((option,), (plain,)) = (planned(tables_of([100_000], **own), **given)[1] for own in (options, {}))
    (shard,), (other,) = option.shards, plain.shards
    assert shard.storage.ddr == 100_000 * 64
    assert shard.storage.hbm < 100_000 * (4 + 12) == 100_000 * 16
    assert other.storage.ddr == 0
    assert other.storage.hbm > 100_000 * 64


def test_tables_in_files() -> None:
    """Rows in files count as a share of the ranks' budgets, which include slots; the rest is read in blocks."""
    rows, budget = 100_000, 1 << 20
    options = {"optimizer": rk.RowwiseAdagrad(), "types": ("row_wise",), "lengths": {"f0": 100}}
    found = {}
    for path in (None, "rows"):
        own = {"backing": "disk", "path": path, "memory_budget": budget} if path else {}
        cache = rk.RowCache(0.01, **own)
        given = {name: value for name, value in options.items() if name != "optimizer"}
        ((option,),) = planned(tables_of([rows], optimizer=options["optimizer"], cache=cache), **given)[1:]
        found[path] = option.shards
    for memory, file in zip(found[None], found["rows"], strict=True):
        slots = 16 * 32 * (4 * 16 + 18)  # of 500 rows
        assert memory.storage.ddr - file.storage.ddr == rows // 2 * 64 - (budget - slots)
        ids = 64 * 100
        more = (1 - 2 * budget / (rows * 64)) * ids * 4096 / 104857.6
        assert file.perf.fwd_compute - memory.perf.fwd_compute == pytest.approx(more)


def test_constraints() -> None:
    """TorchRec's constraints of a table select its sharding types and set its lengths; others keep theirs."""
    from torchrec.distributed.planner import ParameterConstraints

    types = ("table_wise", "row_wise", "column_wise", "data_parallel")
    constraints = {f"t{i}": ParameterConstraints(sharding_types=[kind]) for i, kind in enumerate(types[:3])}
    found, options = planned(tables_of([100, 50, 40, 30]), types=types, constraints=constraints, lengths={"f0": 3})
    assert found == {"t0": "table_wise", "t1": "row_wise", "t2": "column_wise", "t3": found["t3"]}
    assert next(o for o in options if o.name == "t0").input_lengths == [3]
    for factors, expected in (([7.0], 7), (None, 3)):
        given = {"t0": ParameterConstraints(pooling_factors=factors)}
        found, options = planned(tables_of([100]), types=("row_wise",), constraints=given, lengths={"f0": 3})
        assert found == {"t0": "row_wise"}
        assert options[0].input_lengths == [expected]


def test_errors() -> None:
    """Lengths of unknown features, duplicate table names and models without tables are rejected."""
    from torchrec.distributed.planner import ParameterConstraints

    with pytest.raises(
        ValueError, match=r"lengths name \['x'\], which are not among the features of the model's tables: \['f0'\]"
    ):
        planned(tables_of([10]), lengths={"x": 3})
    row_wise, columns = (ParameterConstraints(sharding_types=[kind]) for kind in ("row_wise", "column_wise"))
    with pytest.raises(ValueError, match=r"constraints name \['x'\], which are not among the model's tables: \['t0'\]"):
        planned(tables_of([10]), constraints={"x": row_wise})
    with pytest.raises(ValueError, match=r"constraints\['t0'\]\.sharding_types = \['column_wise'\] must have one of"):
        planned(tables_of([10]), constraints={"t0": columns})
    name = r"constraints\['t0'\]\.pooling_factors"
    for factors, text in (
        ([1.0, 2.0], rf"{name} must be a list of 1 numbers, one per feature, got \[1\.0, 2\.0\]"),
        ([], rf"{name} must be a list of 1 numbers, one per feature, got \[\]"),
        ([-1.0], rf"{name}\[0\] = -1.0 must be a number, at least 0"),
    ):
        with pytest.raises(ValueError, match=text):
            planned(tables_of([10]), constraints={"t0": ParameterConstraints(pooling_factors=factors)})
    both = nn.ModuleDict({"a": tables_of([10]), "b": tables_of([20])})
    with pytest.raises(ValueError, match=r"tables \['t0'\] of collection 'tables.b' have the same names as others"):
        planned(both)
    with pytest.raises(ValueError, match="model must have a collection that one of the sharders can shard"):
        planned(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": None}, "model must be a torch.nn.Module, got None"),
        ({"sharders": "x"}, "sharders must be a list of sharders, got 'x'"),
        ({"sharders": ["x"]}, r"sharders must be a list of sharders, got \['x'\]"),
        ({"topology": 2}, "topology must be TorchRec's Topology, got 2"),
        ({"batch_size": 0}, "batch_size must be an integer, at least 1 and below 2.63, got 0"),
        ({"lengths": [1]}, r"lengths must be a dict of features' numbers of ids, got \[1\]"),
        ({"constraints": {"t0": 1}}, "constraints must be a dict .* ParameterConstraints, got {'t0': 1}"),
        ({"lengths": {"f0": -1}}, r"lengths\['f0'\] = -1 must be a number, at least 0"),
        ({"lengths": {"f0": "x"}}, r"lengths\['f0'\] = 'x' must be a number, at least 0"),
    ],
)
def test_wrong_arguments(given: dict, text: str) -> None:
    """The planner rejects wrong arguments before TorchRec sees them."""
    from torchrec.distributed.planner import Topology

    known = {"model": Model(tables_of([10])), "sharders": [rk.distributed.EmbeddingBagCollectionSharder()]}
    known["topology"] = Topology(2, compute_device="cpu", local_world_size=2)
    with pytest.raises((TypeError, ValueError), match=text):
        rk.distributed.planner(**{**known, **given})


def test_wrong_sharders() -> None:
    """Sharding types must be a list, and a plan must have the blocks of every table that is not replicated."""
    from rec_kernels.distributed.parameter_sharding import shards_from_plan

    for types in ("row_wise", None, []):
        with pytest.raises(ValueError, match="sharding_types must be a list of one or more of"):
            rk.distributed.EmbeddingBagCollectionSharder(sharding_types=types)
    ebc, plan = collection(Case(), device="meta"), plan_of(Case(), 2)
    plan["t1"].sharding_spec = None
    with pytest.raises(
        ValueError, match="table 't1': the plan must have a sharding_spec with the blocks of table_wise"
    ):
        shards_from_plan(ebc.tables, ebc.optimizer, plan, 2)
    plan = plan_of(Case(), 2)
    plan["t2"].sharding_spec.shards[0].placement = None
    with pytest.raises(ValueError, match="table 't2': the plan has a shard without a placement, such as rank:0/cpu"):
        shards_from_plan(ebc.tables, ebc.optimizer, plan, 2)
    for other in (nn.Linear(2, 1), rk.EmbeddingCollection([rk.EmbeddingConfig(3, 4, name="t", feature_names=["f"])])):
        with pytest.raises(TypeError, match=rf"must be an rk\.EmbeddingBagCollection, got {type(other).__name__}"):
            rk.distributed.EmbeddingBagCollectionSharder().constraints(other)
