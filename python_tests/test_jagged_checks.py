"""Errors of jagged containers at construction, their wording, and where no check happens."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged_cases import unchecked
from test_embedding_bag_bounds import LATER, late, message
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree

import rec_kernels as rk
from rec_kernels.nn.jagged import checks as jagged_checks
from rec_kernels.nn.jagged import tensors as jagged

IDS = torch.arange(6)
KEYS = ["user", "item"]
FALLING, BEHIND = [0, 3, 1, 4, 6], [0, 3, 3, 4, 7]


def _refused(make: Callable[[], object], message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value) == message


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_rise(dtype: torch.dtype) -> None:
    """The op distinguishes good offsets from bad ones, also of a view; a tracer's pass."""
    offsets_rise = torch.ops.rec_kernels._offsets_rise
    good, lowest = torch.tensor([0, 2, 2, 5], dtype=dtype), torch.iinfo(dtype).min
    assert offsets_rise(good, 5)
    assert not offsets_rise(good, 4)
    assert offsets_rise(torch.tensor([0, 9, 2, 9], dtype=dtype)[::2], 2)
    for bad in ([-1, 2], [0, 2, 1], [0, lowest, 2], [3]):
        assert not offsets_rise(torch.tensor(bad, dtype=dtype), 2)
    with FakeTensorMode():
        assert offsets_rise(torch.tensor([2, 0], dtype=dtype), 2)
    _refused(lambda: offsets_rise(good[:0], 5), "offsets must have one element more than there are bags, got none")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3, 1], "offsets[2] = 1 (row 1) is below the offset before it, 3"),
        ([-1, 3, 6], "offsets[0] = -1 (row 0) must be in [0, 6], the number of values"),
        ([0, 3, 7], "offsets[2] = 7 (row 1) must be in [0, 6], the number of values"),
        ([0, 8, 6], "offsets[1] = 8 (row 0) must be in [0, 6], the number of values"),
        ([0, -3, 6], "offsets[1] = -3 (row 0) is below the offset before it, 0"),
        ([7], "offsets[0] = 7 (row 0) must be in [0, 6], the number of values"),
        ([1, -(2**31), -(2**30), 0, 6], f"offsets[1] = {-(2**31)} (row 0) is below the offset before it, 1"),
        ([], "offsets must have one element more than there are bags, got none"),
    ],
)
def test_offsets_of_rows(offsets: list[int], message: str, dtype: torch.dtype) -> None:
    """Offsets that decrease or exceed the values are rejected."""
    _refused(lambda: rk.JaggedTensor(IDS, offsets=torch.tensor(offsets, dtype=dtype)), message)


@pytest.mark.parametrize(
    ("parts", "message", "error"),
    [
        (
            (IDS, torch.tensor([0.0, 6.0])),
            "offsets must be int32 or int64 with one dimension, got torch.float32 [2]",
            0,
        ),
        ((IDS, torch.tensor([[0, 6]])), "offsets must be int32 or int64 with one dimension, got torch.int64 [1, 2]", 0),
        ((IDS, [0, 6]), "offsets must be a tensor, got list", 1),
        (([1], torch.tensor([0, 1])), "values must be a tensor, got list", 1),
        (
            (torch.tensor(1), torch.tensor([0, 1])),
            "values must have at least 1 dimension, got a 0-dim tensor",
            0,
        ),
        ((IDS.to("meta"), torch.tensor([0, 6])), "offsets must be on values' device, meta, got cpu", 0),
        ((IDS, torch.tensor([0, 6]), torch.ones(5)), "weights must have values' shape [6], got [5]", 0),
        ((IDS[:, None], torch.tensor([0, 6]), torch.ones(6, 1)), "weights must have values' shape [6], got [6, 1]", 0),
        ((IDS, torch.tensor([0, 6]), IDS), "weights must be floating-point numbers, got torch.int64", 0),
        ((IDS, torch.tensor([0, 6]), [1.0]), "weights must be a tensor, got list", 1),
    ],
)
def test_parts_of_rows(parts: tuple, message: str, error: int) -> None:
    """Incompatible shapes, dtypes and devices, and other types than tensors, are rejected."""
    _refused(
        lambda: rk.JaggedTensor(parts[0], parts[2] if parts[2:] else None, offsets=parts[1]),
        message,
        TypeError if error else ValueError,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": [4, -1, 2, 1]}, "lengths[1] = -1 (feature 'user', bag 1) is below 0: a bag has 0 values or more"),
        ({"lengths": [1, 1, 9, -5]}, "lengths[2] = 9 (feature 'item', bag 0) makes 11 values up to there: there are 6"),
        ({"lengths": [1, 2, 3, 1]}, "lengths[3] = 1 (feature 'item', bag 1) makes 7 values up to there: there are 6"),
        ({"offsets": FALLING}, "offsets[2] = 1 (feature 'user', bag 1) is below the offset before it, 3"),
        ({"offsets": BEHIND}, "offsets[4] = 7 (feature 'item', bag 1) must be in [0, 6], the number of values"),
        (
            {"offsets": [-1, 1, 2, 4, 6]},
            "offsets[0] = -1 (feature 'user', bag 0) must be in [0, 6], the number of values",
        ),
        ({"offsets": [7]}, "offsets[0] = 7 (in no feature) must be in [0, 6], the number of values"),
        (
            {"lengths": [1, 2, 1, -2], "stride_per_key": [1, 3]},
            "lengths[3] = -2 (feature 'item', bag 2) is below 0: a bag has 0 values or more",
        ),
    ],
)
def test_bags(given: dict, message: str, dtype: torch.dtype) -> None:
    """Errors of lengths and offsets use the argument's name, with the feature and the sample."""
    given = {k: torch.tensor(v, dtype=dtype) if k != "stride_per_key" else v for k, v in given.items()}
    _refused(lambda: rk.KeyedJaggedTensor(KEYS, IDS, **given), message)


