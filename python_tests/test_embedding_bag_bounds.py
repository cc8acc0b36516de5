"""Invalid input that lookups report late, as on a GPU: it raises later, once, and training goes on.

Inside ``late()``, CPU tensors act as a GPU's: lookups use the emulated CUDA kernels below the package's autograd and
fake kernels, and the function that decides which lookups report late returns True.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from backends import emulated
from collection_cases import assert_same, pooled
from jagged_cases import unchecked
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import rec_kernels as rk
from rec_kernels.nn import late_errors
from rec_kernels.nn.jagged import select_features as selected
from rec_kernels.ops.table_layout import Column
from rec_kernels.testing import same_bits

OPTIMIZERS = [None, rk.SGD(lr=0.5), rk.RowwiseAdagrad(lr=0.5)]
FUSED = OPTIMIZERS[1:]
OPS = (
    *("embedding_bag", "embedding_bag_tables", "embedding_bag_fused", "embedding_bag_backward_fused_"),
    *("embedding_bag_backward_dense", "embedding_bag_backward_sparse", "embedding_bag_backward_per_sample_weights"),
    *("row_cache_insert_", "row_cache_lookup", "jagged_permute"),
)
LATER = "; found on the GPU, in an earlier lookup of this collection"
KEYS = ["f", "g", "h"]
GOOD = [4, 0, 4, 3, 3, 1, 0]
OFFSETS = [0, 2, 3, 3, 4, 6, 7]
BAD_IDS = [(0, 5), (2, -1), (3, 4), (6, 2**40), (5, -(2**63))]
BAD_OFFSETS = [[0, 2, 1, 3, 4, 6, 7], [0, 2, 3, 3, 4, 6, 8], [-1, 2, 3, 3, 4, 6, 7], [0, 99, 3, 3, 4, 6, 7]]


@contextmanager
def late() -> Iterator[None]:
    """Context in which lookups report late."""
    ops, library = emulated(), torch.library.Library("rec_kernels", "IMPL")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for op in OPS:
            packet = getattr(ops.ops, op)
            for name in packet.overloads():
                library.impl(op if name == "default" else f"{op}.{name}", getattr(packet, name), "CPU")
        patch.setattr(late_errors, "reports_late", lambda status: type(status) is Tensor and not status.is_meta)
        patch.setattr(selected, "_reports_late", lambda _: True)
        try:
            yield
        finally:
            library._destroy()


@pytest.fixture(name="late")
def _late() -> Iterator[None]:
    with late():
        yield


def make(optimizer=FUSED[1], **options) -> rk.EmbeddingBagCollection:
    """Tables of 5 x 3 and 4 x 20 elements, with an optimizer."""
    return pooled(optimizer, **options)


def batch(*changes: tuple[int, int], offsets: list[int] = OFFSETS, ids=torch.int64) -> rk.KeyedJaggedTensor:
    """Two samples; ``changes`` are (position, id)."""
    values = torch.tensor(GOOD)
    for position, value in changes:
        values[position] = value
    return unchecked(KEYS, values.to(ids), offsets)


def step(collection: rk.EmbeddingBagCollection, jagged: rk.KeyedJaggedTensor | None = None) -> None:
    """One backward of a nonlinear loss."""
    collection(batch() if jagged is None else jagged).values().square().sum().backward()


def message(call: Callable[[], object], error: type[Exception] = IndexError) -> str:
    """Returns the message of the call's exception, which must be ``error``."""
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error
    return str(raised.value)


class Event:
    """An event that the test completes."""

    made: list[Event]

    def __init__(self, _: object = None) -> None:
        self.done = False
        self.made.append(self)

    def query(self) -> bool:
        """True once the event is done."""
        return self.done

    def synchronize(self) -> None:
        """Completes the event."""
        self.done = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events of the lookups in order, not done."""
    monkeypatch.setattr(late_errors, "_copied", Event)
    Event.made = []
    return Event.made


def test_nothing_to_report_on_the_cpu() -> None:
    """The CPU raises at once, and stores no report."""
    collection = make()
    with pytest.raises(IndexError):
        collection(batch((0, 5)))
    step(collection)
    assert not collection._late_errors._lookups
    collection.check()
    assert collection.step.item() == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(("position", "value"), BAD_IDS)
def test_bad_id_is_told_by_the_next_lookup(optimizer, position: int, value: int) -> None:
    """The next lookup raises the CPU's message; fused tables skip the bad batch and train on without it."""
    bad = batch((position, value))
    expected = make(optimizer)
    text = message(lambda: expected(bad))
    step(expected)
    with late():
        found = make(optimizer)
        step(found, bad)
        assert message(lambda: step(found)) == text + LATER
        if optimizer is None:
            found.zero_grad()  # gradients of the batch without its bad id: a GPU's backward does not raise
        step(found)
        assert_same(found, expected)
    for mine, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert optimizer is not None or same_bits(mine.grad, other.grad)


