"""Conversion of FBGEMM's training and inference tables to collections of this package, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import convert_cases
import pytest
import torch
from convert_cases import BATCH, FEATURES, SIZES, fbgemm, ids_of, same_bits, train, trained_copy
from torch import Tensor

import rec_kernels as rk

pytest.importorskip("fbgemm_gpu")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPTIMIZERS = {
    "EXACT_SGD": rk.SGD(lr=0.25),
    "EXACT_ADAGRAD": rk.Adagrad(lr=0.25, eps=2**-10),
    "EXACT_ROWWISE_ADAGRAD": rk.RowwiseAdagrad(lr=0.25, eps=2**-10),
}
MOMENTS = {"ADAM": rk.Adam, "PARTIAL_ROWWISE_ADAM": rk.RowwiseAdam, "LAMB": rk.LAMB}


def batch(step: int) -> tuple[Tensor, Tensor]:
    rows = [list(SIZES.values())[t][0] for t in FEATURES]
    ids = torch.cat([ids_of(100 * step + f, r).flatten() for f, r in enumerate(rows)])
    return ids, torch.arange(len(FEATURES) * BATCH + 1) * 4


def fbgemm_lookup(module: Any) -> Callable[[int], Tensor]:
    return lambda step: module(*batch(step))


def our_lookup(collection: Any) -> Callable[[int], Tensor]:
    """Lookups of ours in FBGEMM's output layout."""

    def look_up(step: int) -> Tensor:
        ids, offsets = batch(step)
        keys = [f"f{i}" for i in range(len(FEATURES))]
        found = collection(rk.KeyedJaggedTensor(keys, ids, offsets=offsets))
        return torch.cat([found[key].values() for key in keys]) if isinstance(found, dict) else found.values()

    return look_up


@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_there_and_back(name: str, pooling: str) -> None:
    """Import and export keep FBGEMM's training bits; ours has its losses up to rounding.

    Losses are sums of at most 48 products of magnitude 1, so losses of five steps agree to 5e-6, while lost state
    changes them by more than 1e-3.
    """
    theirs = fbgemm(name, pooling=pooling)
    train(fbgemm_lookup(theirs), range(4))
    ours: Any = rk.convert_embeddings(theirs)
    assert ours.optimizer == OPTIMIZERS[name]
    assert isinstance(ours, rk.EmbeddingCollection if pooling == "NONE" else rk.EmbeddingBagCollection)
    assert [t.feature_names for t in ours.tables] == [["f0", "f1"], ["f2"], ["f3"]]
    again = fbgemm(name, pooling=pooling)
    rk.export_tables(ours, again)
    losses = train(fbgemm_lookup(theirs), range(4, 9))
    assert train(fbgemm_lookup(again), range(4, 9)) == losses
    assert all(map(torch.equal, again.split_embedding_weights(), theirs.split_embedding_weights()))
    torch.testing.assert_close(train(our_lookup(ours), range(4, 9)), losses, rtol=5e-6, atol=0)
    if name != "EXACT_SGD":
        fresh = fbgemm(name, pooling=pooling)
        rk.export_tables(ours, fresh)
        for state in fresh.split_optimizer_states():
            state[0].zero_()
        lost = train(fbgemm_lookup(fresh), range(9, 12))
        assert abs(lost[-1] - train(our_lookup(ours), range(9, 12))[-1]) > 1e-3 * lost[-1]


def test_features_that_are_not_in_the_order_of_tables(monkeypatch) -> None:
    """Columns are grouped by table and named; in feature order, they are FBGEMM's."""
    monkeypatch.setattr(convert_cases, "FEATURES", [0, 1, 0, 2])
    theirs = fbgemm("EXACT_SGD")
    ours: Any = rk.convert_embeddings(theirs)
    ids, offsets = torch.tensor([1, 2, 3, 4, 4, 0, 2, 1]), torch.arange(9)
    keys = ["f0", "f1", "f2", "f3"]
    found, expected = ours(rk.KeyedJaggedTensor(keys, ids, offsets=offsets)), theirs(ids, offsets)
    assert found.keys() == ["f0", "f2", "f1", "f3"]
    assert not torch.equal(found.values(), expected)
    assert torch.equal(rk.KeyedTensor.regroup([found], [keys])[0], expected)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MOMENTS])