def test_lengths_that_int32_cannot_add_up() -> None:
    """A sum of lengths beyond int32 is rejected instead of wrapping."""
    many = torch.zeros(1, dtype=torch.int32).expand(2**31 + 2)  # one element in memory
    lengths = torch.tensor([2**30, 2**30, 1], dtype=torch.int32)
    message = f"lengths add up to {2**31 + 1}, more than torch.int32 can hold: they must be int64"
    _refused(lambda: rk.KeyedJaggedTensor(["a"], many, lengths=lengths), message)
    assert rk.KeyedJaggedTensor(["a"], many, lengths=lengths.long()).offsets()[-1] == 2**31 + 1


@pytest.mark.parametrize("keys", ["ab", None, 2])
def test_names_of_keys(keys: Any) -> None:
    """A single string is no list of names, nor is an object without names."""
    message = f"keys must be a list of feature names, got {keys!r}"
    lengths = torch.ones(2, dtype=torch.int64)
    _refused(lambda: rk.KeyedJaggedTensor(keys, IDS[:2], lengths=lengths), message)
    _refused(lambda: rk.KeyedJaggedWindows(keys, IDS[:2], lengths, lengths), message)
    _refused(lambda: rk.KeyedTensor(keys, [1, 2], torch.rand(4, 3)), message)
    with pytest.raises(TypeError, match=r"keys\[1\] must be a feature's name, a str, got 2"):
        rk.KeyedJaggedTensor(["a", 2], IDS[:2], lengths=lengths)


def test_inverse_indices() -> None:
    """Inverse indices must be in range and of the batch's keys, in any order."""
    places = torch.tensor([[0, 1, 9], [1, 2, 0], [0, 0, 1]])
    given = {"lengths": torch.tensor([2, 1, 1, 1, 1]), "stride_per_key": [2, 3]}
    kept = rk.KeyedJaggedTensor(KEYS, IDS, **given, inverse_indices=(["other", "item", "user"], places))
    assert kept.stride() == 3
    message = "inverse_indices of 'user' have 2 at row 1: they must be in [0, 2), the feature's bags"
    bad = (["other", "user", "item"], places)
    _refused(lambda: rk.KeyedJaggedTensor(KEYS, IDS, **given, inverse_indices=bad), message, IndexError)
    _refused(
        lambda: rk.KeyedJaggedTensor(KEYS, IDS, **given, inverse_indices=(KEYS, [[0]])),
        "inverse_indices[1] must be a tensor, got list",
        TypeError,
    )
    _refused(
        lambda: rk.InverseKeyedJaggedTensor(unchecked(["a"], IDS, [0, 6]), [["a"]], [[0]]),
        "inverse must be a tensor, got list",
        TypeError,
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((["a", "a"], [1, 2], torch.rand(4, 3)), "keys must be unique, got ['a', 'a']"),
        ((["a", "b"], [3], torch.rand(4, 3)), "length_per_key must have a width for each of the 2 keys, got [3]"),
        (
            (["a", "b"], [4, -1], torch.rand(4, 3)),
            "length_per_key must have a width for each of the 2 keys, got [4, -1]",
        ),
        ((["a", "b"], [1, 1], torch.rand(4, 3)), "values must be [B, 2], the sum of length_per_key, got [4, 3]"),
        ((["a"], [3], torch.rand(3)), "values must be [B, 3], the sum of length_per_key, got [3]"),
    ],
)
def test_columns(parts: tuple, message: str) -> None:
    """Keys and widths must match the values."""
    _refused(lambda: rk.KeyedTensor(*parts), message)
    _refused(lambda: rk.KeyedTensor(["a"], [1], [1.0]), "values must be a tensor, got list", TypeError)


