"""EmbeddingBagCollection: moved, copied, saved, scheduled, reordered."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from collection_cases import OtherJagged
from layout_calls import OPS

import rec_kernels as rk
from rec_kernels.testing import same_bits

KEYS = ["f", "g", "h"]


def make(optimizer=None, **options) -> rk.EmbeddingBagCollection:
    """Two tables, the first with f and g, the second with mean pooling; names are those of nn.Module's methods."""
    torch.manual_seed(0)
    tables = [
        rk.EmbeddingBagConfig(50, 6, name="type", feature_names=["f", "g"]),
        rk.EmbeddingBagConfig(70, 20, name="keys", feature_names=["h"], pooling="mean"),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def batch(keys: list[str] = KEYS, seed: int = 0, size: int = 5) -> rk.KeyedJaggedTensor:
    """Bags of 0 to 3 ids below 50 for each key, independent of its position."""
    parts = []
    for key in keys:
        generator = torch.Generator().manual_seed(seed * 100 + KEYS.index(key) if key in KEYS else 99)
        lengths = torch.randint(0, 4, (size,), generator=generator)
        parts.append((torch.randint(0, 50, (int(lengths.sum()),), generator=generator), lengths))
    return rk.KeyedJaggedTensor(keys, torch.cat([v for v, _ in parts]), lengths=torch.cat([n for _, n in parts]))


def train(collection: rk.EmbeddingBagCollection, steps: int = 3) -> None:
    """A few backward passes of a nonlinear loss."""
    for step in range(steps):
        collection(batch(seed=step)).values().square().sum().backward()


def test_names() -> None:
    """named_parameters, state_dict and memory_report use the tables' names."""
    collection = make(rk.RowwiseAdagrad())
    assert [n for n, _ in collection.named_parameters()] == ["embedding_bags.type.weight", "embedding_bags.keys.weight"]
    assert set(collection.state_dict()) == {
        "step",
        "embedding_bags.type.weight",
        "embedding_bags.type.sum",
        "embedding_bags.keys.weight",
        "embedding_bags.keys.sum",
    }
    assert collection.memory_report()[1] == {
        "name": "keys",
        "num_embeddings": 70,
        "embedding_dim": 20,
        "format": "fp32",
        "weight_bytes": 70 * 20 * 4,
        "state_bytes": 70 * 4,
    }
    assert "type: 50 x 6 sum" in repr(collection)


@pytest.mark.parametrize("cache", [None, rk.RowCache(0.5, ways=2)])
def test_two_lookups_in_one_graph(cache: rk.RowCache | None) -> None:
    """Two lookups make one update with both gradients, with the bits of accumulate()."""
    found, expected = (make(rk.RowwiseAdagrad(lr=0.1), cache=cache) for _ in range(2))
    expected.load_state_dict(found.state_dict())

    def loss_of(collection: rk.EmbeddingBagCollection) -> torch.Tensor:
        unused = collection(batch(seed=2)).values()  # without a backward
        first, second = (collection(batch(seed=seed)).values() for seed in (0, 1))
        return first.square().sum() + second.sum() + 0 * unused.detach().sum()

    kept = loss_of(found)  # a graph without a backward
    loss_of(found).backward()
    with expected.accumulate():
        loss_of(expected)
        loss_of(expected).backward()
    assert found.step == expected.step == 1
    assert all(map(same_bits, found.state_dict().values(), expected.state_dict().values()))
    kept.backward()
    assert found.step == 2


def test_two_lookups_of_different_kinds() -> None:
    """Distinct and plain bags make one update; a failing backward changes nothing."""
    found, plain = (make(rk.Adagrad(lr=0.1)) for _ in range(2))
    plain.load_state_dict(found.state_dict())
    shared = rk.deduplicated(found)
    before = {name: tensor.clone() for name, tensor in found.state_dict().items()}
    first = found(batch(seed=0)).values()
    first.register_hook(lambda _: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"):
        (first.sum() + found(batch(seed=1)).values().sum()).backward()
    assert all(map(same_bits, found.state_dict().values(), before.values()))
    (shared(batch(seed=0)).values().sum() + found(batch(seed=1)).values().sum()).backward()
    (plain(batch(seed=0)).values().sum() + plain(batch(seed=1)).values().sum()).backward()
    assert found.step == plain.step == 1
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor)


def test_lists_of_tables_only_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, lookups avoid torch's registration for lists, which takes time per table."""
    collection, jagged = make(), batch()
    factors = torch.rand(len(jagged.values()), requires_grad=True)
    weighted = rk.KeyedJaggedTensor(KEYS, jagged.values(), lengths=jagged.lengths(), weights=factors)
    collection(weighted).values().square().sum().backward()
    expected, right = collection(jagged).values().detach(), factors.grad
    with monkeypatch.context() as patch:
        patch.setattr(OPS, "embedding_bag_tables", None)
        with torch.no_grad():
            assert torch.equal(collection(jagged).values(), expected)
        collection.requires_grad_(False)
        assert torch.equal(collection(jagged).values(), expected)
    factors.grad = None
    collection(weighted).values().square().sum().backward()
    assert right is not None
    assert torch.equal(factors.grad, right)


def test_any_order_and_superset() -> None:
    """Features are found by name; other keys are ignored."""
    collection = make()
    expected = collection(batch()).values()
    assert torch.equal(collection(batch(["h", "f", "g"])).values(), expected)
    assert torch.equal(collection(batch(["x", "h", "y", "f", "g"])).values(), expected)
    with pytest.raises(KeyError, match=r"\['h'\]"):
        collection(batch(["f", "g"]))


def test_duck_typed_input() -> None:
    """Any object with TorchRec's methods is accepted."""
    assert torch.equal(make()(OtherJagged(batch())).values(), make()(batch()).values())


def test_feature_of_two_tables() -> None:
    """A feature of two tables has two outputs, named as TorchRec names them."""
    tables = [rk.EmbeddingBagConfig(9, d, name=f"t{d}", feature_names=["f"]) for d in (3, 5)]
    out = rk.EmbeddingBagCollection(tables)(
        rk.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2, 0]))
    )
    assert out.keys() == ["f@t3", "f@t5"]
    assert out.length_per_key() == [3, 5]
    assert out["f@t5"].shape == (2, 5)
    assert list(out.to_dict()) == ["f@t3", "f@t5"]


