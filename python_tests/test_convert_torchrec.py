"""Conversion of TorchRec's unsharded collections to collections of this package, and back."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convert_cases import BATCH, SIZES, jagged, round_trips, same_bits, train
from torch import Tensor

import rec_kernels as rk

torchrec = pytest.importorskip("torchrec")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def rowwise(parameters: Any) -> Any:
    """TorchRec's row-wise Adagrad in a wrapper that names parameters."""
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    named = {str(i): p for i, p in enumerate(parameters)}
    return CombinedOptimizer([KeyedOptimizerWrapper(named, lambda p: RowWiseAdagrad(p, lr=0.25, eps=2**-10))])


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.25), rk.SGD(lr=0.25)),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.25, eps=2**-10), rk.Adagrad(lr=0.25, eps=2**-10)),
    "rowwise_adagrad": (rowwise, rk.RowwiseAdagrad(lr=0.25, eps=2**-10)),
}


def collection_of(*, pooled: bool = True, mean: str = "item", seed: int = 0, **options: Any) -> Any:
    """TorchRec's collection of three tables; the bags of ``mean`` are averaged."""
    torch.manual_seed(seed)
    if pooled:
        kind = torchrec.PoolingType.MEAN
        of = [(n, s, {"pooling": kind} if n == mean else {}) for n, s in SIZES.items()]
        configs = [
            torchrec.EmbeddingBagConfig(name=n, num_embeddings=s[0], embedding_dim=s[1], feature_names=[f"{n}f"], **own)
            for n, s, own in of
        ]
        return torchrec.EmbeddingBagCollection(tables=configs, **options)
    configs = [
        torchrec.EmbeddingConfig(name=n, num_embeddings=s[0], embedding_dim=8, feature_names=[f"{n}f"])
        for n, s in SIZES.items()
    ]
    return torchrec.EmbeddingCollection(tables=configs, **options)


