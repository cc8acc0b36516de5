"""Conversion of torch.nn layers with torch's optimizers to layers and collections of this package, and back."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from convert_cases import SIZES, ids_of, jagged, layer_lookup, round_trips, same_bits, train
from torch import nn

import rec_kernels as rk

OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.3), rk.SGD(lr=0.3)),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.3, eps=1e-3, initial_accumulator_value=0.125),
        rk.Adagrad(lr=0.3, eps=1e-3),
    ),
    "sparse_adam": (
        lambda p: torch.optim.SparseAdam(p, lr=0.05, betas=(0.8, 0.95), eps=1e-12),
        rk.Adam(lr=0.05, betas=(0.8, 0.95), eps=1e-12),
    ),
}
LAYERS = (nn.EmbeddingBag, nn.Embedding)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def layer_of(kind: Any, seed: int = 0, **options: Any) -> Any:
    """A layer with 30 rows."""
    torch.manual_seed(seed)
    return kind(30, 8, **{"sparse": True, "padding_idx": 3, **options})


def mismatched() -> tuple[Any, Any, rk.EmbeddingBag]:
    """A layer of torch with its optimizer after two steps, and one of ours with equal options."""
    theirs = layer_of(nn.EmbeddingBag)
    optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    train(layer_lookup(theirs), range(2), [optimizer])
    return theirs, optimizer, rk.EmbeddingBag(30, 8, optimizer=rk.Adagrad())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_there_and_back(kind: Any, name: str) -> None:
    """Import and export keep torch's training bits; ours has its losses up to rounding.

    Losses are means of 48 squares of values below 4, and a step moves a row by at most lr: a relative difference of a
    few roundings (2^-24 each) per step and element, 1e-5 with a wide margin, while a state or a step that is lost
    changes them by more than 1e-3.
    """
    make, expected = OPTIMIZERS[name]
    theirs = layer_of(kind)
    optimizer = make(theirs.parameters())
    train(layer_lookup(theirs), range(4), [optimizer])
    ours: Any = rk.convert_embeddings(theirs, trained_by=optimizer)
    assert ours.collection.optimizer == expected
    again = layer_of(kind, seed=1)
    its_optimizer = make(again.parameters())
    rk.export_tables(ours, again, trained_by=its_optimizer)
    losses = train(layer_lookup(theirs), range(4, 9), [optimizer])
    assert train(layer_lookup(again), range(4, 9), [its_optimizer]) == losses
    assert torch.equal(again.weight, theirs.weight)
    torch.testing.assert_close(train(layer_lookup(ours), range(4, 9)), losses, rtol=1e-5, atol=0)
    fresh: Any = rk.convert_embeddings(layer_of(kind), optimizer=expected)
    assert abs(train(layer_lookup(fresh), range(4, 9))[-1] - losses[-1]) > 1e-3 * losses[-1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_there_and_back(name: str) -> None:
    """Exporting three tables to torch.nn with an optimizer and importing keeps all bits."""
    make, optimizer = OPTIMIZERS[name]
    configs = [rk.EmbeddingBagConfig(*size, name=n, feature_names=[f"{n}f"]) for n, size in SIZES.items()]
    ours = rk.EmbeddingBagCollection(configs, optimizer=optimizer)
    train(lambda step: ours(jagged(step)).values(), range(5))
    theirs = nn.ModuleDict({n: nn.EmbeddingBag(*SIZES[n], sparse=True) for n in reversed(SIZES)})
    assert round_trips(ours, theirs, make(theirs.parameters()), counts_steps=name != "sgd")


def test_adam_of_dense_gradients() -> None:
    """torch.optim.Adam, which also moves rows without a gradient, is imported only with an explicit optimizer."""
    theirs = layer_of(nn.Embedding, sparse=False)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.05)
    train(layer_lookup(theirs), range(3), [optimizer])
    with pytest.raises(ValueError, match=r"Adam has no counterpart here \(it moves every row"):
        rk.convert_embeddings(theirs, trained_by=optimizer)
    ours: Any = rk.convert_embeddings(theirs, trained_by=optimizer, optimizer=rk.Adam(lr=0.05))
    assert torch.equal(ours.state_dict()["exp_avg"], optimizer.state[theirs.weight]["exp_avg"])
    assert int(ours.collection.step) == 3
    again = layer_of(nn.Embedding, seed=1, sparse=False)
    its_optimizer = torch.optim.Adam(again.parameters(), lr=0.05)
    rk.export_tables(ours, again, trained_by=its_optimizer)
    steps = range(3, 6)
    losses = train(layer_lookup(theirs), steps, [optimizer])
    assert train(layer_lookup(again), steps, [its_optimizer]) == losses


def test_layers_keep_their_options() -> None:
    """Options, training mode and requires_grad are kept; without fusion, so is the parameter."""
    theirs = nn.EmbeddingBag(30, 8, mode="max", include_last_offset=True, padding_idx=2, sparse=False).eval()
    theirs.weight.requires_grad_(False)
    ours: Any = rk.convert_embeddings(theirs)
    assert ours.weight is theirs.weight
    assert not ours.weight.requires_grad
    assert not ours.training
    assert (ours.mode, ours.include_last_offset, ours.padding_idx) == ("max", True, 2)
    ids, offsets = torch.tensor([1, 2, 5, 7]), torch.tensor([0, 3, 4])
    assert torch.equal(ours(ids, offsets), theirs(ids, offsets))
    fused: Any = rk.convert_embeddings(theirs, optimizer=rk.SGD(lr=1.0), format="bf16", seed=5)
    assert fused.weight.dtype == torch.bfloat16
    assert fused.collection.seed == 5
    assert torch.equal(fused.weight, theirs.weight.bfloat16())
    assert not fused.weight.requires_grad
    half: Any = rk.convert_embeddings(nn.Embedding(9, 4, dtype=torch.float16), optimizer=rk.SGD())
    assert half.weight.dtype == torch.float16
    assert rk.convert_embeddings(nn.Embedding(9, 4, device="meta"), optimizer=rk.SGD()).weight.is_meta


def test_formats_and_caches() -> None:
    """Rows are rounded to a format and exported decoded; cached rows are exported up to date."""
    theirs = layer_of(nn.EmbeddingBag)
    ours: Any = rk.convert_embeddings(theirs, optimizer=rk.SGD(lr=0.1), format="int8")
    assert torch.equal(ours.weight, rk.quantize_rows(theirs.weight.detach(), "int8"))
    again = layer_of(nn.EmbeddingBag, seed=1)
    rk.export_tables(ours, again)
    assert torch.equal(again.weight, rk.dequantize_rows(ours.weight.detach(), "int8", 8))
    cached: Any = rk.convert_embeddings(theirs, optimizer=rk.SGD(lr=0.1), cache=rk.RowCache(0.5))
    train(layer_lookup(cached), range(3))
    rk.export_tables(cached, again)
    assert torch.equal(
        again.weight[ids_of(2, 30)], cached.collection.state_dict()["embedding_bags.weight.weight"][ids_of(2, 30)]
    )
    rk.import_tables(cached, theirs)
    with torch.no_grad():
        assert torch.equal(cached(ids_of(0, 30)), theirs(ids_of(0, 30)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: c.update(trained_by="Adagrad"), TypeError, "trained_by must be a torch.optim.Optimizer, a list"),
        (lambda c: c.update(theirs=nn.Linear(2, 2)), TypeError, "theirs must be a torch.nn.Embedding or .*got Linear"),
        (
            lambda c: c.update(theirs={"weight": nn.Linear(2, 2)}),
            TypeError,
            r"theirs\['weight'\] must be .* got Linear",
        ),
        (
            lambda c: c.update(ours=nn.Linear(2, 2)),
            TypeError,
            "ours must be an rk.EmbeddingBagCollection, .*got Linear",
        ),
        (lambda c: c.update(ours=rk.EmbeddingBag(30, 8)), ValueError, "has no table options, so its weight is"),
        (
            lambda c: c.update(ours=rk.EmbeddingBag(30, 8, optimizer=rk.SGD(), compression=rk.Hash(9))),
            ValueError,
            r"table 'weight': compression = Hash\(.*\) has no counterpart",
        ),
        (
            lambda c: c.update(ours=rk.EmbeddingBag(31, 8, optimizer=rk.Adagrad())),
            ValueError,
            r"table 'weight' is \[31, 8\], but theirs is \[30, 8\]",
        ),
        (
            lambda c: c.update(ours=rk.EmbeddingBag(30, 8, optimizer=rk.RowwiseAdagrad())),
            ValueError,
            r"ours is trained by RowwiseAdagrad\(.*\), but theirs by Adagrad: use rk.Adagrad",
        ),
        (
            lambda c: c.update(ours=rk.EmbeddingBag(30, 8, cache=None, seed=3)),
            ValueError,
            "ours has no fused optimizer for the state of Adagrad",
        ),
        (
            lambda c: c.update(trained_by=torch.optim.RMSprop(c["theirs"].parameters())),
            ValueError,
            "trained_by: RMSprop has no counterpart here: it must be torch.optim.SGD, Adagrad, ",
        ),
        (
            lambda c: c.update(trained_by=torch.optim.SGD(nn.Linear(2, 2).parameters())),
            ValueError,
            "trained_by does not have the weight of table 'weight'",
        ),
        (
            lambda c: c.update(trained_by=[c["trained_by"], type(c["trained_by"])(c["theirs"].parameters())]),
            ValueError,
            "table 'weight' has 2 optimizers: it must have one",
        ),
        (
            lambda c: c["trained_by"].state[c["theirs"].weight].update(sum=torch.zeros(30)),
            ValueError,
            r"table 'weight': sum of adagrad must be floats \[30, 8\], got \[30\] torch.float32",
        ),
        (
            lambda c: c.update(theirs=nn.EmbeddingBag(30, 8, dtype=torch.float64), trained_by=None),
            ValueError,
            r"table 'weight': weight must be \[num_embeddings, embedding_dim\] float32, .*got \[30, 8\] torch.float64",
        ),
    ],
)
def test_errors_of_import_and_export(change: Any, error: Any, message: str) -> None:
    """Each error names the argument, the value, its place and what is allowed, and changes nothing on either side."""
    call: dict[str, Any] = dict(zip(("theirs", "trained_by", "ours"), mismatched(), strict=True))
    change(call)
    modules = [m for m in (call["ours"], call["theirs"]) if isinstance(m, nn.Module)]
    before = copy.deepcopy([m.state_dict() for m in modules])
    for function in (rk.import_tables, rk.export_tables):
        with pytest.raises(error, match=message):
            function(call["ours"], call["theirs"], trained_by=call["trained_by"])
    assert all(same_bits(b, m.state_dict()) for b, m in zip(before, modules, strict=True))


def test_errors_of_several_tables() -> None:
    """Layers must match the tables in names, sizes, optimizers and, for Adam, the step."""
    layers = {n: nn.EmbeddingBag(*size, sparse=True) for n, size in SIZES.items()}
    configs = [rk.EmbeddingBagConfig(*size, name=n, feature_names=[n]) for n, size in SIZES.items()]
    ours = rk.EmbeddingBagCollection(configs, optimizer=rk.Adam())
    adam = torch.optim.SparseAdam([layer.weight for layer in layers.values()])
    layers["item"](ids_of(0, 12)).sum().backward()
    adam.step()
    with pytest.raises(
        ValueError, match=r"step must be the same for all tables of a collection, got \{'user': 0, 'item': 1"
    ):
        rk.import_tables(ours, layers, trained_by=adam)
    mixed = [
        torch.optim.SGD([layers["user"].weight]),
        torch.optim.SparseAdam([layers[n].weight for n in ("item", "shop")]),
    ]
    text = r"table 'user' of ours is trained by Adam\(.*\), but theirs by SGD: use rk\.SGD"
    with pytest.raises(ValueError, match=text):
        rk.import_tables(ours, layers, trained_by=mixed)
    with pytest.raises(ValueError, match="ours has 3 tables, user, item, shop, but theirs has 2"):
        rk.import_tables(ours, {n: layers[n] for n in ("user", "item")})
    with pytest.raises(ValueError, match="theirs has no table 'shop' of ours, only user, item, store"):
        rk.import_tables(ours, {"user": layers["user"], "item": layers["item"], "store": layers["shop"]})
    assert int(ours.step) == 0
    assert not any(ours.state_dict()["embedding_bags.item.exp_avg"].flatten())


def test_the_step_of_several_optimizers() -> None:
    """The step is that of Adam, which needs it, whatever the other optimizers' steps."""
    layers = {n: nn.EmbeddingBag(*size, sparse=True) for n, size in SIZES.items()}
    trained = {"user": (rk.Adagrad(), torch.optim.Adagrad, 3), "item": (rk.Adam(), torch.optim.SparseAdam, 2)}
    trained["shop"] = rk.Adagrad(), torch.optim.Adagrad, 0
    theirs = []
    for name, (_, kind, steps) in trained.items():
        theirs.append(kind([layers[name].weight]))
        for _ in range(steps):
            layers[name](ids_of(0, 12)).sum().backward()
            theirs[-1].step()
    configs = [
        rk.EmbeddingBagConfig(*SIZES[n], name=n, feature_names=[n], optimizer=own) for n, (own, *_) in trained.items()
    ]
    ours = rk.EmbeddingBagCollection(configs, optimizer=rk.SGD())
    rk.import_tables(ours, layers, trained_by=theirs)
    assert int(ours.step) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"trained_by": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
            ValueError,
            "SGD with momentum=0.9 has no",
        ),
        ({"trained_by": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)}, ValueError, "weight_decay=0.1"),
        ({"trained_by": lambda p: torch.optim.Adagrad(p, lr_decay=0.1)}, ValueError, "Adagrad with lr_decay=0.1"),
        ({"optimiser": rk.SGD()}, TypeError, "unexpected keyword argument 'optimiser'"),
    ],
)
def test_errors_of_convert(options: dict[str, Any], error: Any, message: str) -> None:
    """Optimizers with other formulas and unknown arguments are rejected."""
    theirs = layer_of(nn.EmbeddingBag)
    given = {name: value(theirs.parameters()) if name == "trained_by" else value for name, value in options.items()}
    with pytest.raises(error, match=message):
        rk.convert_embeddings(theirs, **given)