@pytest.mark.parametrize("bounds_check", ["error", "ignore", "none"])
@pytest.mark.parametrize("offsets", BAD_OFFSETS)
def test_bad_offsets_are_told_in_every_mode(offsets: list[int], bounds_check: str) -> None:
    """Every mode reports bad offsets with the CPU's message."""
    bad, expected = batch(offsets=offsets), make(bounds_check=bounds_check)
    text = message(lambda: expected(bad), ValueError)
    step(expected)
    with late():
        found = make(bounds_check=bounds_check)
        step(found, bad)
        assert message(lambda: step(found), ValueError) == text + LATER
        step(found)
        assert_same(found, expected)


@pytest.mark.parametrize("expands", [False, True])
def test_the_lookup_that_tells_changes_nothing(late, expands: bool) -> None:
    """A lookup that raises an earlier report changes no row cache or counter; repeated, it succeeds."""
    found = make(cache=rk.RowCache(0.5, ways=2, policy="lfu"))
    given = rk.InverseKeyedJaggedTensor.from_kjt(batch(), [KEYS]) if expands else batch()
    step(found, batch((0, 5)))
    before = {name: t.clone() for name, t in found.named_buffers()}
    assert message(lambda: step(found, given)).startswith("values[0] = 5")
    assert all(same_bits(t, before[name]) for name, t in found.named_buffers())
    step(found, given)
    found.check()
    assert found.row_cache.clock == before["row_cache.clock"] + 1


def test_ignored_ids_are_no_error(late) -> None:
    """Ignored ids raise nothing and do not stop the update."""
    found = make(bounds_check="ignore")
    for ids in (torch.int32, torch.int64):
        step(found, batch((0, 99), (4, -7), ids=ids))
    found.check()
    assert found.step.item() == 2


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
def test_lookups_without_gradients_report_too(late, how) -> None:
    """Evaluation ends with check()."""
    found = make()
    with how():
        found(batch((3, 4), ids=torch.int32))
    assert message(found.check).startswith("values[3] = 4 (feature 'g', bag 1) is out of range")
    found.check()


def test_nobody_waits_for_a_lookup(late, events: list[Event]) -> None:
    """A lookup reads finished reports in order; check() waits; each error raises once."""
    found = make()
    for position in (0, 2, 3):
        found(batch((position, 9)))
    events[1].done = True  # the previous one is not
    found(batch())
    assert len(found._late_errors._lookups) == 4
    events[0].done = True
    assert message(lambda: found(batch())).startswith("values[0] = 9")
    assert message(lambda: found(batch())).startswith("values[2] = 9")
    found(batch())
    assert not events[2].done
    assert message(found.check).startswith("values[3] = 9")
    found.check()
    assert all(event.done for event in events)
    assert not found._late_errors._lookups


def test_what_is_done_is_let_go(late) -> None:
    """Ids are released once their lookup is known to be valid."""
    found = make()
    for _ in range(5):
        step(found)
    assert len(found._late_errors._lookups) == 1


def test_memory_that_was_reused(late) -> None:
    """If the caller has overwritten ids or offsets, the report has the position only."""
    for jagged, tensor, error, text in (
        (batch((6, 77)), "values", IndexError, "values[6] was not valid; values or offsets have been overwritten"),
        (batch((6, 77)), "offsets", IndexError, "values[6] was not valid; values or offsets have been overwritten"),
        (batch(offsets=BAD_OFFSETS[0]), "offsets", ValueError, "offsets[2] was not valid; offsets or"),
    ):
        found = make()
        found(jagged)
        getattr(jagged, tensor)().zero_()
        assert message(found.check, error).startswith(text[:40])


def test_features_in_another_order(late) -> None:
    """Positions are those of the collection's features, as on the CPU."""
    lengths, found = torch.tensor([1, 1, 0, 1]), make()
    for value, text in ((3, None), (4, "values[1] = 4 (feature 'h', bag 0)")):
        found(rk.KeyedJaggedTensor(["h", "x", "f", "g"], torch.tensor([value, 9, 0]), lengths=lengths))
        assert text is None or message(found.check).startswith(text)
        found.check()


