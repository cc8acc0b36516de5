"""Rejects figures of wrong kernels: compares outputs with torch's, and updates with torch's in float64."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.implementations import BETAS, EPS, LR, Implementation, Tables
from rec_kernels.testing import assert_same_sum, rounding_bound

UNIT = torch.finfo(torch.float32).eps / 2


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills new memory with NaN, so that unwritten outputs do not contain a correct kernel's earlier results."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_forward(data: Tables, implementation: Implementation) -> None:
    """Compares the output with torch's, table by table.

    Raises:
        AssertionError: they differ by more than the rounding of sums of L rows explains, or something is NaN.
    """
    w = data.workload
    with poisoned():
        output = implementation.forward()
    found = output if isinstance(output, list) else output.split(w.dim, dim=1)
    parts = zip(found, implementation.tables, data.ids_of_tables, data.factors_of_tables, strict=True)
    for mine, table, ids, factors in parts:
        bags, each = ids.view(w.batch, w.bag), None if factors is None else factors.view(w.batch, w.bag)
        expected = F.embedding_bag(bags, table, mode="sum", per_sample_weights=each)
        magnitude = table[bags].abs().double()
        if each is not None:
            magnitude *= each[..., None]
        # With factors, each product is also rounded.
        assert_same_sum(mine, expected, magnitude.sum(1), terms=w.bag + (each is not None))


class _Touched(NamedTuple):
    """The rows of one table that a batch names, before the update."""

    rows: Tensor  # [U], distinct
    row_of: Tensor  # [B * L], each id's place among them
    counts: Tensor  # [U]
    weights: Tensor  # [U, D]
    state: Tensor | None  # [U] or [U, D]; None for Adam, whose state is zero before
    factors: Tensor | None  # [B * L]


def check_update(data: Tables, implementation: Implementation, update: Callable[[], None]) -> None:
    """Compares every touched row and its state with torch's update in float64 from the same gradient.

    Raises:
        AssertionError: a row or its state differs by more than rounding in FP32 explains, or is NaN.
    """
    state = implementation.state or [None] * data.workload.tables
    adam = isinstance(state[0], tuple)
    if adam:
        implementation.forget()
    touched = []
    parts = (data.ids_of_tables, implementation.tables, state, data.factors_of_tables)
    for ids, table, sums, factors in zip(*parts, strict=True):
        rows, row_of, counts = ids.unique(return_inverse=True, return_counts=True)
        of_rows = None if sums is None or adam else sums[rows]
        touched.append(_Touched(rows, row_of, counts, table[rows], of_rows, factors))
    with poisoned():
        update()
    parts = (touched, implementation.tables, state, data.grads_of_tables)
    for number, (before, table, sums, grad) in enumerate(zip(*parts, strict=True)):
        where, rows = f"table {number}", table[before.rows]
        if adam:
            _check_adam(where, before, rows, tuple(moment[before.rows] for moment in sums), grad)
        else:
            after = rows, None if sums is None else sums[before.rows]
            _check_table(where, before, after, grad, implementation.adds_to_rows)


def _rounding(before: _Touched) -> Tensor:
    """[U, 1] float64: bound of the FP32 rounding error of a row's sum, relative to the sum of its terms' magnitudes.

    In any order of the additions, of rounded products (``rounding_bound``), and with a few operations beside them.
    """
    n_u = (before.counts + 3).double()[:, None] * UNIT
    return n_u / (1 - n_u)


def _sum_gradients(before: _Touched, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows' gradients and the error bounds of their FP32 sums, [U, D] float64 each."""
    terms = grad.double().repeat_interleave(len(before.row_of) // len(grad), 0)
    if before.factors is not None:
        terms *= before.factors.double()[:, None]
    g = torch.zeros(before.weights.shape, dtype=torch.float64, device=grad.device)
    size = g.clone()
    g.index_add_(0, before.row_of, terms)
    size.index_add_(0, before.row_of, terms.abs_())
    return g, 2 * _rounding(before) * size  # with a safety factor of two


def _check_adam(where: str, before: _Touched, rows: Tensor, moments: tuple[Tensor, Tensor], grad: Tensor) -> None:
    """Checks Adam's first step, whose direction g / (|g| + eps) is a sign unless g is close to 0."""
    g, error = _sum_gradients(before, grad)
    inexact = rounding_bound(16)
    for name, found, expected, off in (
        ("first moment", moments[0], (1 - BETAS[0]) * g, (1 - BETAS[0]) * error),
        ("second moment", moments[1], (1 - BETAS[1]) * g**2, (1 - BETAS[1]) * (2 * g.abs() + error) * error),
    ):
        # 1 - beta is also rounded: for 0.999, by 2^-25 of 2^-10.
        _within(f"{where}: {name}", found, expected, off + (inexact + 2.0**-14) * expected.abs())
    direction = g / (g.abs() + EPS)
    off = (2 * error / (g.abs() + EPS)).clamp_(max=2) + 2.0**-12
    allowed = LR * off + 4 * UNIT * (before.weights.double().abs() + LR)
    _within(f"{where}: rows", rows, before.weights.double() - LR * direction, allowed)


def _check_table(
    where: str, before: _Touched, after: tuple[Tensor, Tensor | None], grad: Tensor, adds_to_rows: bool
) -> None:
    g, error = _sum_gradients(before, grad)
    factor, slack = torch.full_like(g, LR), torch.full_like(g, 4 * UNIT)
    if before.state is not None:
        elementwise = before.state.dim() == 2
        mean = (lambda x: x) if elementwise else (lambda x: x.mean(1, keepdim=True))
        v = (before.state if elementwise else before.state[:, None]).double() + mean(g.square())
        # sqrt(v) is the norm of a vector that contains g, so its error is at most the norm of g's error.
        off, inexact = mean(error.square()).sqrt(), rounding_bound(g.shape[1] + 8)
        found = after[1] if elementwise else after[1][:, None]
        allowed = 2 * v.sqrt() * off + off.square() + inexact * v
        _within(f"{where}: optimizer state", found, v, allowed)
        factor = LR / (v.sqrt() + EPS)
        slack = 1.1 * off / (v.sqrt() + EPS) + 2 * inexact
    moved = factor * (g.abs() + error)
    allowed = factor * error + slack * moved + 4 * UNIT * (before.weights.double().abs() + moved)
    if adds_to_rows:
        # The row is also a term of the sum, and each addition may round it: rows grow during a measurement.
        allowed += _rounding(before) * before.weights.double().abs()
    _within(f"{where}: rows", after[0], before.weights.double() - factor * g, allowed)


def _within(what: str, found: Tensor, expected: Tensor, allowed: Tensor) -> None:
    worst = ((found.double() - expected).abs() - allowed).max().item()
    # written so that NaN fails, too
    if not worst <= 0:
        raise AssertionError(f"{what} differ by {worst:.3e} more than rounding explains")
