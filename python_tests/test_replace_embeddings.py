"""rk.replace_embeddings replaces a model's embeddings by this package's modules."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from convert_cases import BATCH, fbgemm, ids_of, train
from torch import Tensor, nn

import rec_kernels as rk

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Model(nn.Module):
    """Three tables at several depths, one of them at two places, and an MLP."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleDict({n: nn.EmbeddingBag(30, 8, mode="sum", sparse=sparse) for n in ("user", "shop")})
        self.again = self.bags["user"]
        self.tower = nn.Sequential(nn.Embedding(12, 8, sparse=sparse), nn.Flatten(1))
        self.top = nn.Linear(8 * 7, 8)

    def forward(self, step: int) -> Tensor:
        bags = [self.bags["user"](ids_of(step, 30)), self.bags["shop"](ids_of(step + 1, 30))]
        return self.top(torch.cat([*bags, self.again(ids_of(step + 2, 30)), self.tower(ids_of(step, 12))], dim=1))


def optimizers_of(model: Model, sparse: Any) -> list[Any]:
    """An optimizer for the tables, and Adam for the rest."""
    tables = [*model.bags.parameters(), *model.tower.parameters()]
    return [sparse(tables, lr=0.05), torch.optim.Adam(model.top.parameters(), lr=0.01)]


@pytest.mark.parametrize("sparse", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_training_goes_on(sparse: Any) -> None:
    """The model keeps torch's losses, and the other parameters' optimizer continues.

    Losses agree to 1e-5: each step adds a few roundings of 2^-24, and of SparseAdam the position of eps = 1e-8, below
    1e-6 of an update of lr.
    """
    theirs = Model()
    optimizers = optimizers_of(theirs, sparse)
    train(theirs, range(3), optimizers)
    model = copy.deepcopy(theirs)
    own = optimizers_of(model, sparse)
    for mine, other in zip(own, optimizers, strict=True):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))
    found = rk.replace_embeddings(model, trained_by=own)
    assert [f.names for f in found.swapped] == [["bags.user", "again"], ["bags.shop"], ["tower.0"]]
    assert [f.tables for f in found.swapped] == [[("weight", 30, 8)], [("weight", 30, 8)], [("weight", 12, 8)]]
    assert found.left == []
    assert str(found).splitlines()[:2] == [
        "3 swapped, 0 left",
        "bags.user = again: EmbeddingBag (weight 30 x 8) -> rk.EmbeddingBag",
    ]
    assert model.again is model.bags["user"] is found.swapped[0].module
    assert own[0].param_groups[0]["params"] == []
    assert not own[0].state
    assert [model.bags[n].collection.seed for n in ("user", "shop")] == [0, 1]
    assert [p.shape for p in rk.dense_parameters(model)] == [(8, 56), (8,)]
    names = set(theirs.state_dict())
    assert names <= set(model.state_dict())
    torch.testing.assert_close(
        train(model, range(3, 8), own), train(theirs, range(3, 8), optimizers), rtol=1e-5, atol=0
    )


def test_ordinary_parameters() -> None:
    """Without an optimizer, parameters are the same objects, still trained by their optimizers, also tied ones."""
    theirs = Model()
    model = copy.deepcopy(theirs)
    optimizers, own = optimizers_of(theirs, torch.optim.SGD), optimizers_of(model, torch.optim.SGD)
    before = list(model.parameters())
    found = rk.replace_embeddings(model)
    assert len(found.swapped) == 3
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    torch.testing.assert_close(train(model, range(5), own), train(theirs, range(5), optimizers), rtol=1e-5, atol=0)
    assert list(theirs.state_dict()) == list(model.state_dict())


