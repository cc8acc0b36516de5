"""InverseKeyedJaggedTensor: conversion from batches and from parts, and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import device_backends
from hypothesis import given, settings
from inverse_jagged_cases import OtherWithStride, assert_same_batch, grouped_batches, sessions
from jagged_cases import unchecked
from torch import Tensor
from torch.utils import _pytree

import rec_kernels as rk
from rec_kernels.nn.jagged import inverse as inverse_jagged
from rec_kernels.nn.jagged.select_features import select_keys
from rec_kernels.testing import same_bits

KEYS = ["a", "b", "c", "d"]
Grouped = tuple[rk.KeyedJaggedTensor, list[list[str]]]


@settings(max_examples=150)
@given(grouped_batches())
def test_round_trip(case: Grouped) -> None:
    """Conversion restores the batch to the bit, without writing to it."""
    batch, groups = case
    before = [batch.values().clone(), batch.offsets().clone()]
    few = rk.InverseKeyedJaggedTensor.from_kjt(batch, groups)
    assert_same_batch(few.to_kjt(), batch)
    assert all(map(same_bits, before, [batch.values(), batch.offsets()]))
    assert few.keys() == batch.keys()
    assert few.groups() == groups
    assert few.stride() == batch.stride()


@settings(max_examples=60)
@given(grouped_batches())
def test_groups_have_distinct_samples(case: Grouped) -> None:
    """A group has each distinct sample once, in the order of first occurrence; other features are unchanged."""
    batch, groups = case
    few = rk.InverseKeyedJaggedTensor.from_kjt(batch, groups)
    for g, group in enumerate(groups):
        unique, inverse = few.unique(g), few.inverse(group[-1])
        assert unique.keys() == group
        assert same_bits(few.unique(group[0]).values(), unique.values())
        looks = list(zip(*[_bags(unique, key) for key in group], strict=True))
        assert len(set(looks)) == len(looks) == unique.stride()
        assert [looks[u] for u in inverse.tolist()] == list(zip(*[_bags(batch, key) for key in group], strict=True))
        firsts = [inverse.tolist().index(u) for u in range(unique.stride())]
        assert firsts == sorted(firsts)
        assert unique.offset_per_key() == unique.offsets()[:: max(unique.stride(), 1)].tolist() or not unique.stride()
    alone = [key for key, g in few.group_of_keys().items() if g is None]
    if alone:
        assert few.rest().keys() == alone
        assert all(_bags(few.rest(), key) == _bags(batch, key) for key in alone)
    else:
        assert few.rest() is None


def _bags(kjt: rk.KeyedJaggedTensor, key: str) -> list[tuple]:
    jagged = kjt[key]
    weights = jagged.weights_or_none()
    factors = rk.JaggedTensor(jagged.values() if weights is None else weights, offsets=jagged.offsets()).to_dense()
    return [tuple(zip(b.tolist(), w.tolist(), strict=True)) for b, w in zip(jagged.to_dense(), factors, strict=True)]


@settings(max_examples=60)
@given(grouped_batches())
def test_dedup_factor(case: Grouped) -> None:
    """The factor is the number of the batch's ids divided by the kept ones."""
    batch, groups = case
    few = rk.InverseKeyedJaggedTensor.from_kjt(batch, groups)
    before = after = 0
    for key, g in few.group_of_keys().items():
        counts = len(batch[key].values()), 0 if g is None else len(few.unique(g)[key].values())
        if g is not None:
            before, after = before + counts[0], after + counts[1]
        assert few.dedup_factor(key) == (counts[0] / counts[1] if counts[1] else 1.0)
    assert few.dedup_factor() == (before / after if after else 1.0)


def test_views_of_a_group() -> None:
    """A group's views copy no ids and know the offsets of their features."""
    few = rk.InverseKeyedJaggedTensor.from_kjt(sessions(KEYS, weighted=True), [["c"], ["a", "d"]])
    kept = few.bags()
    for part in (few.unique("c"), few.unique("d"), few.rest()):
        for mine, whole in ((part.values(), kept.values()), (part.weights_or_none(), kept.weights_or_none())):
            assert mine.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert part.known_offset_per_key() == part.offsets()[:: part.stride()].tolist()
    assert kept.stride_per_key() == [few.unique(0).stride(), *[few.unique(1).stride()] * 2, 9]


