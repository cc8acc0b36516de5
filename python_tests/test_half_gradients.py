"""Gradients of tables in torch's dtypes: those of float32 tables, rounded once; and torch's optimizers train them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from backends import every_backend
from collection_cases import is_tied
from collection_format_cases import DTYPES, batch
from embedding_bag_cases import Case, Parts, make_case
from embedding_bag_format_cases import EncodedCase
from torch import Tensor

import rec_kernels as rk
from rec_kernels.reference import row_formats as reference
from rec_kernels.testing import same_bits

FLOATS = list(DTYPES)


def mixture(shift: int, weighted: bool) -> Case:
    """Narrow, wide and very wide rows; rows with 70 and with 4200 occurrences; features that share a table."""
    tables = [(1, 5), (4, 37), (2, 130), (3, 600), (1, 1030), (5, 16), (1, 3)]
    lengths = [40, 30, 3, 0, 2, 70, 1, 2, 2, 3, 9, 80, 4, 0, 2200, 2000]
    options = {"mean": [f % 3 == 1 for f in range(8)], "weighted": weighted, "padding_idx": [None] * 7 + [1]}
    return make_case(tables, [0, 1, 2, 3, 4, 1, 5, 6], lengths, seed=shift, **options)


def products(shift: int) -> Case:
    """Parts that are multiplied, two and three of them, added, and concatenated; hot rows among them."""
    tables = [(4, 20), (5, 20), (3, 20), (3, 20), (4, 20), (2, 6), (5, 9)]
    two = Parts([0, 1], [(5, 4), (1, 5)], 20, "mult")
    three = Parts([2, 3, 4], [(1, 3), (3, 3), (9, 4)], 36, "mult")
    apart = Parts([5, 6], [(5, 2), (1, 5)], 10, "concat")
    return make_case(tables, [two, three, apart, 1], [70, 3, 5, 90, 2, 8, 1, 1], seed=shift, weighted=shift == 1)


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("kind", ["plain", "weighted", "products"])
def test_dense_gradients_in_the_tables_dtypes(kind: str, shift: int) -> None:
    """Each row's sum in float32 is rounded once to nearest, at the table's bytes; all other bytes are 0."""
    case = products(shift) if kind == "products" else mixture(shift, kind == "weighted")
    formats = [FLOATS[(shift + t) % 3] for t in range(len(case.tables))]
    if kind == "products":
        formats = [FLOATS[(shift + n) % 3] for n in (0, 0, 1, 1, 1, 2, 0)]
    encoded = EncodedCase(case, formats)
    expected = torch.zeros_like(encoded.flat)
    views = encoded.split(expected)
    for (table, row), g in case.row_gradients.items():
        views[table][row] = reference.quantize_rows(g[None], formats[table], raise_not_finite=False)[0]
    given = {**encoded.layout, "weights": encoded.flat}
    for backend in every_backend():
        found = backend.ops.embedding_bag_backward_dense(case.grad, [len(encoded.flat)], *case.jagged, **given)
        assert same_bits(found, expected), backend.name
        _, floats, _ = backend.ops.embedding_bag_backward_sparse(case.grad, [0], *case.jagged, **given)
        assert same_bits(floats, torch.cat([case.row_gradients[key] for key in sorted(case.row_gradients)]))


ROWS = 30
MIXTURES = [["fp16", "bf16", "fp32"], ["bf16"] * 3, ["fp16"] * 3]
KINDS = {"bags": rk.EmbeddingBagConfig, "rows": rk.EmbeddingConfig, "compressed": rk.EmbeddingBagConfig}


def make(formats: list[str], kind: str = "bags", **options) -> rk.EmbeddingBagCollection | rk.EmbeddingCollection:
    """Three tables of 6, 37 and 300 columns, the first with two features; compressed: hashed, added, multiplied."""
    torch.manual_seed(0)
    rules = [rk.Hash(7), rk.QuotientRemainder(4, combine="add"), rk.QuotientRemainder(5, combine="mult")]
    tables = []
    for i, format in enumerate(formats):
        own = {} if kind == "rows" else {"pooling": ["sum", "mean"][i % 2]}
        own |= {"compression": rules[i]} if kind == "compressed" else {}
        features = [f"f{i}", f"g{i}"][: 2 - min(i, 1)]
        tables.append(KINDS[kind](ROWS, [6, 37, 300][i], name=f"t{i}", feature_names=features, format=format, **own))
    return (rk.EmbeddingCollection if kind == "rows" else rk.EmbeddingBagCollection)(tables, **options)


def twins(formats: list[str], kind: str = "bags") -> tuple[torch.nn.Module, torch.nn.Module]:
    """A collection in these formats, and one with the same numbers in float32."""
    found, floats = make(formats, kind), make(["fp32"] * 3, kind)
    with torch.no_grad():
        for own, other in zip(found.parameters(), floats.parameters(), strict=True):
            other.copy_(own)
    return found, floats


def backward(module: torch.nn.Module, given: rk.KeyedJaggedTensor) -> Tensor | None:
    """The gradients of a loss that is not linear, which arrive at the module; returns those of the batch's weights."""
    output = module(given)
    tensors = [output.values()] if isinstance(output, rk.KeyedTensor) else [t.values() for t in output.values()]
    sum(t.square().sum() for t in tensors).backward()
    return None if given.weights_or_none() is None else given.weights().grad