def test_what_is_allowed() -> None:
    """Values outside of all rows, empty rows and empty batches are allowed."""
    for offsets in ([1, 2, 5], [6, 6], [0], [3]):
        rows = rk.JaggedTensor(IDS, offsets=torch.tensor(offsets))
        assert [row.tolist() for row in rows.to_dense()] == [list(range(*b)) for b in itertools.pairwise(offsets)]
        assert rk.KeyedJaggedTensor(["a"], IDS, offsets=torch.tensor(offsets)).stride() == len(offsets) - 1
    assert rk.KeyedJaggedTensor(KEYS, IDS, lengths=torch.tensor([1, 2])).offsets().tolist() == [0, 1, 3]
    assert rk.KeyedJaggedTensor([], IDS[:0], lengths=IDS[:0]).offsets().tolist() == [0]
    strided = torch.tensor([0, 9, 2, 9, 6])[::2]
    assert rk.JaggedTensor(IDS, offsets=strided).lengths().tolist() == [2, 4]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (FALLING, "offsets[2] = 1 (row 1) is below the offset before it, 3"),
        (BEHIND, "offsets[4] = 7 (row 3) must be in [0, 6], the number of values"),
    ],
)
def test_rows_are_read_late(offsets: list[int], message: str) -> None:
    """Unchecked offsets, as on a GPU, raise when rows are read instead of being padded or cut."""
    rows = rk.JaggedTensor._from_parts(IDS, torch.tensor(offsets))
    for read in (rows.to_dense, rows.to_padded_dense, lambda: rows.to_padded_dense(2)):
        _refused(read, message)
    written = rk.JaggedTensor(IDS, offsets=torch.tensor([0, 1, 2, 3, 4]))
    written.offsets().copy_(torch.tensor(offsets))
    _refused(written.to_padded_dense, message)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1, 7, 2, 3], "offsets[2] = 7, where feature 'item' begins, must be in [0, 6]"),
        ([0, 1, 5, 5, 3], "offsets[4] = 3, where the last feature ends, must be in [5, 6]"),
        ([-1, 1, 5, 5, 6], "offsets[0] = -1, where feature 'user' begins, must be in [0, 6]"),
    ],
)
def test_features_are_read_late(offsets: list[int], message: str) -> None:
    """A feature with unchecked offsets raises when it is read."""
    behind = ", between the start of the feature before it and the number of values"
    _refused(lambda: unchecked(KEYS, IDS, offsets)["user"], message + behind)


def test_late_in_the_words_of_lengths() -> None:
    """A late error names lengths if the batch was made from lengths."""
    collection = rk.EmbeddingBagCollection([rk.EmbeddingBagConfig(9, 4, name=key, feature_names=[key]) for key in KEYS])
    with late():
        for keys in (KEYS, KEYS[::-1]):
            batch = rk.KeyedJaggedTensor(keys, IDS, lengths=torch.tensor([1, 2, 1, 2])).to("cpu")
            batch.offsets().copy_(torch.tensor([0, 3, 1, 4, 6]))
            collection(batch)
            feature = "user" if keys == KEYS else "item"
            text = f"lengths[1] = -2 (feature {feature!r}, bag 1) is below 0: a bag has 0 values or more"
            assert message(collection.check, ValueError) == text + LATER


def test_joined_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining batches leaves out ids outside of bags without waiting for the GPU; the lookup raises."""
    good, gap = (
        rk.KeyedJaggedTensor([key], IDS, offsets=torch.tensor([0, 2, end])) for key, end in (("a", 6), ("b", 5))
    )
    monkeypatch.setattr(jagged, "has_data", lambda _: False)
    concat = rk.KeyedJaggedTensor.concat
    assert concat([good, gap]).offsets().tolist() == [0, 2, 6, 8, 11]
    assert concat([gap, good]).offsets()[0] == -1
    gap.keep_offset_per_key([0, 5])
    good.keep_offset_per_key([0, 6])
    assert concat([gap, good]).offsets().tolist() == [0, 2, 5, 7, 11]
    assert concat([gap.to("meta"), good.to("meta")]).offsets().is_meta


BAD = torch.tensor(FALLING)


def _make_all(values: Tensor, bad: Tensor) -> list:
    """Every container with offsets, lengths or starts, with bad values."""
    lengths = bad.diff()
    return [
        rk.JaggedTensor(values, offsets=bad),
        rk.KeyedJaggedTensor(KEYS, values, offsets=bad),
        rk.KeyedJaggedTensor(KEYS, values, lengths=lengths),
        rk.KeyedJaggedWindows(KEYS, values, bad[:-1], lengths),
    ]


def test_tensors_without_numbers() -> None:
    """Containers accept meta tensors, fake tensors and those of torch.func."""
    _make_all(IDS.to("meta"), BAD.to("meta"))
    with FakeTensorMode() as mode:
        _make_all(mode.from_tensor(IDS), mode.from_tensor(BAD))
    take = torch.func.functionalize(lambda v, o: _make_all(v, o)[0].values())
    assert torch.equal(take(IDS, BAD), IDS)
    padded = torch.vmap(lambda o: _make_all(IDS, o)[0].lengths())(BAD[None])
    assert torch.equal(padded, BAD.diff()[None])


def test_traced() -> None:
    """Tracing gives no warning about reading tensor data."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        torch.jit.trace(lambda v, o: rk.JaggedTensor(v, offsets=o).lengths(), (IDS, BAD), check_trace=False)


