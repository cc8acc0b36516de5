"""Collections: batch sizes per feature, freezing, output dtypes, clipping and weight decay."""

from __future__ import annotations

import pytest
import torch
from collection_cases import OPTIMIZERS, assert_same, deduplicated, sequences
from test_embedding_bag_module import batch, make
from torch._dynamo.testing import CompileCounterWithBackend

import rec_kernels as rk
from rec_kernels.testing import cpu_isas, same_bits, use_cpu_isa


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_inverse_indices(optimizer) -> None:
    """A lookup of distinct bags with inverse indices has the whole batch's output and gradients."""
    few, whole = deduplicated()
    one, other = make(optimizer), make(optimizer)
    found, expected = one(few), other(whole)
    assert torch.equal(found.values(), expected.values())
    assert found.keys() == expected.keys()
    (found.values() ** 2).sum().backward()
    (expected.values() ** 2).sum().backward()
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_by_feature() -> None:
    """by_feature() returns a tensor per feature, with equal or different batch sizes."""
    few, whole = deduplicated()
    collection = make()
    found = collection.by_feature(few)
    assert {k: t.shape for k, t in found.items()} == {"f": (2, 6), "g": (3, 6), "h": (4, 20)}
    places = few.inverse_indices_or_none()[1]
    expected = collection(whole).to_dict()
    for row, (key, t) in zip(places, found.items(), strict=True):
        assert torch.equal(t[row], expected[key])
    assert all(torch.equal(t, expected[k]) for k, t in collection.by_feature(whole).items())
    bare = rk.KeyedJaggedTensor(few.keys(), few.values(), offsets=few.offsets(), stride_per_key=[2, 3, 4])
    with pytest.raises(ValueError, match=r"no inverse indices: 'f' has 2 samples, 'g' has 3, so .*by_feature"):
        collection(bare)
    assert torch.equal(collection.by_feature(bare)["g"], found["g"])
    few.inverse_indices_or_none()[1][0, 0] = 99  # by_feature() ignores it
    assert torch.equal(collection.by_feature(few)["g"], found["g"])


def test_strides_in_another_order() -> None:
    """Keys may have any order, and unused ones may exist."""
    few, _ = deduplicated()
    order = [2, 0, 1]
    parts = [few["fgh"[i]] for i in order]
    names, places = few.inverse_indices_or_none()
    moved = rk.KeyedJaggedTensor(
        ["h", "f", "g"],
        torch.cat([p.values() for p in parts]),
        lengths=torch.cat([p.lengths() for p in parts]),
        stride_per_key=[4, 2, 3],
        inverse_indices=(names, places),
    )
    assert torch.equal(make()(moved).values(), make()(few).values())
    assert moved.stride() == 7
    assert moved.offset_per_key() == [0, *torch.tensor([len(p.values()) for p in parts]).cumsum(0).tolist()]


def test_strides_accumulate() -> None:
    """Micro-batches may have different or equal batch sizes per feature."""
    for second in deduplicated(seed=2):
        one, several = make(rk.SGD(lr=0.5)), make(rk.SGD(lr=0.5))
        pairs = [deduplicated(seed=1)[0], second]
        parts = [b[k] for k in "fgh" for b in pairs]
        joined = rk.KeyedJaggedTensor(
            list("fgh"),
            torch.cat([p.values() for p in parts]),
            lengths=torch.cat([p.lengths() for p in parts]),
            stride_per_key=[sum(len(b[k].lengths()) for b in pairs) for k in "fgh"],
        )
        sum((t**2).sum() for t in one.by_feature(joined).values()).backward()
        with several.accumulate():
            for b in pairs:
                sum((t**2).sum() for t in several.by_feature(b).values()).backward()
        assert_same(one, several)


def test_inverse_indices_are_checked() -> None:
    """An inverse index beyond a feature's bags raises."""
    few, _ = deduplicated()
    for bad in (2, -1, 2**40):
        few.inverse_indices_or_none()[1][0, 3] = bad
        with pytest.raises(IndexError, match=rf"inverse_indices of 'f' have {bad} at row 3: .* \[0, 2\)"):
            make(rk.SGD(lr=0.5))(few)


def test_empty_full_batch() -> None:
    """Inverse indices of no samples give an empty output, although features have bags."""
    few, _ = deduplicated()
    none = rk.KeyedJaggedTensor(
        few.keys(),
        few.values(),
        offsets=few.offsets(),
        stride_per_key=[2, 3, 4],
        inverse_indices=(few.keys(), torch.zeros(3, 0).long()),
    )
    assert make()(none).values().shape == (0, 32)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_freeze(optimizer) -> None:
    """A frozen feature does not train its table, other features of the table do; unfreeze() restores training."""
    whole = deduplicated()[1]
    few, all_of_it = make(optimizer), make(optimizer)
    few.freeze("g", "h")
    emptied = rk.KeyedJaggedTensor(
        list("fgh"),
        whole["f"].values(),
        lengths=torch.cat([whole["f"].lengths(), torch.zeros(14).long()]),
    )
    assert torch.equal(few(whole).values(), all_of_it(whole).values())
    few(whole).values().sum().backward()
    all_of_it(emptied).values().sum().backward()
    assert_same(few, all_of_it)
    if optimizer is None:
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(few.parameters(), all_of_it.parameters(), strict=True))
    few.unfreeze("g", "h")
    few(whole).values().sum().backward()
    all_of_it(whole).values().sum().backward()
    assert_same(few, all_of_it)
    with pytest.raises(KeyError, match="'x'"):
        few.freeze("x")