def check_rounded(found: torch.nn.Module, floats: torch.nn.Module) -> None:
    """The gradients are those of the float32 tables in the tables' dtypes."""
    for (name, own), other in zip(found.named_parameters(), floats.parameters(), strict=True):
        assert own.grad.any(), name
        assert same_bits(own.grad, other.grad.to(own.dtype)), name


@pytest.mark.parametrize("formats", MIXTURES, ids=str)
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_float32_tables_rounded_once(kind: str, factors: bool, formats: list[str]) -> None:
    """Also of two lookups in one graph, which torch adds up in the table's dtype."""
    found, floats = twins(formats, kind)
    results = []
    for module in (found, floats):
        given = batch(module, factors=factors)
        if factors:
            given.weights().requires_grad_()
        results.append(backward(module, given))
    check_rounded(found, floats)
    assert results[0] is None or same_bits(*results)


@pytest.mark.parametrize("formats", MIXTURES, ids=str)
def test_gradients_are_torchs(formats: list[str]) -> None:
    """torch.nn.functional.embedding_bag of the same numbers in float64, in every table."""
    collection = make(formats)
    given = batch(collection)
    collection(given).values().square().sum().backward()
    for i, p in enumerate(collection.parameters()):
        weight = p.detach().double().requires_grad_()
        for feature in [f"f{i}", f"g{i}"][: 2 - min(i, 1)]:
            jagged = given[feature]
            bags = torch.nn.functional.embedding_bag(
                jagged.values(), weight, jagged.offsets(), mode=["sum", "mean"][i % 2], include_last_offset=True
            )
            bags.square().sum().backward()
        torch.testing.assert_close(p.grad, weight.grad.to(p.dtype))


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, lookup: Any, steps: range) -> None:
    """Steps of a loss that is not linear."""
    for step in steps:
        optimizer.zero_grad()
        lookup(batch(module, step)).values().square().sum().backward()
        optimizer.step()


def test_steps_are_torchs_and_compiled_ones_too() -> None:
    """Steps compile to one graph; Adam steps as with separate parameters that get the same gradients."""
    found, compiled = make(MIXTURES[0]), make(MIXTURES[0])
    one_graph = torch.compile(lambda given: compiled(given), fullgraph=True, backend="aot_eager")
    apart = [p.detach().clone() for p in found.parameters()]
    optimizers = [torch.optim.Adam(p, lr=0.1) for p in (found.parameters(), compiled.parameters(), apart)]
    for step in range(3):
        train(compiled, optimizers[1], one_graph, range(step, step + 1))
        train(found, optimizers[0], found, range(step, step + 1))
        for own, p in zip(apart, found.parameters(), strict=True):
            own.grad = p.grad
        optimizers[2].step()
    for other in (compiled.parameters(), apart):
        assert all(map(same_bits, found.parameters(), other))


@pytest.mark.parametrize("formats", MIXTURES, ids=str)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save", "save both", "state_dict", "assign"])
def test_copies_go_on_alike(way: str, formats: list[str]) -> None:
    """With the optimizer, which holds the copy's parameters, or its state."""
    original = make(formats)
    optimizer = torch.optim.Adam(original.parameters(), lr=0.1)
    train(original, optimizer, original, range(2))
    both = original, optimizer
    if way == "save both" and len(set(formats)) > 1:
        with pytest.raises(RuntimeError, match="Cannot save multiple tensors"):
            torch.save(both, io.BytesIO())
        return
    if way == "deepcopy":
        other, copied = copy.deepcopy(both)
    elif way == "pickle":
        other, copied = pickle.loads(pickle.dumps(both))
    elif way == "save both":
        other, copied = saved(both)
    else:
        other = saved(original) if way == "save" else make(formats, device="meta" if way == "assign" else None)
        if way != "save":
            other.load_state_dict(original.state_dict(), assign=way == "assign")
        copied = torch.optim.Adam(other.parameters(), lr=0.1)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert is_tied(other)
    assert [p.dtype for p in other.parameters()] == [DTYPES[f] for f in formats]
    before = [p.detach().clone() for p in original.parameters()]
    train(other, copied, other, range(2, 4))
    assert all(map(same_bits, original.parameters(), before))
    train(original, optimizer, original, range(2, 4))
    assert all(map(same_bits, original.parameters(), other.parameters()))
    assert not any(map(same_bits, original.parameters(), before))


