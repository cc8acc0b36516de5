"""``rk.Embedding`` and ``rk.EmbeddingBag`` compared with torch's: results, states, copies, and errors."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nested, nn
from torch.fx.experimental.proxy_tensor import make_fx

import rec_kernels as rk
from rec_kernels import testing

ROWS, DIM = 12, 4
PADDED = torch.tensor([[1, 3, 3], [3, 3, 3], [9, 9, 0]])
JAGGED = torch.tensor([1, 3, 3, 3, 5, 5, 7]), torch.tensor([0, 2, 2, 4])
SGD = {"optimizer": rk.SGD(lr=0.1)}


def seeded(make: Callable[..., nn.Module], *args: object, **options: object) -> nn.Module:
    torch.manual_seed(3)
    return make(*args, **options)


def trained(layer: nn.Module, inputs: tuple[Tensor, ...], steps: int = 3) -> Tensor:
    """Trains, by torch's SGD if the layer is not fused; returns the outputs of all steps."""
    fused = getattr(layer, "collection", None) is not None
    optimizer = None if fused else torch.optim.SGD(layer.parameters(), lr=0.1)
    outputs = []
    for _ in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        outputs.append(layer(*inputs))
        outputs[-1].square().sum().backward()
        if optimizer is not None:
            optimizer.step()
    return torch.stack(outputs)


@pytest.mark.parametrize("options", [{}, SGD, SGD | {"format": "fp16"}], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("inputs", [(PADDED,), JAGGED], ids=["padded", "jagged"])
def test_bags_are_torchs(mode: str, options: dict, inputs: tuple[Tensor, ...]) -> None:
    """With equal seeds, weights, outputs and steps equal torch's, in fp16 within its precision."""
    theirs = seeded(nn.EmbeddingBag, ROWS, DIM, mode=mode, padding_idx=3)
    ours = seeded(rk.EmbeddingBag, ROWS, DIM, mode=mode, padding_idx=3, **options)
    close = {"rtol": 2e-3, "atol": 2e-3} if "format" in options else {}
    torch.testing.assert_close(ours.weight.float(), theirs.weight, **close)
    torch.testing.assert_close(trained(ours, inputs), trained(theirs, inputs), **close)
    torch.testing.assert_close(ours.weight.float(), theirs.weight, **close)


@pytest.mark.parametrize("options", [{}, SGD], ids=str)
def test_ties_of_the_largest_are_torchs(options: dict) -> None:
    """One of several equal maxima gets a column's gradient; bags may be empty, and offsets may skip ids."""
    theirs = seeded(nn.EmbeddingBag, ROWS, DIM, mode="max", padding_idx=3)
    ours = seeded(rk.EmbeddingBag, ROWS, DIM, mode="max", padding_idx=3, include_last_offset=True, **options)
    signs = torch.tensor([1.0, -1.0, 2.0, -3.0])
    ids, before = torch.tensor([3, 1, 1, 1, 3, 3, 5, 1, 5]), ours.weight.detach().clone()
    expected = theirs(ids[:8], torch.tensor([0, 4, 6]))
    found = ours(ids, torch.tensor([0, 4, 6, 8]))
    assert torch.equal(found, expected)
    (expected * signs).sum().backward()
    (found * signs).sum().backward()
    gradient = ours.weight.grad if not options else (before - ours.weight.detach()) / 0.1
    torch.testing.assert_close(gradient, theirs.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind", [rk.Embedding, *(functools.partial(rk.EmbeddingBag, mode=m) for m in ("sum", "mean", "max"))], ids=str
)
def test_half_precision_without_options(kind: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    """A layer without options has a parameter and results of its dtype; torch's optimizers train it."""
    given = torch.randn(ROWS, DIM)
    layers = [kind(ROWS, DIM, _weight=given.to(dtype)), kind(ROWS, DIM, _weight=given).to(dtype)]
    assert [(each.collection, each.weight.dtype) for each in (*layers, kind(ROWS, DIM, dtype=dtype))] == [
        (None, dtype)
    ] * 3
    wide = kind(ROWS, DIM, _weight=given.to(dtype).float())
    expected = wide(PADDED).to(dtype)  # sums are rounded once
    expected.float().square().sum().backward()
    for each in layers:
        output = each(PADDED)
        assert output.dtype == dtype
        assert torch.equal(output, expected)
        output.float().square().sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert torch.equal(each.weight.grad, wide.weight.grad.to(dtype))
        assert torch.equal(each.weight, given.to(dtype).add(each.weight.grad, alpha=-0.1))


@pytest.mark.parametrize("ends", [[0, 3, 2, 6], [0, 7], [-1, 6]])
def test_bad_offsets_of_the_largest(ends: list[int]) -> None:
    """Bad offsets of max pooling raise; nothing outside of the rows is read."""
    layer = rk.EmbeddingBag(ROWS, DIM, mode="max", include_last_offset=True)
    with pytest.raises(ValueError, match=r"offsets\[\d\] = "):
        layer(torch.arange(6), torch.tensor(ends))


@pytest.mark.parametrize("options", [{}, SGD], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 0), (2, 3, 2)])
def test_rows_are_torchs(shape: tuple[int, ...], options: dict) -> None:
    """Ids have any shape and either width; the padding id's row is zeros."""
    theirs = seeded(nn.Embedding, ROWS, DIM, padding_idx=3)
    ours = seeded(rk.Embedding, ROWS, DIM, padding_idx=3, **options)
    ids = torch.randint(ROWS, shape)
    assert torch.equal(ours(ids), theirs(ids))
    assert torch.equal(ours(ids.int()), theirs(ids))
    torch.testing.assert_close(trained(ours, (ids,)), trained(theirs, (ids,)))
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize("options", [{}, SGD], ids=str)
@pytest.mark.parametrize("padding", [0.0, -0.0, 2.0, torch.nan])
def test_rows_of_padding_are_replaced_if_not_zeros(padding: float, options: dict) -> None:
    """Lookups of the padding have its row's bits; rows are replaced only if that row is not +0."""
    given = torch.randn(ROWS, DIM).index_fill_(0, torch.tensor([3]), padding)
    layer = rk.Embedding.from_pretrained(given, freeze=False, padding_idx=3, **options)
    ids = torch.tensor([[1, 3], [3, 4]])
    with torch.profiler.profile() as profile:
        found = layer(ids)
    assert testing.same_bits(found.detach(), given[ids])
    is_zeros = padding == 0 and math.copysign(1, padding) == 1
    assert any(event.key == "aten::where" for event in profile.key_averages()) == (not is_zeros)
    with torch.no_grad():  # tracers read no row
        for traced in (make_fx(layer)(ids), torch.compile(layer, backend="aot_eager", fullgraph=True)):
            assert testing.same_bits(traced(ids), given[ids])