def test_what_is_left() -> None:
    """Layers that cannot be replaced have a reason, and are unchanged."""

    class Own(nn.Embedding):
        """A subclass may override anything."""

    layers = nn.ModuleDict(
        {
            "norm": nn.Embedding(5, 4, max_norm=1.0),
            "frequency": nn.EmbeddingBag(5, 4, scale_grad_by_freq=True),
            "wide": nn.Embedding(5, 4, dtype=torch.float64),
            "own": Own(5, 4),
            "hooked": nn.Embedding(5, 4),
            "tied": nn.Embedding(5, 4),
            "output": nn.Linear(4, 5, bias=False),
            "ours": rk.Embedding(5, 4),
            "swapped": nn.Embedding(5, 4),
        }
    )
    layers["hooked"].register_forward_hook(lambda *_: None)
    layers["output"].weight = layers["tied"].weight
    before = dict(layers.items())
    found = rk.replace_embeddings(layers, optimizer=rk.SGD())
    shape = "[num_embeddings, embedding_dim]"
    assert {f.names[0]: f.reason for f in found.left} == {
        "norm": "max_norm=1.0 is not offered",
        "frequency": "scale_grad_by_freq=True is not offered",
        "wide": f"table 'weight': weight must be {shape} float32, float16 or bfloat16, got [5, 4] torch.float64",
        "own": "it is a subclass of Embedding, whose lookups may be others",
        "hooked": "it has hooks",
        "tied": "its weight is shared (tied.weight and output.weight), and its replacement would have its own",
    }
    assert [n for n, m in layers.items() if m is not before[n]] == ["swapped"] == [f.names[0] for f in found.swapped]
    assert "own: Own (weight 5 x 4) left: it is a subclass of Embedding, whose lookups may be others" in str(found)
    tied = rk.replace_embeddings(layers)
    assert [f.names[0] for f in tied.swapped] == ["tied"]
    for name, reason in (("own", "it is a subclass of Embedding"), ("hooked", "it has hooks")):
        with pytest.raises(ValueError, match=f"theirs: {reason}"):
            rk.convert_embeddings(layers[name])
    assert layers["tied"].weight is layers["output"].weight


def test_errors() -> None:
    """Errors name the module, and nothing is replaced."""
    model = Model()
    before = list(model.modules())
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (nn.Embedding(5, 4), {}, TypeError, "model must be a module that contains embeddings, got Embedding: "),
        ("model", {}, TypeError, "model must be a module that contains embeddings, got str"),
        (model, {"trained_by": 3}, TypeError, "trained_by must be a torch.optim.Optimizer, a list of some .*, got 3"),
        (
            model,
            {"trained_by": torch.optim.SGD(model.top.parameters())},
            ValueError,
            "trained_by has no table of the model",
        ),
        (
            model,
            {"trained_by": torch.optim.SGD(model.parameters(), momentum=0.5)},
            ValueError,
            "bags.user: SGD with momentum=0.5 has no counterpart here",
        ),
        (
            model,
            {"trained_by": torch.optim.Adagrad(model.tower.parameters()), "optimizer": rk.SGD()},
            ValueError,
            "tower.0: table 'weight' of ours is trained by SGD",
        ),
        (model, {"format": "int3", "optimizer": rk.SGD()}, ValueError, "bags.user: format must be .fp32., "),
        (model, {"formats": "int8"}, TypeError, r"bags.user: convert_embeddings\(\) got an unexpected keyword"),
    ]
    for given, options, error, message in cases:
        with pytest.raises(error, match=message):
            rk.replace_embeddings(given, **options)
    assert list(model.modules()) == before