def saved(what: Any) -> Any:
    """``what``, saved by torch and loaded."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_shallow_copy_shares_the_rows() -> None:
    """It looks up what the original's optimizer has trained."""
    original = make(MIXTURES[0])
    other = copy.copy(original)
    train(original, torch.optim.SGD(original.parameters(), lr=0.1), original, range(1))
    assert is_tied(original)
    assert torch.equal(other(batch(other)).values(), original(batch(original)).values())


def test_only_wanted_gradients() -> None:
    """A frozen table has no gradient, and no gradient keeps the memory of others; casts change nothing."""
    found, whole = make(MIXTURES[0]).half(), make(MIXTURES[0])
    found.embedding_bags["t1"].weight.requires_grad_(False)
    for module in (found, whole):
        module(batch(module)).values().square().sum().backward()
    for name, p in found.named_parameters():
        if "t1" in name:
            assert p.grad is None
        else:
            assert same_bits(p.grad, whole.get_parameter(name).grad)
            assert p.grad.untyped_storage().nbytes() == p.grad.nbytes
    assert all(own is p for own, p in zip(found.state_dict(keep_vars=True).values(), found.parameters(), strict=True))


def test_gradients_overflow_as_in_torch() -> None:
    """Beyond the largest half they are infinite, by which a GradScaler knows."""
    collection = make(["fp16", "bf16", "fp32"])
    (collection(batch(collection)).values().sum() * 1e5).backward()
    first, second, third = collection.parameters()
    assert first.grad.isinf().any()
    assert second.grad.isfinite().all()
    assert third.grad.isfinite().all()


@pytest.mark.parametrize("sparse", [False, True])
def test_tables_of_the_op_have_any_of_the_dtypes(sparse: bool) -> None:
    """The op takes them in bytes, at multiples of 64; others are refused."""
    dtypes = [torch.float16, torch.float32, torch.bfloat16]
    flat = torch.zeros(192, dtype=torch.uint8)
    tables = [flat[s : s + 16 * d.itemsize].view(d).view(4, 4) for s, d in zip((0, 64, 128), dtypes, strict=True)]
    places = {"weight_offsets": [0, 64, 128], "formats": ["fp16", "fp32", "bf16"]}
    layout = rk.table_layout([4] * 3, [4] * 3, **places)._asdict()
    bags = torch.tensor([1, 2, 1, 3, 3, 0]), torch.tensor([0, 2, 3, 4, 4, 5, 6])
    lookup = torch.ops.rec_kernels.embedding_bag_tables.layout
    tables = [t.requires_grad_() for t in tables]
    output, _ = lookup(flat, tables, *bags, **layout, sparse=sparse)
    output.backward(torch.arange(1.0, 25.0).view(2, 12) + 2**-12)
    assert [t.grad.dtype for t in tables] == dtypes
    for t, rows in zip(tables, ([1, 2], [3], [0, 3]), strict=True):
        assert t.grad.is_sparse == sparse
        assert t.grad.to_dense().any(1).nonzero().flatten().tolist() == rows
    with pytest.raises(ValueError, match=r"tables\[1\] must be float32, float16 or bfloat16, got float64"):
        lookup(flat, [tables[0], tables[1].double(), tables[2]], *bags, **layout)
    with pytest.raises(ValueError, match=r"layout\[0\]: .* \(4 x 4, fp16\) are the place of none of the tables"):
        lookup(flat, [tables[2], *tables[1:]], *bags, **layout)
    with pytest.raises(ValueError, match=r"weights must have 256 elements, .* at multiples of 64, got 192"):
        lookup(flat, [*tables, tables[0]], *bags, **layout)


def test_batch_sizes_of_features() -> None:
    """Each bag has a row of output of its own."""
    found, floats = twins(MIXTURES[0])
    lengths = torch.tensor([2, 0, 3, 1, 70, 1, 2, 0, 1, 5])
    values = torch.arange(int(lengths.sum())) % ROWS
    given = rk.KeyedJaggedTensor(found.feature_names, values, lengths=lengths, stride_per_key=[3, 2, 4, 1])
    for module in (found, floats):
        sum(output.square().sum() for output in module.by_feature(given).values()).backward()
    check_rounded(found, floats)