def lookup(collection: Any) -> Callable[[int], Tensor]:
    """Lookups of either library with TorchRec's batches."""

    def look_up(step: int) -> Tensor:
        batch = jagged(step)
        theirs = torchrec.KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths())
        found = collection(theirs)
        return torch.cat([t.values() for t in found.values()]) if isinstance(found, dict) else found.values()

    return look_up


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_there_and_back(name: str, pooled: bool) -> None:
    """Import and export keep TorchRec's training bits; ours has its losses up to rounding."""
    make, expected = OPTIMIZERS[name]
    theirs = collection_of(pooled=pooled)
    optimizer = make(list(theirs.parameters()))
    train(lookup(theirs), range(4), [optimizer])
    ours: Any = rk.convert_embeddings(theirs, trained_by=optimizer)
    assert ours.optimizer == expected
    assert type(ours) is (rk.EmbeddingBagCollection if pooled else rk.EmbeddingCollection)
    again = collection_of(pooled=pooled, seed=1)
    its_optimizer = make(list(again.parameters()))
    rk.export_tables(ours, again, trained_by=its_optimizer)
    losses = train(lookup(theirs), range(4, 9), [optimizer])
    assert train(lookup(again), range(4, 9), [its_optimizer]) == losses
    assert same_bits(dict(theirs.state_dict()), dict(again.state_dict()))
    torch.testing.assert_close(train(lookup(ours), range(4, 9)), losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_there_and_back(name: str) -> None:
    make, optimizer = OPTIMIZERS[name]
    ours: Any = rk.convert_embeddings(collection_of(), optimizer=optimizer)
    train(lookup(ours), range(5))
    theirs = collection_of(seed=1)
    assert round_trips(ours, theirs, make(list(theirs.parameters())), counts_steps=name != "sgd")


def test_in_the_backward() -> None:
    """Optimizers that TorchRec applies in the backward are detected."""
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    theirs = collection_of()
    apply_optimizer_in_backward(RowWiseAdagrad, theirs.parameters(), {"lr": 0.25, "eps": 2**-10})
    train(lookup(theirs), range(3))
    ours: Any = rk.convert_embeddings(theirs)
    assert ours.optimizer == rk.RowwiseAdagrad(lr=0.25, eps=2**-10)
    assert int(ours.step) == 3
    torch.testing.assert_close(train(lookup(ours), range(3, 6)), train(lookup(theirs), range(3, 6)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("pooled", [True, False])
def test_optimizers_of_tables(pooled: bool) -> None:
    """Each table keeps its optimizer, state and learning rate in both directions."""
    from torchrec.optim import RowWiseAdagrad

    def trainers(collection: Any) -> list[Any]:
        user, item, shop = collection.parameters()
        adam = torch.optim.SparseAdam([item], lr=0.02, betas=(0.5, 0.75))
        return [RowWiseAdagrad([user], lr=0.25, eps=2**-10), adam, torch.optim.SGD([shop], lr=0.5)]

    theirs = collection_of(pooled=pooled)
    _make_sparse(theirs)
    optimizers = trainers(theirs)
    train(lookup(theirs), range(4), optimizers)
    ours: Any = rk.convert_embeddings(theirs, trained_by=optimizers)
    assert [t.optimizer for t in ours.tables] == [None, rk.Adam(lr=0.02, betas=(0.5, 0.75)), rk.SGD(lr=0.5)]
    assert ours.optimizer == rk.RowwiseAdagrad(lr=0.25, eps=2**-10)
    assert int(ours.step) == 4
    assert ours.beta_powers.tolist() == [0.5**4, 0.75**4]
    again = collection_of(pooled=pooled, seed=1)
    _make_sparse(again)
    others = trainers(again)
    rk.export_tables(ours, again, trained_by=others)
    losses = train(lookup(theirs), range(4, 9), optimizers)
    assert train(lookup(again), range(4, 9), others) == losses
    assert same_bits(dict(theirs.state_dict()), dict(again.state_dict()))
    torch.testing.assert_close(train(lookup(ours), range(4, 9)), losses, rtol=1e-4, atol=0)
    rates = [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(theirs.parameters(), 1)]
    rated: Any = rk.convert_embeddings(theirs, trained_by=torch.optim.SGD(rates))
    assert torch.allclose(rated.lr, torch.tensor([0.1, 0.2, 0.3]))
    assert not rated._update.has_several


def fused_of(name: str, seed: int = 0, mean: str = "shop") -> Any:
    """``collection_of``'s tables in FBGEMM's modules, one per pooling, trained in the backward."""
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    kinds: Any = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    configs = collection_of(mean=mean).embedding_bag_configs()
    torch.manual_seed(seed)
    return FusedEmbeddingBagCollection(configs, kinds[name], {"lr": 0.25} | ({"eps": 2**-10} if name != "sgd" else {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused(name: str) -> None:
    """Tables of a fused collection, also within a model, are imported with FBGEMM's state, trained, and exported."""
    theirs = fused_of(name)
    train(lookup(theirs), range(4))
    model = torch.nn.ModuleDict({"tables": theirs})
    found = rk.replace_embeddings(model)
    assert str(found).startswith("1 swapped, 0 left\ntables: FusedEmbeddingBagCollection (user 30 x 8, item 12 x 16")
    ours: Any = model["tables"]
    assert ours.optimizer == OPTIMIZERS[name][1]
    again = fused_of(name, seed=1)
    rk.export_tables(ours, again)
    losses = train(lookup(theirs), range(4, 9))
    assert train(lookup(again), range(4, 9)) == losses
    assert same_bits(dict(theirs.state_dict()), dict(again.state_dict()))
    torch.testing.assert_close(train(lookup(ours), range(4, 9)), losses, rtol=1e-5, atol=0)
    with pytest.raises(TypeError, match=r"trained_by must be None or \[\]: FBGEMM's tables include"):
        rk.import_tables(ours, theirs, trained_by=torch.optim.SGD(theirs.parameters()))


def test_fused_columns_of_others() -> None:
    """A fused collection with several poolings orders columns differently from its keys; it is rejected."""
    theirs, ours = fused_of("sgd", mean="item"), collection_of(mean="item")
    ours.load_state_dict(theirs.state_dict())
    expected = lookup(ours)(0).split([8, 16, 4], dim=1)
    assert torch.allclose(lookup(theirs)(0), torch.cat([expected[0], expected[2], expected[1]], dim=1))
    found = rk.replace_embeddings(torch.nn.ModuleDict({"tables": theirs}))
    assert found.left[0].reason.startswith(
        "its columns are those of tables user, shop, item, and its keys those of user, item, shop: TorchRec's lookups"
    )
    converted: Any = rk.convert_embeddings(ours, optimizer=rk.SGD(lr=0.25))
    with torch.no_grad():
        converted._weights.zero_()
    rk.import_tables(converted, theirs)
    assert same_bits(
        {n: w for n, w in converted.state_dict().items() if n in ours.state_dict()}, dict(ours.state_dict())
    )


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.float16, torch.float32])
@pytest.mark.parametrize("pooled", [True, False])
def test_quantized(pooled: bool, dtype: torch.dtype) -> None:
    """Converted quantized collections have TorchRec's outputs and keys, and no training."""
    from torchrec.modules.embedding_configs import QuantConfig
    from torchrec.quant import embedding_modules as quantized

    def observer(dtype: torch.dtype) -> Any:
        return torch.ao.quantization.PlaceholderObserver.with_args(dtype=dtype)

    single: Any = collection_of(pooled=pooled)
    single.qconfig = QuantConfig(activation=observer(torch.float32), weight=observer(dtype))
    kind: Any = quantized.EmbeddingBagCollection if pooled else quantized.EmbeddingCollection
    model = torch.nn.ModuleDict({"tables": kind.from_float(single)}).eval()
    theirs = model["tables"]
    assert str(rk.replace_embeddings(model)).startswith("1 swapped, 0 left\ntables: Embedding")
    ours: Any = model["tables"]
    assert not ours.training
    assert rk.dense_parameters(ours) == []
    batch = jagged(0)
    batch = torchrec.KeyedJaggedTensor(batch.keys(), batch.values().int(), lengths=batch.lengths().int())
    expected, found, served = theirs(batch), ours(batch), ours.for_serving()(batch)
    if pooled:
        assert found.keys() == served.keys() == expected.keys() == ["userf", "shopf", "itemf"]
        torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=1e-6)
    else:
        assert all(torch.equal(found[key].values(), rows.values()) for key, rows in expected.items())
    with pytest.raises(TypeError, match=r"got torchrec\.quant\..*: convert tables for inference with rk.convert_"):
        rk.export_tables(ours, theirs)
    for option, value in (("format", "fp16"), ("optimizer", rk.SGD())):
        with pytest.raises(ValueError, match=f"^{option} requires tables that can be trained, but these are for inf"):
            rk.convert_embeddings(theirs, **{option: value})


def _make_sparse(collection: Any) -> None:
    layers = collection.embedding_bags if hasattr(collection, "embedding_bags") else collection.embeddings
    layers["item"].sparse = True


def test_configs_are_kept() -> None:
    """Names, features, pooling, float16 rows and frozen tables are kept; without an optimizer nothing is fused."""
    theirs = collection_of()
    theirs.embedding_bags["item"].weight.requires_grad_(False)
    ours: Any = rk.convert_embeddings(theirs)
    assert ours.optimizer is None
    assert [(t.name, t.feature_names, t.pooling) for t in ours.tables] == [
        ("user", ["userf"], "sum"),
        ("item", ["itemf"], "mean"),
        ("shop", ["shopf"], "sum"),
    ]
    assert [p.requires_grad for p in ours.parameters()] == [True, False, True]
    assert torch.equal(lookup(ours)(0), lookup(theirs)(0))
    data_type = torchrec.DataType.INT8  # TorchRec uses it for sharded tables only: here, rows are float16
    config = torchrec.EmbeddingConfig(
        name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"], data_type=data_type
    )
    of_halves = torchrec.EmbeddingCollection(tables=[config])
    half: Any = rk.convert_embeddings(of_halves, optimizer=rk.SGD())
    assert half.tables[0].format == "fp16"
    both: list[Any] = [of_halves, rk.convert_embeddings(of_halves)]
    for collection in both:  # torch's optimizers train them, too
        batch = torchrec.KeyedJaggedTensor(["f"], torch.tensor([1, 2, 8, 1]), lengths=torch.tensor([2, 2]))
        collection(batch)["f"].values().float().square().sum().backward()
        torch.optim.SGD(collection.parameters(), lr=0.25).step()
    for found, expected in zip(both[1].parameters(), of_halves.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    eighth: Any = rk.convert_embeddings(theirs, optimizer=rk.SGD(), format="int8")
    assert [t.format for t in eighth.tables] == ["int8"] * 3
    assert lookup(eighth)(0).shape == (BATCH, 28)


@pytest.mark.parametrize(("pooled", "is_weighted"), [(True, False), (True, True), (False, False)])
def test_weights_of_batches(pooled: bool, is_weighted: bool) -> None:
    """The collection and its serving copy use weights as TorchRec does, and reject batches without required weights."""
    theirs = collection_of(pooled=pooled, **{"is_weighted": True, "mean": ""} if is_weighted else {})
    ours: Any = rk.convert_embeddings(theirs, optimizer=rk.SGD(lr=0.25))
    assert ours.is_weighted() is is_weighted
    plain, weights = jagged(0), torch.rand(len(jagged(0).values()))
    batch = torchrec.KeyedJaggedTensor(plain.keys(), plain.values(), lengths=plain.lengths(), weights=weights)
    expected = theirs(batch)
    for module in (ours, ours.for_serving(), ours.for_serving("fp32"), copy.deepcopy(ours)):
        found = module(batch)
        if pooled:
            torch.testing.assert_close(found.values(), expected.values())
        else:
            assert all(torch.equal(found[key].values(), rows.values()) for key, rows in expected.items())
        if is_weighted:
            with pytest.raises(ValueError, match="the batch must have weights, because the collection was built"):
                module(plain)
    with pytest.raises(ValueError, match="is_weighted must be True, False or None, got 'no'"):
        type(ours)(ours.tables, is_weighted="no")


def test_errors() -> None:
    """Unsupported options, pruned tables, and an optimizer of some tables only are rejected."""
    with pytest.raises(ValueError, match="theirs: need_indices=True: the rows of "):
        rk.convert_embeddings(collection_of(pooled=False, need_indices=True))
    theirs = collection_of()
    half = torch.optim.SGD([theirs.embedding_bags["user"].weight], lr=0.1)
    with pytest.raises(ValueError, match="trained_by does not have the weight of table 'item'"):
        rk.convert_embeddings(theirs, trained_by=half)
    theirs.embedding_bag_configs()[1].num_embeddings_post_pruning = 5
    with pytest.raises(ValueError, match=r"theirs: table .item.: num_embeddings_post_pruning must be left"):
        rk.convert_embeddings(theirs)


def test_wrappers_let_tables_go() -> None:
    """TorchRec's optimizer wrappers release replaced tables; gradient clipping is rejected."""
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import KeyedOptimizerWrapper

    model = torch.nn.ModuleDict({"tables": collection_of(), "top": torch.nn.Linear(28, 1)})
    wrapped = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: torch.optim.Adagrad(p, lr=0.25))
    clipped = GradientClippingOptimizer(wrapped, clipping=GradientClipping.NORM, max_gradient=1.0)
    with pytest.raises(ValueError, match=r"^tables: GradientClippingOptimizer with clipping='NORM', max_g"):
        rk.replace_embeddings(model, trained_by=clipped)
    old = weakref.ref(model["tables"].embedding_bags["user"].weight)
    old().grad = torch.full_like(old(), 1e3)  # a gradient of the last step
    rk.replace_embeddings(model, trained_by=clipped, optimizer=rk.Adagrad(lr=0.25))
    gc.collect()
    assert old() is None
    assert list(wrapped.params) == ["top.weight", "top.bias"]
    for parameter in model["top"].parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    clipped.step()
    assert model["top"].bias.grad == 1e-3  # unclipped: its norm is below 1


def test_wrappers_take_fused_optimizers() -> None:
    """TorchRec's warm-up sets the learning rates of tables and layers without warnings."""
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    tables = rk.convert_embeddings(collection_of(), optimizer=rk.Adam(lr=1.0))
    layer = torch.nn.Linear(28, 1)
    own = KeyedOptimizerWrapper(dict(tables.named_parameters()), lambda _: tables.fused_optimizer)
    dense = KeyedOptimizerWrapper(dict(layer.named_parameters()), torch.optim.SGD)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.25)]
    optimizer = WarmupOptimizer(CombinedOptimizer([("tables", own), ("layer", dense)]), stages, lr=0.5)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(4):
            optimizer.zero_grad()
            layer(tables(jagged(step)).values()).sum().backward()
            rates.append(float(tables.lr))
            optimizer.step()
    assert rates == [0.125, 0.21875, 0.3125, 0.40625]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    state = optimizer.state_dict()
    assert state["state"]["tables.embedding_bags.user.weight"] == {"step": torch.tensor(4)}
    optimizer.load_state_dict(state)


def test_models_of_torchrec_take_collections() -> None:
    """TorchRec's DLRM accepts our collection, and loads TorchRec's weights into it."""
    from torchrec.models.dlrm import DLRM

    configs = [
        torchrec.EmbeddingBagConfig(name=n, num_embeddings=s[0], embedding_dim=8, feature_names=[f"{n}f"])
        for n, s in SIZES.items()
    ]
    theirs = DLRM(torchrec.EmbeddingBagCollection(tables=configs), 4, [8, 8], [8, 1])
    ours = DLRM(rk.EmbeddingBagCollection(configs, optimizer=rk.SGD(lr=0.25)), 4, [8, 8], [8, 1])
    ours.load_state_dict(theirs.state_dict())
    batch = jagged(0)
    features = torchrec.KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths())
    dense = torch.randn(batch.stride(), 4)
    assert torch.equal(ours(dense, features), theirs(dense, features))
    sequences = rk.EmbeddingCollection([rk.EmbeddingConfig(9, 8, name="t", feature_names=["f"])])
    assert sequences.embedding_configs() == list(sequences.tables)