def test_ours_there_and_back(name: str) -> None:
    """Exporting to FBGEMM and importing keeps all bits: weights, state, step and beta powers."""
    optimizer = OPTIMIZERS[name] if name in OPTIMIZERS else MOMENTS[name](lr=0.25, eps=2**-10, betas=(0.75, 0.875))
    betas = {"beta1": 0.75, "beta2": 0.875} if name in MOMENTS else {}
    theirs = fbgemm(name, on_device=name in MOMENTS, **betas)
    features = [[f"f{i}" for i, of in enumerate(FEATURES) if of == t] for t in range(3)]
    sizes = zip(SIZES.items(), features, strict=True)
    ours = rk.EmbeddingBagCollection(
        [rk.EmbeddingBagConfig(*size, name=n, feature_names=f) for (n, size), f in sizes], optimizer=optimizer
    )
    train(our_lookup(ours), range(5))
    rk.export_tables(ours, theirs)
    assert int(theirs.iter) == int(theirs.iter_cpu) == 5
    back = trained_copy(ours)
    rk.import_tables(back, theirs)
    assert same_bits(ours.state_dict(), back.state_dict())
    converted: Any = rk.convert_embeddings(theirs)
    assert converted.optimizer == optimizer
    assert [t for n, t in converted.state_dict().items() if n == "step"] == [torch.tensor(5)]


def test_half_rows() -> None:
    """float16 rows are converted bit for bit; export of float32 rows to float16 rounds."""
    from fbgemm_gpu.split_embedding_configs import SparseType

    theirs = fbgemm("EXACT_ROWWISE_ADAGRAD", weights_precision=SparseType.FP16)
    ours: Any = rk.convert_embeddings(theirs)
    assert [t.format for t in ours.tables] == ["fp16"] * 3
    own = [ours.embedding_bags[name].weight for name in ("t0", "t1", "t2")]
    assert all(map(torch.equal, own, theirs.split_embedding_weights()))
    single = fbgemm("EXACT_ROWWISE_ADAGRAD")
    rk.export_tables(rk.convert_embeddings(single), theirs)
    rounded = [w.half() for w in single.split_embedding_weights()]
    assert all(map(torch.equal, theirs.split_embedding_weights(), rounded))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_is_a_hook(name: str) -> None:
    """FBGEMM's gradient_clipping clips the output's gradient, as a hook on ours does."""
    theirs = fbgemm(name, pooling="SUM", gradient_clipping=True, max_gradient=2**-8)
    ours = rk.convert_embeddings(theirs, optimizer=OPTIMIZERS[name])
    plain = rk.convert_embeddings(fbgemm(name, pooling="SUM"))

    def clipped(step: int) -> Tensor:
        pooled = our_lookup(ours)(step)
        pooled.register_hook(lambda grad: grad.clamp(-(2**-8), 2**-8))
        return pooled

    losses = train(fbgemm_lookup(theirs), range(5))
    torch.testing.assert_close(train(clipped, range(5)), losses, rtol=5e-6, atol=0)
    assert abs(train(our_lookup(plain), range(5))[-1] - losses[-1]) > 1e-3 * losses[-1]