def test_all_equal_and_all_distinct() -> None:
    """A group has one sample if all are equal, and all if they are distinct."""
    same = rk.InverseKeyedJaggedTensor.from_kjt(sessions(["a"], 1, 8, seed=1), [["a"]])
    assert same.unique(0).stride() == 1
    assert same.inverse(0).tolist() == [0] * 8
    assert same.dedup_factor() == 8
    ids = rk.KeyedJaggedTensor(["a"], torch.arange(8), lengths=torch.ones(8).long())
    other = rk.InverseKeyedJaggedTensor.from_kjt(ids, [["a"]])
    assert other.inverse("a").tolist() == list(range(8))
    assert other.dedup_factor("a") == 1


def test_weights_tell_samples_apart() -> None:
    """Equal ids with different weights, also -0, are different bags."""
    weights = torch.tensor([1.0, 1.0, 2.0, 0.0, -0.0])
    batch = rk.KeyedJaggedTensor(["a"], torch.zeros(5).long(), lengths=torch.ones(5).long(), weights=weights)
    few = rk.InverseKeyedJaggedTensor.from_kjt(batch, [["a"]])
    assert few.inverse(0).tolist() == [0, 0, 1, 2, 3]
    assert_same_batch(few.to_kjt(), batch)


def parts(**changes) -> rk.InverseKeyedJaggedTensor:
    """Two groups, of 2 and 3 distinct samples, and a feature of a batch of 4."""
    options = {"lengths": torch.tensor([1, 2, 0, 1, 1, 0, 1, 1, 1, 2, 0]), "stride_per_key": [2, 2, 3, 4]}
    bags = changes.pop("unique", None) or rk.KeyedJaggedTensor(["c", "a", "d", "b"], torch.arange(10), **options)
    given = {"groups": [["c", "a"], ["d"]], "inverse": torch.tensor([[1, 1, 0, 1], [2, 0, 0, 1]]), "keys": KEYS}
    return rk.InverseKeyedJaggedTensor(bags, **(given | changes))


def test_from_parts() -> None:
    """A data set that knows its sessions can construct the batch from parts."""
    whole = parts().to_kjt()
    assert whole.keys() == KEYS
    assert [b.tolist() for b in whole["a"].to_dense()] == [[3], [3], [], [3]]
    assert [b.tolist() for b in whole["b"].to_dense()] == [[6], [7], [8, 9], []]
    assert whole.stride() == 4
    assert [b.tolist() for b in whole["c"].to_dense()] == [[1, 2], [1, 2], [0], [1, 2]]
    assert [b.tolist() for b in whole["d"].to_dense()] == [[5], [4], [4], []]
    assert parts(keys=None).keys() == ["c", "a", "d", "b"]
    assert parts().dedup_factor("c") == 7 / 3
    assert parts().dedup_factor("b") == 1
    one = rk.KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))  # one batch size for all
    shared = rk.InverseKeyedJaggedTensor(one, [["a"]], torch.tensor([[1, 0, 1]]))
    assert shared.to_kjt().values().tolist() == [*[1, 2], 0, *[1, 2]]
    tables = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(3, 4, name="t", feature_names=["a"])])
    assert torch.equal(tables(shared).values(), tables(shared.to_kjt()).values())


def _kjt(keys: list[str], strides: list[int], **options) -> rk.KeyedJaggedTensor:
    lengths = torch.ones(sum(strides)).long()
    return rk.KeyedJaggedTensor(keys, torch.arange(sum(strides)), lengths=lengths, stride_per_key=strides, **options)


def _inverse(place: tuple[int, int], value: int) -> Tensor:
    inverse = torch.tensor([[1, 1, 0, 1], [2, 0, 0, 1]])
    inverse[place] = value
    return inverse