def test_freeze_in_compiled_code() -> None:
    """After the first freeze(), changing the frozen features does not recompile."""
    collection, expected = make(rk.SGD(lr=0.5)), make(rk.SGD(lr=0.5))
    collection.freeze()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda kjt: collection(kjt).values().sum(), backend=counter, fullgraph=True)
    whole = deduplicated()[1]
    for names in ((), ("f",), ("g", "h")):
        collection.freeze(*names)
        expected.freeze(*names)
        compiled(whole).backward()
        expected(whole).values().sum().backward()
        assert_same(collection, expected)
        collection.unfreeze(*names)
        expected.unfreeze(*names)
    assert counter.frame_count == 1


def test_freeze_inside_accumulate() -> None:
    """freeze() inside a block raises: one update has one set of frozen features."""
    collection = make(rk.SGD(lr=0.5))
    with collection.accumulate(), pytest.raises(RuntimeError, match="inside accumulate"):
        collection.freeze("f")
    assert not collection._layout.frozen


def test_requires_grad_inside_accumulate() -> None:
    """Changing requires_grad inside a block raises at the next lookup, and nothing is trained."""
    collection = make(rk.SGD(lr=0.5))
    before = collection._weights.clone()
    refused = pytest.raises(RuntimeError, match="changing requires_grad of tables is not allowed")
    with refused, collection.accumulate():
        collection(deduplicated()[0]).values().sum().backward()
        collection.requires_grad_(False)
        collection(deduplicated()[0])
    assert torch.equal(collection._weights, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_output_dtype(optimizer, dtype: torch.dtype) -> None:
    """Outputs are the rounded float32 ones; training uses their gradients."""
    half, whole = make(optimizer, output_dtype=dtype), make(optimizer)
    given = deduplicated()[1]
    output = half(given).values()
    assert output.dtype == dtype
    assert torch.equal(output, whole(given).values().to(dtype))
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    output.backward(grad)
    whole(given).values().backward(grad.float())
    assert_same(half, whole)
    few = deduplicated()[0]
    assert torch.equal(half(few).values(), half(given).values())
    sequence = sequences(optimizer, output_dtype=dtype)(batch())
    assert torch.equal(sequence["h"].values(), sequences(optimizer)(batch())["h"].values().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_outputs_of_half_precision(dtype: torch.dtype) -> None:
    """Outputs of thousands of columns, beside narrow ones, and composed rows are rounded once."""
    parts = rk.QuotientRemainder(4, combine="mult")
    tables = [
        rk.EmbeddingBagConfig(50, 2052, name="wide", feature_names=["f"]),
        rk.EmbeddingBagConfig(50, 6, name="narrow", feature_names=["g"]),
        rk.EmbeddingBagConfig(50, 2100, name="composed", feature_names=["h"], compression=parts),
    ]
    half, whole = (rk.EmbeddingBagCollection(tables, output_dtype=d) for d in (dtype, torch.float32))
    half.load_state_dict(whole.state_dict())
    for isa in cpu_isas():
        with use_cpu_isa(isa):
            found, expected = half(deduplicated()[1]).values(), whole(deduplicated()[1]).values()
        assert expected.count_nonzero() > 0.5 * expected.numel()
        assert same_bits(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_accumulate_with_half_outputs(dtype: torch.dtype) -> None:
    """Micro-batches with gradients of half-precision outputs have the bits of one batch."""
    one, several = (make(rk.Adam(lr=0.1), output_dtype=dtype) for _ in range(2))
    given = deduplicated()[1]
    one(given).values().sum().backward()
    with several.accumulate():
        several(given).values().sum().backward()
    assert_same(one, several)


def test_weight_decay_and_clipping_in_a_module() -> None:
    """SGD with weight decay and clipping equals a computation by hand."""
    table = [rk.EmbeddingBagConfig(4, 3, name="t", feature_names=["f"], init=lambda w: w.fill_(2.0))]
    given = rk.KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    for optimizer, expected in [
        (rk.SGD(lr=0.5, weight_decay=0.1), 2.0 - 0.5 * (4.0 + 0.2)),
        (rk.SGD(lr=0.5, weight_decay=0.1, weight_decay_mode="decoupled"), 2.0 * (1 - 0.05) - 0.5 * 4.0),
        (rk.SGD(lr=0.5, clip_grad_value=0.25), 2.0 - 0.5 * 0.25),
        (rk.SGD(lr=0.5, clip_grad_norm=3.0), 2.0 - 0.5 * 3.0 / 3**0.5),
    ]:
        collection = rk.EmbeddingBagCollection(table, optimizer=optimizer)
        (collection(given).values() ** 2).sum().backward()
        weight = collection.embedding_bags["t"].weight
        torch.testing.assert_close(weight[1], torch.full((3,), expected))
        assert same_bits(weight[0], torch.full((3,), 2.0))


def test_optimizers_in_words() -> None:
    """The repr shows options that are not the default."""
    assert repr(rk.SGD(lr=0.5)) == "SGD(lr=0.5)"
    shown = repr(rk.Adam(weight_decay=0.1, clip_grad_norm=2.0))
    assert shown == "Adam(lr=0.001, weight_decay=0.1, clip_grad_norm=2.0)"