def test_distributed_data_parallel(tmp_path: Any) -> None:
    """A model that is already wrapped is rejected."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(
            ValueError, match=r"model: it is a DistributedDataParallel, .*: replace the embeddings before wrapping"
        ):
            rk.replace_embeddings(nn.parallel.DistributedDataParallel(Model(sparse=False)))
    finally:
        torch.distributed.destroy_process_group()


def test_torchrec_model() -> None:
    """TorchRec's DLRM with this package's collection has its losses."""
    torchrec = pytest.importorskip("torchrec")
    from torchrec.models.dlrm import DLRM

    def make() -> Any:
        torch.manual_seed(0)
        tables = [
            torchrec.EmbeddingBagConfig(name=n, num_embeddings=20, embedding_dim=8, feature_names=[f"{n}f"])
            for n in ("user", "item")
        ]
        collection = torchrec.EmbeddingBagCollection(tables=tables)
        return DLRM(collection, dense_in_features=4, dense_arch_layer_sizes=[8], over_arch_layer_sizes=[8, 1])

    class Fed(nn.Module):
        """The model with the batch of a step."""

        def __init__(self) -> None:
            super().__init__()
            self.dlrm = make()

        def forward(self, step: int) -> Tensor:
            ids, lengths = ids_of(step, 20, 8).flatten(), torch.full((2 * BATCH,), 4)
            batch = torchrec.KeyedJaggedTensor(["itemf", "userf"], ids, lengths=lengths)
            return self.dlrm(torch.arange(4.0).repeat(BATCH, 1), batch)

    theirs, model, other = Fed(), Fed(), Fed()
    optimizers, own = ([torch.optim.SGD(m.parameters(), lr=0.1)] for m in (theirs, model))
    found = rk.replace_embeddings(model, trained_by=own)
    assert [(f.names, f.kind, f.tables) for f in found.swapped] == [
        (["dlrm.sparse_arch.embedding_bag_collection"], "EmbeddingBagCollection", [("user", 20, 8), ("item", 20, 8)])
    ]
    assert isinstance(model.dlrm.sparse_arch.embedding_bag_collection, rk.EmbeddingBagCollection)
    losses = train(theirs, range(5), optimizers)
    torch.testing.assert_close(train(model, range(5), own), losses, rtol=1e-5, atol=0)
    assert set(theirs.state_dict()) <= set(model.state_dict())
    # An existing optimizer that is not named warns that it does not train the tables.
    late = torch.optim.SGD(other.parameters(), lr=0.1)
    report = rk.replace_embeddings(other)
    assert "its parameters are new, for an optimizer of torch made from now on" in str(report)
    assert "parameters are new" not in str(found)
    with pytest.warns(UserWarning, match=r"SGD was given tables that rk\.replace_embeddings has since replaced"):
        train(other, range(1), [late])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(other, range(1), [torch.optim.SGD(other.parameters(), lr=0.1)])


def test_sharded_is_left(tmp_path: Any) -> None:
    """A collection sharded by TorchRec is reported with an alternative; this package's own is not replaced."""
    torchrec = pytest.importorskip("torchrec")
    from torchrec.distributed.model_parallel import DistributedModelParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        table = {"name": "t", "num_embeddings": 20, "embedding_dim": 8, "feature_names": ["f"]}
        theirs = torchrec.EmbeddingBagCollection([torchrec.EmbeddingBagConfig(**table)])
        ours = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(**table)], optimizer=rk.SGD())
        sharder = rk.distributed.EmbeddingBagCollectionSharder()
        sharded = DistributedModelParallel(nn.ModuleDict({"a": theirs}), device=torch.device("cpu"))
        own = DistributedModelParallel(nn.ModuleDict({"b": ours}), device=torch.device("cpu"), sharders=[sharder])
        found = rk.replace_embeddings(nn.Sequential(sharded.module, own.module))
        reason = "it is sharded by TorchRec: rk.distributed.torchrec_state takes its checkpoints"
        assert [(f.names, f.kind, f.reason) for f in found.left] == [(["0.a"], "ShardedEmbeddingBagCollection", reason)]
        with pytest.raises(ValueError, match=f"theirs: {reason}"):
            rk.convert_embeddings(sharded.module["a"])
        with pytest.raises(TypeError, match=r"got ShardedEmbeddingBagCollection: use rk\.distributed\.torchrec_state"):
            rk.import_tables(ours, sharded.module["a"])
    finally:
        torch.distributed.destroy_process_group()


def test_fbgemm_is_left() -> None:
    """FBGEMM's module is reported with an alternative."""
    pytest.importorskip("fbgemm_gpu")
    model = nn.Sequential(fbgemm("EXACT_SGD"))
    found = rk.replace_embeddings(model)
    assert found.swapped == []
    assert [(f.tables[0], f.reason) for f in found.left] == [
        (("t0", 30, 8), "FBGEMM's module takes ids and offsets: rk.convert_embeddings makes a collection of it")
    ]