@pytest.mark.filterwarnings("ignore:table 'weight'. its init receives all rows at once")
@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("backing", ["device", "host", "disk"])
def test_rows_of_padding_behind_a_cache(backing: str, format: str, tmp_path: Path) -> None:
    """A nonzero padding row is read from a cache of any backing, and never trained."""
    given = torch.randn(5000, 16)
    where = {"path": tmp_path / "rows", "memory_budget": 300_000} if backing == "disk" else {}
    options = {"cache": rk.RowCache(0.01, backing=backing, **where), "format": format, **SGD}
    layer = rk.Embedding.from_pretrained(given, freeze=False, padding_idx=3333, **options)
    ids = torch.tensor([[1, 3333], [3333, 4000]])
    for step in range(2):
        rows = layer(ids)
        padding = rk.dequantize_rows(rk.quantize_rows(given[3333:3334], format), format, 16)
        assert torch.equal(rows[ids == 3333], padding.expand(2, -1))
        assert torch.equal(rows[0, 0], given[1]) == (step == 0 and format == "fp32")
        rows.square().sum().backward()


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_rows_of_padding_beside_a_gpu(format: str) -> None:
    """The padding row of a table in host memory is copied to the ids' device."""
    layer = rk.Embedding(ROWS, DIM, padding_idx=3, cache=rk.RowCache(0.5, backing="host"), format=format, **SGD)
    row = layer._padding_row(torch.device("meta"))
    assert (row.device.type, row.dtype, list(row.shape)) == ("meta", torch.float32, [1, DIM])


def test_factors_and_last_offsets() -> None:
    """``per_sample_weights``, with a gradient, and ``include_last_offset`` work with a fused optimizer."""
    ids, offsets = JAGGED
    factors = torch.arange(7.0, requires_grad=True)
    theirs = seeded(nn.EmbeddingBag, ROWS, DIM, mode="sum", include_last_offset=True)
    ours = seeded(rk.EmbeddingBag, ROWS, DIM, mode="sum", include_last_offset=True, **SGD)
    ends = torch.cat([offsets, torch.tensor([7])])
    expected = theirs(ids, ends, factors)
    expected.sum().backward()
    reference, factors.grad = factors.grad, None
    output = ours(ids, ends, factors)
    output.sum().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(factors.grad, reference)
    halves = ours(ids, ends, factors.detach().double())
    torch.testing.assert_close(halves, ours(ids, ends, factors.detach()))