@pytest.mark.parametrize("optimizer", [None, rk.RowwiseAdagrad(lr=0.1)], ids=str)
def test_failed_step_changes_nothing(optimizer) -> None:
    """An id out of range names feature and bag, and leaves weights, state and step as they were."""
    collection = make(optimizer)
    train(collection, steps=1)
    before = copy.deepcopy(collection.state_dict())
    bad = rk.KeyedJaggedTensor(KEYS, torch.tensor([1, 2, 70]), lengths=torch.tensor([1, 0, 1, 0, 0, 1]))
    with pytest.raises(IndexError, match=r"values\[2\] = 70 \(feature 'h', bag 1\).*\[0, 70\)"):
        collection(bad).values().sum().backward()
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name]), name


TABLE = rk.EmbeddingBagConfig(5, 4, name="t", feature_names=["f"])


def _config(**changed: object) -> rk.EmbeddingBagConfig:
    return rk.EmbeddingBagConfig(
        **{"num_embeddings": 5, "embedding_dim": 4, "name": "t", "feature_names": ["f"]} | changed
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: rk.EmbeddingBagCollection([TABLE, TABLE]), "must be unique"),
        (lambda: rk.EmbeddingBagCollection([TABLE], bounds_check="sometimes"), "bounds_check must be"),
        (lambda: rk.EmbeddingBagCollection([TABLE], optimizer="adagrad"), "optimizer must be"),
        (lambda: make(output_dtype=torch.float64), r"output_dtype must be torch\.float32, float16 or bfloat16"),
        (lambda: make().fused_optimizer, "optimizer=None"),
        (lambda: _config(num_embeddings=0), "at least 1"),
        (lambda: _config(name="a.b"), "without dots"),
        (lambda: _config(feature_names="f"), "list of names"),
        (lambda: _config(pooling="max"), "'sum' or 'mean'"),
        (
            lambda: _config(format="int3"),
            "format must be one of fp32, fp16, bf16, int8, int4, mx9, mx6, mx4, got 'int3'",
        ),
        (lambda: rk.SGD(lr=-1), "lr = -1"),
        (lambda: rk.Adam(state_dtype=torch.float16), r"state_dtype must be torch\.float32 or .*, got torch\.float16"),
        *((lambda b=b: rk.Adam(betas=b), r"must be two numbers in \[0, 1\)") for b in ((-0.1, 0.9), (0.99999999, 0.9))),
        *(
            (lambda kind=kind, bad=bad: kind(lr=0.1, **bad), next(iter(bad)))
            for kind in (rk.SGD, rk.RowwiseAdagrad, rk.LAMB)
            for bad in (
                {"weight_decay": -1.0},
                {"weight_decay": float("inf")},
                {"weight_decay_mode": "both"},
                {"clip_grad_value": 0.0},
                {"clip_grad_norm": float("nan")},
            )
        ),
    ],
)
def test_bad_configurations(made: Callable, message: str) -> None:
    """Invalid collections, tables and optimizers are rejected at construction, by name."""
    with pytest.raises(ValueError, match=message):
        made()
