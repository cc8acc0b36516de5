"""Weights of fused tables that are used beside lookups: their gradients join the lookups' update."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from tied_weights_cases import B, D, E, batch, loss_of, make, start
from torch import Tensor, nn
from torch.nn import functional as F

import rec_kernels as rk
from rec_kernels.nn.training import tied_weights


def pooled(features: rk.KeyedJaggedTensor, item: Tensor, other: Tensor) -> dict[str, Tensor]:
    """The lookups by torch."""
    found = {}
    for key, table in (("a", item), ("b", item), ("c", other)):
        bags = features[key]
        ids, offsets = bags.values(), bags.offsets()
        factors = bags.weights_or_none()
        found[key] = F.embedding_bag(
            ids, table, offsets, mode="sum", per_sample_weights=factors, include_last_offset=True
        )
    return found


def train_torch(
    steps: int, optimizer: Callable, batches: list, twice: bool = False
) -> tuple[list[Tensor], list[float]]:
    """Rows of both tables and losses of plain torch."""
    item, other = nn.Parameter(start()), nn.Parameter(torch.full((30, 12), 0.5))
    trained, losses = optimizer([item, other]), []
    for step in range(steps):
        trained.zero_grad()
        loss = loss_of(pooled(batches[step], item, other), item, step)
        if twice:
            loss = loss + loss_of(pooled(batches[step + 1], item, other), item, step)
        loss.backward()
        trained.step()
        losses.append(loss.item())
    return [item.detach(), other.detach()], losses


OPTIMIZERS = {
    "adamw": (rk.AdamW(lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "sgd": (rk.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (rk.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
}


@pytest.mark.parametrize("twice", [False, True], ids=["one_lookup", "two_lookups"])
@pytest.mark.parametrize("kind", ["plain", "weights", "variable"])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_the_losses_of_torch(name: str, kind: str, twice: bool) -> None:
    """Tables and losses follow plain torch's, which adds both uses' gradients before its step."""
    fused, reference = OPTIMIZERS[name]
    given = [batch(i, weights=kind == "weights", variable=kind == "variable") for i in range(6)]
    collection, losses = make(fused), []
    item = collection.embedding_bags["item"].weight
    look_up = collection.by_feature if kind == "variable" else (lambda x: collection(x).to_dict())
    for step in range(5):
        loss = loss_of(look_up(given[step]), item, step)
        if twice:
            loss = loss + loss_of(look_up(given[step + 1]), item, step)
        loss.backward()
        losses.append(loss.item())
        assert item.grad is None
    expected, expected_losses = train_torch(5, reference, given, twice)
    torch.testing.assert_close(losses, expected_losses, rtol=2e-6, atol=0)
    for table, rows in zip(("item", "other"), expected, strict=True):
        torch.testing.assert_close(collection.embedding_bags[table].weight.detach(), rows, rtol=3e-6, atol=3e-6)
    assert collection.step == 5


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "optimizer",
    [rk.RowwiseAdagrad(lr=0.1), rk.Adam(lr=0.01), rk.LAMB(lr=0.01, weight_decay=0.1, weight_decay_mode="decoupled")],
    ids=str,
)
def test_the_bits_of_a_lookup_of_every_row(optimizer: object, format: str) -> None:
    """A dense gradient equals another lookup of every row in accumulate(), to the bit."""
    found, expected = make(optimizer, format=format), make(optimizer, format=format)
    for step in range(3):
        features, generator = batch(step), torch.Generator().manual_seed(step)
        grad = torch.randn(B, 28, generator=generator)
        dense = torch.randn(E, D, generator=generator)
        weight = found.embedding_bags["item"].weight
        torch.autograd.backward([found(features).values(), weight * 1.0], [grad, dense.to(weight.dtype)])
        rows = rk.KeyedJaggedTensor(
            ["a", "b", "c"], torch.arange(E), offsets=torch.tensor([*[0] * E, *range(E + 1), *[E] * E])
        )
        wide = F.pad(dense.to(weight.dtype).float(), (D, 12))
        with expected.accumulate():
            expected(features).values().backward(grad)
            expected(rows).values().backward(wide)
    for name, t in expected.state_dict().items():
        if not name.startswith("embedding_bags.other"):
            assert torch.equal(found.state_dict()[name], t), name


def dense_only(weight: Tensor) -> None:
    """A penalty on all rows."""
    (weight**2).sum().backward()


def sparse_only(weight: Tensor) -> None:
    """torch's own lookup."""
    F.embedding(torch.tensor([3, 3, 7]), weight, sparse=True).sum().backward()