def test_errors_of_layers() -> None:
    """Unsupported options, dtypes, tensor subclasses and optimizer state are rejected."""
    with pytest.raises(ValueError, match=r"theirs: max_norm=1\.0 is not offered"):
        rk.convert_embeddings(nn.Embedding(9, 4, max_norm=1.0))
    with pytest.raises(ValueError, match=r"theirs: table .weight.: weight must be .* got \[9, 4\] torch\.float64"):
        rk.convert_embeddings(nn.Embedding(9, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="rows of format int8 can only be trained by fused optimizers"):
        rk.convert_embeddings(nn.Embedding(9, 4, dtype=torch.float16), format="int8")
    with pytest.raises(TypeError, match="theirs must be one module, got several: rk"):
        rk.convert_embeddings(nn.ModuleDict({"a": nn.Embedding(9, 4)}))

    class Sharded(torch.Tensor):
        """Stands for a DTensor."""

    layer = nn.Embedding(9, 4)
    layer.weight = nn.Parameter(torch.zeros(9, 4).as_subclass(Sharded))
    with pytest.raises(
        ValueError, match="theirs: table 'weight': weight must be an ordinary tensor, got Sharded: conv"
    ):
        rk.convert_embeddings(layer)
    layer = nn.Embedding(9, 4)
    optimizer = torch.optim.Adam(layer.parameters(), amsgrad=True)
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"table .weight.: max_exp_avg_sq of Adam has no counterpart"):
        rk.convert_embeddings(layer, trained_by=optimizer, optimizer=rk.Adam())


