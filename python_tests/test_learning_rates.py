"""Learning rates per table: the op's ``lr`` with an element per table, ``lr`` of configs, and parameter groups."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from backends import device_backends, every_backend
from layout_calls import OPS
from torch import Tensor

import rec_kernels as rk
from rec_kernels.testing import same_bits

ROWS, DIM, STEPS = 12, 8, 3
RATES = {"a": None, "b": 0.3, "c": None, "d": 0.0}
OPTIMIZERS = ["sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam", "lamb"]
IDS = torch.tensor([[3, 3, 1], [0, 5, 3], [7, 2, 3]])


def _state(optimizer: str) -> dict[str, Tensor]:
    rows, elements = torch.zeros(2 * ROWS), torch.zeros(2 * ROWS * DIM)
    if optimizer == "sgd":
        return {}
    if "adagrad" in optimizer:
        return {"sum": rows if optimizer == "rowwise_adagrad" else elements}
    second = rows if optimizer == "rowwise_adam" else elements.clone()
    return {"exp_avg": elements, "exp_avg_sq": second, "beta_powers": torch.ones(2)}


def _updated(ops, lr: Tensor, optimizer: str, format: str, **options: object) -> Tensor:
    """Rows of two tables, numbers 4 and 2 of the noise, after an update of rows of both."""
    floats = torch.randn(2 * ROWS, DIM, generator=torch.Generator().manual_seed(0))
    encoded = floats.view(torch.uint8) if format == "fp32" else rk.quantize_rows(floats, format)
    weights = encoded.flatten().contiguous()
    grad = torch.randn(3, 2 * DIM, generator=torch.Generator().manual_seed(1))
    state = _state(optimizer)
    ops.embedding_bag_backward_fused_(
        weights,
        state.pop("sum", None),
        torch.tensor(6),
        lr,
        grad,
        torch.cat([IDS.flatten(), IDS.flatten()]),
        torch.arange(0, 19, 3),
        optimizer=optimizer,
        num_embeddings=[ROWS, ROWS],
        embedding_dims=[DIM, DIM],
        formats=[format],
        table_ids=[4, 2],
        **state,
        **options,
    )
    return weights.view(2, -1)


@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rate_for_each_table(optimizer: str, format: str) -> None:
    """A table's rows equal those of a call with its rate for all tables, including weight decay."""
    rates = torch.tensor([9.0, 9.0, 0.25, 9.0, 0.5])
    for decay in ({}, {"weight_decay": 0.1, "weight_decay_mode": "decoupled"}):
        expected = None
        for backend in every_backend():
            found = _updated(backend.ops, rates, optimizer, format, seed=torch.tensor(5), **decay)
            alone = [_updated(backend.ops, r, optimizer, format, seed=torch.tensor(5), **decay) for r in rates[[4, 2]]]
            assert all(same_bits(found[i], alone[i][i]) for i in range(2)), backend.name
            assert not same_bits(found[0], alone[1][0])
            expected = found if expected is None else expected
            assert same_bits(found, expected), backend.name


def test_rates_of_fewer_tables() -> None:
    """Too few rates raise on the CPU; CUDA kernels, which cannot raise, change nothing."""
    few = torch.tensor([0.1, 0.1, 0.1, 0.1])
    text = "layout[0]: table_id must be in [0, 65536), and below the number of learning rates"
    with pytest.raises(ValueError, match=re.escape(text)):
        _updated(OPS, few, "sgd", "fp32")
    for backend in device_backends():
        unchanged = _updated(backend.ops, torch.tensor(0.0), "sgd", "fp32")
        assert same_bits(_updated(backend.ops, few, "sgd", "fp32"), unchanged), backend.name


@pytest.mark.parametrize(
    ("lr", "text"),
    [
        (torch.ones(2, 3), "lr must have at most 1 dimension, got shape [2, 3]"),
        (torch.ones(10)[::2], "lr must be contiguous"),
        (torch.ones(5, dtype=torch.float64), "lr must be float32, got float64"),
    ],
)
def test_wrong_rates(lr: Tensor, text: str) -> None:
    for backend in every_backend():
        with pytest.raises(ValueError, match=re.escape(text)):
            _updated(backend.ops, lr, "sgd", "fp32")


def test_a_rate_that_is_not_finite() -> None:
    """A non-finite rate raises on the CPU; a device updates tables with other rates as usual."""
    rates = torch.tensor([0.1, 0.1, 0.1, torch.inf, 0.1])
    with pytest.raises(ValueError, match=re.escape("lr[3] = inf must be finite")):
        _updated(OPS, rates, "sgd", "fp32")
    for backend in device_backends():
        expected = _updated(backend.ops, torch.tensor(0.1), "sgd", "fp32")
        assert same_bits(_updated(backend.ops, rates, "sgd", "fp32"), expected), backend.name