def test_state_dict_tells(late) -> None:
    """state_dict, also a parent's, raises once; afterwards the state is that before the bad batch."""
    found, expected = make(), make()
    parent = torch.nn.Sequential(found)
    step(found, batch((0, 5)))
    assert message(parent.state_dict).startswith("values[0] = 5")
    assert parent.state_dict()["0.step"].item() == 0
    step(found, batch((0, 5)))
    found.load_state_dict(expected.state_dict())  # loading does not raise
    assert message(found.state_dict).startswith("values[0] = 5")
    assert_same(found, expected)


@pytest.mark.parametrize("optimizer", FUSED, ids=str)
def test_accumulate(late, optimizer) -> None:
    """A bad micro-batch skips the update of its block, whether it is reported inside the block or after it."""
    found = make(optimizer)
    with found.accumulate():
        step(found)
        step(found, batch((0, 5)))
    assert message(found.check).startswith("values[0] = 5")

    def block() -> None:
        with found.accumulate():
            step(found, batch((0, 5)))
            step(found)

    assert message(block).startswith("values[0] = 5")
    assert_same(found, make(optimizer))
    with found.accumulate():
        step(found)
    assert found.step.item() == 1


@pytest.mark.parametrize("other", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies_have_nothing_to_tell(late, events: list[Event], other) -> None:
    """Only the original raises its reports, not copies."""
    found = make()
    found(batch((0, 5)))
    found._layout.bad_position.fill_(3)
    copied = other(found)
    copied.check()
    step(copied, batch((2, 5)))
    assert message(copied.check).startswith("values[2] = 5")
    assert message(found.check).startswith("values[0] = 5")
    assert message(found.check).startswith("values[3] was out of range")


def test_rule_that_is_changed(late) -> None:
    """The bounds_check in effect when a report arrives decides whether it raises."""
    found = make()
    found(batch((0, 5)))
    found.bounds_check = "ignore"
    found.check()
    found.bounds_check = "error"
    found(batch((0, 5)))
    assert message(found.check).startswith("values[0] = 5")


def test_moves(late) -> None:
    """A collection moved off the GPU still raises its reports; one moved from the meta device has none."""
    found = make()
    found(batch((0, 5)))
    found._layout.bad_position.fill_(3)
    found.to("cpu").double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_errors, "reports_late", lambda status: False)
        assert message(found.check).startswith("values[0] = 5")
        assert message(found.state_dict).startswith("values[3] was out of range")
    meta = make(device="meta")
    assert meta(batch_on("meta")).values().is_meta
    meta.check()
    born = meta.to_empty(device="cpu")
    born.check()
    born.load_state_dict(make().state_dict())
    step(born, batch((0, 5)))
    assert message(born.check).startswith("values[0] = 5")


def batch_on(device: str) -> rk.KeyedJaggedTensor:
    return batch().to(device)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_compiled(late, optimizer) -> None:
    """One graph, compiled once, handles good and bad ids; check() and state_dict() raise without naming the lookup."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    found, expected = make(optimizer), make(optimizer)
    compiled = torch.compile(lambda kjt: found(kjt).values().square().sum(), backend=counter, fullgraph=True)
    for bad in ((), ((6, 9),), ((2, 9),), ()):
        compiled(batch(*bad)).backward()
        if not bad:
            step(expected)
    assert message(found.check).startswith(
        "values[2] was out of range in a lookup that was compiled or replayed from a CUDA graph"
    )
    found.check()
    compiled(batch(offsets=BAD_OFFSETS[1])).backward()
    assert message(found.state_dict, ValueError).startswith("offsets[6] was below the offset before it or outside")
    assert counter.frame_count == 1
    assert not found._late_errors._lookups
    assert_same(found, expected)


def reordered(offsets: list[int], known: bool = False) -> rk.KeyedJaggedTensor:
    """Two samples with keys in another order than the collection's, and an additional key."""
    jagged = unchecked(["h", "x", "f", "g"], torch.tensor([3, 1, 0, 3, 2]), offsets)
    if known:
        jagged.keep_offset_per_key([offsets[i] for i in (0, 2, 4, 6, 8)])
    return jagged


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [
        ([0, 1, 1, 2, 3, 2, 4, 4, 5], "offsets[5] = 2 (feature 'f', bag 0) is below the offset before it, 3"),
        ([0, 1, 1, 2, 3, 3, 4, 4, 6], "offsets[8] = 6 (feature 'g', bag 1) must be in [0, 5], the number of values"),
        ([-1, 1, 1, 2, 3, 3, 4, 4, 5], "offsets[0] = -1 (feature 'h', bag 0) must be in [0, 5], the number of values"),
    ],
)
def test_keys_in_another_order(late, offsets: list[int], wrong: str, known: bool) -> None:
    """Reports use the batch's positions; no update, bad bags and the first are empty, and the host does not wait."""
    torch._dynamo.reset()
    found, expected, ids = make(), make(), reordered(offsets).values()
    rows = [ids[a:b] if 0 <= a <= b <= 5 else ids[:0] for a, b in itertools.pairwise(offsets)]
    rows = [ids[:0], *rows[5:], *rows[:2]]
    chosen = rk.KeyedJaggedTensor(KEYS, torch.cat(rows), lengths=torch.tensor([len(row) for row in rows]))
    compiled = torch.compile(lambda kjt: found(kjt).values(), backend="aot_eager", fullgraph=True)
    for lookup in (lambda kjt: found(kjt).values(), compiled):
        output = lookup(reordered(offsets, known))
        assert known or same_bits(output, expected(chosen).values())  # with known sizes, bags may not fit
        output.square().sum().backward()
        error = message(found.check, ValueError)
        assert error == wrong + LATER or "any of the offsets" in error
    assert_same(found, expected)


