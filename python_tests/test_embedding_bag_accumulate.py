"""accumulate(): micro-batches give the bits of one batch; rejected uses change nothing."""

from __future__ import annotations

import copy
import random
from typing import NamedTuple

import pytest
import torch
from collection_cases import assert_same, snapshot
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import rec_kernels as rk
from rec_kernels.nn.training.accumulate import Lookup, LookupQueue
from rec_kernels.testing import same_bits

OPTIMIZERS = [rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5)]
ROWS = {"f": 7, "g": 7, "h": 5}  # so few that rows occur in every micro-batch and in several chunks
SIZES = (3, 0, 40, 1)  # of the micro-batches; the second one is empty


class Rows(NamedTuple):
    """Samples as Python lists.

    Args:
        ids: per feature and sample, the ids of a bag.
        weights: per id, with the same nesting.
        grad: [B, 32], gradient of the pooled output.
    """

    ids: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]]
    grad: Tensor


def make(optimizer=OPTIMIZERS[1], **options) -> rk.EmbeddingBagCollection:
    """f and g share the first table; the second one has mean pooling."""
    torch.manual_seed(1)
    tables = [
        rk.EmbeddingBagConfig(7, 6, name="shared", feature_names=["f", "g"]),
        rk.EmbeddingBagConfig(5, 20, name="averaged", feature_names=["h"], pooling="mean"),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def rows(size: int, seed: int) -> Rows:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ids = {f: [[draw.randrange(e) for _ in range(draw.randrange(7))] for _ in range(size)] for f, e in ROWS.items()}
    weights = {f: [[draw.uniform(-2, 2) for _ in bag] for bag in bags] for f, bags in ids.items()}
    return Rows(ids, weights, torch.randn(size, 32, generator=generator))


def together(parts: list[Rows]) -> Rows:
    """Concatenates samples to one batch."""
    ids = {f: [bag for part in parts for bag in part.ids[f]] for f in ROWS}
    weights = {f: [bag for part in parts for bag in part.weights[f]] for f in ROWS}
    return Rows(ids, weights, torch.cat([part.grad for part in parts]))


def jagged(
    samples: Rows,
    *,
    weighted: bool = False,
    ids: torch.dtype = torch.int64,
    offsets: torch.dtype = torch.int64,
    learned: bool = False,
) -> rk.KeyedJaggedTensor:
    """Key-major tensors of the samples."""
    bags = [bag for f in ROWS for bag in samples.ids[f]]
    factors = [factor for f in ROWS for bag in samples.weights[f] for factor in bag]
    return rk.KeyedJaggedTensor(
        list(ROWS),
        torch.tensor([i for bag in bags for i in bag], dtype=ids),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=offsets),
        weights=torch.tensor(factors, requires_grad=learned) if weighted else None,
    )