@pytest.mark.parametrize("uses", [[dense_only], [sparse_only], [sparse_only, dense_only]])
def test_without_a_lookup(uses: list[Callable[[Tensor], None]]) -> None:
    """A backward or a block without a lookup updates the table, and no other."""
    collection, expected = make(rk.Adagrad(lr=0.1)), nn.Parameter(start())
    with collection.accumulate() if len(uses) > 1 else contextlib.nullcontext():
        for use in uses:
            use(collection.embedding_bags["item"].weight)
            use(expected)
    torch.optim.Adagrad([expected], lr=0.1).step()
    torch.testing.assert_close(collection.embedding_bags["item"].weight.detach(), expected.detach())
    assert collection.step == 1
    assert (collection.embedding_bags["other"].weight == 0.5).all()
    assert not collection.embedding_bags["other"].sum.any()


def test_adamw() -> None:
    """With gradients of every row, ``rk.AdamW`` equals torch's AdamW, with its defaults."""
    fused, reference = OPTIMIZERS["adamw"]
    collection, expected = make(fused), nn.Parameter(start())
    assert (fused.weight_decay, fused.weight_decay_mode, repr(fused)) == (0.01, "decoupled", "AdamW(lr=0.01)")
    assert rk.AdamW(0.5).lr == 0.5
    optimizer, weight = reference([expected]), collection.embedding_bags["item"].weight
    for step in range(5):
        optimizer.zero_grad()
        for one in (weight, expected):
            (one * torch.randn(E, D, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected.detach(), rtol=2e-6, atol=1e-6)


def test_several_micro_batches() -> None:
    """accumulate() joins the dense gradients of all micro-batches."""
    collection, given = make(rk.Adagrad(lr=0.1)), [batch(0), batch(1)]
    item = collection.embedding_bags["item"].weight
    with collection.accumulate():
        for features in given:
            loss_of(collection(features).to_dict(), item, 0).backward()
        assert torch.equal(item.detach(), start())
    expected, _ = train_torch(1, lambda p: torch.optim.Adagrad(p, lr=0.1), given, twice=True)
    torch.testing.assert_close(item.detach(), expected[0], rtol=3e-6, atol=3e-6)
    assert collection.step == 1


@pytest.mark.parametrize("overflows", [False, True])
def test_scaled_losses(overflows: bool) -> None:
    """Both kinds of gradients are unscaled; an overflow in either skips the update."""
    collection, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    collection.set_grad_scaler(scaler)
    for one in (collection, expected):
        loss = loss_of(one(batch(0)).to_dict(), one.embedding_bags["item"].weight, 0)
        if overflows and one is collection:
            loss = loss + (one.embedding_bags["item"].weight * float("inf")).sum()
        (scaler.scale(loss) if one is collection else loss).backward()
    scaler.step(collection.fused_optimizer)
    scaler.update()
    assert scaler.get_scale() == (512.0 if overflows else 1024.0)
    item = collection.embedding_bags["item"].weight.detach()
    torch.testing.assert_close(item, start() if overflows else expected.embedding_bags["item"].weight.detach())
    assert collection.step == (0 if overflows else 1)


def test_what_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors name the table, the reason and alternatives; nothing changes, and training goes on."""
    cached = make(rk.Adagrad(lr=0.1), cache=rk.RowCache(fraction=0.5))
    large = make(rk.Adagrad(lr=0.1))
    monkeypatch.setattr(tied_weights, "LARGEST", E * D - 1)
    for one, reason in ((cached, "cached rows hold updates"), (large, "has 320 elements, and at most 319")):
        before = {name: t.clone() for name, t in one.state_dict().items()}
        item = one.embedding_bags["item"].weight
        with pytest.raises(RuntimeError, match=rf"weight of table 'item' .*{reason}.*optimizer=None"):
            (item**2).sum().backward()
        assert all(torch.equal(before[name], t) for name, t in one.state_dict().items())
        assert item.grad is None
        one(batch(0)).values().sum().backward()
        assert one.step == 1


class Failing(torch.autograd.Function):
    """Identity with a failing backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx, *_: Tensor) -> Tensor:
        raise ValueError("stop")