def inference(kind: str, *, pooling: str = "SUM", names: tuple[str, str] = ("a", "b"), **options: Any) -> Any:
    """FBGEMM's module of two tables for inference; the first has features 0 and 2."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_inference as fbgemm_inference

    types, place = fbgemm_inference.SparseType, fbgemm_inference.EmbeddingLocation.HOST
    sizes = {"SUM": (8, 16), "MEAN": (8, 16), "NONE": (8, 8)}[pooling]
    module = fbgemm_inference.IntNBitTableBatchedEmbeddingBagsCodegen(
        [(name, 20, size, types[kind], place) for name, size in zip(names, sizes, strict=True)],
        feature_table_map=[0, 1, 0],
        pooling_mode=fbgemm_inference.PoolingMode[pooling],
        device="cpu",
        **{"output_dtype": types.FP32, **options},
    )
    module.initialize_weights()
    generator = torch.Generator().manual_seed(0)
    for size, (rows, _) in zip(sizes, module.split_embedding_weights(split_scale_shifts=False), strict=True):
        numbers = torch.randn(20, size, generator=generator)
        if kind.startswith("FP"):
            rows[:] = numbers.to(torch.float16 if kind == "FP16" else torch.float32).view(torch.uint8)
        else:
            rows[:] = rk.rows_to_fbgemm(rk.quantize_rows(numbers, kind.lower()), kind.lower(), size)
    return module


@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
@pytest.mark.parametrize("kind", ["INT8", "INT4", "FP16", "FP32"])
def test_inference(kind: str, pooling: str) -> None:
    """Imported inference tables give FBGEMM's outputs, also for weighted and empty bags, and are frozen."""
    theirs = inference(kind, pooling=pooling)
    ours: Any = rk.convert_embeddings(theirs, bounds_check="ignore")
    assert [(t.name, t.feature_names, t.format) for t in ours.tables] == [
        ("a", ["f0", "f2"], kind.lower()),
        ("b", ["f1"], kind.lower()),
    ]
    assert rk.dense_parameters(ours) == []
    ids, offsets = torch.randint(20, (12,), dtype=torch.int32), torch.tensor([0, 3, 3, 7, 8, 12, 12]).int()
    keys = ["f0", "f1", "f2"]
    for weights in (None, torch.rand(12)):
        found = ours(rk.KeyedJaggedTensor(keys, ids, offsets=offsets, weights=weights))
        expected = theirs(ids, offsets, weights)
        if pooling == "NONE":
            assert torch.equal(torch.cat([found[key].values() for key in keys]), expected)
        else:
            columns = rk.KeyedTensor.regroup([found], [keys])[0]
            torch.testing.assert_close(columns, expected, rtol=0, atol=2e-6)