def test_state_without_a_place_is_not_lost() -> None:
    """Momentum is rejected in both directions unless trained_by=[]; an optimizer's subclass must be named."""

    class Own(torch.optim.SGD):
        """An optimizer with unknown formulas."""

    theirs = layer_of(nn.EmbeddingBag, sparse=False)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.5)
    train(layer_lookup(theirs), range(2), [optimizer])
    ours: Any = rk.convert_embeddings(theirs, trained_by=[], optimizer=rk.SGD())
    for function in (rk.import_tables, rk.export_tables):
        with pytest.raises(ValueError, match="table 'weight': momentum_buffer of SGD has no counterpart"):
            function(ours, theirs, trained_by=optimizer)
    with pytest.raises(ValueError, match="Own may have its own formulas: pass the optimizer"):
        rk.convert_embeddings(theirs, trained_by=Own(theirs.parameters()))
    rk.convert_embeddings(theirs, trained_by=Own(theirs.parameters()), optimizer=rk.SGD())


def test_optimizers_in_the_backward() -> None:
    """Optimizers that torch applies in the backward are detected; trained_by=[] ignores them."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    theirs = layer_of(nn.EmbeddingBag, sparse=False)
    _apply_optimizer_in_backward(torch.optim.Adagrad, theirs.parameters(), {"lr": 0.2})
    train(layer_lookup(theirs), range(3))
    ours: Any = rk.convert_embeddings(theirs)
    assert ours.collection.optimizer == rk.Adagrad(lr=0.2)
    assert int(ours.collection.step) == 3
    rows: Any = rk.convert_embeddings(theirs, trained_by=[], optimizer=rk.SGD())
    assert torch.equal(rows.weight, theirs.weight)
    assert int(rows.collection.step) == 0


def test_powers_of_beta() -> None:
    """Powers of beta that follow from the step have the bits of training, also after underflow."""
    ours = rk.EmbeddingBag(5, 4, optimizer=rk.Adam(betas=(0.5, 0.999)))
    for _ in range(160):
        ours(torch.tensor([[1]])).sum().backward()
    theirs = nn.EmbeddingBag(5, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(theirs.parameters(), betas=(0.5, 0.999))
    rk.export_tables(ours, theirs, trained_by=optimizer)
    back: Any = rk.convert_embeddings(theirs, trained_by=optimizer)
    assert same_bits(ours.state_dict(), back.state_dict())
    assert 0 <= float(back.state_dict()["beta_powers"][0]) < 2.0**-148


@pytest.mark.full
def test_no_other_package_is_imported() -> None:
    """Conversions of torch.nn layers, and errors for unknown modules, import neither TorchRec nor FBGEMM."""
    program = (
        "import sys, torch, rec_kernels as rk; from torch import nn\n"
        "model = nn.Sequential(nn.EmbeddingBag(9, 4)); rk.replace_embeddings(model, optimizer=rk.SGD())\n"
        "rk.export_tables(model[0], nn.EmbeddingBag(9, 4))\n"
        "try:\n    rk.convert_embeddings(nn.Linear(2, 2))\n"
        "except TypeError as error:\n    assert 'got Linear' in str(error)\n"
        "assert not {'torchrec', 'fbgemm_gpu', 'safetensors'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
