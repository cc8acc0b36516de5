"""KeyedJaggedTensor.concat and InverseKeyedJaggedTensor.with_rest join features of several batches."""

from __future__ import annotations

import pytest
import torch
from inverse_jagged_cases import assert_same_batch

import rec_kernels as rk


def kjt(keys: str, lengths: list[int], **options) -> rk.KeyedJaggedTensor:
    """A batch with one key per letter."""
    dtype = options.pop("dtype", torch.int64)
    ids = torch.arange(sum(lengths), dtype=dtype) + 10 * len(keys)
    return rk.KeyedJaggedTensor(list(keys), ids, lengths=torch.tensor(lengths, dtype=dtype), **options)


def bags(batch: rk.KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    """Bags of each key."""
    keys = batch.keys()
    return {key: [bag.tolist() for bag in batch[key].to_dense()] for key in keys}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int64), (torch.int32, torch.int32)])
def test_concat(dtypes: tuple, known: bool) -> None:
    parts = [kjt("ab", [2, 0, 1, 3], dtype=dtypes[0]), kjt("c", [1, 4], dtype=dtypes[1]), kjt("", []), kjt("d", [0, 0])]
    if known:
        for part in parts:
            part.offset_per_key()
    joined = rk.KeyedJaggedTensor.concat(parts)
    assert joined.keys() == list("abcd")
    assert (joined.stride(), joined.variable_stride_per_key()) == (2, False)
    assert joined.known_offset_per_key() == ([0, 2, 6, 11, 11] if known else None)
    assert bags(joined) == {key: found for part in parts for key, found in bags(part).items()}
    assert joined.offset_per_key() == [0, 2, 6, 11, 11]


def test_concat_of_other_batch_sizes() -> None:
    parts = [kjt("a", [2, 0, 1]), kjt("bc", [1, 1, 2], stride_per_key=[2, 1])]
    joined = rk.KeyedJaggedTensor.concat(parts)
    assert joined.stride_per_key() == [3, 2, 1]
    assert bags(joined) == bags(parts[0]) | bags(parts[1])


@pytest.mark.parametrize("place", [0, 1])
def test_concat_of_a_view(place: int) -> None:
    """A view of a larger batch leaves out ids before and after its bags."""
    ids = torch.arange(7)
    view = rk.KeyedJaggedTensor(["v"], ids, offsets=torch.tensor([2, 3, 5]), weights=ids / 2)
    other = kjt("a", [1, 2], weights=torch.ones(3))
    joined = rk.KeyedJaggedTensor.concat([view, other] if place == 0 else [other, view])
    assert bags(joined) == {"v": [[2], [3, 4]]} | bags(other)
    assert joined["v"].weights_or_none().tolist() == [1.0, 1.5, 2.0]
    view.offset_per_key()
    other.offset_per_key()
    known = rk.KeyedJaggedTensor.concat([other, view])
    assert known.known_offset_per_key() == [0, 3, 6]


def test_concat_of_weights() -> None:
    parts = [kjt(key, [2], weights=torch.full((2,), number)) for key, number in (("a", 0.5), ("b", 2.0))]
    assert rk.KeyedJaggedTensor.concat(parts).weights_or_none().tolist() == [0.5, 0.5, 2.0, 2.0]


def test_concat_of_one() -> None:
    only = kjt("ab", [1, 2])
    assert rk.KeyedJaggedTensor.concat([kjt("", []), only]) is only


def test_concat_refuses() -> None:
    inverse = (["b"], torch.zeros(1, 3, dtype=torch.int64))
    weighted = kjt("b", [2], weights=torch.ones(2))
    cases = [
        ([], "kjt_list must have at least one"),
        ([kjt("a", [1]), kjt("a", [1])], r"keys must be unique, got \['a', 'a'\]"),
        ([kjt("a", [1]), weighted], r"features without weights, \['a'\]"),
        (
            [kjt("a", [1]), kjt("b", [1], stride_per_key=[1], inverse_indices=inverse)],
            "kjt_list must not have inverse_indices",
        ),
    ]
    for parts, message in cases:
        with pytest.raises(ValueError, match=message):
            rk.KeyedJaggedTensor.concat(parts)
    with pytest.raises(TypeError, match=r"kjt_list\[1\] must be an rk\.KeyedJaggedTensor, got Tensor"):
        rk.KeyedJaggedTensor.concat([kjt("a", [1]), torch.ones(1)])


@pytest.mark.parametrize("windows", [False, True])
def test_with_rest(windows: bool) -> None:
    """The batch has all features, and its lookup has the bits of two."""
    shared, features = kjt("ab", [2, 2, 1, 0, 0, 3]), kjt("cd", [1] * 6)
    shared = rk.KeyedJaggedTensor(["a", "b"], shared.values() * 0 + 7, offsets=shared.offsets())
    few = rk.InverseKeyedJaggedTensor.from_kjt(shared, [["a", "b"]])
    joined = (few.with_windows() if windows else few).with_rest(features)
    assert joined.groups() == [["a", "b"]]
    assert_same_batch(joined.to_kjt(), rk.KeyedJaggedTensor.concat([shared, features]))
    assert_same_batch(joined.rest(), features)
    tables = [rk.EmbeddingBagConfig(40, 4, name=key, feature_names=[key]) for key in "abcd"]
    both = rk.EmbeddingBagCollection(tables)
    whole = both(rk.KeyedJaggedTensor.concat([shared, features])).values()
    assert torch.equal(both(joined).values(), whole)
    assert few.with_rest(kjt("", [])).keys() == ["a", "b"]


def test_with_rest_refuses() -> None:
    few = rk.InverseKeyedJaggedTensor.from_kjt(kjt("a", [1, 1, 1]), [["a"]])
    with pytest.raises(ValueError, match=r"features must have 3 bags each, one per sample, got \[2\]"):
        few.with_rest(kjt("b", [1, 1]))
    with pytest.raises(ValueError, match=r"keys must be unique, got \['a', 'a'\]"):
        few.with_rest(kjt("a", [1, 1, 1]))