BAD_PARTS = [
    (TypeError, {"unique": {"a": 1}}, "unique must be an rk.KeyedJaggedTensor or rk.KeyedJaggedWindows, got dict"),
    (KeyError, {"groups": [["c", "a"], ["x"]]}, r"groups\[1\] names 'x', which is not among the keys \['c', 'a'"),
    (
        ValueError,
        {"groups": [["c", "a"], ["c"]]},
        r"'c' is in both groups\[0\] = \['c', 'a'\] and groups\[1\] = \['c'\]",
    ),
    (ValueError, {"groups": [["c", "a"], []]}, r"groups\[1\] must name at least one feature"),
    (ValueError, {"groups": ["ca", "d"]}, r"groups must be lists of feature names, .* got \['ca', 'd'\]"),
    (ValueError, {"groups": [["a", "c"], ["d"]]}, r"features of groups first, \['a', 'c', 'd'\], in this order"),
    (ValueError, {"inverse": torch.zeros(1, 4).long()}, r"inverse must be int64 \[2, B\] .* torch.int64 \[1, 4\]"),
    (ValueError, {"inverse": torch.zeros(2, 4)}, r"inverse must be int64 \[2, B\] .* got torch.float32"),
    (ValueError, {"inverse": torch.zeros(2, 4, device="meta").long()}, "inverse must be on unique's device, cpu"),
    (ValueError, {"inverse": torch.zeros(2, 5).long()}, "'b' is in no group, .* that of inverse, 5, got 4"),
    (ValueError, {"keys": ["a", "b", "c"]}, "keys must be those of unique"),
    (ValueError, {"keys": 1}, "keys must be a list of feature names, got 1"),
    (
        ValueError,
        {"unique": _kjt(["c", "a", "d", "b"], [2, 3, 3, 4])},
        r"one batch size, got \[\('c', 2\), \('a', 3\)\]",
    ),
    (IndexError, {"inverse": _inverse((1, 2), 3)}, r"inverse\[1, 2\] = 3 is out of range: .* \[0, 3\), .* \['d'\]"),
    (IndexError, {"inverse": _inverse((0, 3), -1)}, r"inverse\[0, 3\] = -1 is out of range: .* \[0, 2\)"),
    (
        ValueError,
        {"unique": _kjt(list("cadb"), [2, 2, 3, 4], inverse_indices=(list("cadb"), torch.zeros(4, 4).long()))},
        "unique must have no inverse_indices",
    ),
]


@pytest.mark.parametrize(("error", "changes", "message"), BAD_PARTS)
def test_bad_parts(error: type[Exception], changes: dict, message: str) -> None:
    """Each invalid part is rejected by name."""
    with pytest.raises(error, match=message):
        parts(**changes)


def test_bad_batches() -> None:
    """from_kjt rejects bad batches."""
    make, batch = rk.InverseKeyedJaggedTensor.from_kjt, sessions(KEYS)
    with pytest.raises(KeyError, match=r"groups\[0\] names 'x', which is not among the keys \['a', 'b', 'c', 'd'\]"):
        make(batch, [["x"]])
    with pytest.raises(ValueError, match=r"'a' is in both groups\[0\] = \['a', 'b'\] and groups\[2\] = \['a'\]"):
        make(batch, [["a", "b"], ["c"], ["a"]])
    with pytest.raises(ValueError, match=r"'a' is in both groups\[0\] = \['a', 'a'\]"):
        make(batch, [["a", "a"]])
    with pytest.raises(ValueError, match=r"groups\[1\] must name at least one feature"):
        make(batch, [["a"], []])
    with pytest.raises(ValueError, match="groups must be lists of feature names"):
        make(batch, [["a"], 3])
    with pytest.raises(TypeError, match=r"pass kjt.to_kjt\(\) to group it differently"):
        make(make(batch, [["a"]]), [["b"]])
    with pytest.raises(ValueError, match=r"have their own batch sizes \(stride_per_key\)"):
        make(_kjt(KEYS, [1, 2, 1, 1]), [["a"]])
    weighted = sessions(KEYS, weighted=True)
    weighted.weights_or_none().requires_grad_()
    with pytest.raises(ValueError, match="weights must not require a gradient"):
        make(weighted, [["a"]])
    with torch.no_grad():
        make(weighted, [["a"]])


@pytest.mark.parametrize(("bounds", "first"), [([0, 3, 2, 4], 2), ([-1, 1, 2, 4], 0), ([0, 1, 2, 5], 3)])
def test_bad_offsets_on_a_device(monkeypatch: pytest.MonkeyPatch, bounds: list[int], first: int) -> None:
    """Kernels on a device cannot raise; from_kjt raises once it reads the sizes."""
    batch = unchecked(["a"], torch.arange(4), bounds)
    with pytest.raises(ValueError, match=rf"offsets\[{first}\] = {bounds[first]} must be in"):
        rk.InverseKeyedJaggedTensor.from_kjt(batch, [["a"]])
    for backend in device_backends():
        monkeypatch.setattr(inverse_jagged, "_ops", backend.ops)
        with pytest.raises(
            ValueError, match=rf"offsets\[{first}\] is bad: offsets must be non-decreasing and in \[0, 4\]"
        ):
            rk.InverseKeyedJaggedTensor.from_kjt(batch, [["a"]])