def test_inference_errors() -> None:
    """Unsupported row types, pruned rows and block sizes are rejected; unnamed tables get names."""
    assert [t.name for t in rk.convert_embeddings(inference("INT8", names=("", ""))).tables] == ["t0", "t1"]
    remapping, wide = torch.arange(20, dtype=torch.int32), inference("INT8")
    wide.scale_bias_size_in_bytes = 8
    for module, message in (
        (inference("INT2"), "theirs: table 'a': its rows are INT2, but must be one of INT8, INT4, FP16, FP32; rk.dequ"),
        (inference("INT8", index_remapping=[remapping, remapping]), "theirs: its rows are pruned: ids are remapped"),
        (wide, "theirs: scale_bias_size_in_bytes must be 4, got 8"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            rk.convert_embeddings(module)
    found = rk.replace_embeddings(torch.nn.Sequential(inference("INT8")))
    assert (
        str(found).splitlines()[1].startswith("0: IntNBitTableBatchedEmbeddingBagsCodegen (a 20 x 8, b 20 x 16) left")
    )
    with pytest.raises(TypeError, match="trained_by must be None: tables for inference"):
        rk.convert_embeddings(inference("INT8"), trained_by=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


def test_weighted_means() -> None:
    """FBGEMM's CPU kernels divide weighted means by the number of ids, as ours do, but not the gradients."""
    theirs = fbgemm("EXACT_SGD")
    ours: Any = rk.convert_embeddings(theirs)
    before = [weight.clone() for weight in theirs.split_embedding_weights()]
    ids, offsets = batch(0)
    weights = [torch.rand(len(ids), generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
    keys = [f"f{i}" for i in range(len(FEATURES))]
    expected = theirs(ids, offsets, weights[0])
    found = ours(rk.KeyedJaggedTensor(keys, ids, offsets=offsets, weights=weights[1])).values()
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(weights[0].grad, 4 * weights[1].grad)  # bags have four ids
    for old, weight, own in zip(before, theirs.split_embedding_weights(), ours.embedding_bags.values(), strict=True):
        torch.testing.assert_close(weight - old, 4 * (own.weight - old), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["NONE", "L2", "DECOUPLE"])
def test_weight_decay(mode: str) -> None:
    """Row-wise Adagrad has FBGEMM's weight decay in modes L2 and DECOUPLE; other modes do not exist on the CPU."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

    name = "EXACT_ROWWISE_ADAGRAD"
    theirs = fbgemm(name, weight_decay=0.5, weight_decay_mode=WeightDecayMode[mode])
    with pytest.raises(ValueError, match=r"EXACT_ROWWISE_ADAGRAD with weight_decay=0\.5 has no counterpart here"):
        rk.convert_embeddings(theirs)
    decay: Any = {"L2": {"weight_decay_mode": "l2"}, "DECOUPLE": {"weight_decay_mode": "decoupled"}}.get(mode)
    options = {"weight_decay": 0.5, **decay} if decay else {}
    ours: Any = rk.convert_embeddings(theirs, optimizer=rk.RowwiseAdagrad(lr=0.25, eps=2**-10, **options))
    plain = fbgemm(name)
    for look_up in (fbgemm_lookup(theirs), our_lookup(ours), fbgemm_lookup(plain)):
        train(look_up, range(3))
    shared, *others = theirs.split_embedding_weights()
    torch.testing.assert_close(shared, ours.embedding_bags["t0"].weight.detach(), rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, others, plain.split_embedding_weights()[1:]))


def test_rows_only() -> None:
    """trained_by=[] ignores FBGEMM's optimizer, so that another one may follow."""
    theirs = fbgemm("EXACT_ADAGRAD")
    train(fbgemm_lookup(theirs), range(2))
    ours: Any = rk.convert_embeddings(theirs, trained_by=[], optimizer=rk.RowwiseAdagrad())
    assert int(ours.step) == 0
    assert torch.equal(ours.embedding_bags["t1"].weight, theirs.split_embedding_weights()[1])
    sums = [s[0].clone() for s in theirs.split_optimizer_states()]
    with torch.no_grad():
        ours.embedding_bags["t1"].weight.zero_()
    rk.export_tables(ours, theirs, trained_by=[])
    assert not theirs.split_embedding_weights()[1].any()
    assert all(map(torch.equal, sums, [s[0] for s in theirs.split_optimizer_states()]))


def test_errors() -> None:
    """Optimizers without a counterpart, unsupported options, and mismatched tables are rejected."""
    theirs = fbgemm("EXACT_ADAGRAD")
    with pytest.raises(ValueError, match=r"ours is trained by SGD\(.*\), but theirs by FBGEMM's EXACT_ADAGRAD: use"):
        rk.convert_embeddings(theirs, optimizer=rk.SGD())
    with pytest.raises(TypeError, match=r"trained_by must be None or \[\]: FBGEMM's tables include"):
        rk.convert_embeddings(theirs, trained_by=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    with pytest.raises(ValueError, match="theirs: FBGEMM's LARS_SGD has no counterpart here, only EXACT_SGD, "):
        rk.convert_embeddings(fbgemm("LARS_SGD", on_device=True))
    with pytest.raises(ValueError, match="FBGEMM's EXACT_ADAGRAD with gradient_clipping=True has no counterpart"):
        rk.convert_embeddings(fbgemm("EXACT_ADAGRAD", gradient_clipping=True))
    from fbgemm_gpu.split_embedding_configs import SparseType

    with pytest.raises(ValueError, match="weights_precision must be FP32, FP16 or BF16, got INT8"):
        rk.convert_embeddings(fbgemm("EXACT_SGD", weights_precision=SparseType.INT8, cache_precision=SparseType.FP32))
    ours: Any = rk.convert_embeddings(theirs)
    wrong = rk.EmbeddingBagCollection(list(reversed(ours.tables)), optimizer=ours.optimizer)
    before = {n: t.clone() for n, t in wrong.state_dict().items()}
    with pytest.raises(ValueError, match=r"table 't2' is \[5, 4\], but theirs is \[30, 8\]"):
        rk.import_tables(wrong, theirs)
    with pytest.raises(ValueError, match=r"table 't2' is \[5, 4\], but theirs is \[30, 8\]"):
        rk.export_tables(wrong, theirs)
    assert same_bits(before, wrong.state_dict())
