"""set_grad_scaler(): losses scaled by torch.amp.GradScaler train fused tables with the bits of unscaled losses."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from collection_cases import assert_same, snapshot
from test_embedding_bag_module import batch
from torch import Tensor
from torch.amp import GradScaler

import rec_kernels as rk
from rec_kernels.testing import same_bits

OPTIMIZERS = [rk.SGD(lr=0.1), rk.RowwiseAdagrad(lr=0.1), rk.Adam(lr=0.1, state_dtype=torch.bfloat16)]
FORMATS = [("fp32", "fp32"), ("bf16", "int8")]
KEYS = ["f", "g", "h"]
COLUMNS = 32


def make(optimizer=OPTIMIZERS[1], formats=FORMATS[0], *, seed: int = 0, **options) -> rk.EmbeddingBagCollection:
    """Two tables, the first with f and g, the second with mean pooling."""
    torch.manual_seed(seed)
    tables = [
        rk.EmbeddingBagConfig(50, 6, name="shared", feature_names=["f", "g"], format=formats[0]),
        rk.EmbeddingBagConfig(70, 20, name="averaged", feature_names=["h"], pooling="mean", format=formats[1]),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, **options)


def scaled(collection, **options) -> tuple[rk.EmbeddingBagCollection, GradScaler]:
    """The collection with a scaler, and the scaler."""
    scaler = GradScaler("cpu", **options)
    collection.set_grad_scaler(scaler)
    return collection, scaler


def grad_of(step: int, *, bad: float | None = None) -> Tensor:
    """[5, 32]: the gradient of a pooled output; ``bad``: the value of one element."""
    grad = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(step))
    if bad is not None:
        grad[3, 17] = bad
    return grad


def loss_of(collection, step: int, **options) -> Tensor:
    """A loss with the gradient ``grad_of(step)`` at the pooled output."""
    return (collection(batch(seed=step)).values().float() * grad_of(step, **options)).sum()


@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**-3])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_the_bits_of_a_loss_that_is_not_scaled(optimizer, formats, init_scale: float) -> None:
    """Every step has the bits of the unscaled loss, while the scale grows."""
    plain = make(optimizer, formats)
    found, scaler = scaled(make(optimizer, formats), init_scale=init_scale, growth_interval=1)
    for step in range(4):
        assert scaler.get_scale() == init_scale * 2**step
        loss_of(plain, step).backward()
        scaler.scale(loss_of(found, step)).backward()
        scaler.step(found.fused_optimizer)
        scaler.update()
        assert_same(found, plain)
    assert found.step.item() == 4


def test_a_scale_that_is_no_power_of_two() -> None:
    plain = make()
    found, scaler = scaled(make(), init_scale=1000.0)
    loss_of(plain, 0).backward()
    scaler.scale(loss_of(found, 0)).backward()
    torch.testing.assert_close(found._weights, plain._weights, rtol=1e-5, atol=1e-7)
    assert not same_bits(found._weights, make()._weights)


def test_sequences() -> None:
    """EmbeddingCollection supports scalers, too."""
    torch.manual_seed(0)
    tables = [rk.EmbeddingConfig(50, 6, name="t", feature_names=KEYS)]
    plain = rk.EmbeddingCollection(tables, optimizer=rk.RowwiseAdagrad())
    found, scaler = scaled(copy.deepcopy(plain))
    for collection, scale in ((plain, lambda loss: loss), (found, scaler.scale)):
        rows = torch.cat([t.values() for t in collection(batch()).values()])
        scale(rows.square().sum()).backward()
    assert found.step.item() == 1
    assert_same(found, plain)


@pytest.mark.parametrize(
    ("optimizer", "formats", "bad"),
    [
        *((optimizer, formats, torch.inf) for optimizer in OPTIMIZERS for formats in FORMATS),
        *((OPTIMIZERS[1], FORMATS[0], bad) for bad in (-torch.inf, torch.nan)),
    ],
    ids=str,
)
def test_an_overflow_skips_the_update(optimizer, formats, bad: float) -> None:
    """Tables, state and step stay, the scale is halved once, and training goes on without zero_grad()."""
    plain, (found, scaler) = make(optimizer, formats), scaled(make(optimizer, formats))
    for step in range(4):
        before, scale = snapshot(found), scaler.get_scale()
        overflows = step == 1
        scaler.scale(loss_of(found, step, bad=bad if overflows else None)).backward()
        scaler.step(found.fused_optimizer)
        scaler.update()
        assert scaler.get_scale() == (scale / 2 if overflows else scale)
        if overflows:
            assert_same(found, before)
        else:
            loss_of(plain, step).backward()
    assert_same(found, plain)
    assert found.step.item() == 3


def test_finite_gradients_of_any_size_are_no_overflow() -> None:
    """Large gradients of both signs, and none at all, are no overflow."""
    found, scaler = scaled(make())
    grad = torch.full((5, COLUMNS), 3e38)
    grad[::2] = -3e38
    found(batch()).values().backward(grad)
    assert found.step.item() == 1
    found(batch(size=0)).values().backward(torch.zeros(0, COLUMNS))
    assert found.step.item() == 2
    scaler.step(found.fused_optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16


def test_who_has_overflowed() -> None:
    """Tables and dense parameters skip their updates independently."""
    found, scaler = scaled(make())
    dense = torch.nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([dense], lr=1.0)
    steps = 0
    for step, (tables_bad, dense_bad) in enumerate([(True, False), (False, True), (False, False)]):
        before, scale = dense.detach().clone(), scaler.get_scale()
        sgd.zero_grad()
        other = dense.sum() * (torch.inf if dense_bad else 1.0)
        scaler.scale(loss_of(found, step, bad=torch.inf if tables_bad else None) + other).backward()
        for optimizer in (sgd, found.fused_optimizer):
            scaler.unscale_(optimizer)
        for optimizer in (sgd, found.fused_optimizer):
            scaler.step(optimizer)
        scaler.update()
        steps += not tables_bad
        assert found.step.item() == steps
        assert torch.equal(dense, before if dense_bad else before - 1)
        assert scaler.get_scale() == (scale / 2 if tables_bad or dense_bad else scale)


def test_two_lookups_before_a_step() -> None:
    """Two updates: the one that overflows is skipped, the other is made, and the scaler detects it in either order."""
    for first_bad, accumulates in itertools.product((True, False), repeat=2):
        plain, (found, scaler) = make(), scaled(make())
        for step, bad in enumerate((first_bad, not first_bad)):
            with found.accumulate() if accumulates else contextlib.nullcontext():
                scaler.scale(loss_of(found, step, bad=torch.nan if bad else None)).backward()
        scaler.step(found.fused_optimizer)
        scaler.update()
        loss_of(plain, int(first_bad)).backward()
        assert_same(found, plain)
        assert scaler.get_scale() == 2.0**15


def test_two_collections() -> None:
    """With one scaler for two collections, the one that overflows skips its update; the scale is halved once."""
    a, b = make(seed=1), make(seed=2)
    expected, scaler = copy.deepcopy(b), GradScaler("cpu")
    for collection in (a, b):
        collection.set_grad_scaler(scaler)
    before = snapshot(a)
    scaler.scale(loss_of(a, 0, bad=torch.inf) + loss_of(b, 1)).backward()
    for collection in (a, b):
        scaler.step(collection.fused_optimizer)
    scaler.update()
    loss_of(expected, 1).backward()
    assert_same(a, before)
    assert_same(b, expected)
    assert scaler.get_scale() == 2.0**15


def test_the_scale_is_that_of_the_lookup() -> None:
    """The update uses the scale at the lookup, even if it changes before the backward, in place or inside a block."""
    for accumulates in (False, True):
        plain, (found, scaler) = make(), scaled(make())
        scaler.scale(torch.ones(1))  # initializes the tensor that it changes in place
        with found.accumulate() if accumulates else contextlib.nullcontext():
            output = found(batch(seed=0)).values()
            scaler.update(4.0)
            output.backward(grad_of(0) * 2.0**16)
        loss_of(plain, 0).backward()
        assert_same(found, plain)
        loss_of(plain, 1).backward()
        scaler.scale(loss_of(found, 1)).backward()  # with 4
        assert_same(found, plain)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_accumulate(optimizer, formats) -> None:
    """One update with all gradients, or none if any of them overflows."""
    plain, (found, scaler) = make(optimizer, formats), scaled(make(optimizer, formats), growth_interval=1)
    for block in range(3):
        before = snapshot(found)
        for collection, scale in ((plain, lambda loss: loss), (found, scaler.scale)):
            if collection is plain and block == 1:
                continue
            with collection.accumulate():
                for part in range(3):
                    bad = torch.inf if block == part == 1 else None
                    scale(loss_of(collection, 3 * block + part, bad=bad)).backward()
        if block == 1:
            assert_same(found, before)
        scaler.step(found.fused_optimizer)
        scaler.update()
        assert_same(found, plain)
    assert found.step.item() == 2
    assert scaler.get_scale() == 2.0**17  # twice, halved, twice
    with found.accumulate():
        pass
    assert found.step.item() == 2


def test_an_exception_inside_accumulate() -> None:
    """Nothing is applied, and the scaler records nothing."""
    found, scaler = scaled(make())
    with contextlib.suppress(KeyError), found.accumulate():
        scaler.scale(loss_of(found, 0, bad=torch.inf)).backward()
        raise KeyError
    scaler.scale(loss_of(found, 1)).backward()
    scaler.step(found.fused_optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16
    assert found.step.item() == 1


def test_per_sample_weights() -> None:
    """Gradients of weights are those of the scaled loss, for their own optimizer to unscale, also on overflow."""
    found, plain = (make(rk.SGD(lr=0.1)) for _ in range(2))
    scaler, given, grads = GradScaler("cpu", init_scale=8.0), batch(), []
    found.set_grad_scaler(scaler)
    for collection, scale in ((plain, lambda loss: loss), (found, scaler.scale)):
        factors = torch.linspace(-1, 1, len(given.values())).requires_grad_()
        weighted = rk.KeyedJaggedTensor(KEYS, given.values(), offsets=given.offsets(), weights=factors)
        scale((collection(weighted).values() * grad_of(0)).sum()).backward()
        grads.append(factors.grad)
    assert same_bits(grads[1], 8 * grads[0])
    assert_same(found, plain)
    before = snapshot(found)
    factors.grad = None
    scaler.scale(found(weighted).values().sum() * torch.inf).backward()
    assert_same(found, before)
    assert not factors.grad.isfinite().any()


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_row_cache(accumulates: bool) -> None:
    """Cached rows are updated, and left by an overflow, as uncached ones are."""
    cache = rk.RowCache(0.4, ways=4)
    plain, (found, scaler) = make(cache=cache), scaled(make(cache=cache))
    for step, bad in enumerate((None, torch.inf, None)):
        with found.accumulate() if accumulates else contextlib.nullcontext():
            scaler.scale(loss_of(found, step, bad=bad)).backward()
        with torch.set_grad_enabled(True):
            loss = loss_of(plain, step)  # rows are inserted whether or not the update is made
        if bad is None:
            loss.backward()
        scaler.step(found.fused_optimizer)
        scaler.update()
    assert found.step.item() == 2
    assert_same(found, plain)


def test_a_scaler_that_is_off() -> None:
    """A disabled scaler divides nothing and skips nothing."""
    plain, (found, scaler) = make(), scaled(make(), enabled=False)
    for step, bad in enumerate((None, torch.inf)):
        loss_of(plain, step, bad=bad).backward()
        scaler.scale(loss_of(found, step, bad=bad)).backward()
        scaler.step(found.fused_optimizer)
        scaler.update()
    assert found.step.item() == 2
    assert not found._weights.isfinite().all()
    assert_same(found, plain)


def test_none_takes_it_back() -> None:
    plain, (found, _) = make(), scaled(make())
    found.set_grad_scaler(None)
    loss_of(plain, 0).backward()
    loss_of(found, 0).backward()
    assert_same(found, plain)
    assert len(found.fused_optimizer.param_groups[0]["params"]) == 2


def test_not_told() -> None:
    """A scaler that steps a collection without set_grad_scaler() raises, as the update used the scaled loss."""
    scaler, found, plain = GradScaler("cpu", init_scale=2.0), make(rk.SGD(lr=0.1)), make(rk.SGD(lr=0.2))
    scaler.scale(loss_of(found, 0)).backward()
    loss_of(plain, 0).backward()
    torch.testing.assert_close(found._weights, plain._weights)
    with pytest.raises(RuntimeError, match=r"call collection\.set_grad_scaler\(scaler\) before training"):
        scaler.step(found.fused_optimizer)


def test_a_scaler_after_the_lookup() -> None:
    """The backward raises, because its update would use the lookup's scale; the next step works."""
    found, scaler = make(), GradScaler("cpu", init_scale=2.0**16)
    before = {name: t.clone() for name, t in found.state_dict().items()}
    for given in (scaler, None):
        loss = found(batch()).values().sum()
        found.set_grad_scaler(given)
        with pytest.raises(RuntimeError, match=r"set_grad_scaler\(\) was called between a lookup and its backward"):
            scaler.scale(loss).backward()
    assert all(torch.equal(t, before[name]) for name, t in found.state_dict().items())
    found.set_grad_scaler(None)  # the next scaler
    loss = found(batch()).values().sum()
    found.set_grad_scaler(None)
    loss.backward()
    assert found.step == 1


