"""Training steps with a row cache have the bits of the reference: insertion, lookup and update."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import EPS, LR, OPTIMIZERS, Case, wide_floats
from embedding_bag_format_cases import ROUNDINGS, STEP
from hypothesis import strategies as st
from row_cache_cases import Batch, CacheCase, CacheSample, State, batches, call, samples
from tiers import drawn
from torch import Tensor

from rec_kernels.ops.table_layout import Size
from rec_kernels.reference import embedding_bag as reference
from rec_kernels.reference.embedding_bag import Bags, Parts
from rec_kernels.reference.row_cache import POLICIES, RowCache
from rec_kernels.testing import same_bits

ops = torch.ops.rec_kernels


def sums_of(case: CacheCase) -> Tensor:
    """Row-wise Adagrad state before the first step, of every linear row."""
    return case.encoded.case.sum.clone()


def grad_of(case: CacheCase, batch: Case, seed: int) -> Tensor:
    """Gradient of the output of a batch, float32 [B, columns]."""
    return wide_floats(batch.batch, case.arguments["layout_sizes"][Size.output_dim], seed=seed)


class Model:
    """The reference of training: the cache, and the optimizer's state."""

    def __init__(self, case: CacheCase, optimizer: str) -> None:
        self.case, self.optimizer = case, optimizer
        self.cache: RowCache = case.model()
        self.sum, self.step = sums_of(case), STEP

    def forward(self, batch: Case, factors: Tensor | None = None) -> Tensor:
        """Returns float32 [B, columns]."""
        return reference.embedding_bag(*self._given(batch, factors))

    def factors_gradient(self, grad: Tensor, batch: Case, factors: Tensor) -> Tensor:
        """Returns float32 [N]."""
        return reference.per_sample_weights_gradient(grad, *self._given(batch, factors))

    def gradients(self, grad: Tensor, batch: Case, factors: Tensor | None = None) -> dict[tuple[int, int], Tensor]:
        """Gradients of all rows of the batch."""
        return reference.row_gradients(grad, *self._given(batch, factors))

    def _given(self, batch: Case, factors: Tensor | None) -> tuple:
        tables = [self.cache.read_table(t) for t in range(len(self.cache.tables))]
        return tables, batch.features, batch.mean, Bags(batch.values, batch.offsets, factors, batch.padding_idx)

    def update(self, gradients: dict[tuple[int, int], Tensor]) -> None:
        """Writes a cached row to its slot, and encodes any other one."""
        for t, table in enumerate(self.cache.tables):
            mine = {row: g for (of, row), g in gradients.items() if of == t}
            rows = self.cache.read_table(t)
            if self.optimizer == "sgd":
                reference.sgd_(rows, mine, LR)
            else:
                reference.rowwise_adagrad_(rows, self.sum[table.first_row :][: len(rows)], mine, LR, EPS)
            for row in mine:
                self.cache.write((t, row), rows[row], self.step)
        self.step += 1

    def train(self, batch: Case, grad: Tensor) -> tuple[list[int], Tensor]:
        """Takes a step; returns slots and output."""
        slots = self.cache.insert(self.case.named(batch))
        output = self.forward(batch)
        self.update(self.gradients(grad, batch))
        return slots, output


class Trained:
    def __init__(self, case: CacheCase, optimizer: str, namespace: object = ops, **options: object) -> None:
        self.state: State = case.state()
        self.sum, self.step = sums_of(case), torch.tensor(STEP)
        self.ops = namespace
        self.arguments = case.arguments | options | {"optimizer": optimizer, "eps": EPS, "lr": torch.tensor(LR)}
        self.arguments |= {"sum": None if optimizer == "sgd" else self.sum, "step": self.step}

    def given(self, batch: Case, **more: object) -> dict[str, object]:
        """Arguments of any of the ops."""
        bags = {"values": batch.values, "offsets": batch.offsets}
        return self.arguments | self.state | bags | more

    def insert(self, batch: Case) -> Tensor:
        """Returns int64 [N]."""
        return call("row_cache_insert_", self.given(batch), self.ops)

    def forward(self, batch: Case, slots: Tensor) -> Tensor:
        """Returns float32 [B, columns]."""
        return call("embedding_bag", self.given(batch, cache_slots=slots), self.ops)[0]

    def update(self, batch: Case, grad: Tensor, **more: object) -> None:
        """The fused update of a batch's rows."""
        call("embedding_bag_backward_fused_", self.given(batch, grad=grad, **more), self.ops)

    def train(self, batch: Case, grad: Tensor, autograd: bool = False) -> tuple[list[int], Tensor]:
        """Takes a step; returns slots and output."""
        slots = self.insert(batch)
        if autograd:
            token = torch.empty(0, requires_grad=True)
            output = call("embedding_bag_fused", self.given(batch, cache_slots=slots, token=token))[0]
            output.backward(grad)
            return slots.tolist(), output.detach()
        output = self.forward(batch, slots)
        self.update(batch, grad)
        return slots.tolist(), output


