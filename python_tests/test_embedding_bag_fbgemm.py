"""EmbeddingBagCollection against FBGEMM's table-batched embedding on the CPU: outputs, tables and state of 20 steps.

Both compute the same formulas in different orders, so they may differ only by rounding. The number of roundings of a
value is counted; the tolerance is Higham's bound for it (``rec_kernels.testing.rounding_bound``) times the sum of the
terms' magnitudes from a third computation in float64. To make the count rigorous also for squares, roots and quotients,
the terms of a row's gradient in a step have one sign: the sum is then as exact, relative to itself, as its terms.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import rec_kernels as rk
from rec_kernels.testing import assert_same_sum, use_threads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of FBGEMM's own modules

TABLES = [(30, 8), (12, 20), (50, 64)]
# FBGEMM's CPU kernels require adjacent features per table.
FEATURES = [0, 0, 1, 2]
KEYS = [f"f{f}" for f in range(len(FEATURES))]
BATCH, STEPS, LONGEST = 16, 20, 5
LR, EPS = 0.05, 1e-3  # large enough that a misplaced eps would show
DIMS = [TABLES[t][1] for t in FEATURES]
OPTIMIZERS = {"EXACT_SGD": rk.SGD, "EXACT_ADAGRAD": rk.Adagrad, "EXACT_ROWWISE_ADAGRAD": rk.RowwiseAdagrad}


@dataclass
class Batch:
    """Bags of 0 to 5 ids, key-major; their weights; the gradient of the output."""

    values: Tensor
    offsets: Tensor
    factors: Tensor | None
    grad: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff().view(len(FEATURES), BATCH)


def batches(weighted: bool) -> list[Batch]:
    """Batches of all steps."""
    g, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        lengths = torch.randint(LONGEST + 1, (len(FEATURES) * BATCH,), generator=g)
        rows = torch.tensor([TABLES[t][0] for t in FEATURES]).repeat_interleave(BATCH).repeat_interleave(lengths)
        values = torch.randint(2**40, (len(rows),), generator=g) % rows
        signs = [torch.randint(2, (d,), generator=g) * 2.0 - 1 for _, d in TABLES]
        grad = (0.1 + torch.rand(BATCH, sum(DIMS), generator=g)) * torch.cat([signs[t] for t in FEATURES])
        factors = 0.5 + torch.rand(len(rows), generator=g) if weighted else None
        found.append(Batch(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), factors, grad))
    return found


def initial() -> list[Tensor]:
    """The tables before the first step."""
    g = torch.Generator().manual_seed(2)
    return [torch.randn(e, d, generator=g) for e, d in TABLES]


class Ours:
    def __init__(self, optimizer: str, pooling: str, _: bool) -> None:
        options = {} if optimizer == "EXACT_SGD" else {"eps": EPS}
        keys = [[k for k, of in zip(KEYS, FEATURES, strict=True) if of == t] for t in range(len(TABLES))]
        tables = [
            rk.EmbeddingBagConfig(e, d, name=f"t{t}", feature_names=keys[t], pooling=pooling)
            for t, (e, d) in enumerate(TABLES)
        ]
        self.module = rk.EmbeddingBagCollection(tables, optimizer=OPTIMIZERS[optimizer](lr=LR, **options))
        for weight, first in zip(self.tables(), initial(), strict=True):
            weight.copy_(first)

    def forward(self, batch: Batch, factors: Tensor | None) -> Tensor:
        jagged = rk.KeyedJaggedTensor(KEYS, batch.values, offsets=batch.offsets, weights=factors)
        return self.module(jagged).values()

    def tables(self) -> list[Tensor]:
        return [self.module.embedding_bags[name].weight.detach() for name in self.module.embedding_bags]

    def state(self) -> list[Tensor]:
        return [t for name, t in self.module.state_dict().items() if name.endswith(".sum")]


class Theirs:
    """FBGEMM.

    The backward of its weighted mean omits the division on the CPU; it gets the sum of divided weights instead.
    """

    def __init__(self, optimizer: str, pooling: str, weighted: bool) -> None:
        self.divided = weighted and pooling == "mean"
        with contextlib.redirect_stdout(io.StringIO()):
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                EmbeddingLocation,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(e, d, EmbeddingLocation.HOST, ComputeDevice.CPU) for e, d in TABLES],
            feature_table_map=FEATURES,
            optimizer=EmbOptimType[optimizer],
            pooling_mode=PoolingMode.MEAN if pooling == "mean" and not self.divided else PoolingMode.SUM,
            learning_rate=LR,
            eps=EPS,
        )
        for weight, first in zip(self.module.split_embedding_weights(), initial(), strict=True):
            weight.data.copy_(first)

    def forward(self, batch: Batch, factors: Tensor | None) -> Tensor:
        if self.divided:
            factors = factors / batch.lengths.flatten().repeat_interleave(batch.lengths.flatten())
        return self.module(batch.values, batch.offsets, factors)

    def tables(self) -> list[Tensor]:
        return [w.detach() for w in self.module.split_embedding_weights()]

    def state(self) -> list[Tensor]:
        """momentum1."""
        return [of_table[0] for of_table in self.module.split_optimizer_states()]


class Exact:
    """The formulas in float64, with the magnitudes of the terms that the other two sum."""

    def __init__(self, optimizer: str, pooling: str, _: bool) -> None:
        self.optimizer, self.mean = optimizer, pooling == "mean"
        self.weights = [w.double() for w in initial()]
        self.sizes = [w.abs() for w in self.weights]  # initial |w|, plus those of every step
        rowwise = optimizer == "EXACT_ROWWISE_ADAGRAD"
        self.sums = [torch.zeros(e, *([] if rowwise else [d])).double() for e, d in TABLES]
        self.most = 0  # occurrences of a row in a step

    def of_features(self, batch: Batch) -> list[tuple[int, Tensor, Tensor, Tensor, slice]]:
        """Table, ids, samples of the ids, coefficients and columns of each feature."""
        found, column = [], 0
        for f, table in enumerate(FEATURES):
            first, last = batch.offsets[f * BATCH], batch.offsets[(f + 1) * BATCH]
            samples = torch.arange(BATCH).repeat_interleave(batch.lengths[f])
            factors = torch.ones(int(last - first)) if batch.factors is None else batch.factors[first:last]
            each = batch.lengths[f][samples].double() if self.mean else 1.0
            columns = slice(column, column + DIMS[f])
            found.append((table, batch.values[first:last], samples, factors.double() / each, columns))
            column += DIMS[f]
        return found

    def pool(self, batch: Batch, tables: list[Tensor]) -> Tensor:
        out = torch.zeros(BATCH, sum(DIMS)).double()
        for table, ids, samples, c, columns in self.of_features(batch):
            out[:, columns] = out[:, columns].index_add(0, samples, tables[table][ids] * c[:, None])
        return out

    def factor_gradient(self, batch: Batch, grad: Tensor, tables: list[Tensor]) -> Tensor:
        """Returns [N], of per_sample_weights."""
        parts = []
        for f, (table, ids, samples, _, columns) in enumerate(self.of_features(batch)):
            dots = (grad.double()[samples, columns] * tables[table][ids]).sum(1)
            parts.append(dots / batch.lengths[f][samples] if self.mean else dots)
        return torch.cat(parts)

    def step(self, batch: Batch) -> None:
        """Updates the tables and their state."""
        gradients = [torch.zeros_like(w) for w in self.weights]
        for table, ids, samples, c, columns in self.of_features(batch):
            gradients[table].index_add_(0, ids, batch.grad.double()[samples, columns] * c[:, None])
        for t, (e, _) in enumerate(TABLES):
            ids = torch.cat([part[1] for part in self.of_features(batch) if part[0] == t])
            self.most = max(self.most, int(torch.bincount(ids, minlength=e).max()))
            step = LR * self.direction(t, gradients[t])
            self.weights[t] -= step
            self.sizes[t] += step.abs()

    def direction(self, table: int, g: Tensor) -> Tensor:
        """Direction of the update; zeros for a row without ids."""
        if self.optimizer == "EXACT_SGD":
            return g
        squares = g.square()
        if self.optimizer == "EXACT_ROWWISE_ADAGRAD":
            self.sums[table] += squares.mean(1)
            return g / (self.sums[table].sqrt() + EPS)[:, None]
        self.sums[table] += squares
        return g / (self.sums[table].sqrt() + EPS)

    @property
    def roundings(self) -> tuple[int, int]:
        """Largest numbers of roundings of a weight and of a state."""
        # Weight times 1 / n, times the gradient, and one addition for each occurrence.
        gradient = self.most + 3
        if self.optimizer == "EXACT_SGD":
            return gradient + 1 + STEPS, 0  # with lr; an addition for each step
        squares = 2 * gradient + 1 + STEPS
        if self.optimizer == "EXACT_ROWWISE_ADAGRAD":
            squares += max(DIMS) + 1  # the mean over the columns
        # The root and eps; a divisor's count twice (Higham, lemma 3.1); quotient, lr, and an addition for each step.
        return gradient + 2 * (squares + 2) + 2 + STEPS, squares


@pytest.fixture(scope="module", autouse=True)
def fbgemm() -> None:
    """Imports FBGEMM; skips the tests if it is missing, or built for another torch."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError) as error:
        pytest.skip(f"fbgemm_gpu cannot be imported: {error}")