def fail(collection: rk.EmbeddingBagCollection) -> None:
    """A backward that fails after the dense gradient and before the lookup's."""
    lookups = Failing.apply(collection(batch(1)).values())
    with pytest.raises(ValueError, match="stop"):
        (lookups.sum() + 3 * collection.embedding_bags["item"].weight.sum()).backward()


def leave_block(collection: rk.EmbeddingBagCollection) -> None:
    """An accumulate() block that raises after gradients of both kinds."""
    with collection.accumulate():
        (2 * collection.embedding_bags["item"].weight.sum() + collection(batch(2)).values().sum()).backward()
        raise KeyError


def test_a_backward_that_fails() -> None:
    """A failed backward leaves nothing in the next one, in a block, or in ``grad``."""
    for in_block in (False, True):
        found, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
        if in_block:
            with pytest.raises(KeyError):
                leave_block(found)
        fail(found)
        assert found.step == 0
        assert found.embedding_bags["item"].weight.grad is None
        for one in (found, expected):
            with one.accumulate() if in_block else contextlib.nullcontext():
                one(batch(0)).values().sum().backward()
        assert torch.equal(found.embedding_bags["item"].weight, expected.embedding_bags["item"].weight)
        for one in (found, expected):
            loss_of(one(batch(0)).to_dict(), one.embedding_bags["item"].weight, 0).backward()
        assert torch.equal(found.embedding_bags["item"].weight, expected.embedding_bags["item"].weight)


def test_moves_within_a_block() -> None:
    """Dense gradients in accumulate() survive a move."""
    found, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
    for one in (found, expected):
        with one.accumulate():
            one.embedding_bags["item"].weight.sum().backward()
            if one is found:
                one.float()
            (2 * one.embedding_bags["item"].weight.sum() + one(batch(0)).values().sum()).backward()
    assert torch.equal(found.embedding_bags["item"].weight, expected.embedding_bags["item"].weight)
    assert found.step == 1


def test_gradients_with_respect_to_the_weight() -> None:
    """torch.autograd.grad returns the gradient of the other uses; its lookups update the table."""
    collection = make(rk.SGD(lr=0.1))
    features = batch(0, weights=True)
    features._weights.requires_grad_()
    weight = collection.embedding_bags["item"].weight
    loss = collection(features).values().sum() + 3 * weight.sum()
    _, dense = torch.autograd.grad(loss, [features.weights(), weight])
    assert (dense == 3).all()
    assert collection.step == 1


def through_pickle(collection: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(collection))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, lambda c: c.to("cpu"), lambda c: c.double()])
def test_copies_and_moves(copied: Callable) -> None:
    """Copies are tied to their own weight."""
    first = make(rk.Adagrad(lr=0.1))
    other, expected = copied(first), make(rk.Adagrad(lr=0.1))
    for one in (other, expected):
        loss_of(one(batch(0)).to_dict(), one.embedding_bags["item"].weight, 0).backward()
    assert torch.equal(other.embedding_bags["item"].weight, expected.embedding_bags["item"].weight)
    assert other.embedding_bags["item"].weight.grad is None
    if other is not first:
        assert torch.equal(first.embedding_bags["item"].weight.detach(), start())


def test_activation_checkpointing() -> None:
    """Lookups recomputed in the backward wait for dense gradients as others do."""
    found, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
    for one in (found, expected):
        look_up = lambda x, one=one: one(x).values()  # noqa: E731
        values = (
            torch.utils.checkpoint.checkpoint(look_up, batch(0), use_reentrant=False)
            if one is found
            else look_up(batch(0))
        )
        parts = dict(zip("abc", values.split([D, D, 12], dim=1), strict=True))
        loss_of(parts, one.embedding_bags["item"].weight, 0).backward()
    assert torch.equal(found.embedding_bags["item"].weight, expected.embedding_bags["item"].weight)