def check_same(case: CacheCase, found: Trained, model: Model, where: object) -> None:
    """Compares all state."""
    differing = case.differing(found.state, case.state(model.cache))
    assert not differing, (where, differing)
    assert same_bits(found.sum, model.sum), where
    assert found.step.item() == model.step, where


def check(sample: CacheSample, given: Sequence[Batch], optimizer: str, autograd: bool) -> None:
    """Compares steps on every backend, or through autograd, with the reference's."""
    case = CacheCase(sample)
    model, steps = Model(case, optimizer), []
    runs = [("autograd", Trained(case, optimizer))] if autograd else []
    for i, each in enumerate(given):
        batch = case.batch(each)
        steps.append((batch, grad_of(case, batch, seed=i)))
    expected = []
    for batch, grad in steps:
        slots, output = model.train(batch, grad)
        expected.append((slots, output, case.state(model.cache), model.sum.clone(), model.step))
    if not autograd:
        for backend in every_backend():
            _check_run(case, Trained(case, optimizer, backend.ops), steps, expected, False, backend.name)
    for name, run in runs:
        _check_run(case, run, steps, expected, True, name)


def _check_run(case: CacheCase, run: Trained, steps: list, expected: list, autograd: bool, name: str) -> None:
    for i, ((batch, grad), (slots, output, state, sums, step)) in enumerate(zip(steps, expected, strict=True)):
        found_slots, found_output = run.train(batch, grad, autograd)
        where = (name, i)
        assert found_slots == slots, where
        assert same_bits(found_output, output), where
        assert not case.differing(run.state, state), (where, case.differing(run.state, state))
        assert same_bits(run.sum, sums), where
        assert run.step.item() == step, where


#: 8 of the 32 choices of five options, in which every two options have all of their pairs.
CHOICES = [
    (pooling, ROUNDINGS[r], POLICIES[p], OPTIMIZERS[m ^ r], (m ^ p) == 0)
    for m, pooling in enumerate(("sum", "mean"))
    for r in range(2)
    for p in range(2)
]


@pytest.mark.parametrize(("pooling", "rounding", "policy", "optimizer", "autograd"), CHOICES)
def test_steps(pooling: str, rounding: str, policy: str, optimizer: str, autograd: bool) -> None:
    """Tables of several formats and widths: one with two features, one uncached, one hashed."""
    tables = [(21, 5, "int8"), (17, 5, "int4"), (13, 16, "bf16"), (19, 33, "mx6"), (6, 5, "int8")]
    hashed = Parts([1], [(1, 17)], 500, "concat")
    features = [(0, pooling), (hashed, pooling), (2, "sum"), (0, pooling), (3, pooling), (4, "sum")]
    options = {"policy": policy, "rounding": rounding, "uncached": (4,), "decay_every": 3 if policy == "lfu" else 0}
    sample = CacheSample(tables, features, {5: 3, 16: 2, 33: 4}, 2, **options)
    given = [Batch([[2, 0, 3]] * len(features), seed=i) for i in range(5)]
    check(sample, given, optimizer, autograd)