def one_update(optimizer, batch: rk.KeyedJaggedTensor, grad: Tensor, **options) -> dict[str, Tensor]:
    """State after one ordinary backward."""
    collection = make(optimizer, **options)
    collection(batch).values().backward(grad)
    return snapshot(collection)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_micro_batches_equal_one_batch(optimizer, dtypes, weighted: bool) -> None:
    """Micro-batches have one batch's bits and one step; separate updates have other bits."""
    ids, offsets = dtypes
    parts = [rows(size, seed) for seed, size in enumerate(SIZES)]
    options = {"weighted": weighted, "ids": ids, "offsets": offsets}
    whole = together(parts)
    expected = one_update(optimizer, jagged(whole, **options), whole.grad)
    found, single = make(optimizer), make(optimizer)
    with found.accumulate():
        for part in parts:
            found(jagged(part, **options)).values().backward(part.grad)
            single(jagged(part, **options)).values().backward(part.grad)
    assert_same(found, expected)
    assert found.step.item() == 1
    assert single.step.item() == len(parts)
    assert not same_bits(single._weights, found._weights)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_long_sums(optimizer) -> None:
    """A row in several chunks of 64 is summed in the order of one batch, feature before sample."""
    parts = [rows(60, seed) for seed in range(3)]
    whole = together(parts)
    assert sum(bag.count(1) for f in "fg" for bag in whole.ids[f]) > 128
    expected = one_update(optimizer, jagged(whole), whole.grad)
    for order, same in (((0, 1, 2), True), ((2, 0, 1), False)):
        found = make(optimizer)
        with found.accumulate():
            for i in order:
                found(jagged(parts[i])).values().backward(parts[i].grad)
        assert all(same_bits(value, expected[name]) for name, value in found.state_dict().items()) is same


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_mixed_micro_batches(optimizer) -> None:
    """Micro-batches with and without weights, of both id and offset widths, act as weights of 1 and int64."""
    parts = [rows(size, seed) for seed, size in enumerate((4, 3, 5))]
    plain = parts[1]._replace(weights={f: [[1.0] * len(bag) for bag in bags] for f, bags in parts[1].ids.items()})
    whole = together([parts[0], plain, parts[2]])
    expected = one_update(optimizer, jagged(whole, weighted=True), whole.grad)
    found = make(optimizer)
    with found.accumulate():
        for part, options in zip(
            parts, ({"weighted": True}, {"ids": torch.int32}, {"weighted": True, "offsets": torch.int32}), strict=True
        ):
            found(jagged(part, **options)).values().backward(part.grad)
    assert_same(found, expected)


def test_several_backwards_of_one_forward() -> None:
    """Each backward of a retained graph is a micro-batch; a forward without a backward is none."""
    part, other = rows(6, 0), rows(4, 1)
    left, right = part.grad.clone(), part.grad.clone()
    left[:, 10:], right[:, :10] = 0, 0
    whole = together([part._replace(grad=left), part._replace(grad=right)])
    expected = one_update(OPTIMIZERS[1], jagged(whole), whole.grad)
    found = make()
    with found.accumulate():
        pooled = found(jagged(part)).values()
        found(jagged(other))
        pooled[:, :10].backward(part.grad[:, :10], retain_graph=True)
        pooled[:, 10:].backward(part.grad[:, 10:])
    assert_same(found, expected)


def test_both_lookups_of_one_backward() -> None:
    """Two lookups in one graph are two micro-batches, in autograd's order."""
    parts = [rows(5, 0), rows(6, 1)]
    expected = [one_update(OPTIMIZERS[1], jagged(w), w.grad) for w in (together(parts), together(parts[::-1]))]
    found = make()
    with found.accumulate():
        outputs = [found(jagged(part)).values() for part in parts]
        torch.autograd.backward(outputs, [part.grad for part in parts])
    assert any(all(same_bits(v, one[name]) for name, v in found.state_dict().items()) for one in expected)


def test_nothing_to_apply() -> None:
    """Without a backward no step is counted; backward passes of empty batches count one, like a single empty batch."""
    found, before, empty = make(), snapshot(make()), rows(0, 0)
    with found.accumulate():
        found(jagged(rows(3, 0)))
        with torch.no_grad():
            found(jagged(rows(3, 0)))
    assert_same(found, before)
    with found.accumulate():
        for _ in range(2):
            found(jagged(empty)).values().backward(empty.grad)
    assert_same(found, one_update(OPTIMIZERS[1], jagged(empty), empty.grad))
    none = rk.KeyedJaggedTensor([], torch.zeros(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64))
    collection = rk.EmbeddingBagCollection([], optimizer=rk.SGD())
    with collection.accumulate():
        for _ in range(2):
            collection(none).values().sum().backward()
    assert collection.step.item() == 1


def test_tables_rest_until_the_end() -> None:
    """Lookups inside a block see the old rows; the update uses the learning rate at the end."""
    part = rows(6, 0)
    found, before = make(), snapshot(make())
    expected = make()(jagged(part)).values()
    with found.accumulate():
        for _ in range(2):
            pooled = found(jagged(part)).values()
            assert same_bits(pooled.detach(), expected.detach())
            pooled.square().sum().backward()
            assert_same(found, before)
        found.fused_optimizer.param_groups[0]["lr"] = 0.0
    assert found.step.item() == 1
    assert same_bits(found._weights, make()._weights)
    assert found._memory["_sum"].any()


