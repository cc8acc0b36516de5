"""rk.deduplicated: modules that process every distinct sample once."""

from __future__ import annotations

import copy

import pytest
import torch
from inverse_jagged_cases import sessions
from tiers import full
from torch import Tensor, nn

import rec_kernels as rk
from rec_kernels.testing import same_bits

GROUPS = [["d"], ["b", "a"], ["c"]]


class Tower(nn.Module):
    """Pooled embeddings of a and b, followed by layers."""

    def __init__(self, optimizer=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [rk.EmbeddingBagConfig(12, 8, name="t", feature_names=["a", "b"])]
        self.tables = rk.EmbeddingBagCollection(tables, optimizer=optimizer)
        self.top = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, batch) -> Tensor:
        return self.top(self.tables(batch).values())


class Returns(nn.Module):
    """Returns the results of a function of the features."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, batch) -> object:
        return self.function(batch)


def dedup(batch: rk.KeyedJaggedTensor) -> rk.InverseKeyedJaggedTensor:
    """Deduplicates three groups."""
    return rk.InverseKeyedJaggedTensor.from_kjt(batch, GROUPS)


@pytest.mark.parametrize("group", [1, "a", "b"])
@pytest.mark.parametrize("optimizer", [None, rk.SGD(lr=0.5)], ids=str)
def test_values_and_gradients(optimizer, group: int | str) -> None:
    """Values and gradients equal those of the whole batch, but only the distinct rows are computed."""
    batch = sessions(list("abcd"), 3, 20)
    tower, whole = Tower(optimizer), Tower(optimizer)
    few, wrapped = dedup(batch), rk.deduplicated(tower, group)
    grad = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    rows = []
    tower.top.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    found, expected = wrapped(few), whole(batch)
    torch.testing.assert_close(found, expected)
    assert rows == [few.unique("a").stride()]
    found.backward(grad), expected.backward(grad)
    for a, b in zip(tower.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a.grad, b.grad)
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in tower.state_dict()]
    assert repr(wrapped).startswith(f"Deduplicated(\n  group={group!r}\n  (module): Tower(")


def test_a_plain_batch_passes() -> None:
    batch, tower = sessions(list("abcd")), Tower()
    assert same_bits(rk.deduplicated(tower, 1)(batch), tower(batch))
    seen = rk.deduplicated(Returns(lambda given: given))(batch)
    assert seen is batch


def test_trees() -> None:
    """Tuples, lists and dicts of tensors, KeyedTensor and numbers are expanded, in any dtype of rk.expand."""
    batch, tables = sessions(list("abcd"), 3, 20), Tower().tables
    few = dedup(batch)
    unique, inverse = few.unique(1), few.inverse(1)

    def outputs(given: rk.KeyedJaggedTensor) -> dict:
        pooled = tables(given)
        lengths = given["a"].lengths()
        return {"pooled": pooled, "both": (lengths, [pooled.values().half().view(-1, 2, 8)]), "more": (7, None, "x")}

    found, expected = rk.deduplicated(Returns(outputs), 1)(few), outputs(batch)
    assert found["pooled"].keys() == ["a", "b"]
    assert same_bits(found["pooled"]["b"], expected["pooled"]["b"])
    assert same_bits(found["both"][0], expected["both"][0])
    assert same_bits(found["both"][1][0], expected["both"][1][0])
    assert found["more"] == (7, None, "x")
    assert same_bits(found["both"][0], unique["a"].lengths()[inverse])


def test_sequences() -> None:
    """Sequence outputs are expanded as jagged tensors, with their gradients."""
    table = rk.EmbeddingConfig(12, 4, name="t", feature_names=["a", "b"])
    module = rk.EmbeddingCollection([table])
    batch = sessions(list("abcd"), 3, 20, weighted=True)
    found, expected = rk.deduplicated(module, "a")(dedup(batch)), module(batch)
    grads = []
    for output in (found, expected):
        module.zero_grad()
        sum((t.values() ** 2).sum() for t in output.values()).backward()
        grads.append(module.embedding_bags["t"].weight.grad.clone())
    for key, jagged in expected.items():
        assert same_bits(found[key].values(), jagged.values())
        assert torch.equal(found[key].offsets(), jagged.offsets())
    torch.testing.assert_close(*grads)
    given_back = rk.deduplicated(Returns(lambda given: given["b"]), "a")(dedup(batch))
    assert same_bits(given_back.weights_or_none(), batch["b"].weights_or_none())


def test_dropout_and_batch_norm() -> None:
    """Samples that share a distinct sample have the same dropout noise; batch statistics count it once."""
    few = dedup(sessions(list("abcd"), 3, 50))
    noisy = rk.deduplicated(nn.Sequential(Tower(), nn.Dropout(0.5)), 1)(few)
    inverse = few.inverse(1)
    for u in range(few.unique(1).stride()):
        assert len(noisy[inverse == u].unique(dim=0)) == 1
    tower = Tower()
    norm = nn.BatchNorm1d(3, momentum=1.0)
    rk.deduplicated(nn.Sequential(tower, norm), 1)(few)
    torch.testing.assert_close(norm.running_mean, tower(few.unique(1)).mean(0))


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (
            lambda given: torch.zeros(len(given.values()) + 30),
            r"one row for each of the 3 distinct samples, got \d+ rows",
        ),
        (lambda given: (torch.zeros(3, 2), torch.zeros(())), "3 distinct samples, got a tensor without dimensions"),
        (lambda given: given, "returned a KeyedJaggedTensor, which has features instead of one row per sample"),
        (
            lambda given: rk.KeyedJaggedWindows(["a"], *[torch.arange(3)] * 2, torch.zeros(3, dtype=torch.int64)),
            "returned a KeyedJaggedWindows, which has features instead of one row per sample",
        ),
        (lambda given: rk.JaggedTensor(torch.zeros(3), offsets=torch.tensor([0, 3])), "3 distinct samples, got 1 rows"),
    ],
)
def test_bad_outputs(returns, message: str) -> None:
    """Outputs without a row for each distinct sample are rejected."""
    few = dedup(sessions(list("abcd"), 3, 20))
    assert few.unique(1).stride() == 3
    with pytest.raises(ValueError, match=message):
        rk.deduplicated(Returns(returns), 1)(few)


def test_bad_groups() -> None:
    """Unknown groups are rejected at the first batch."""
    few = dedup(sessions(list("xabcd")))
    with pytest.raises(KeyError, match="'x' is in no group"):
        rk.deduplicated(Tower(), "x")(few)
    with pytest.raises(IndexError, match=r"group 3 must be in \[0, 3\)"):
        rk.deduplicated(Tower(), 3)(few)


class Model(nn.Module):
    """A tower on the distinct samples of one group, and a lookup of other features."""

    def __init__(self) -> None:
        super().__init__()
        self.user = rk.deduplicated(Tower(rk.SGD(lr=0.5)), "a")
        tables = [rk.EmbeddingBagConfig(12, 5, name="u", feature_names=["d", "x"])]
        self.item = rk.EmbeddingBagCollection(tables, optimizer=rk.SGD(lr=0.5))

    def forward(self, batch) -> Tensor:
        return torch.cat([self.user(batch), self.item(batch).values()], dim=1)


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
def test_compiled(backend: str) -> None:
    """A model of several groups and ungrouped features compiles to one graph."""
    torch._dynamo.reset()
    model = Model()
    before = copy.deepcopy(model.state_dict())
    compiled, found, expected = torch.compile(model, backend=backend, fullgraph=True), [], []
    for call, outputs in ((model, expected), (compiled, found)):
        model.load_state_dict(before)
        for seed in range(3):
            output = call(dedup(sessions(list("xabcd"), 4, 10 + seed, seed=seed)))
            output.square().sum().backward()
            outputs.append(output.detach().clone())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