def test_captured(late, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed CUDA graph keeps the smallest bad position on the GPU."""
    monkeypatch.setattr(late_errors, "cannot_read", lambda status: True)
    for bounds_check in ("error", "ignore"):
        found = make(bounds_check=bounds_check)
        for bad in ((), ((6, 9),), ((2, 9),), ((4, 9),)):
            step(found, batch(*bad))
        if bounds_check == "error":
            assert message(found.check).startswith("values[2] was out of range in a lookup")
        found.check()
        step(found, batch(offsets=BAD_OFFSETS[2]))
        step(found, batch((2, 9)))
        assert message(found.check, ValueError).startswith("offsets[0] was below")
        found.check()
        found._layout.records[0, Column.weight_offset] = -1
        step(found)
        assert message(found.check, ValueError).startswith("the collection's layout of tables was overwritten in a")
        assert not found._late_errors._lookups


def test_layout_that_was_overwritten(late) -> None:
    """An overwritten layout is not reported as an error of the batch."""
    found = make()
    found._layout.records[0, Column.weight_offset] = -1
    step(found)
    assert message(found.check, ValueError) == "the collection's layout of tables has been overwritten" + LATER


def test_who_reports_late() -> None:
    """The CPU never reports late, nor do a tracer's tensors, which hold no status."""
    assert not late_errors.reports_late(torch.zeros(2))
    with FakeTensorMode() as mode:
        fake = torch.empty(2, device="cuda")
    assert fake.is_cuda
    assert not late_errors.reports_late(fake)
    make()._late_errors.check(mode.from_tensor(torch.tensor(3)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_on_a_gpu(optimizer) -> None:
    """Pinned copies, events, compiled lookups and a CUDA graph work on a GPU."""
    found, jagged = make(optimizer, device="cuda"), batch((6, 9)).to("cuda")
    step(found, jagged)
    torch.cuda.synchronize()
    assert message(lambda: step(found)).startswith("values[6] = 9 (feature 'h', bag 1)")
    found.check()
    compiled = torch.compile(lambda kjt: found(kjt).values().square().sum(), fullgraph=True)
    compiled(jagged).backward()
    assert message(found.check).startswith("values[6] was out of range")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    good = batch().to("cuda")
    with torch.cuda.stream(stream), torch.no_grad():
        found(good)
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph):
        found(good)
    found.check()
    good.values()[2] = 9
    graph.replay()
    assert message(found.state_dict).startswith("values[2] was out of range")
    good.values()[2] = 0
    graph.replay()
    found.check()


@pytest.mark.usefixtures("late")
def test_every_id() -> None:
    """Negative ids of a hashed table are valid; an invalid one beside them is named."""
    tables = [
        rk.EmbeddingBagConfig(None, 3, name="a", feature_names=["f"], compression=rk.Hash(5)),
        rk.EmbeddingBagConfig(4, 20, name="b", feature_names=["g", "h"]),
    ]
    collection = rk.EmbeddingBagCollection(tables, optimizer=FUSED[0])
    negative = [(0, -1), (2, -(2**63))]
    step(collection, batch(*negative))
    collection.check()
    before = collection._weights.clone()
    step(collection, batch(*negative, (3, 4)))
    with pytest.raises(
        IndexError, match=r"values\[3\] = 4 \(feature 'g', bag 1\) is out of range: .* in \[0, 4\)" + LATER
    ):
        collection.check()
    assert same_bits(collection._weights, before)