def test_gradient_of_weights_in_the_batch() -> None:
    """The gradient of weights is computed in each backward, with an ordinary backward's bits."""
    part, found = rows(6, 0), make()
    inside, outside = (jagged(part, weighted=True, learned=True) for _ in range(2))
    make()(outside).values().backward(part.grad)
    with found.accumulate():
        found(inside).values().backward(part.grad)
        assert same_bits(inside.weights_or_none().grad, outside.weights_or_none().grad)
    assert_same(found, one_update(OPTIMIZERS[1], jagged(part, weighted=True), part.grad))


def test_memory_may_be_reused() -> None:
    """Ids, weights and gradients of a micro-batch may be overwritten after its backward."""
    part = rows(6, 0)
    expected = one_update(OPTIMIZERS[1], jagged(part, weighted=True), part.grad)
    found, batch, grad = make(), jagged(part, weighted=True), part.grad.clone()
    with found.accumulate():
        found(batch).values().backward(grad)
        for tensor in (batch.values(), batch.offsets(), batch.weights_or_none(), grad):
            tensor.zero_()
    assert_same(found, expected)


def test_any_use_of_the_output() -> None:
    """Outputs may be changed in place, have expanded gradients, or be recomputed by activation checkpointing."""

    def loss(collection: rk.EmbeddingBagCollection) -> Tensor:
        return collection(jagged(rows(6, 0))).values().mul_(2).sum()

    for recomputed in (False, True):
        found, expected = make(), make()
        loss(expected).backward()
        with found.accumulate():
            (checkpoint(loss, found, use_reentrant=False) if recomputed else loss(found)).backward()
        assert_same(found, expected)


def test_ignored_ids() -> None:
    """bounds_check="ignore" leaves out the same ids as outside a block."""
    parts = [rows(5, 0), rows(5, 1)]
    for part in parts:
        part.ids["h"][2] = [99, 0, -1]
        part.weights["h"][2] = [1.0] * 3
    whole = together(parts)
    expected = one_update(OPTIMIZERS[0], jagged(whole), whole.grad, bounds_check="ignore")
    found = make(OPTIMIZERS[0], bounds_check="ignore")
    with found.accumulate():
        for part in parts:
            found(jagged(part)).values().backward(part.grad)
    assert_same(found, expected)


def test_bad_id_reported_late() -> None:
    """A bad id that a lookup could report only late skips the whole block's update."""
    for bad in range(3):
        found = make()
        with found.accumulate():
            for seed, size in enumerate((4, 0, 3)):
                part = rows(size, seed)
                found(jagged(part)).values().backward(part.grad)
            found._update.pending.queue.lookups[bad].status[0] = 2
        assert_same(found, make())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_exception_drops_everything(optimizer) -> None:
    """A bad id raises in its forward; the block applies nothing, and training goes on as if it had not begun."""
    part, bad = rows(4, 0), rows(4, 1)
    bad.ids["h"][3] = [5]
    found, reached = make(optimizer), []

    def block() -> None:
        with found.accumulate():
            found(jagged(part)).values().backward(part.grad)
            pooled = found(jagged(bad)).values()
            reached.append(pooled)

    with pytest.raises(IndexError, match=r"= 5 \(feature 'h', bag 3\).*\[0, 5\)"):
        block()
    assert not reached
    assert_same(found, make(optimizer))
    found(jagged(part)).values().backward(part.grad)
    assert_same(found, one_update(optimizer, jagged(part), part.grad))


def test_refused_uses() -> None:
    """Nested blocks and collections without a fused optimizer are rejected."""
    with pytest.raises(ValueError, match="has optimizer=None"), make(None).accumulate():
        pass
    found, other, part = make(), make(), rows(4, 0)
    with found.accumulate(), other.accumulate():
        with pytest.raises(RuntimeError, match=r"accumulate\(\) blocks of one"), found.accumulate():
            pass
        found(jagged(part)).values().backward(part.grad)
    assert_same(found, one_update(OPTIMIZERS[1], jagged(part), part.grad))
    assert other.step.item() == 0


