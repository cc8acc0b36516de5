"""The optimizers of EmbeddingBagCollection compared with torch's, and their state."""

from __future__ import annotations

import pytest
import torch
from collection_format_cases import WITH_MOMENTS
from layout_calls import OPS
from test_embedding_bag_module import batch, make, train
from torch import Tensor

import rec_kernels as rk


def tables(collection: rk.EmbeddingBagCollection) -> dict[str, Tensor]:
    return {name: collection.embedding_bags[name].weight.detach() for name in collection.embedding_bags}


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        (rk.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (rk.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (rk.Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-12), lambda p: torch.optim.SparseAdam(p, 0.01, (0.8, 0.95), 1e-12)),
    ],
    ids=["SGD", "Adagrad", "Adam"],
)
def test_as_torch_has_it(fused, plain) -> None:
    """Steps agree with torch's optimizers of sparse gradients, up to the position of eps."""
    mine, dense = make(fused), make()
    theirs = {n: w.clone().requires_grad_() for n, w in tables(dense).items()}
    optimizer = plain(theirs.values())
    for step in range(5):
        for collection in (mine, dense):
            collection.zero_grad()
            collection(batch(seed=step)).values().square().sum().backward()
        for name, weight in theirs.items():
            grad = dense.embedding_bags[name].weight.grad
            rows = grad.abs().sum(1).nonzero()[:, 0]
            weight.grad = torch.sparse_coo_tensor(
                rows[None], grad[rows], grad.shape, is_coalesced=True, check_invariants=False
            )
        optimizer.step()
        for name, weight in theirs.items():
            dense.embedding_bags[name].weight.data.copy_(weight.detach())
    assert all(parameter.grad is None for parameter in mine.parameters())
    for name, weight in tables(mine).items():
        torch.testing.assert_close(weight, theirs[name].detach(), rtol=1e-4, atol=1e-6)


DECAYED = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.3}


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        *((rk.Adam(lr=0.02, eps=e), lambda p, e=e: torch.optim.Adam([p], lr=0.02, eps=e)) for e in (1e-8, 0.1)),
        (rk.Adam(**DECAYED, weight_decay_mode="decoupled"), lambda p: torch.optim.AdamW([p], **DECAYED)),
    ],
    ids=["Adam", "eps", "AdamW"],
)
def test_all_rows_as_torch_adam(fused, plain) -> None:
    """If every batch has every row, lazy Adam equals torch's Adam, including eps and weight decay."""
    table = rk.EmbeddingBagConfig(6, 5, name="t", feature_names=["f"])
    torch.manual_seed(0)
    collection = rk.EmbeddingBagCollection([table], optimizer=fused)
    weight = tables(collection)["t"].clone().requires_grad_()
    adam = plain(weight)
    for _ in range(10):
        ids = torch.randperm(6)
        found = collection(rk.KeyedJaggedTensor(["f"], ids, lengths=torch.ones(6, dtype=torch.int64))).values()
        found.pow(3).sum().backward()
        adam.zero_grad()
        weight[ids].pow(3).sum().backward()
        adam.step()
    torch.testing.assert_close(tables(collection)["t"], weight.detach())


@pytest.mark.parametrize("optimizer", WITH_MOMENTS, ids=lambda o: type(o).__name__)
def test_state(optimizer) -> None:
    collection = make(optimizer)
    train(collection)
    shapes = {"type": (50, 6), "keys": (70, 20)}
    expected, sizes = {"step": ()}, dict.fromkeys(shapes, 0)
    for name, shape in shapes.items():
        expected[f"embedding_bags.{name}.weight"] = shape
        for kind, elementwise in optimizer.state.items():
            expected[f"embedding_bags.{name}.{kind}"] = own = shape if elementwise else shape[:1]
            sizes[name] += 4 * torch.Size(own).numel()
    if "exp_avg" in optimizer.state:
        expected["beta_powers"] = (2,)
        assert torch.allclose(collection.beta_powers, torch.tensor([0.9**3, 0.999**3]))
    assert {n: tuple(t.shape) for n, t in collection.state_dict().items()} == expected
    assert {r["name"]: r["state_bytes"] for r in collection.memory_report()} == sizes


@pytest.mark.parametrize("kind", [rk.Adagrad, rk.Adam, rk.RowwiseAdam, rk.LAMB])
def test_state_in_bfloat16(kind) -> None:
    """bfloat16 state has half the bytes, is saved and loaded exactly, and trains nearly as float32 does."""
    tables = [rk.EmbeddingBagConfig(8, 32, name="t", feature_names=["f"], init=lambda w: w.fill_(1.0))]
    batch = rk.KeyedJaggedTensor(["f"], torch.arange(8), lengths=torch.ones(8).long())
    whole = rk.EmbeddingBagCollection(tables, optimizer=kind(lr=0.01))
    half = rk.EmbeddingBagCollection(tables, optimizer=kind(lr=0.01, state_dtype=torch.bfloat16), seed=3)
    for collection in (whole, half):
        for _ in range(150):
            (collection(batch).values() ** 2).sum().backward()
    found, expected = (c.embedding_bags["t"].weight for c in (half, whole))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
    state = half.state_dict()
    for name, each in kind.state.items():
        assert state[f"embedding_bags.t.{name}"].dtype == (torch.bfloat16 if each else torch.float32)
    sizes = [2 * 8 * 32 if each else 4 * 8 for each in kind.state.values()]
    assert half.memory_report()[0]["state_bytes"] == sum(sizes)
    again = rk.EmbeddingBagCollection(tables, optimizer=kind(lr=0.01, state_dtype=torch.bfloat16), seed=3)
    again.load_state_dict(state)
    for collection in (half, again):
        (collection(batch).values() ** 2).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(half.state_dict().values(), again.state_dict().values(), strict=True))


def test_state_dtype_is_checked() -> None:
    """The op also checks the state's dtype."""
    weight, ids, offsets = torch.zeros(2, 4), torch.tensor([1]), torch.tensor([0, 1])
    given = (torch.tensor(0), torch.tensor(0.1), torch.zeros(1, 4), ids, offsets)
    moments = {"exp_avg": torch.zeros(8).bfloat16(), "exp_avg_sq": torch.zeros(8), "beta_powers": torch.ones(2)}
    update = OPS.embedding_bag_backward_fused_
    with pytest.raises(ValueError, match="exp_avg_sq must have exp_avg's dtype"):
        update(weight, None, *given, optimizer="adam", **moments)
    with pytest.raises(ValueError, match="sum must be float32"):
        update(weight, torch.zeros(2).bfloat16(), *given, optimizer="rowwise_adagrad")
    moments |= {"exp_avg_sq": torch.zeros(2).bfloat16()}
    with pytest.raises(ValueError, match="exp_avg_sq must be float32"):
        update(weight, None, *given, optimizer="rowwise_adam", **moments)