def test_sparse_gradients() -> None:
    layer = rk.EmbeddingBag(ROWS, DIM, sparse=True)
    layer(PADDED).sum().backward()
    assert layer.weight.grad.is_sparse
    rows = rk.Embedding(ROWS, DIM, sparse=True)
    rows(PADDED).sum().backward()
    assert rows.weight.grad.coalesce().indices().flatten().tolist() == [0, 1, 3, 9]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["weight"]),
        (SGD, ["weight", "step"]),
        ({"optimizer": rk.RowwiseAdagrad(lr=0.1)}, ["weight", "step", "sum"]),
        (
            {"optimizer": rk.Adam(lr=0.1), "format": "int8"},
            ["weight", "step", "format", "beta_powers", "exp_avg", "exp_avg_sq"],
        ),
        (
            {"optimizer": rk.RowwiseAdagrad(lr=0.1), "compression": rk.QuotientRemainder(3)},
            ["weight_0", "weight_1", "sum_0", "sum_1", "step"],
        ),
    ],
)
def test_states(options: dict, names: list[str]) -> None:
    """A state has the layer's names, and restores training to the bit."""
    layer = rk.Embedding(ROWS, DIM, **options)
    trained(layer, (PADDED,))
    state = {name: tensor.clone() for name, tensor in nn.ModuleDict({"item": layer}).state_dict().items()}
    assert sorted(state) == sorted(f"item.{name}" for name in names)
    other = rk.Embedding(ROWS, DIM, **options)
    nn.ModuleDict({"item": other}).load_state_dict(state)
    assert torch.equal(trained(other, (PADDED,)), trained(layer, (PADDED,))) or not options


def test_state_of_torch() -> None:
    """torch.nn's state loads if the optimizer has no state; otherwise the missing names are reported."""
    theirs = nn.Embedding(ROWS, DIM)
    ours = rk.Embedding(ROWS, DIM, **SGD)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict({"weight": ours.state_dict()["weight"]})
    adagrad = rk.Embedding(ROWS, DIM, optimizer=rk.Adagrad(lr=0.1))
    before = adagrad.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "step", "sum"'):
        adagrad.load_state_dict(theirs.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for item\.weight: the state has \[3, 4\]"):
        nn.ModuleDict({"item": adagrad}).load_state_dict({"item.weight": torch.zeros(3, 4)})
    assert not torch.equal(adagrad.weight, before)  # the first state had its weight, and lacked the others
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        ours.load_state_dict(ours.state_dict() | {"other": torch.zeros(1)})


def _by_pickle(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


def _by_torch(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _by_pickle, _by_torch])
@pytest.mark.parametrize("options", [SGD, SGD | {"format": "int8"}], ids=str)
def test_copies_train_alone(copied: Callable[[nn.Module], nn.Module], options: dict) -> None:
    """A copy has equal values, separate memory, and a fused optimizer."""
    layer = rk.Embedding(ROWS, DIM, **options)
    before = layer.weight.detach().clone()
    other = copied(layer)
    assert torch.equal(other.weight, before)
    trained(other, (PADDED,))
    assert torch.equal(layer.weight, before)
    assert not torch.equal(other.weight, before)
    assert other.collection.step == 3
    assert layer.collection.step == 0


def test_a_tied_layer_is_copied_with_its_table() -> None:
    """An output layer that shares the weight shares it in the copy, too, and both uses train it."""
    model = nn.ModuleDict({"item": rk.Embedding(ROWS, DIM, **SGD), "scores": nn.Linear(DIM, ROWS, bias=False)})
    model["scores"].weight = model["item"].weight
    plain = nn.ModuleDict({"item": nn.Embedding(ROWS, DIM), "scores": nn.Linear(DIM, ROWS, bias=False)})
    plain["item"].load_state_dict({"weight": model["item"].weight})
    plain["scores"].weight = plain["item"].weight
    for tied in (model, copy.deepcopy(model)):
        tied["scores"](tied["item"](PADDED)).square().mean().backward()
        assert tied["item"].collection.step == 1
        plain.zero_grad()
        plain["scores"](plain["item"](PADDED)).square().mean().backward()
        expected = plain["item"].weight - 0.1 * plain["item"].weight.grad
        torch.testing.assert_close(tied["item"].weight, expected)


def test_moves_and_the_meta_device() -> None:
    """Casts leave the table unchanged; memory may be allocated after construction."""
    layer = rk.Embedding(ROWS, DIM, **SGD)
    assert nn.Sequential(layer).half()[0].weight.dtype == torch.float32
    empty = rk.Embedding(ROWS, DIM, device="meta", **SGD)
    assert empty.weight.is_meta
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(PADDED), layer(PADDED))
    sized = rk.Embedding(ROWS, DIM, device="meta", **SGD).to_empty(device="cpu")
    sized.load_state_dict(layer.state_dict())
    assert torch.equal(sized(PADDED), layer(PADDED))