def test_reentrant_checkpoints() -> None:
    """A reentrant checkpoint's nested backward cannot see other gradients: it raises instead of updating twice."""
    collection = make(rk.Adagrad(lr=0.1))
    leaf = torch.ones(1, requires_grad=True)
    values = torch.utils.checkpoint.checkpoint(lambda x: collection(batch(0)).values() * x, leaf, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        (values.sum() + collection.embedding_bags["item"].weight.sum()).backward()


@pytest.mark.parametrize("reentrant", [(True, True), (True, False), (False, True)])
def test_lookups_beside_a_reentrant_checkpoint(reentrant: tuple[bool, bool]) -> None:
    """A lookup after the checkpoint's update would read other rows or update twice: it raises; accumulate() works."""

    def backward(collection: rk.EmbeddingBagCollection) -> None:
        leaf, loss = torch.ones(1, requires_grad=True), torch.zeros(())
        for n, recomputed in enumerate(reentrant):

            def part(x: Tensor, n: int = n) -> Tensor:
                return collection(batch(n)).values().square() * x

            values = torch.utils.checkpoint.checkpoint(part, leaf, use_reentrant=True) if recomputed else part(leaf)
            loss = loss + values.sum()
        loss.backward()

    found, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        backward(make(rk.Adagrad(lr=0.1)))
    with found.accumulate():
        backward(found)
    sum(expected(batch(n)).values().square().sum() for n in range(2)).backward()
    torch.testing.assert_close(found.embedding_bags["item"].weight, expected.embedding_bags["item"].weight)


@pytest.mark.parametrize("lookup_first", [False, True])
def test_weights_in_a_reentrant_checkpoint(lookup_first: bool) -> None:
    """Gradients of weights in a nested backward raise instead of updating twice; accumulate() makes one update."""

    def backward(collection: rk.EmbeddingBagCollection, **options: bool) -> None:
        weight, hidden = collection.embedding_bags["item"].weight, torch.ones(3, D, requires_grad=True)
        head = lambda x: F.linear(x, weight).square().sum()  # noqa: E731
        first = collection(batch(0)).values().square().sum() if lookup_first else 0
        loss = first + (torch.utils.checkpoint.checkpoint(head, hidden, **options) if options else head(hidden))
        (loss if lookup_first else loss + collection(batch(0)).values().square().sum()).backward()

    found, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        backward(make(rk.Adagrad(lr=0.1)), use_reentrant=True)
    with found.accumulate():
        backward(found, use_reentrant=True)
    backward(expected)
    for name, t in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], t), name


def test_no_gradient_after_all() -> None:
    """A use with a None gradient leaves the lookups' update unchanged, also of cached rows."""

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx, *_: Tensor) -> None:
            return None

    for cache in (None, rk.RowCache(fraction=0.5)):
        found, expected = make(rk.Adagrad(lr=0.1), cache=cache), make(rk.Adagrad(lr=0.1), cache=cache)
        item = found.embedding_bags["item"].weight
        for step in range(2):
            (found(batch(step)).values().sum() + NoGradient.apply(item)).backward()
            expected(batch(step)).values().sum().backward()
        found.flush()
        expected.flush()
        for name, t in expected.state_dict().items():
            assert torch.equal(found.state_dict()[name], t), name


def test_the_first_backward_of_inference_mode() -> None:
    """A backward in inference mode updates, as torch's computes gradients there."""
    layer = rk.Embedding(10, 4, optimizer=rk.SGD(lr=0.1))
    before, loss = layer.weight.detach().clone(), layer(torch.tensor([1, 2])).sum()
    with torch.inference_mode():
        loss.backward()
    assert (layer.weight != before).any(1).nonzero().flatten().tolist() == [1, 2]