@dataclass
class Round:
    """Results of a step: both packages', those in float64, and the magnitudes."""

    outputs: list[Tensor]
    factor_gradients: list[Tensor | None]
    exact: list[Tensor]
    magnitudes: list[Tensor]


def train(optimizer: str, pooling: str, weighted: bool) -> tuple[Ours, Theirs, Exact, list[Round]]:
    """Trains all three over all steps."""
    ours, theirs, exact = (of(optimizer, pooling, weighted) for of in (Ours, Theirs, Exact))
    rounds = []
    for batch in batches(weighted):
        outputs, gradients = [], []
        for either in (ours, theirs):
            factors = None if batch.factors is None else batch.factors.clone().requires_grad_()
            outputs.append(either.forward(batch, factors))
            outputs[-1].backward(batch.grad)
            gradients.append(None if factors is None else factors.grad)
        expected, sizes = (
            [exact.pool(batch, tables), exact.factor_gradient(batch, grad, tables)]
            for tables, grad in ((exact.weights, batch.grad), (exact.sizes, batch.grad.abs()))
        )
        rounds.append(Round([out.detach() for out in outputs], gradients, expected, sizes))
        exact.step(batch)
    return ours, theirs, exact, rounds


def agree(found: list[Tensor], expected: Tensor, size: Tensor, roundings: int) -> None:
    """Asserts that both packages agree with each other and with float64."""
    mine, other = found
    for a, b in ((mine, other), (mine, expected), (other, expected)):
        assert_same_sum(a, b, size, roundings)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_training(optimizer: str, pooling: str, weighted: bool) -> None:
    """Pooled outputs and gradients of per-sample weights agree at every step; tables and state after the last."""
    with use_threads(1):  # several threads wait for each other for long on a busy machine
        ours, theirs, exact, rounds = train(optimizer, pooling, weighted)
    of_tables, of_state = exact.roundings
    for found in rounds:
        # Two for the weight, one for its product, the sum of a bag; a row's dot product and the division.
        agree(found.outputs, found.exact[0], found.magnitudes[0], of_tables + LONGEST + 3)
        if weighted:
            agree(found.factor_gradients, found.exact[1], found.magnitudes[1], of_tables + max(DIMS) + 1)
    for *tables, expected, size in zip(ours.tables(), theirs.tables(), exact.weights, exact.sizes, strict=True):
        agree(tables, expected, size, of_tables)
    for first, last in zip(initial(), ours.tables(), strict=True):
        assert (first != last).any(1).all()  # every row has been trained
    if of_state:
        for *state, expected in zip(ours.state(), theirs.state(), exact.sums, strict=True):
            agree(state, expected, expected, of_state)
