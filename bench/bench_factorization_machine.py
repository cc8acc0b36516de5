"""factorization_machine beside torch's two products, the same compiled, and two limits."""

from __future__ import annotations

import itertools

import pytest
import torch

import rec_kernels as rk
from bench.dense_side import NAMES, DenseSubject
from rec_kernels.reference.factorization_machine import formula

BATCH, FACTORS = 2048, 16
SHAPES = list(itertools.product((13, 27), (16, 32, 64, 128)))  # F, D
IMPLEMENTATIONS = NAMES


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"F={s[0]} D={s[1]}")
def subject(request: pytest.FixtureRequest) -> DenseSubject:
    """The shape under test; y is shared."""
    vectors, columns = request.param
    products = BATCH * vectors * columns * FACTORS
    return DenseSubject(
        f"F={vectors} D={columns} K={FACTORS}",
        rk.factorization_machine,
        formula,
        lambda: (torch.randn(BATCH, vectors, columns), torch.randn(vectors, FACTORS)),
        # Forward x^T y, and x times that. Backward those of the gradient, too, and two for the gradient of x. Ours
        # does two more: it keeps nothing of the forward, and has x^T times the gradient both ways.
        (2 * products, 6 * products),
    )


def test_forward(benchmark, subject: DenseSubject, name: str, rounds: int) -> None:
    """Under no_grad."""
    benchmark.group = f"factorization_machine {subject.name}"
    subject.time(benchmark, "forward", name, rounds)


def test_train(benchmark, subject: DenseSubject, name: str, rounds: int) -> None:
    """Forward and backward."""
    benchmark.group = f"factorization_machine, trained, {subject.name}"
    subject.time(benchmark, "train", name, rounds)
