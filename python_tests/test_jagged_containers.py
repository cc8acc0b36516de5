"""Jagged containers: copies whose tensors are written to, feature names, symbolic sizes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rec_kernels as rk

BEFORE, AFTER = [0, 1, 2, 4, 6], [0, 0, 5, 5, 6]


def _saved(x: object) -> object:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)  # weights_only is torch's default


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": _saved,
}


def _kjt() -> rk.KeyedJaggedTensor:
    return rk.KeyedJaggedTensor(["name", "a"], torch.arange(6), offsets=torch.tensor(BEFORE))


def _windows() -> rk.KeyedJaggedWindows:
    offsets = torch.tensor(BEFORE)
    return rk.KeyedJaggedWindows(["name", "a"], torch.arange(6), offsets[:-1].clone(), offsets.diff())


def _deduplicated() -> rk.InverseKeyedJaggedTensor:
    return rk.InverseKeyedJaggedTensor.from_kjt(_kjt(), [["name"]])


def _write(container: rk.KeyedJaggedTensor | rk.KeyedJaggedWindows, offsets: list[int]) -> None:
    new = torch.tensor(offsets)
    if isinstance(container, rk.KeyedJaggedWindows):
        container.starts().copy_(new[:-1])
        container.lengths().copy_(new.diff())
    else:
        container.offsets().copy_(new)


# Writes to the original's tensors, as many of them as to those of some way's copy.
@pytest.mark.parametrize("writes", range(4))
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("make", [_kjt, _windows], ids=["bags", "windows"])
def test_copies_learn_anew(make: Callable, way: str, writes: int) -> None:
    """A copy drops the original's cached values once its tensors are written to."""
    original = make()
    for _ in range(writes):
        _write(original, BEFORE)
    assert original.offset_per_key() == [0, 2, 6]
    other = COPIES[way](original)
    assert other.known_offset_per_key() == [0, 2, 6]  # without waiting for a GPU
    _write(other, AFTER)
    assert other.known_offset_per_key() is None
    assert other.offset_per_key() == [0, 5, 6]


@pytest.mark.parametrize("writes", range(4))
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_windows_make_bags_anew(way: str, writes: int) -> None:
    """Copies of windows make bags from their own tensors."""
    original = _windows()
    for _ in range(writes):
        _write(original, BEFORE)
        original.values().copy_(torch.arange(6))
    original.to_kjt()
    other = COPIES[way](original)
    _write(other, AFTER)
    other.values().copy_(torch.arange(6) + 10)
    assert other.to_kjt().values().tolist() == list(range(10, 16))
    assert other.to_kjt().offsets().tolist() == AFTER


@pytest.mark.parametrize("make", [_kjt, _windows], ids=["bags", "windows"])
def test_copies_of_what_is_no_longer_true(make: Callable) -> None:
    """Copies do not inherit cached values that are no longer true."""
    original = make()
    original.offset_per_key()
    _write(original, AFTER)
    assert copy.deepcopy(original).offset_per_key() == [0, 5, 6]


def test_copies_of_inference_tensors() -> None:
    """Inference tensors have no version counters: bags and copies cache nothing."""
    with torch.inference_mode():
        for make in (_kjt, _windows):
            container = make()
            container.offset_per_key()
            assert copy.deepcopy(container).offset_per_key() == [0, 2, 6]


@pytest.mark.parametrize(
    "make",
    [_windows, _deduplicated, lambda: _deduplicated().with_windows()],
    ids=["windows", "deduplicated", "deduplicated windows"],
)
def test_stored_of_features(make: Callable) -> None:
    """Names must be a list of existing features."""
    container = make()
    assert container.num_stored(["name"]) == 2
    assert container.num_stored(("a", "name")) == 6
    assert container.num_stored([]) == 0
    with pytest.raises(ValueError, match="keys must be a list of feature names, got 'name'"):
        container.num_stored("name")
    with pytest.raises(KeyError, match=r"features \['b'\] are not among the input's keys \['name', 'a'\]"):
        container.num_stored(["name", "b"])


IDS, LENGTHS, WEIGHTS = torch.arange(6), torch.tensor([2, 2, 1, 1]), torch.rand(6)
MOVING = {
    "rows": (lambda: rk.JaggedTensor(IDS, offsets=torch.tensor([0, 2, 6]), weights=WEIGHTS), 3),
    "bags": (lambda: rk.KeyedJaggedTensor(["name", "a"], IDS, lengths=LENGTHS, weights=WEIGHTS), 3),
    "own sizes": (
        lambda: rk.KeyedJaggedTensor(
            *(["a"], IDS), lengths=LENGTHS, stride_per_key=[4], inverse_indices=(["a"], torch.zeros(1, 5).long())
        ),
        3,
    ),
    "windows": (_windows, 3),
    "deduplicated": (_deduplicated, 3),
    "deduplicated windows": (lambda: _deduplicated().with_windows(), 4),
    "columns": (lambda: rk.KeyedTensor(["f", "g"], [2, 1], torch.rand(4, 3)), 1),
}