def test_backward_after_the_block() -> None:
    """A backward after the block raises and changes nothing."""
    found = make()
    with found.accumulate():
        pooled = found(jagged(rows(4, 0))).values()
    with pytest.raises(RuntimeError, match="block that has ended"), found.accumulate():
        pooled.sum().backward()
    assert_same(found, make())


def test_forward_before_the_block() -> None:
    """The backward of a forward before the block is rejected; the block's gradients are dropped."""
    found, part = make(), rows(4, 0)
    pooled = found(jagged(part)).values()

    def block() -> None:
        with found.accumulate():
            found(jagged(rows(4, 1))).values().sum().backward()
            pooled.backward(part.grad)

    with pytest.raises(RuntimeError, match="made before this accumulate"):
        block()
    assert_same(found, make())
    pooled = found(jagged(part)).values()
    pooled.backward(part.grad)  # an ordinary lookup again
    assert_same(found, one_update(OPTIMIZERS[1], jagged(part), part.grad))


def test_compiled_forward_before_the_block() -> None:
    """A compiled forward before the block, which updates inside its graph, is rejected with that reason."""
    found, part = make(), rows(4, 0)
    pooled = torch.compile(lambda ids: found(ids).values(), backend="aot_eager")(jagged(part))
    with pytest.raises(RuntimeError, match="a compiled lookup made before this accumulate"), found.accumulate():
        pooled.backward(part.grad)
    assert_same(found, one_update(OPTIMIZERS[1], jagged(part), part.grad))


def test_copy_inside_a_block() -> None:
    """The copy is outside of the block."""
    found, part = make(), rows(4, 0)
    with found.accumulate():
        found(jagged(part)).values().backward(part.grad)
        copied = copy.deepcopy(found)
        assert_same(copied, make())
        copied(jagged(part)).values().backward(part.grad)
        assert copied.step.item() == 1
        assert found.step.item() == 0
    assert_same(found, copied)


def test_compiled() -> None:
    """The graph breaks at the lookup, compiled once inside and once outside; fullgraph raises with the reason."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def loss(collection: rk.EmbeddingBagCollection, batch: rk.KeyedJaggedTensor) -> Tensor:
        return collection(batch).values().square().sum()

    found, expected = make(), make()
    compiled, counts = torch.compile(loss, backend=counter), []
    for step in range(4):
        batches = [jagged(rows(6, 10 * step + i)) for i in range(3)]
        for collection, function in ((found, compiled), (expected, loss)):
            with collection.accumulate():
                for batch in batches:
                    function(collection, batch).backward()
            function(collection, batches[0]).backward()
        counts.append(counter.frame_count)
    assert_same(found, expected)
    assert found.step.item() == 8
    assert counts[1:] == counts[1:2] * 3
    torch._dynamo.reset()
    whole = torch.compile(loss, backend=counter, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"accumulate\(\) collects gradients"), found.accumulate():
        whole(found, batches[0])


class Stream:
    """Replaces a GPU's stream."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


def test_backwards_on_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update waits for the streams of all backward passes, which keep their memory until then."""
    main, beside, other = (Stream() for _ in range(3))
    current = [main]
    recorded: list[tuple[Tensor, Stream]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: recorded.append((t, stream)))
    queue = LookupQueue()
    with FakeTensorMode():  # tensors on a GPU, without one
        lookups = [Lookup(*(torch.empty(2, device="cuda") for _ in range(3)), None, torch.empty(2)) for _ in range(3)]
        for current[0], lookup in zip((beside, main, other), lookups, strict=True):
            queue.add(lookup)
        current[0] = main
        assert queue.take() == lookups
    assert main.waited_for == [beside, other]
    assert [id(t) for t, _ in recorded] == [id(t) for lookup in lookups[::2] for t in lookup[:3]]
    assert {stream for _, stream in recorded} == {main}
    assert queue.take() == []