def test_part_of_a_compressed_table() -> None:
    """A part's dense gradient joins that of lookups."""
    compression = rk.QuotientRemainder(4, combine="add")
    collection = rk.EmbeddingBagCollection(
        [rk.EmbeddingBagConfig(E, D, name="item", feature_names=["a"], compression=compression)],
        optimizer=rk.SGD(lr=1.0),
    )
    part, rest = (collection.embedding_bags[f"item_{i}"].weight for i in range(2))
    before = part.detach().clone(), rest.detach().clone()
    features = rk.KeyedJaggedTensor(["a"], torch.tensor([13]), lengths=torch.tensor([1]))
    (collection(features).values().sum() + 2 * part.sum()).backward()
    expected = torch.full_like(part, 2.0)
    expected[13 % len(part)] += 1.0
    torch.testing.assert_close(before[0] - part.detach(), expected)
    assert (before[1] - rest.detach()).abs().sum(1).bool().sum() == 1


def test_shared_bags() -> None:
    """Distinct bags get the gradients of all their samples, also of several lookups in a backward."""
    found, expected = make(rk.SGD(lr=0.1)), make(rk.SGD(lr=0.1))
    values, lengths = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([1, 1, 2, 1, 1])
    inverse = (["a", "b", "c"], torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1]]))
    few = rk.KeyedJaggedTensor(
        ["a", "b", "c"], values, lengths=lengths, stride_per_key=[2, 1, 2], inverse_indices=inverse
    )
    full = rk.KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.tensor([1, 2, 2, 3, 4, 3, 4, 3, 4, 6, 5, 6]),
        lengths=torch.tensor([1, 1, 1, 2, 2, 2, 1, 1, 1]),
    )
    for one, features in ((found, few), (expected, full)):
        loss_of(one(features).to_dict(), one.embedding_bags["item"].weight, 0).backward()
        (one(features).values().square().sum() + one(features).values().sum()).backward()
    for table in ("item", "other"):
        rows = [one.embedding_bags[table].weight.detach() for one in (found, expected)]
        torch.testing.assert_close(*rows)


def test_sequences() -> None:
    """A row per id, as in sequence models whose output layer is the item table."""
    made = [
        rk.EmbeddingCollection(
            [rk.EmbeddingConfig(E, D, name="item", feature_names=["a"], init=lambda w: w.copy_(start()))], optimizer=o
        )
        for o in (rk.Adagrad(lr=0.1), None)
    ]
    features = rk.KeyedJaggedTensor(["a"], torch.arange(12) % 7, lengths=torch.tensor([5, 0, 7]))
    dense = torch.optim.Adagrad([made[1].embedding_bags["item"].weight], lr=0.1)
    for step in range(4):
        losses = []
        for one in made:
            hidden = one(features)["a"].values()
            loss = F.cross_entropy(hidden @ one.embedding_bags["item"].weight.T, torch.arange(12) + step)
            dense.zero_grad()
            loss.backward()
            losses.append(loss.item())
        dense.step()
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)


@pytest.mark.parametrize("frozen", [["item"], ["item", "other"]])
def test_frozen_weights_beside_lookups(frozen: list[str]) -> None:
    """Updates do not change frozen weights, so that autograd may save them for other gradients."""
    found, expected = make(rk.Adagrad(lr=0.1)), make(rk.Adagrad(lr=0.1))
    for name in frozen:
        found.embedding_bags[name].weight.requires_grad_(False)
        expected.embedding_bags[name].weight.requires_grad_(False)
    hidden = torch.ones(2, D, requires_grad=True)
    scores = F.linear(hidden, found.embedding_bags["item"].weight)
    (scores.sum() + found(batch(0)).values().square().sum()).backward()
    expected(batch(0)).values().square().sum().backward()
    torch.testing.assert_close(hidden.grad, start().sum(0).expand(2, D))
    for name, t in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], t), name


def test_compiled_lookups_refuse_dense_gradients() -> None:
    """Compiled lookups update at once: a dense gradient raises instead of updating twice."""
    collection = make(rk.SGD(lr=1.0))
    compiled = torch.compile(lambda x: collection(x).values(), backend="aot_eager")
    output = compiled(batch(0))
    with pytest.raises(RuntimeError, match="compiled"):
        (output.sum() + collection.embedding_bags["item"].weight.sum()).backward()