@pytest.mark.parametrize("name", MOVING)
def test_moves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor, also of bags made from windows, moves to a device and to pinned memory and is recorded on a stream;
    cached values stay known.
    """
    make, count = MOVING[name]
    here, streams, pinned = make(), [], []
    monkeypatch.setattr(Tensor, "record_stream", lambda t, stream: streams.append((t.device.type, stream)))
    monkeypatch.setattr(Tensor, "pin_memory", lambda t: pinned.append(t) or t.clone())
    here.record_stream("stream")
    there = here.to("meta", non_blocking=True)
    assert type(there) is type(here.pin_memory()) is type(here)
    assert streams == []
    if isinstance(there, rk.KeyedJaggedWindows):
        there.to_kjt()
        count += 2
    there.record_stream("stream")
    assert streams == [("meta", "stream")] * count
    leaves = [t for t in torch.utils._pytree.tree_leaves(here) if isinstance(t, Tensor)]
    assert sorted(map(id, pinned)) == sorted(map(id, leaves))
    if hasattr(here, "known_offset_per_key"):
        assert there.known_offset_per_key() == here.known_offset_per_key() is not None


@pytest.mark.parametrize("name", MOVING)
def test_trees_that_are_saved(name: str) -> None:
    """Leaves are tensors or None; torch.save and a safe load restore them, also after bags were made of windows."""
    made = MOVING[name][0]()
    for make_bags in (lambda: None, getattr(made, "bags", None) or getattr(made, "to_kjt", lambda: None)):
        make_bags()
        before, after = (torch.utils._pytree.tree_leaves(container) for container in (made, _saved(made)))
        assert [type(leaf) for leaf in before] == [type(leaf) for leaf in after]
        assert all(leaf is None or isinstance(leaf, Tensor) for leaf in before)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))


META = WEIGHTS.to("meta")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lengths": torch.full((4,), 1.5)}, ValueError, r"lengths must be int32 or int64 with one .*float32 \[4\]"),
        ({"lengths": torch.full((4,), 100, dtype=torch.uint8)}, ValueError, "lengths must be int32 .* torch.uint8"),
        ({"lengths": torch.ones(2, 2).long()}, ValueError, r"lengths must be .* with one dimension, .*\[2, 2\]"),
        ({"lengths": LENGTHS.to("meta")}, ValueError, "lengths must be on values' device, cpu, got meta"),
        ({"lengths": [2, 2, 1, 1]}, TypeError, "lengths must be a tensor, got list"),
        ({"offsets": torch.tensor([[0, 2, 4, 5, 6]])}, ValueError, r"offsets must be .* got torch.int64 \[1, 5\]"),
        ({"offsets": torch.tensor(0)}, ValueError, r"offsets must be .* with one dimension, got torch.int64 \[\]"),
        ({"values": torch.tensor(1), "lengths": LENGTHS}, ValueError, "values must have at least 1 dimension"),
        ({}, ValueError, "lengths or offsets must be given with values"),
        ({"values": [1], "lengths": LENGTHS}, TypeError, "values must be a tensor, got list"),
        ({"lengths": LENGTHS, "weights": META}, ValueError, "weights must be on values' device, cpu, got meta"),
        ({"lengths": LENGTHS, "weights": IDS}, ValueError, "weights must be floating-point numbers, got torch.int64"),
        ({"lengths": LENGTHS, "weights": WEIGHTS[1:]}, ValueError, "weights must have"),
        ({"lengths": LENGTHS[1:]}, ValueError, "not a multiple of the 2 keys"),
        ({"keys": ["a", "a"], "lengths": LENGTHS}, ValueError, "must be unique"),
    ],
)
def test_tensors_that_do_not_fit(given: dict, error: type[Exception], message: str) -> None:
    """Invalid tensors are rejected at construction, by their argument names."""
    with pytest.raises(error, match=message):
        rk.KeyedJaggedTensor(**{"keys": ["name", "a"], "values": IDS} | given)


class _Bags(torch.nn.Module):
    """Applies ``module`` to a jagged tensor of values and offsets."""

    def __init__(self, module: Callable) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.module(rk.JaggedTensor(values, offsets=offsets))


def _padded(jagged: rk.JaggedTensor) -> Tensor:
    return jagged.to_padded_dense(3)


@pytest.mark.parametrize("make", [lambda: _padded, lambda: rk.MixedDimensionEmbeddingBag([2, 8], [6, 3], 6)])
def test_exported(make: Callable) -> None:
    """An exported program takes any number of bags and ids."""
    module = _Bags(make())
    sizes = ({0: torch.export.Dim("ids")}, {0: torch.export.Dim("bounds", min=3)})
    given = torch.arange(6), torch.tensor(BEFORE)
    with torch.no_grad():
        program = torch.export.export(module, given, dynamic_shapes=sizes, strict=False)
    for offsets in (AFTER, [0, 2, 3, 9, 9, 10]):
        given = torch.arange(offsets[-1]), torch.tensor(offsets)
        torch.testing.assert_close(program.module()(*given), module(*given))


def test_bags_without_numbers() -> None:
    """Blocks by popularity have a shape on the meta device."""
    module = rk.MixedDimensionEmbeddingBag([2, 8], [6, 3], 6, device="meta")
    ids, offsets = torch.arange(6, device="meta"), torch.arange(5, device="meta")
    assert module(rk.JaggedTensor(ids, offsets=offsets)).shape == (4, 6)
