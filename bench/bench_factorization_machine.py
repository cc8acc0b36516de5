"""factorization_machine compared with torch's two products, eager and compiled, and two limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

import rec_kernels as rk
from bench.cases import Case, dense_cases
from rec_kernels.reference.factorization_machine import formula

BATCH, FACTORS = 2048, 16


def cases() -> Iterator[Case]:
    """Yields the cases: samples of F vectors of D columns with a shared y."""
    for vectors, columns in itertools.product((13, 27), (16, 32, 64, 128)):
        shapes = (BATCH, vectors, columns), (vectors, FACTORS)
        products = BATCH * vectors * columns * FACTORS
        yield from dense_cases(
            "factorization_machine",
            f"F={vectors} D={columns} K={FACTORS}",
            rk.factorization_machine,
            formula,
            lambda shapes=shapes: tuple(map(torch.randn, shapes)),
            # Forward: x^T y, and x times it. Backward: the same for the gradient, and two for the gradient of x. Ours
            # does two more: it saves nothing in the forward, and computes x^T times the gradient twice.
            (2 * products, 6 * products),
        )