@drawn(60, st.data())
def test_samples(data: st.DataObject) -> None:
    """Samples of all tables, features and sets agree with the reference, including partitioned features."""
    sample = data.draw(samples())
    given = data.draw(st.lists(batches(sample), min_size=1, max_size=4))
    check(sample, given, data.draw(st.sampled_from(OPTIMIZERS)), data.draw(st.booleans()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_that_have_left_since(optimizer: str) -> None:
    """The update reaches evicted rows in the tables if a batch comes between a lookup and its update."""
    sample = CacheSample([(40, 6, "int4"), (30, 9, "bf16")], [(0, "sum"), (1, "mean")], {6: 2, 9: 3}, 2)
    case = CacheCase(sample)
    first, second = (case.batch(Batch([[3, 2], [1, 4]], seed=seed)) for seed in (1, 2))
    grad, model = grad_of(case, first, seed=4), Model(case, optimizer)
    model.train(second, grad)  # so that evicted rows are dirty
    before = model.cache.insert(case.named(first))
    gradients = model.gradients(grad, first)
    model.cache.insert(case.named(second))
    assert model.cache.lookup(case.named(first)) != before
    model.update(gradients)
    for backend in every_backend():
        run = Trained(case, optimizer, backend.ops)
        run.train(second, grad)
        run.insert(first)
        run.insert(second)
        run.update(first, grad)
        check_same(case, run, model, backend.name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skipped_updates_and_frozen_features(optimizer: str) -> None:
    """Skipped updates and frozen features write nothing, and make no slot dirty."""
    case = CacheCase(CacheSample([(20, 6, "int4"), (9, 6, "int8")], [(0, "sum"), (1, "mean")], {6: 3}))
    batch = case.batch(Batch([[3, 2], [1, 4]]))
    grad, model = grad_of(case, batch, seed=1), Model(case, optimizer)
    slots = model.cache.insert(case.named(batch))
    assert max(slots) >= 0
    for backend in every_backend():
        run = Trained(case, optimizer, backend.ops)
        run.insert(batch)
        run.update(batch, grad, found_inf=torch.tensor(1.0))
        run.update(batch, grad, status=torch.tensor([0, 1]))
        check_same(case, run, model, backend.name)
        run.update(batch, grad, **case.layout(frozen=[True, True])._asdict())
        run.step.sub_(1)
        check_same(case, run, model, backend.name)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_per_sample_weights(pooling: str) -> None:
    """Outputs, the gradient of the weights (from rows before the update, cached or not), and the update."""
    tables, features = [(40, 6, "int4"), (30, 9, "bf16"), (9, 6, "int8")], [(t, pooling) for t in range(3)]
    case = CacheCase(CacheSample(tables, features, {6: 2, 9: 3}, 2, uncached=(2,)))
    model, run = Model(case, "rowwise_adagrad"), Trained(case, "rowwise_adagrad")
    for i in range(4):
        batch = case.batch(Batch([[3, 2]] * 3, seed=i))
        grad, factors = grad_of(case, batch, seed=i), wide_floats(len(batch.values), seed=i + 50)
        model.cache.insert(case.named(batch))
        output, expected = model.forward(batch, factors), model.factors_gradient(grad, batch, factors)
        slots, lookup = run.insert(batch), {"per_sample_weights": factors}
        for backend in every_backend():
            given = run.given(batch, cache_slots=slots, grad=grad, **lookup)
            assert same_bits(call("embedding_bag", given, backend.ops)[0], output), backend.name
            found = call("embedding_bag_backward_per_sample_weights", given, backend.ops)
            assert same_bits(found, expected), backend.name
        model.update(model.gradients(grad, batch, factors))
        leaf, token = factors.clone().requires_grad_(), torch.empty(0, requires_grad=True)
        given = run.given(batch, cache_slots=slots, token=token, per_sample_weights=leaf)
        call("embedding_bag_fused", given)[0].backward(grad)
        assert same_bits(leaf.grad, expected), i
        check_same(case, run, model, i)


def test_per_sample_weights_of_rows_that_have_left_since() -> None:
    """The weights' gradient uses the rows just before the backward's update."""
    case = CacheCase(CacheSample([(40, 6, "int4"), (30, 9, "bf16")], [(0, "sum"), (1, "mean")], {6: 2, 9: 3}, 2))
    first, second = (case.batch(Batch([[3, 2], [1, 4]], seed=seed)) for seed in (1, 2))
    grad, model, run = grad_of(case, first, seed=4), Model(case, "sgd"), Trained(case, "sgd")
    factors, token = wide_floats(len(first.values), seed=9).requires_grad_(), torch.empty(0, requires_grad=True)
    for trained in (model, run):
        trained.train(second, grad)
    model.cache.insert(case.named(first))
    given = run.given(first, cache_slots=run.insert(first), token=token, per_sample_weights=factors)
    output = call("embedding_bag_fused", given)[0]
    assert same_bits(output, model.forward(first, factors.detach()))
    model.cache.insert(case.named(second))
    run.insert(second)
    expected = model.factors_gradient(grad, first, factors.detach())
    model.update(model.gradients(grad, first, factors.detach()))
    output.backward(grad)
    assert same_bits(factors.grad, expected)
    check_same(case, run, model, "autograd")