def test_freezing_and_pretrained_rows() -> None:
    rows = torch.randn(ROWS, DIM)
    rows[2] = 0
    for options in ({}, SGD):
        frozen = rk.Embedding.from_pretrained(rows, padding_idx=2, **options)
        assert torch.equal(frozen.weight, rows)
        assert not frozen.weight.requires_grad
        assert not frozen(PADDED).requires_grad or frozen.collection is not None
        bag = rk.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum", **options)
        bag(PADDED).sum().backward()
        assert bag.weight.requires_grad
    fused = rk.Embedding.from_pretrained(rows, **SGD)
    fused(PADDED).sum().backward()
    assert torch.equal(fused.weight, rows)
    fused.requires_grad_(True)
    fused(PADDED).sum().backward()
    assert not torch.equal(fused.weight, rows)


def test_modes_reach_the_cache() -> None:
    """Rows are inserted into a cache in training, and not in ``eval()``."""
    options = SGD | {"format": "int8", "cache": rk.RowCache(0.5, ways=2)}
    model = nn.Sequential(rk.Embedding(100, DIM, **options))
    model.eval()(PADDED)
    assert model[0].collection.memory_report()[0]["cached_rows"] == 0
    model.train()(PADDED)
    assert model[0].collection.memory_report()[0]["cached_rows"] > 0


@pytest.mark.parametrize("options", [{}, SGD], ids=str)
def test_compiled(options: dict) -> None:
    """One graph has the eager outputs and updates."""
    layer, eager = (seeded(rk.EmbeddingBag, ROWS, DIM, **options) for _ in range(2))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        output, expected = compiled(PADDED), eager(PADDED)
        assert torch.equal(output, expected)
        output.sum().backward()
        expected.sum().backward()
    assert torch.equal(layer.weight, eager.weight)


def test_parameters() -> None:
    """``weight`` is the only parameter; dense_parameters() excludes fused ones."""
    model = nn.Sequential(rk.Embedding(ROWS, DIM, **SGD), rk.Embedding(ROWS, DIM))
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.weight"]
    assert rk.dense_parameters(model) == [model[1].weight]
    assert isinstance(repr(model), str)
    assert "optimizer=SGD(lr=0.1)" in repr(model[0])
    assert repr(rk.EmbeddingBag(ROWS, DIM, padding_idx=1)) == "EmbeddingBag(12, 4, mode='mean', padding_idx=1)"


def _looked_up(options: dict, *bags: object) -> Tensor:
    return rk.EmbeddingBag(ROWS, DIM, **options)(*bags)


def _checked_no_more() -> None:
    layer = rk.EmbeddingBag(9, 4, mode="max", **SGD)
    layer.collection.bounds_check = "ignore"
    layer(PADDED % 9)