def _tables(rates: dict[str, float | None] = RATES, **options: object) -> list[rk.EmbeddingBagConfig]:
    return [rk.EmbeddingBagConfig(ROWS, DIM, name=n, feature_names=[n], lr=lr, **options) for n, lr in rates.items()]


def _make(optimizer=None, **options: object) -> rk.EmbeddingBagCollection:
    torch.manual_seed(0)
    return rk.EmbeddingBagCollection(_tables(), optimizer=optimizer or rk.Adagrad(lr=0.1), **options)


def _train(collection, steps: int = STEPS) -> None:
    for step in range(steps):
        collection(dict.fromkeys(RATES, (IDS + step) % ROWS)).values().square().sum().backward()


def _rows(collection) -> dict[str, Tensor]:
    collection.flush()
    return {name: collection.embedding_bags[name].weight.detach() for name in RATES}


@pytest.mark.parametrize("cache", [None, rk.RowCache(0.5, ways=2)])
def test_training_is_that_of_torch(cache: rk.RowCache | None) -> None:
    """Training equals torch's Adagrad with a parameter group for each table with its own rate."""
    ours = _make(rk.Adagrad(lr=0.1, eps=1e-10), cache=cache)
    theirs = {n: torch.nn.Parameter(w.clone()) for n, w in _rows(ours).items()}
    groups = [{"params": [p], "lr": 0.1 if RATES[n] is None else RATES[n]} for n, p in theirs.items()]
    optimizer = torch.optim.Adagrad(groups, eps=1e-10)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(p[(IDS + step) % ROWS].sum(1).square().sum() for p in theirs.values()).backward()
        optimizer.step()
    _train(ours)
    for name, weight in _rows(ours).items():
        torch.testing.assert_close(weight, theirs[name].detach(), rtol=1e-5, atol=1e-6)


def test_groups() -> None:
    """The first group has the optimizer's rate and all tables without their own; each other table is a group."""
    collection = _make()
    groups, tables = collection.fused_optimizer.param_groups, collection.embedding_bags
    assert [g["lr"] for g in groups] == [0.1, 0.3, 0.0]
    assert [[id(p) for p in g["params"]] for g in groups] == [
        [id(tables[n].weight) for n in names] for names in ("ac", "b", "d")
    ]
    assert torch.equal(collection.lr, torch.tensor([0.1, 0.3, 0.1, 0.0]))
    groups[1]["lr"] = 0.5
    groups[0]["lr"] = 0.2
    assert torch.equal(collection.lr, torch.tensor([0.2, 0.5, 0.2, 0.0]))
    assert "b: 12 x 8 sum lr=0.3" in repr(collection)
    alone = rk.EmbeddingBagCollection(_tables({"a": 0.3}), optimizer=rk.SGD(lr=0.1))
    assert [g["lr"] for g in alone.fused_optimizer.param_groups] == [0.3]


def test_schedulers_and_states() -> None:
    """Rates of a scheduler with several functions are in the optimizer's state, and load into another collection."""
    collection, other = _make(), _make()
    halved = torch.optim.lr_scheduler.LambdaLR(
        collection.fused_optimizer, [lambda _: 1.0, lambda s: 0.5**s, lambda _: 1.0]
    )
    _train(collection, 1)
    halved.step()
    assert torch.equal(collection.lr, torch.tensor([0.1, 0.15, 0.1, 0.0]))
    other.fused_optimizer.load_state_dict(collection.fused_optimizer.state_dict())
    assert torch.equal(other.lr, collection.lr)
    assert [g["lr"] for g in other.fused_optimizer.param_groups] == [0.1, 0.15, 0.0]
    other.load_state_dict(collection.state_dict())
    for c in (collection, other):
        _train(c)
    assert all(same_bits(a, b) for a, b in zip(_rows(collection).values(), _rows(other).values(), strict=True))
    turned = rk.EmbeddingBagCollection(_tables({n: RATES[n] for n in "dacb"}), optimizer=rk.Adagrad(lr=0.1))
    turned.fused_optimizer.load_state_dict(collection.fused_optimizer.state_dict())
    assert [g["lr"] for g in turned.fused_optimizer.param_groups] == [0.1, 0.0, 0.15]
    few = rk.EmbeddingBagCollection(_tables({"a": None}), optimizer=rk.SGD(lr=0.1))
    with pytest.raises(ValueError, match="the state has parameter groups for tables"):
        few.fused_optimizer.load_state_dict(collection.fused_optimizer.state_dict())


