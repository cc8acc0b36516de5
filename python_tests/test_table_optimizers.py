"""Optimizers per table: each table trains as in a collection with its optimizer for all tables."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import every_backend
from collection_cases import assert_same
from tiers import cross
from torch import Tensor

import rec_kernels as rk
from rec_kernels.nn.tables.layout import tensors_of
from rec_kernels.ops import embedding_bag_autograd
from rec_kernels.ops.version_counters import call_in_place
from rec_kernels.testing import same_bits

ROWS, STEPS = 12, 3
ALL = [
    rk.SGD(lr=0.05, weight_decay=0.1),
    rk.RowwiseAdagrad(lr=0.3),
    rk.Adagrad(lr=0.2, state_dtype=torch.bfloat16),
    rk.Adam(lr=0.1),
    rk.AdamW(lr=0.1, clip_grad_norm=0.5),
    rk.RowwiseAdam(lr=0.1, betas=(0.5, 0.9)),
    rk.LAMB(lr=0.05),
]
#: Optimizer of each table by name; None: the collection's, ``ALL[0]``.
OWN = {"a": None, "b": ALL[3], "c": ALL[1], "d": ALL[2], "e": ALL[5], "f": rk.Adam(lr=0.3), "g": ALL[1]}
DIMS = {"a": 8, "b": 4, "c": 8, "d": 5, "e": 8, "f": 4, "g": 16}
FEATURES = ["a", "a2", *"bcdefg"]


def configs(own: dict[str, Any], kind: type = rk.EmbeddingBagConfig, **options: Any) -> list[rk.EmbeddingConfig]:
    """Tables of several widths; the first has two features, two are compressed."""
    compressions = {"d": rk.QuotientRemainder(4, compose="per_id"), "g": rk.Hash(7)}
    tables = []
    for name, dim in DIMS.items():
        features = [name, "a2"] if name == "a" else [name]
        given = options | {"compression": compressions.get(name), "optimizer": own[name]}
        tables.append(kind(ROWS, dim, name=name, feature_names=features, **given))
    return tables


def made(own: dict[str, Any], default: Any = ALL[0], kind: Any = rk.EmbeddingBagCollection, **options: Any) -> Any:
    """A collection with the same initial rows, whatever its optimizers."""
    torch.manual_seed(0)
    config = rk.EmbeddingBagConfig if kind is rk.EmbeddingBagCollection else rk.EmbeddingConfig
    tables = configs(own, config, format=options.pop("format", "fp32"))
    if "cache" in options:
        options["cache"] = options["cache"]()
    return kind(tables, optimizer=default, seed=7, **options)


def uniform(optimizer: Any, **options: Any) -> Any:
    """A collection with one optimizer for all tables."""
    return made(dict.fromkeys(DIMS), optimizer, **options)


def batch(step: int, *, weights: Tensor | None = None) -> rk.KeyedJaggedTensor:
    """Bags of three ids, with duplicates."""
    ids = torch.randint(ROWS, (len(FEATURES) * 4 * 3,), generator=torch.Generator().manual_seed(step))
    return rk.KeyedJaggedTensor(FEATURES, ids, weights, lengths=torch.full((len(FEATURES) * 4,), 3))


def by_feature(output: Any) -> dict[str, Tensor]:
    """The outputs by feature, of any kind of collection."""
    output = output if isinstance(output, dict) else output.to_dict()
    return {name: t if isinstance(t, Tensor) else t.values() for name, t in output.items()}


def loss_of(output: Any) -> Tensor:
    """A loss whose gradient of a feature depends on that feature alone."""
    return sum(t.square().sum() for t in by_feature(output).values())


def one_backward_per_step(collection: Any) -> None:
    """One backward per step."""
    for step in range(STEPS):
        loss_of(collection(batch(step))).backward()


def check(way: Callable[[Any], Any] = one_backward_per_step, **options: Any) -> Any:
    """Trains by ``way``, compares each table with the collection of its optimizer, and returns the mixed result."""
    mixed = made(OWN, **options)
    found = way(mixed)
    state, seen = mixed.state_dict(), set()
    for optimizer in dict.fromkeys(OWN.values()):
        other = uniform(optimizer or ALL[0], **options)
        before = {name: t.clone() for name, t in other.state_dict().items()}
        results = way(other)
        tables = [name for name, own in OWN.items() if own == optimizer]
        seen |= compare(state, other.state_dict(), before, tables)
        for name, result in (results or {}).items():
            if name[0] in tables:
                assert same_bits(found[name], result), name
    left = {name for name in state if not name.startswith(("beta_powers", "row_cache.", "file_")) and name != "step"}
    assert left == seen
    assert int(mixed.step) == int(other.step) > 0
    return mixed


def compare(state: dict, other: dict, before: dict, tables: list[str]) -> set[str]:
    """Asserts that tables and their state are equal in two states, and changed; returns their names."""
    names = [n for n in other if re.fullmatch(rf"embedding\w*\.({'|'.join(tables)})(_\d)?\.\w+", n)]
    for name in names:
        assert same_bits(state[name], other[name]), name
        if not name.endswith(".format"):
            assert not same_bits(state[name], before[name]), name
    return set(names)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "mx6"])
def test_formats(format: str) -> None:
    """Every format works, also with noise by step, table, row and column."""
    check(format=format)


@pytest.mark.parametrize(("a", "b"), cross(range(len(ALL)), range(len(ALL)), 3))
def test_pairs(a: int, b: int) -> None:
    """Each pair of optimizers in both orders; the second has its own rate."""
    optimizers = {"x": ALL[a], "y": ALL[b]}

    def of(given: dict[str, Any], default: Any) -> Any:
        torch.manual_seed(1)
        sizes = {"x": 6, "y": 8}
        tables = [
            rk.EmbeddingBagConfig(
                ROWS, d, name=n, feature_names=[n], optimizer=given.get(n), lr=0.25 if n == "y" else None
            )
            for n, d in sizes.items()
        ]
        collection = rk.EmbeddingBagCollection(tables, optimizer=default)
        for step in range(2):
            ids = torch.randint(ROWS, (5, 2), generator=torch.Generator().manual_seed(step))
            loss_of(collection({"x": ids, "y": ids.flip(0)})).backward()
        return collection

    mixed = of(optimizers, None).state_dict()
    for name, optimizer in optimizers.items():
        alone = of({}, optimizer).state_dict()
        for key in [k for k in alone if k.startswith(f"embedding_bags.{name}.")]:
            assert same_bits(mixed[key], alone[key]), key


def test_accumulated() -> None:
    """Several micro-batches make one update by each optimizer."""

    def way(collection: Any) -> None:
        for step in range(STEPS):
            with collection.accumulate():
                for part in range(2):
                    loss_of(collection(batch(2 * step + part))).backward()

    mixed = check(way, format="int8")
    assert int(mixed.step) == STEPS


@pytest.mark.parametrize("joint", [False, True])
def test_gradients_of_weights(joint: bool) -> None:
    """Per-sample weights have the gradient of the rows before the update, also of two lookups in one backward."""

    def way(collection: Any) -> dict[str, Tensor]:
        weights = torch.rand(len(FEATURES) * 12, generator=torch.Generator().manual_seed(3)).requires_grad_()
        for step in range(STEPS):
            loss = loss_of(collection(batch(step, weights=weights)))
            if joint:
                loss = loss + loss_of(collection(batch(step + 9, weights=weights)))
            loss.backward()
        grads = weights.grad.view(len(FEATURES), -1)
        return dict(zip(FEATURES, grads, strict=True))

    check(way)


def test_tied_weights() -> None:
    """Dense gradients of some tables join their optimizer's update; the step counts once."""

    def way(collection: Any) -> None:
        for step in range(STEPS):
            weights = collection.embedding_bags
            penalty = sum(weights[name].weight.square().sum() * 0.1 for name in "bce")
            (loss_of(collection(batch(step))) + penalty).backward()

    assert int(check(way).step) == STEPS
    alone = made(OWN)
    before = {name: t.clone() for name, t in alone.state_dict().items()}
    alone.embedding_bags["b"].weight.square().sum().backward()
    changed = {name for name, t in alone.state_dict().items() if not torch.equal(t, before[name])}
    held = {f"embedding_bags.b.{kind}" for kind in ("weight", "exp_avg", "exp_avg_sq")}
    # The powers count all updates, also of other tables.
    assert changed == held | {"step", "beta_powers", "beta_powers_1"}


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_scaled_losses(format: str) -> None:
    """An overflow of any output skips all updates, and lowers the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def way(collection: Any) -> None:
        collection.set_grad_scaler(scaler)
        for step in range(STEPS):
            (loss_of(collection(batch(step))) * 4.0).backward()
            collection.fused_optimizer.step()

    mixed = check(way, format=format)
    before = {name: t.clone() for name, t in mixed.state_dict().items()}
    (by_feature(mixed(batch(0)))["b"] * torch.inf).sum().backward()
    assert all(same_bits(t, before[name]) for name, t in mixed.state_dict().items())
    assert mixed.fused_optimizer.param_groups[0]["params"][-1].grad.item() == torch.inf


def test_frozen() -> None:
    """Features and tables may be frozen, up to all of an optimizer."""

    def way(collection: Any) -> None:
        collection.freeze("a2", "e")
        collection.embedding_bags["b"].weight.requires_grad_(False)
        for step in range(STEPS):
            loss_of(collection(batch(step))).backward()
            if step == 0:
                collection.unfreeze("e")
                collection.embedding_bags["b"].weight.requires_grad_(True)

    check(way)


@pytest.mark.parametrize("strided", [False, True])
def test_deduplicated(strided: bool) -> None:
    """Bags shared by samples, and batch sizes per feature."""

    def way(collection: Any) -> None:
        for step in range(STEPS):
            few = rk.InverseKeyedJaggedTensor.from_kjt(batch(step), [FEATURES[:4], FEATURES[4:]])
            loss = loss_of(collection(few))
            if strided:
                loss = loss_of(collection.by_feature(_strided(step)))
            loss.backward()

    check(way)


def _strided(step: int) -> rk.KeyedJaggedTensor:
    strides = [2 + f % 3 for f in range(len(FEATURES))]
    ids = torch.randint(ROWS, (2 * sum(strides),), generator=torch.Generator().manual_seed(step))
    lengths = torch.full((sum(strides),), 2)
    return rk.KeyedJaggedTensor(FEATURES, ids, lengths=lengths, stride_per_key=strides)


def test_sequences() -> None:
    check(kind=rk.EmbeddingCollection, format="bf16")


@pytest.mark.parametrize("backing", ["device", "host", "disk"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_row_caches(backing: str, policy: str, tmp_path) -> None:
    """Tables with cached rows may share sets, also in accumulate(); the slots' state is independent of optimizers."""
    numbers = itertools.count()

    def way(collection: Any) -> dict[str, Tensor]:
        for step in range(STEPS):
            pooled = collection(batch(step))
            if step < STEPS - 1:
                collection.prefetch(batch(step + 1))
            loss_of(pooled).backward()
        with collection.accumulate():
            for step in range(2):
                loss_of(collection(batch(step))).backward()
        assert sum(table["cached_rows"] for table in collection.memory_report()) > 0
        with torch.no_grad():
            return by_feature(collection.eval()(batch(STEPS)))

    def cache() -> rk.RowCache:
        path = {"path": tmp_path / f"{next(numbers)}.rows", "memory_budget": 1 << 20} if backing == "disk" else {}
        return rk.RowCache(0.5, ways=2, policy=policy, backing=backing, **path)

    check(way, cache=cache, format="int8")


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "moved", "state", "assigned"])
def test_copies_go_on(way: str) -> None:
    """A copied, moved, or saved and loaded collection continues with equal bits."""
    collection = made(OWN, format="int8")
    one_backward_per_step(collection)
    collection.fused_optimizer.param_groups[2]["lr"] = 0.75
    if way == "deepcopy":
        other = copy.deepcopy(collection)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(collection))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(collection, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    elif way == "moved":
        other = copy.deepcopy(collection).double().float()
    else:
        other = made(OWN, format="int8", device="meta" if way == "assigned" else None)
        file = io.BytesIO()
        torch.save([collection.state_dict(), collection.fused_optimizer.state_dict()], file)
        file.seek(0)
        state, rates = torch.load(file, weights_only=True)
        other.load_state_dict(state, assign=way == "assigned")
        other.fused_optimizer.load_state_dict(rates)
    assert_same(collection, other)
    for each in (collection, other):
        each.freeze("a2")
        one_backward_per_step(each)
    assert_same(collection, other)
    assert [g["lr"] for g in other.fused_optimizer.param_groups] == [0.05, 0.1, 0.75, 0.2, 0.1, 0.3, 0.3]
    assert int(other.step) == 2 * STEPS


def test_states() -> None:
    """A table's state has the names of its optimizer's collection; the step is common."""
    state = made(OWN).state_dict()
    kinds = {"a": (), "b": ALL[3].state, "c": ("sum",), "d_0": ("sum",), "d_1": ("sum",)}
    kinds |= {"e": ALL[5].state, "f": ALL[3].state, "g": ("sum",)}
    names = {f"embedding_bags.{name}.{kind}" for name, own in kinds.items() for kind in ("weight", *own)}
    assert set(state) == names | {"step", "beta_powers", "beta_powers_1"}
    assert state["embedding_bags.d_0.sum"].dtype == torch.bfloat16
    assert state["embedding_bags.e.exp_avg_sq"].shape == (ROWS,)
    one = made(dict.fromkeys(OWN, ALL[3]), None).state_dict()  # given per table, all equal
    assert one.keys() == uniform(ALL[3]).state_dict().keys()


@pytest.mark.parametrize("cached", [False, True])
def test_bytes(cached: bool) -> None:
    """State has the bytes of its optimizer's collection, but a cache and sums of rows index all rows."""
    options = {"cache": lambda: rk.RowCache(0.5)} if cached else {}
    mixed = made(OWN, **options)
    report = {table["name"]: table["state_bytes"] for table in mixed.memory_report()}
    for optimizer in set(OWN.values()) - {None}:
        for table in uniform(optimizer).memory_report():
            if OWN[table["name"][0]] == optimizer:
                assert report[table["name"]] == table["state_bytes"]
    flat = [t for n, t in mixed._memory.items() if t is not None and n.startswith(("_sum", "_exp"))]
    padding = 0 if not cached else 4 * 3 * ROWS + 4 * 4 * ROWS
    assert sum(report.values()) <= sum(t.nbytes for t in flat) <= sum(report.values()) + padding + 64 * len(OWN)


def test_groups() -> None:
    """Parameter groups have their optimizer and its options, which are fixed, except learning rates."""
    collection = made(OWN)
    groups, tables = collection.fused_optimizer.param_groups, collection.embedding_bags
    assert [g["lr"] for g in groups] == [0.05, 0.1, 0.3, 0.2, 0.1, 0.3, 0.3]
    assert [len(g["params"]) for g in groups] == [1, 1, 1, 2, 1, 1, 1]
    assert groups[1]["params"][0] is tables["b"].weight
    assert [g["optimizer"] for g in groups[:4]] == ["SGD", "Adam", "RowwiseAdagrad", "Adagrad"]
    assert (groups[0]["weight_decay"], groups[4]["betas"]) == (0.1, (0.5, 0.9))
    with pytest.raises(ValueError, match=r"eps = 1\.0 must remain 1e-08: of a fused"):
        groups[1]["eps"] = 1.0
    schedule = torch.optim.lr_scheduler.StepLR(collection.fused_optimizer, 1, gamma=0.5)
    collection.fused_optimizer.step()
    schedule.step()
    expected = torch.tensor([0.025, 0.05, 0.15, 0.1, 0.1, 0.05, 0.15, 0.15])
    assert torch.allclose(collection.lr, expected)
    loaded = collection.fused_optimizer.state_dict()
    loaded["param_groups"][1]["eps"] = 1.0  # of a collection with another eps
    collection.fused_optimizer.load_state_dict(loaded)
    assert collection.fused_optimizer.param_groups[1]["eps"] == 1e-08
    only = uniform(ALL[1]).fused_optimizer
    assert only.param_groups[0].keys() == {"params", "lr"}
    with pytest.raises(ValueError, match=r"weight_decay = 0\.5 must remain 0\.0: of a fused"):
        only.param_groups[0]["weight_decay"] = 0.5
    only.load_state_dict({"state": {}, "param_groups": [{**only.state_dict()["param_groups"][0], "weight_decay": 0.5}]})
    assert "weight_decay" not in only.param_groups[0]
    with pytest.raises(ValueError, match=r"the state is of optimizer Adam for tables .*, which have SGD in this"):
        uniform(rk.SGD(lr=0.3)).fused_optimizer.load_state_dict(uniform(rk.Adam(lr=0.1)).fused_optimizer.state_dict())
    assert "b: 12 x 4 sum optimizer=Adam(lr=0.1)" in repr(collection)


def test_equal_optimizers_are_one() -> None:
    """Equal optimizers, except for rates, have the update and the state of one."""
    mixed = made(dict.fromkeys(OWN, rk.Adam(lr=0.5)) | {"a": None, "c": None}, rk.Adam(lr=0.1))
    assert not mixed._update.has_several
    assert {"_exp_avg", "beta_powers"} < tensors_of(mixed).keys()
    assert [g["lr"] for g in mixed.fused_optimizer.param_groups] == [0.1, 0.5, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("weighted", "cached"), [(False, False), (True, False), (False, True)])
def test_compiled(weighted: bool, cached: bool) -> None:
    """Each optimizer's update is in the graph; changed rates and frozen features do not recompile."""
    options = {"cache": lambda: rk.RowCache(0.5, ways=2)} if cached else {}
    plain, compiled = made(OWN, format="int8", **options), made(OWN, format="int8", **options)
    run = torch.compile(lambda given: compiled(given).values(), backend="aot_eager", fullgraph=True)
    grads = []
    for step in range(STEPS):
        for collection in (plain, compiled):
            collection.fused_optimizer.param_groups[1]["lr"] = 0.1 * step
            collection.freeze(*"abc"[:step])
            weights = torch.rand(len(FEATURES) * 12, generator=torch.Generator().manual_seed(3)) if weighted else None
            given = batch(step, weights=weights.requires_grad_() if weighted else None)
            pooled = run(given) if collection is compiled else collection(given).values()
            pooled.square().sum().backward()
            grads.append(weights.grad if weighted else pooled.detach())
    assert_same(plain, compiled)
    assert all(same_bits(a, b) for a, b in zip(grads[::2], grads[1::2], strict=True))


def test_served() -> None:
    """A serving copy has no optimizer, also in another format."""
    collection = made(OWN)
    one_backward_per_step(collection)
    served = collection.for_serving("int8")
    assert sum(table["trained_state_bytes"] for table in served.memory_report()) > 0
    assert all(table.optimizer is None for table in served.tables)
    names = {"_weights", "_layout.records", "_layout.seed", "_layout.bad_position"}
    assert {name for name, _ in collection.for_serving().named_buffers()} == names
    with torch.no_grad():
        assert same_bits(collection.for_serving()(batch(0)).values(), collection(batch(0)).values())


def test_some_without_an_optimizer() -> None:
    """Some tables without an optimizer are rejected; all may have their own."""
    with pytest.raises(ValueError, match=r"tables \['a'\] have no optimizer, because the collection has"):
        made(OWN, None)
    for wrong in ("adam", rk.SGD):  # a name, a class
        with pytest.raises(ValueError, match=r"table 'a': optimizer must be rk\.SGD, .* an instance such .* or None"):
            rk.EmbeddingBagConfig(3, 4, name="a", feature_names=["a"], optimizer=wrong)
    every = OWN | {"a": ALL[0]}
    collections = [made(every, None), made(OWN)]
    for collection in collections:
        one_backward_per_step(collection)
    assert_same(*collections)


def test_failed_backwards() -> None:
    """An error before an update changes no table of any optimizer."""
    collection = made(OWN)
    before = {name: t.clone() for name, t in collection.state_dict().items()}
    given = batch(0)
    loss = loss_of(collection(given))
    given.values()[-1] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    collection.lr[1] = torch.inf
    with pytest.raises(ValueError, match=r"lr\[1\] = inf must be finite"):
        loss_of(collection(batch(0))).backward()
    assert all(same_bits(t, before[name]) for name, t in collection.state_dict().items())


@pytest.mark.parametrize("cached", [False, True])
def test_backends(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend has equal results for each optimizer's layout, in which other tables have no rows."""
    calls: list[dict[str, Any]] = []

    def recorded(op: str, given: dict[str, Any]) -> None:
        calls.append({name: t.clone() if isinstance(t, Tensor) else t for name, t in given.items()})
        call_in_place(op, given)

    monkeypatch.setattr(embedding_bag_autograd, "call_in_place", recorded)
    options = {"cache": lambda: rk.RowCache(0.5, ways=2)} if cached else {}
    collection = made(OWN, format="int8", **options)
    loss_of(collection(batch(0))).backward()
    assert len(calls) == 5
    for given in calls:
        before = [t for t in given.values() if isinstance(t, Tensor)]
        results: list[list[Tensor]] = []
        for backend in every_backend():
            own = {name: t.clone() if isinstance(t, Tensor) else t for name, t in given.items()}
            backend.ops.ops.embedding_bag_backward_fused_.layout(**own)
            results.append([t for t in own.values() if isinstance(t, Tensor)])
            assert all(map(same_bits, results[0], results[-1])), (backend.name, given["optimizer"])
        assert sum(not same_bits(*pair) for pair in zip(before, results[0], strict=True)) > 1  # rows, besides the step