@pytest.mark.parametrize(
    ("error", "make", "message"),
    [
        (NotImplementedError, lambda: rk.Embedding(9, 4, max_norm=1.0), "not supported by rk.Embedding"),
        (
            NotImplementedError,
            lambda: rk.EmbeddingBag(9, 4, scale_grad_by_freq=True),
            "not supported by rk.EmbeddingBag",
        ),
        (TypeError, lambda: rk.Embedding(9, 4, optimiser=None), "unexpected keyword argument 'optimiser'"),
        (ValueError, lambda: rk.EmbeddingBag(9, 4, mode="min"), "mode must be 'sum', 'mean' or 'max', got 'min'"),
        (ValueError, lambda: rk.EmbeddingBag(9, 4, mode="max", bounds_check="none"), 'must be "error" for mode "max"'),
        (ValueError, lambda: rk.Embedding(9, 4, padding_idx=9), "padding_idx = 9 must be in [-9, 9)"),
        (ValueError, lambda: rk.Embedding(9, 4, dtype=torch.float64), "dtype must be torch.float32"),
        (ValueError, lambda: rk.Embedding(9, 4, sparse=True, **SGD), "sparse must be False"),
        (ValueError, lambda: rk.Embedding(9, 4, _weight=torch.zeros(9, 3)), "_weight must be floats [9, 4]"),
        (ValueError, lambda: rk.Embedding(9, 4, _weight=torch.zeros(9, 4).double()), "_weight must be torch.float32,"),
        (ValueError, lambda: rk.Embedding.from_pretrained(torch.ones(9)), "must have two dimensions"),
        (RuntimeError, lambda: rk.Embedding(9, 4, **SGD).reset_parameters(), "requires a layer without options"),
        (TypeError, lambda: rk.Embedding(9, 4)([1, 2]), "input must be a tensor of ids, got list"),
        (ValueError, lambda: rk.Embedding(9, 4, **SGD)(torch.ones(2)), "must be int32 or int64"),
        (
            ValueError,
            lambda: rk.Embedding(9, 4)(nested.nested_tensor([torch.arange(2)], layout=torch.jagged)),
            "input must be a dense tensor, got a nested one",
        ),
        (IndexError, lambda: rk.Embedding(9, 4)(torch.tensor([[0, -1]])), "input[0, 1] = -1 is"),
        (IndexError, lambda: rk.Embedding(9, 4, **SGD)(torch.tensor([[0, 9]])), "input[0, 1] = 9 is"),
        (IndexError, lambda: rk.Embedding(9, 4)(torch.tensor(-3)), "input = -3 is out of range: ids must be in [0, 9)"),
        (IndexError, lambda: rk.EmbeddingBag(9, 4, mode="max")(torch.tensor([[1, 9]])), "input[0, 1] = 9 is"),
        (ValueError, lambda: rk.EmbeddingBag(9, 4, **SGD)(torch.tensor([0])), "offsets must be given"),
        *(
            (kind, functools.partial(_looked_up, options, *bags), message)
            for options in ({}, SGD)
            for kind, bags, message in [
                (TypeError, ([1, 2], torch.zeros(1)), "input must be a tensor of ids, got list"),
                (IndexError, (torch.tensor([[0, 1], [2, 12]]),), "input[1, 1] = 12 (bag 1) is out of range: ids"),
                (ValueError, (torch.ones(2).long(), torch.tensor([0, 5])), "offsets[1] = 5 (bag 0) must be in [0, 2]"),
                (ValueError, (torch.tensor(1),), "input must have one or two dimensions, got shape []"),
                (ValueError, (PADDED[None],), "input must have one or two dimensions, got shape [1, "),
                (ValueError, (PADDED[0], PADDED), "offsets must have one dimension, got shape ["),
                (ValueError, (PADDED.to_sparse(),), "input must be a dense tensor, got one of layout torch.sparse_coo"),
            ]
        ),
        *(
            (
                ValueError,
                functools.partial(_looked_up, options, PADDED[0], torch.zeros(2, device="meta").long()),
                "offsets must be on input's device, cpu, got meta",
            )
            for options in ({}, SGD, {"mode": "max"})
        ),
        (ValueError, _checked_no_more, 'bounds_check must be "error" for mode "max", got \'ignore\''),
        (
            AttributeError,
            lambda: setattr(rk.Embedding(9, 4, **SGD).collection, "optimizer", None),
            "optimizer cannot be set to None: it is fixed when the collection is made",
        ),
        (
            NotImplementedError,
            lambda: rk.EmbeddingBag(9, 4, mode="max")(PADDED % 9, None, torch.ones(3, 3)),
            'per_sample_weights with mode "max"',
        ),
    ],
)
def test_refused(error: type[Exception], make: Callable[[], object], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_a_replaced_weight_is_refused() -> None:
    """Lookups of a fused table reject a replaced weight; a layer without options accepts it."""
    other = nn.Parameter(torch.zeros(ROWS, DIM))
    fused, plain = rk.Embedding(ROWS, DIM, **SGD), rk.Embedding(ROWS, DIM)
    fused.weight = plain.weight = other
    assert bool((plain(PADDED) == 0).all())
    with pytest.raises(RuntimeError, match="weight has been replaced"):
        fused(PADDED)