def test_others_are_left() -> None:
    """Tables of unknown classes of TorchRec and FBGEMM are reported with their module."""
    pytest.importorskip("fbgemm_gpu")
    torchrec = pytest.importorskip("torchrec")
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    class Derived(FusedEmbeddingBagCollection):
        pass

    config = torchrec.EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="u", feature_names=["u"])
    derived = Derived([config], torch.optim.SGD, {"lr": 0.1})
    dense = DenseTableBatchedEmbeddingBagsCodegen([(10, 4)], use_cpu=True)
    found = rk.replace_embeddings(nn.ModuleDict({"dense": dense, "derived": derived}))
    kind = f"{type(dense).__module__}.{type(dense).__name__}"
    assert [f.reason for f in found.left] == [
        f"no module here replaces {kind}",
        "it is a subclass of FusedEmbeddingBagCollection, whose lookups may be others",
    ]
    assert str(found).startswith("0 swapped, 2 left\ndense: DenseTableBatchedEmbeddingBagsCodegen left: no module here")
    with pytest.raises(TypeError, match=f"^theirs must be a .* got {re.escape(kind)}$"):
        rk.convert_embeddings(dense)


def test_classes_with_an_interface_of_torchrec() -> None:
    """TorchRec's collection inside of a user's class with TorchRec's interface is replaced."""
    torchrec = pytest.importorskip("torchrec")
    config = torchrec.EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="u", feature_names=["u"])

    class Own(torchrec.modules.embedding_modules.EmbeddingBagCollectionInterface):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torchrec.EmbeddingBagCollection(tables=[config])

        def forward(self, features: object) -> object:
            return self.inner(features)

        def embedding_bag_configs(self) -> list:
            return self.inner.embedding_bag_configs()

        def is_weighted(self) -> bool:
            return False

    own = Own()
    assert rk.replace_embeddings(nn.Sequential(own)).left == []
    assert isinstance(own.inner, rk.EmbeddingBagCollection)


def test_nothing_is_lost_in_silence() -> None:
    """Rows on the meta device start as theirs do, halves stay halves, hooks and tied weights are reported."""
    torchrec = pytest.importorskip("torchrec")
    config = torchrec.EmbeddingBagConfig(
        num_embeddings=10, embedding_dim=4, name="u", feature_names=["u"], init_fn=lambda w: w.data.fill_(7.0)
    )
    made = rk.convert_embeddings(
        torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("meta")), optimizer=rk.SGD(lr=0.1)
    )
    rows = torch.empty(10, 4)
    made.tables[0].init(rows)
    assert torch.equal(rows, torch.full((10, 4), 7.0))

    for options in ({}, {"optimizer": rk.SGD(lr=0.1)}):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)).bfloat16()
        weight = model[0].weight
        rk.replace_embeddings(model, **options)
        assert model(torch.arange(2)).dtype == torch.bfloat16
        assert (model[0].weight is weight) == (not options)

    hooked = nn.Sequential(nn.Embedding(10, 4))
    hooked[0].weight.register_post_accumulate_grad_hook(print)
    assert rk.replace_embeddings(hooked, optimizer=rk.SGD(lr=0.1)).left[0].reason == "it has hooks"

    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    trainer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^0: with optimizer=None its tables have new parameters"):
        rk.replace_embeddings(model, trained_by=trainer, optimizer=None, bounds_check="ignore")
    assert any(p is model[0].weight for p in trainer.param_groups[0]["params"])
    assert len(rk.replace_embeddings(model, trained_by=[trainer, trainer]).swapped) == 1


def test_rows_have_one_place() -> None:
    """Tied or expanded weights and the meta device are rejected before anything is written."""
    names = ["a", "b"]
    ours = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(5, 2, name=n, feature_names=[n]) for n in names])
    layer = nn.Embedding(5, 2)
    with pytest.raises(ValueError, match="tables 'a' and 'b' share a weight"):
        rk.export_tables(ours, nn.ModuleDict({"a": layer, "b": layer}))
    theirs = nn.ModuleDict({n: nn.Embedding(5, 2) for n in names})
    theirs["b"].weight = nn.Parameter(torch.zeros(1, 2).expand(5, 2), requires_grad=False)
    before = theirs["a"].weight.clone()
    with pytest.raises(ValueError, match="table 'b': weight must have memory for each element"):
        rk.export_tables(ours, theirs)
    assert torch.equal(theirs["a"].weight, before)
    absent = nn.ModuleDict({n: nn.Embedding(5, 2, device="meta") for n in names})
    for copy_of in (rk.import_tables, rk.export_tables):
        with pytest.raises(ValueError, match="theirs must have memory"):
            copy_of(ours, absent)
