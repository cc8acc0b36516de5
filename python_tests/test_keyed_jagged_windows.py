"""KeyedJaggedWindows: found and given windows, their bags, and lookups equal to those of whole bags."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import row_cache_collections as cached
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inverse_jagged_cases import OtherWithStride, assert_same_batch, grouped_batches
from jagged_cases import unchecked
from torch import Tensor
from torch.utils import _pytree

import rec_kernels as rk
from rec_kernels.nn.jagged import windows as jagged_windows
from rec_kernels.testing import same_bits

KEYS = ["a", "b"]
HISTORY, STEP, FIRST = 8, 3, 5


def histories(
    keys: list[str] = KEYS, samples: int = 12, *, rows: int = 40, seed: int = 0, integer: torch.dtype = torch.int64
) -> rk.KeyedJaggedTensor:
    """Samples of three users in turn, each twice, with the user's last ids, which advance."""
    generator = torch.Generator().manual_seed(seed)
    bags = []
    for _ in keys:
        of_user = torch.randint(rows, (3, STEP * samples + FIRST), generator=generator)
        ends = [(i // 2 % 3, STEP * (i // 6) + FIRST) for i in range(samples)]
        bags += [of_user[user, max(end - HISTORY, 0) : end] for user, end in ends]
    lengths = torch.tensor([len(bag) for bag in bags]).to(integer)
    return rk.KeyedJaggedTensor(list(keys), torch.cat([torch.zeros(0).long(), *bags]).to(integer), lengths=lengths)


def windowed(batch: rk.KeyedJaggedTensor, groups: list[list[str]]) -> rk.InverseKeyedJaggedTensor:
    found = rk.InverseKeyedJaggedTensor.from_kjt(batch, groups).with_windows()
    assert isinstance(found.stored(), rk.KeyedJaggedWindows)
    return found


def covered(windows: rk.KeyedJaggedWindows, keys: list[str]) -> int:
    """Number of buffer ids in a bag of these features."""
    ends = list(itertools.accumulate(windows.stride_per_key(), initial=0))
    bags = [i for f, key in enumerate(windows.keys()) if key in keys for i in range(ends[f], ends[f + 1])]
    starts, lengths = windows.starts().tolist(), windows.lengths().tolist()
    return len({place for i in bags for place in range(starts[i], starts[i] + lengths[i])})


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_found_in_a_batch(integer: torch.dtype) -> None:
    """Every id of a user is stored once in order, and the batch is restored to the bit."""
    batch = histories(samples=36, rows=1 << 30, integer=integer)
    found = rk.KeyedJaggedWindows.from_kjt(batch)
    assert_same_batch(found.to_kjt(), batch)
    assert found.to_kjt() is found.to_kjt()
    assert found.values().dtype == found.starts().dtype == found.lengths().dtype == integer
    once = STEP * 5 + FIRST
    assert len(found.values()) == 2 * 3 * once
    assert [found.num_stored(keys) for keys in ([], ["a"], ["b"], KEYS)] == [0, 3 * once, 3 * once, 6 * once]
    assert found.offset_per_key() == found.known_offset_per_key() == batch.offset_per_key()
    assert found.to_kjt().known_offset_per_key() == batch.offset_per_key()
    assert repr(found) == f"KeyedJaggedWindows(keys=['a', 'b'], bags=72, values={6 * once})"


@settings(max_examples=80)
@given(grouped_batches(), st.booleans())
def test_any_batch(case: tuple, by_hand: bool) -> None:
    """Any sizes and groups have equal results with and without windows."""
    batch, groups = case
    if batch.weights_or_none() is not None:
        batch = rk.KeyedJaggedTensor(batch.keys(), batch.values(), offsets=batch.offsets())
    plain, found = rk.InverseKeyedJaggedTensor.from_kjt(batch, groups), windowed(batch, groups)
    if by_hand:
        found = rk.InverseKeyedJaggedTensor(found.stored(), groups, plain._inverse, batch.keys())
    assert found.with_windows() is found
    assert_same_batch(found.to_kjt(), batch)
    assert_same_batch(found.bags(), plain.bags())
    assert found.bags() is found.bags()
    assert found.known_offset_per_key() == plain.bags().offset_per_key()
    for g in range(len(groups)):
        assert_same_batch(found.unique(g), plain.unique(g))
        assert torch.equal(found.inverse(g), plain.inverse(g))
        assert torch.equal(found.lengths(g), plain.unique(g).lengths().view(len(groups[g]), -1))
    assert (found.rest() is None) == (plain.rest() is None)
    for key in [*batch.keys(), None]:
        names = batch.keys() if key is None else [key]
        assert found.num_stored(names) == covered(found.stored(), names) <= plain.num_stored(names)
    for some in (plain, found, found.stored()):
        assert some.num_stored_of_keys() == {key: some.num_stored([key]) for key in plain.group_of_keys()}
    for key, g in plain.group_of_keys().items():
        ids, kept = len(batch[key].values()), found.num_stored([key])
        assert found.dedup_factor(key) == (1.0 if g is None or kept == 0 else ids / kept)


def test_dedup_factor_is_of_the_buffer() -> None:
    """The factor is the batch's ids divided by the stored ones, which are fewer than those of distinct bags."""
    batch = histories(["a"], 60)
    plain, found = rk.InverseKeyedJaggedTensor.from_kjt(batch, [["a"]]), windowed(batch, [["a"]])
    assert plain.dedup_factor() == 2
    assert found.dedup_factor() == found.dedup_factor("a") == len(batch.values()) / len(found.stored().values()) > 3


def given_parts(**changes) -> rk.KeyedJaggedWindows:
    """Two features, with two bags and one."""
    parts = {"keys": ["x", "y"], "values": torch.arange(10), "starts": torch.tensor([4, 6, 10], dtype=torch.int32)}
    parts |= {"lengths": torch.tensor([5, 3, 0]), "stride_per_key": [2, 1]}
    return rk.KeyedJaggedWindows(**(parts | changes))


def test_given() -> None:
    """A data set that knows its sequences can construct the bags from parts."""
    bags = given_parts().to_kjt()
    assert [b.tolist() for b in bags["x"].to_dense()] == [[4, 5, 6, 7, 8], [6, 7, 8]]
    assert [b.tolist() for b in bags["y"].to_dense()] == [[]]
    assert bags.stride_per_key() == given_parts().stride_per_key() == [2, 1]
    assert given_parts().variable_stride_per_key()
    assert given_parts().num_stored(["x"]) == 5
    even = given_parts(keys=["x"], stride_per_key=None)
    assert even.stride_per_key() == [3]
    assert not even.variable_stride_per_key()
    assert not even.to_kjt().variable_stride_per_key()
    grouped = rk.InverseKeyedJaggedTensor(given_parts(), [["x"], ["y"]], torch.tensor([[1, 0, 1], [0, 0, 0]]))
    assert [b.tolist() for b in grouped.to_kjt()["x"].to_dense()] == [[6, 7, 8], [4, 5, 6, 7, 8], [6, 7, 8]]


BIG = 2**63 - 1
BAD_PARTS = [
    (
        ValueError,
        {"values": torch.zeros(3)},
        r"values must be int32 or int64 with .* got torch.float32 \[3\]",
    ),
    (ValueError, {"starts": torch.zeros(3, 1).long()}, r"starts must be int32 or int64 with .* torch.int64 \[3, 1\]"),
    (
        ValueError,
        {"lengths": torch.zeros(3).short()},
        "lengths must be int32 or int64 with .* torch.int16",
    ),
    (ValueError, {"lengths": torch.zeros(2).long()}, r"lengths must have starts' shape \[3\], got \[2\]"),
    (ValueError, {"starts": torch.zeros(3, device="meta").long()}, "starts must be on values' device, cpu, got meta"),
    (ValueError, {"keys": ["x", "x"]}, r"keys must be unique, got \['x', 'x'\]"),
    (ValueError, {"stride_per_key": [2, 2]}, "starts describe 3 bags, but stride_per_key adds up to 4"),
    (ValueError, {"stride_per_key": None}, "starts describe 3 bags, which is not a multiple of the 2 keys"),
    (
        IndexError,
        {"starts": torch.tensor([4, 11, 99])},
        r"starts\[1\] = 11 and lengths\[1\] = 3, of bag 1 of 'x', are out of range: .* within the 10 values",
    ),
    (IndexError, {"starts": torch.tensor([4, 8, 2])}, r"starts\[1\] = 8 and lengths\[1\] = 3, of bag 1 of 'x'"),
    (IndexError, {"lengths": torch.tensor([5, 3, -1])}, r"starts\[2\] = 10 and lengths\[2\] = -1, of bag 0 of 'y'"),
    (IndexError, {"starts": torch.tensor([-BIG - 1, 6, 10]), "lengths": torch.tensor([BIG, 3, 0])}, r"starts\[0\] = -"),
    (IndexError, {"lengths": torch.tensor([BIG, 3, 0])}, r"lengths\[0\] = 9223372036854775807, of bag 0 of 'x'"),
]


@pytest.mark.parametrize(("error", "changes", "message"), BAD_PARTS)
def test_bad_parts(error: type[Exception], changes: dict, message: str) -> None:
    with pytest.raises(error, match=message):
        given_parts(**changes)


def test_bad_windows_that_only_a_device_has_seen() -> None:
    """The constructor does not check tensors on a device; making or counting bags does."""
    grouped = rk.InverseKeyedJaggedTensor(given_parts(), [["x"], ["y"]], torch.zeros(2, 2).long())
    grouped = _pytree.tree_map(lambda t: t + 6 * (t.dtype == torch.int32), grouped)
    spoiled = grouped.stored()
    calls = [spoiled.to_kjt, spoiled.offset_per_key, spoiled.num_stored_of_keys, lambda: spoiled.num_stored(["y"])]
    for call in (*calls, grouped.bags, grouped.dedup_factor, lambda: grouped.dedup_factor("y")):
        with pytest.raises(IndexError, match=r"starts\[0\] = 10 and lengths\[0\] = 5, of bag 0 of 'x', are"):
            call()


def test_lists_are_copies() -> None:
    """Changing a returned list changes no bag."""
    windows = rk.KeyedJaggedWindows(["a", "b"], torch.arange(5), torch.tensor([0, 2]), torch.tensor([2, 3]))
    for _ in range(2):
        windows.offset_per_key()[1] = 99
    assert windows.offset_per_key() == [0, 2, 5]
    assert windows.to_kjt()["b"].values().tolist() == [2, 3, 4]


def test_bags_of_windows_that_were_written_to() -> None:
    """After a write to windows, bags are made and checked again."""
    windows = given_parts()
    before = windows.to_kjt()
    windows.values().fill_(3)
    assert windows.known_offset_per_key() == [0, 8, 8]
    assert windows.to_kjt().values().tolist() == [3] * 8
    assert windows.to_kjt() is windows.to_kjt() is not before
    windows.lengths()[1] = 1
    assert windows.known_offset_per_key() is None
    assert windows.to_kjt().offset_per_key() == windows.offset_per_key() == [0, 6, 6]
    assert windows.to("cpu").known_offset_per_key() == [0, 6, 6]
    windows.starts()[2] = 11
    for call in (windows.to_kjt, windows.offset_per_key, lambda: windows.num_stored(["x"])):
        with pytest.raises(IndexError, match=r"starts\[2\] = 11 and lengths\[2\] = 0, of bag 0 of 'y'"):
            call()


def test_a_capture_makes_bags_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph makes its own bags; cached ones would leave jagged_windows out of replays."""
    windows = given_parts()
    kept = windows.to_kjt()
    with monkeypatch.context() as patch:
        patch.setattr(jagged_windows, "cannot_read", lambda _: True)
        captured = windows.to_kjt()
    assert captured is not kept
    assert_same_batch(captured, kept)
    assert windows.to_kjt() is kept


def test_bad_batches() -> None:
    """from_kjt rejects bad batches."""
    batch, make = histories(), rk.KeyedJaggedWindows.from_kjt
    weights = torch.ones(len(batch.values()))
    with pytest.raises(ValueError, match="kjt must not have weights"):
        make(rk.KeyedJaggedTensor(KEYS, batch.values(), offsets=batch.offsets(), weights=weights))
    inverse = (KEYS, torch.zeros(2, 5).long())
    with pytest.raises(ValueError, match=r"kjt must not have inverse_indices: use rk\.InverseKeyedJaggedTensor"):
        make(
            rk.KeyedJaggedTensor(
                KEYS, batch.values(), offsets=batch.offsets(), stride_per_key=[12, 12], inverse_indices=inverse
            )
        )
    with pytest.raises(ValueError, match="kjt must be on the CPU, got meta: find windows before moving a batch"):
        make(batch.to("meta"))
    with pytest.raises(ValueError, match=r"offsets\[1\] = 9 must be in \[0, 4\]"):
        make(unchecked(["a"], torch.arange(4), [0, 9]))
    assert_same_batch(make(OtherWithStride(batch)).to_kjt(), batch)


@pytest.mark.parametrize(
    "move", [lambda x: x.to("cpu", non_blocking=True), lambda x: _pytree.tree_map_only(Tensor, torch.clone, x)]
)
@pytest.mark.parametrize("with_bags", [False, True])
def test_moves(move: Callable, with_bags: bool) -> None:
    """Windows stay windows when moved, also after bags were made; known sizes stay known."""
    batch = histories()
    few = windowed(batch, [["b"]])
    if with_bags:
        few.bags()
    moved = move(few)
    assert isinstance(moved.stored(), rk.KeyedJaggedWindows)
    assert moved.stored()._bags is None
    tensors = [t for t in _pytree.tree_leaves(moved) if t is not None]
    assert sum(t.nbytes for t in tensors) < sum(t.nbytes for t in (batch.values(), batch.offsets()))
    assert_same_batch(moved.to_kjt(), batch)
    assert_same_batch(move(few.stored()).to_kjt(), few.bags())


def test_meta() -> None:
    """Sizes are known on the meta device."""
    few = windowed(histories(), [["b", "a"]]).to("meta")
    assert few.unique(0).values().is_meta
    assert len(few.unique(0).values()) == few.known_offset_per_key()[-1]
    assert few.known_offset_per_key() == windowed(histories(), [["b", "a"]]).bags().offset_per_key()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_pin_memory_and_a_gpu() -> None:
    """Every tensor is pinned; bags are made on the GPU."""
    batch = histories()
    pinned = windowed(batch, [["b"]]).pin_memory()
    assert all(t.is_pinned() for t in _pytree.tree_leaves(pinned))
    there = pinned.to("cuda", non_blocking=True)
    assert there.stored().values().is_cuda
    assert_same_batch(there.to_kjt().to("cpu"), batch)


OPTIMIZERS = [None, rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5), rk.Adam(lr=0.1)]
GROUPS = {"one group": [KEYS], "groups": [["b"], ["a"]], "with a rest": [["a"]]}


def collection(optimizer=None) -> rk.EmbeddingBagCollection:
    torch.manual_seed(0)
    poolings = {"a": "sum", "b": "mean"}
    tables = [rk.EmbeddingBagConfig(40, 8, name=k, feature_names=[k], pooling=poolings[k]) for k in KEYS]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_collections(groups: str, optimizer) -> None:
    """Outputs, gradients and updates have the bits of whole bags, also if sums round."""
    with_windows, with_bags = collection(optimizer), collection(optimizer)
    for seed in range(3):
        batch = histories(samples=40, seed=seed)
        grad = torch.randn(40, 16, generator=torch.Generator().manual_seed(seed))
        outputs = []
        for module, few in (
            (with_windows, windowed(batch, GROUPS[groups])),
            (with_bags, rk.InverseKeyedJaggedTensor.from_kjt(batch, GROUPS[groups])),
        ):
            outputs.append(module(few).values())
            outputs[-1].backward(grad)
            assert all(same_bits(t, module(few)[key]) for key, t in module.by_feature(few).items())
        assert same_bits(outputs[0].detach(), outputs[1].detach())
        for a, b in zip(with_windows.parameters(), with_bags.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or same_bits(a.grad, b.grad)
    for (name, a), b in zip(with_windows.state_dict().items(), with_bags.state_dict().values(), strict=True):
        assert same_bits(a, b), name


@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.5)], ids=str)
def test_training_after_inference(optimizer) -> None:
    """Cached bags are no inference tensors; windows that are have bags, too."""
    module, few = collection(optimizer), windowed(histories(), GROUPS["one group"])
    with torch.inference_mode():
        expected = module(few).values().clone()
        assert_same_batch(windowed(histories(), GROUPS["groups"]).to("cpu").to_kjt(), histories())
    found = module(few).values()
    assert same_bits(found.detach(), expected)
    found.sum().backward()
    assert_same_batch(few.to_kjt(), histories())


def test_windows_without_groups_are_refused() -> None:
    """Collections reject windows without groups; the error suggests the conversion."""
    windows = rk.KeyedJaggedWindows.from_kjt(histories())
    single = rk.EmbeddingCollection([rk.EmbeddingConfig(40, 8, name="t", feature_names=KEYS)])
    for call in (collection(), collection().by_feature, rk.deduplicated(collection()), single):
        with pytest.raises(
            TypeError, match=r"got KeyedJaggedWindows: .*of rk.KeyedJaggedWindows give to_kjt\(\), or to"
        ):
            call(windows)


def test_deduplicated_modules() -> None:
    module, batch = collection(), histories(samples=30)
    few = windowed(batch, GROUPS["one group"])
    assert same_bits(rk.deduplicated(module, "a")(few).values(), module(batch).values())


def test_prefetched() -> None:
    """The prefetched batch is looked up with the bags made then."""
    module = cached.make(cache=rk.RowCache(0.4, ways=4, backing="host"))
    keys = module.feature_names
    few = [windowed(histories(keys, rows=12, seed=s), [keys]) for s in range(2)]
    module(few[0]).values().sum().backward()
    module.prefetch(few[1])
    with pytest.raises(RuntimeError, match="a lookup of another batch"):
        module(few[0])
    module(few[1]).values().sum().backward()


@pytest.mark.parametrize("groups", GROUPS)
def test_compiled(groups: str) -> None:
    """One graph serves batches of several sizes."""
    module, whole = collection(rk.SGD(lr=0.5)), collection(rk.SGD(lr=0.5))
    torch._dynamo.reset()
    compiled = torch.compile(lambda batch: module(batch).values().square(), fullgraph=True, backend="aot_eager")
    for samples in (12, 20, 31):
        batch = histories(samples=samples, seed=samples)
        found = compiled(windowed(batch, GROUPS[groups]))
        expected = whole(rk.InverseKeyedJaggedTensor.from_kjt(batch, GROUPS[groups])).values().square()
        assert same_bits(found.detach(), expected.detach())
        found.sum().backward(), expected.sum().backward()
    for (name, a), b in zip(module.state_dict().items(), whole.state_dict().values(), strict=True):
        assert same_bits(a, b), name