def test_refused_rates() -> None:
    """A state with an invalid rate changes none, and the groups stay connected to the kernels' rates."""
    optimizer = _make().fused_optimizer
    before, state = [group["lr"] for group in optimizer.param_groups], optimizer.state_dict()
    state["param_groups"][0]["lr"], state["param_groups"][1]["lr"] = 0.5, float("inf")
    with pytest.raises(ValueError, match="lr = inf must be at least 0, and finite as float32"):
        optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == before
    with pytest.raises(ValueError, match="lr = inf must be at least 0, and finite as float32"):
        optimizer.param_groups[1]["lr"] = float("inf")


@pytest.mark.parametrize("value", [3, torch.tensor(3)])
@pytest.mark.parametrize(("name", "way"), [("lr", r"set param_groups\[0\]"), ("step", r"write .* step\.fill_")])
def test_numbers_are_not_assigned(name: str, way: str, value: object) -> None:
    """Assigning ``lr`` or ``step``, which would disconnect schedulers, raises; the error names the right way."""
    with pytest.raises(AttributeError, match=rf"^{name} cannot be set to .*: {way}"):
        setattr(_make(), name, value)


def test_a_step_that_counts_in_place() -> None:
    """``step += 2`` is accepted: it writes to the tensor, and assigns it to itself."""
    collection = _make()
    held = collection.step
    collection.step += 2
    assert collection.step is held
    assert held == 2


def test_no_further_groups() -> None:
    """Groups of parameters that no kernel updates are rejected, also in a copy; the groups stay unchanged."""
    collection = _make()
    for optimizer in (collection.fused_optimizer, copy.deepcopy(collection).fused_optimizer):
        count = len(optimizer.param_groups)
        with pytest.raises(ValueError, match="give other parameters to an optimizer"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        assert len(optimizer.param_groups) == count


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "double"])
def test_copies_keep_their_rates(way: str) -> None:
    """The groups of a copied or moved collection write to its own tensor."""
    collection = _make()
    collection.fused_optimizer.param_groups[1]["lr"] = 0.5
    if way == "deepcopy":
        other = copy.deepcopy(collection)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(collection))
    else:
        other = copy.deepcopy(collection).double().float()
    assert [g["lr"] for g in other.fused_optimizer.param_groups] == [0.1, 0.5, 0.0]
    other.fused_optimizer.param_groups[2]["lr"] = 0.75
    assert torch.equal(other.lr, torch.tensor([0.1, 0.5, 0.1, 0.75]))
    assert torch.equal(collection.lr, torch.tensor([0.1, 0.5, 0.1, 0.0]))
    collection.fused_optimizer.param_groups[2]["lr"] = 0.75
    for c in (collection, other):
        _train(c)
    assert all(same_bits(a, b) for a, b in zip(_rows(collection).values(), _rows(other).values(), strict=True))


def test_parts_and_sequences() -> None:
    """A compressed table's parts have its rate, also for sequences and for direct uses of the weight."""
    table = {"name": "a", "feature_names": ["a"], "compression": rk.QuotientRemainder(5), "lr": 0.0}
    parts = rk.EmbeddingConfig(40, DIM, **table)
    plain = rk.EmbeddingConfig(40, DIM, name="b", feature_names=["b"])
    collection = rk.EmbeddingCollection([plain, parts], optimizer=rk.SGD(lr=0.1))
    before = {n: p.detach().clone() for n, p in collection.named_parameters()}
    out = collection({"a": IDS, "b": IDS})
    loss = sum(t.values().square().sum() for t in out.values())
    (loss + sum(p.square().sum() for p in collection.parameters())).backward()
    for name, weight in collection.named_parameters():
        assert torch.equal(weight, before[name]) == ("a_" in name), name


def test_compiled() -> None:
    """A changed rate is used by the next step of a compiled module."""
    plain, compiled = _make(), _make()
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    batch = rk.KeyedJaggedTensor.from_dict(dict.fromkeys(RATES, IDS))
    for rate in (0.4, 0.0, 1.5):
        for c in (plain, compiled):
            c.fused_optimizer.param_groups[1]["lr"] = rate
        plain(batch).values().square().sum().backward()
        run(batch).values().square().sum().backward()
    assert all(same_bits(a, b) for a, b in zip(_rows(plain).values(), _rows(compiled).values(), strict=True))