def test_compiled() -> None:
    """One graph, compiled once, reads no tensor data."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def lengths(values: Tensor, offsets: Tensor) -> Tensor:
        first, second, third, _ = _make_all(values, offsets)
        columns = rk.KeyedTensor(["a", "b"], [1, 1], first.lengths().view(-1, 2))
        joined = rk.KeyedJaggedTensor.concat([third, rk.KeyedJaggedTensor(["c"], values, lengths=offsets[1:3])])
        return torch.cat([columns.values().flatten(), second.lengths(), joined.lengths()])

    compiled = torch.compile(lengths, backend=counter, fullgraph=True)
    for offsets in (BAD, torch.tensor([0, 2, 3, 4, 6]), torch.tensor(BEHIND)):
        assert torch.equal(compiled(IDS, offsets)[:4], offsets.diff())
    assert counter.frame_count == 1


def test_exported() -> None:
    """Containers made in an exported program read no tensor data."""

    class Lengths(torch.nn.Module):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            return (
                rk.JaggedTensor(values, offsets=offsets).lengths()
                + rk.KeyedJaggedTensor(KEYS, values, offsets=offsets).lengths()
            )

    for strict in (False, True):
        program = torch.export.export(Lengths(), (IDS, torch.tensor([0, 2, 3, 4, 6])), strict=strict)
        assert torch.equal(program.module()(IDS, BAD), 2 * BAD.diff())


def test_copies_are_not_looked_at() -> None:
    """Trees, copies and pickles of bad containers are not checked."""
    for bad in (rk.JaggedTensor._from_parts(IDS, BAD), unchecked(KEYS, IDS, FALLING)):
        for make in (
            copy.deepcopy,
            lambda x: pickle.loads(pickle.dumps(x)),
            lambda x: _pytree.tree_map_only(Tensor, torch.clone, x),
        ):
            assert make(bad).offsets().tolist() == FALLING


def test_what_comes_from_containers_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected, moved and joined parts of a checked batch are not checked again."""
    batch = rk.KeyedJaggedTensor(KEYS, IDS, lengths=torch.tensor([1, 2, 1, 2]), weights=torch.ones(6))
    rows = rk.JaggedTensor(IDS, offsets=batch.offsets())
    few = rk.InverseKeyedJaggedTensor(unchecked(KEYS, IDS, [0, 1, 3, 4, 6]), [["user"]], torch.tensor([[0, 1]]))
    windows = rk.KeyedJaggedWindows(KEYS, IDS, batch.offsets()[:-1], batch.lengths())
    tables = [rk.EmbeddingBagConfig(9, 4, name=key, feature_names=[key]) for key in KEYS]
    sequences, pooled = rk.EmbeddingCollection(tables), rk.EmbeddingBagCollection(tables)
    other = rk.KeyedJaggedTensor(["c"], IDS, lengths=torch.tensor([2, 4]), weights=torch.ones(6))
    plain = rk.KeyedJaggedTensor(["c"], IDS, lengths=torch.tensor([2, 4]))
    for check in ("check_bounds", "check_integers", "checked_widths", "check_weights"):
        monkeypatch.setattr(jagged_checks, check, lambda *_: pytest.fail("looked at"))
    for container in (batch, rows, few, windows):
        container.to("cpu")
    assert batch["item"].values().tolist() == [3, 4, 5]
    rk.KeyedJaggedTensor.concat([batch, other])
    few.with_rest(plain).to_kjt()
    few.unique("user")
    few.rest()
    windows.to_kjt()
    pooled(batch)
    assert sorted(pooled.by_feature(batch)) == sorted(KEYS)
    monkeypatch.undo()
    monkeypatch.setattr(rk.JaggedTensor, "__init__", lambda *_: pytest.fail("looked at"))
    sequences(batch)