def test_names_of_groups() -> None:
    """Groups may be named by number or by feature."""
    few = rk.InverseKeyedJaggedTensor.from_kjt(sessions(KEYS), [["c"], ["a"]])
    for call in (few.unique, few.inverse):
        with pytest.raises(KeyError, match=r"'b' is in no group: the groups are \[\['c'\], \['a'\]\]"):
            call("b")
        with pytest.raises(KeyError, match="'x' is not among the keys"):
            call("x")
        with pytest.raises(TypeError, match="group must be a group's number or the name of a feature, got None"):
            call(None)
        for number in (2, -1):
            with pytest.raises(IndexError, match=rf"group {number} must be in \[0, 2\)"):
                call(number)
    with pytest.raises(KeyError, match="'x' is not among the keys"):
        few.dedup_factor("x")
    shown = repr(few)
    assert shown.startswith(
        "InverseKeyedJaggedTensor(keys=['a', 'b', 'c', 'd'], groups=[['c'], ['a']], batch=9, values="
    )


@pytest.mark.parametrize(
    "move", [lambda x: x.to("cpu", non_blocking=True), lambda x: _pytree.tree_map_only(Tensor, torch.clone, x)]
)
def test_moves(move: Callable) -> None:
    """The container moves as a whole, and as a tree of tensors."""
    batch = sessions(KEYS, weighted=True)
    few = move(rk.InverseKeyedJaggedTensor.from_kjt(batch, [["c", "a"]]))
    assert_same_batch(few.to_kjt(), batch)
    assert few.unique("a").keys() == ["c", "a"]


def test_meta() -> None:
    """Known sizes stay known on the meta device."""
    few = rk.InverseKeyedJaggedTensor.from_kjt(sessions(KEYS), [["c", "a"]]).to("meta")
    assert few.unique(0).values().is_meta
    assert few.rest().offset_per_key()[0] == 0
    assert few.inverse(0).shape == (9,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_pin_memory() -> None:
    few = rk.InverseKeyedJaggedTensor.from_kjt(sessions(KEYS, weighted=True), [["c", "a"]]).pin_memory()
    assert all(t.is_pinned() for t in _pytree.tree_leaves(few) if t is not None)


def test_duck_typed_input() -> None:
    """Any object with TorchRec's methods is accepted, and not modified."""
    batch = sessions(KEYS, weighted=True)
    other = OtherWithStride(batch)
    assert_same_batch(rk.InverseKeyedJaggedTensor.from_kjt(other, [["b", "a"]]).to_kjt(), batch)
    assert vars(other) == {"_kjt": batch}


def test_torchrecs() -> None:
    """TorchRec's KeyedJaggedTensor is accepted."""
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor")
    batch = sessions(KEYS, weighted=True)
    tensors = [batch.values(), batch.lengths(), batch.weights_or_none()]
    theirs = sparse.KeyedJaggedTensor(KEYS, tensors[0].clone(), lengths=tensors[1], weights=tensors[2].clone())
    assert_same_batch(rk.InverseKeyedJaggedTensor.from_kjt(theirs, [["b", "a"], ["d"]]).to_kjt(), batch)
    found = [theirs.values(), theirs.lengths(), theirs.weights()]
    assert all(map(torch.equal, found, tensors))


@pytest.mark.parametrize("weighted", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_select_keys_of_any_batch(dtype: torch.dtype, weighted: torch.dtype | None) -> None:
    """select_keys works with batch sizes per feature, repeated keys, none, and both integer widths; it avoids copies.

    Weights of half precision keep their dtype.
    """
    bags, weights = parts().bags(), None if weighted is None else torch.arange(10).to(weighted)
    ids, offsets = bags.values().to(dtype), bags.offsets().to(dtype)
    bags = rk.KeyedJaggedTensor(
        bags.keys(), ids, offsets=offsets, weights=weights, stride_per_key=bags.stride_per_key()
    )
    assert select_keys(bags, bags.keys()).values is bags.values()
    for known in (False, True):
        if known:
            bags.offset_per_key()
        chosen = select_keys(bags, ["d", "c", "d"])
        assert chosen.values.dtype == chosen.offsets.dtype == dtype
        assert chosen.values.tolist() == [4, 5, 0, 1, 2, 4, 5]
        assert chosen.offsets.tolist() == [0, 1, 1, 2, 3, 5, 6, 6, 7]
        assert chosen.strides == [3, 2, 3]
        assert chosen.weights is None if weights is None else same_bits(chosen.weights, chosen.values.to(weighted))
        nothing = select_keys(bags, [])
        assert (nothing.values.tolist(), nothing.offsets.tolist(), nothing.strides) == ([], [0], None)
    with pytest.raises(KeyError, match=r"features \['x'\] are not among the input's keys \['c', 'a', 'd', 'b'\]"):
        select_keys(bags, ["x", "c"])