def test_refused() -> None:
    """A scaler is rejected without a fused optimizer, and inside a block."""
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match="has optimizer=None: its gradients are torch's"):
        make(None).set_grad_scaler(scaler)
    found = make()
    with found.accumulate(), pytest.raises(RuntimeError, match=r"set_grad_scaler\(\) is not allowed"):
        found.set_grad_scaler(scaler)


class Model(torch.nn.Module):
    """Tables with float16 outputs, and a layer."""

    def __init__(self, optimizer=OPTIMIZERS[1], **options) -> None:
        super().__init__()
        self.tables = make(optimizer, **options)
        self.top = torch.nn.Linear(COLUMNS, 1)

    def forward(self, features: rk.KeyedJaggedTensor) -> Tensor:
        return self.top(self.tables(features).values()).squeeze(1)


TINY = 2.0**-20  # gradients below float16's range without a scale


def train_in_half(model: Model, scaler: GradScaler, steps: int) -> list[float]:
    """Losses of a mean over many samples."""
    sgd, losses = torch.optim.SGD(model.top.parameters(), lr=0.1 / TINY), []
    given, label = batch(size=64), torch.arange(64) % 2.0
    for _ in range(steps):
        sgd.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(given)
        assert output.dtype == torch.float16
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output.float(), label)
        scaler.scale(loss * TINY).backward()
        for optimizer in (sgd, model.tables.fused_optimizer):
            scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def test_training_in_float16() -> None:
    """The tables' gradients vanish without a scaler; with one they learn, though its scale is too large at first."""
    model = Model(rk.SGD(lr=10 / TINY), output_dtype=torch.float16)
    before = snapshot(model.tables)
    train_in_half(model, GradScaler("cpu", enabled=False), 3)
    assert_same(model.tables, before | {"step": torch.tensor(3)})
    _, scaler = scaled(model.tables, init_scale=2.0**60)
    losses = train_in_half(model, scaler, 60)
    assert scaler.get_scale() < 2.0**60
    assert 3 < model.tables.step.item() < 63  # some were skipped
    assert losses[-1] < losses[0] - 0.1
